"""Hunt: prove a scene with a bug in the runtime, and say what the proof found first."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.prove import prove
from schedlang.report import Report
from schedlang.runtime.launch.pool import Hang, Pool, RankDied
from tests.engine import Faults, Threads
from tests.zoo.bug import Bug, found, mutate
from tests.zoo.pool import Mutated
from tests.zoo.scenes import SCENES, case


@dataclass(frozen=True)
class Verdict:
    """What became of one bug on one scene."""

    spec: str
    bug: Bug
    scene: str
    killed: bool
    by: str = ""  # the kind of the first failing row, or how the run ended
    place: str = ""  # which tensor that was
    blamed: tuple[str, ...] = ()
    diagnosis: str = ""
    localised: tuple[tuple[str, str], ...] = ()
    seconds: float = 0.0
    asked: bool = True  # whether a row to blame was looked for

    @property
    def right(self) -> bool | None:
        """Whether the guilty row is among those to blame; None where no row was looked for."""
        if (
            not self.asked
            or not self.killed
            or not self.bug.row
            or self.by.startswith(("refused", "died"))
        ):
            return None
        return any(self.bug.row in row for row in self.blamed)


def hunt(spec: str, scene: str, pool: Pool, *, blame: bool = True) -> Verdict:
    """Prove the scene with the bug `T02` or `T02@site` in it; without `blame` no row is sought."""
    bug, _ = found(spec)
    start = time.perf_counter()

    def verdict(killed: bool, by: str = "", place: str = "", report: Any = None) -> Verdict:
        made = Verdict(
            spec, bug, scene, killed, by, place, seconds=time.perf_counter() - start, asked=blame
        )
        if report is None:
            return made
        return replace(
            made, blamed=report.blamed, diagnosis=report.diagnosis, localised=report.localised
        )

    try:
        report = _proof(spec, bug, scene, pool, blame)
    except Refusal as refusal:
        if any(d.code == "S831" for d in refusal.diagnostics):
            raise  # no compiler here: nothing was hunted
        return verdict(True, f"refused {refusal.diagnostics[0].code}", refusal.diagnostics[0].title)
    except (RankDied, Hang) as error:
        assert bug.dies and bug.dies in str(error), f"the mutation {spec} fails: {error}"
        return verdict(True, "died", str(error).strip().splitlines()[-1])
    first = report.first
    if first is None:
        return verdict(False, report=report)
    return verdict(True, first.kind, first.place, report)


def _proof(spec: str, bug: Bug, scene: str, pool: Any, blame: bool) -> Report:
    with ExitStack() as stack:
        if bug.planning:
            stack.enter_context(mutate(spec))
        if SCENES[scene].optimizer is not None:
            stack.enter_context(_second(SCENES[scene].optimizer))
        if not blame:
            stack.enter_context(mock.patch("schedlang.passes.prove.suspected", _unasked))
        if bug.late:
            pool = stack.enter_context(Threads(Faults()))
        return prove(case(scene), pool=Mutated(pool, spec))  # type: ignore[arg-type]


def _unasked(report: Report, *_: Any) -> Report:
    return report


def _second(optimizer: Any) -> Any:
    """The second run of the proof with a different optimizer."""
    from schedlang.passes import prove as proving

    plain = proving.plan_runs

    def told(*args: Any, **kwargs: Any) -> Any:
        ran = plain(*args, **kwargs)
        first, second, *rest = ran.conditions
        return replace(ran, conditions=(first, replace(second, optimizer=optimizer), *rest))

    return mock.patch.object(proving, "plan_runs", told)
