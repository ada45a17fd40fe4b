"""The lock file beside a schedule: written, read, and compared with the current plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from schedlang.diagnostics.source import read_utf8
from schedlang.verbs.exits import FAILS, show_json

if TYPE_CHECKING:
    from schedlang.passes.lock import Change, Lock
    from schedlang.passes.simulate.account import Account
    from schedlang.verbs.inputs import PlannedSchedule


@dataclass(frozen=True)
class LockComparison:
    """The comparison of a lock with the current plan; the lock holds if nothing changed."""

    schedule: Path
    changes: tuple[Change, ...]
    versions: tuple[str, ...]
    structure: tuple[str, str]

    def __str__(self) -> str:
        path = lock_path(self.schedule)
        if not self.changes:
            return f"{path}: holds"
        old, new = (text[: len("sha256:") + 12] for text in self.structure)
        note = "the model is the same" if old == new else f"the model was {old}, is {new}"
        head = [f"{path} does not hold: {note}"]
        head += [f"  since then: {', '.join(self.versions)}"] if self.versions else []
        lines = [f"  {line}" for change in self.changes for line in change.lines()]
        foot = f"  to accept it: schedlang plan {self.schedule} --lock"
        return "\n".join([*head, *lines, foot])

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "exit": FAILS if self.changes else 0,
            "lock": str(lock_path(self.schedule)),
            "structure": {"was": self.structure[0], "is": self.structure[1]},
            "versions": list(self.versions),
            "changes": [change.to_json() for change in self.changes],
        }


def lock_path(schedule: Path) -> Path:
    """Return the path of a schedule's lock: `x.sched.lock` beside `x.sched`."""
    return schedule.with_name(schedule.name + ".lock")


def lock_of(
    planned: PlannedSchedule, account: Account, knobs: Sequence[str] | None, mesh: str | None
) -> Lock:
    """Return the lock of a planned schedule, with the settings that the schedule was planned
    with."""
    from schedlang.passes.lock import make_lock

    settings = [("--knob", text) for text in sorted(knobs or ())]
    settings += [("--mesh", mesh)] if mesh else []
    return make_lock(planned.plan, account, tuple(settings))


def write_lock(
    planned: PlannedSchedule, account: Account, knobs: Sequence[str] | None, mesh: str | None
) -> Path:
    """Write the lock atomically, over an existing one."""
    from schedlang.passes.lock import to_text
    from schedlang.verbs.inputs import write_text

    path = lock_path(planned.file)
    write_text(path, to_text(lock_of(planned, account, knobs, mesh)))
    return path


def compare_lock(schedule: Path, model: str | None) -> LockComparison:
    """Plan a schedule anew with its lock's settings, and compare.

    Raises Refusal if there is no readable lock (S721), or nothing to plan.
    """
    from schedlang.diagnostics.diagnostic import Refusal
    from schedlang.passes.lock import changed_versions, compare_locks, read_lock
    from schedlang.verbs.inputs import account_costs, plan_schedule

    path = lock_path(schedule)
    try:
        text = read_utf8(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = "there is none" if isinstance(error, FileNotFoundError) else f"{error}"
        title = f"cannot read the lock `{path}`"
        helps = (f"write one: `schedlang plan {schedule} --lock`",)
        raise Refusal.of("S721", title, notes=(reason,), helps=helps) from None
    old = read_lock(text, str(path))
    knobs = [value for option, value in old.settings if option == "--knob"]
    mesh = next((value for option, value in old.settings if option == "--mesh"), None)
    planned = plan_schedule(schedule, model, knobs, mesh)
    new = lock_of(planned, account_costs(planned), knobs, mesh)
    versions = tuple(changed_versions(old, new))
    return LockComparison(
        schedule, tuple(compare_locks(old, new)), versions, (old.structure, new.structure)
    )


def check_lock(
    schedule: Path, model: str | None, as_json: bool = False, show: bool = False
) -> None:
    """Exit with 1 and the differences unless the lock holds; `show`: print also that the lock
    holds."""
    compared = compare_lock(schedule, model)
    if compared.changes or show:
        if as_json:
            show_json(compared.to_json())
        else:
            print(compared)
    if compared.changes:
        raise typer.Exit(FAILS)
