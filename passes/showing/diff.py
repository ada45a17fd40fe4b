"""Two plans compared action by action, not line by line."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from schedlang.diagnostic import quoted
from schedlang.passes.reading.fold import folded
from schedlang.passes.reading.words import arguments
from schedlang.primitive import Primitive
from schedlang.value import shown

if TYPE_CHECKING:
    from schedlang.plan import Action, Plan


@dataclass(frozen=True)
class Change:
    """One row that is new (+), gone (-) or changed (~)."""

    sign: str
    step: str
    sites: tuple[str, ...]
    name: str
    said: str

    @property
    def where(self) -> str:
        """Its modules, folded, and how many there are."""
        count = f" x{len(self.sites)}" if len(self.sites) > 1 else ""
        return folded(self.sites) + count

    def __str__(self) -> str:
        count = f"  x{len(self.sites)}" if len(self.sites) > 1 else ""
        return f"  {self.sign} {folded(self.sites):<28} {self.name:<14} {self.said}{count}".rstrip()


@dataclass(frozen=True)
class Difference:
    """All changes from one plan to another; empty if they do the same."""

    changes: tuple[Change, ...]
    facts: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.changes or self.facts)

    def __str__(self) -> str:
        lines: list[str] = []
        step: str | None = None
        for change in self.changes:
            if change.step != step:
                lines.append(f'step "{change.step}"' if change.step else "outside of steps")
                step = change.step
            lines.append(str(change))
        return "\n".join([*lines, *self.facts]) or "no difference"

    def to_json(self) -> dict[str, object]:
        """The same for machines."""
        rows = [dataclasses.asdict(change) for change in self.changes]
        return {"changes": rows, "facts": list(self.facts)}


def compare(old: Plan, new: Plan) -> Difference:
    """What changes from `old` to `new`: rows by step and verb, then mesh, knobs and grade."""
    before, after = list(old.actions), list(new.actions)
    for action in old.actions:
        same = next((a for a in after if _key(a) == _key(action)), None)
        if same is not None:
            before.remove(action)
            after.remove(same)
    changes: list[Change] = []
    for action in before:
        match = next((a for a in after if _place(a) == _place(action)), None)
        if match is None:
            changes.append(_change("-", action, arguments(action.primitive)))
            continue
        after.remove(match)
        changes.append(_change("~", match, ", ".join(_changed(action, match))))
    changes += [_change("+", action, arguments(action.primitive)) for action in after]
    order = {name: place for place, name in enumerate(dict.fromkeys(_steps(old, new)))}
    changes.sort(key=lambda change: order[change.step])
    return Difference(tuple(changes), tuple(_facts(old, new)))


def _steps(old: Plan, new: Plan) -> Iterator[str]:
    for plan in (old, new):
        yield from (action.step for action in plan.actions)


def _key(action: Action) -> object:
    return action.step, action.primitive, action.sites


def _place(action: Action) -> object:
    return action.step, action.name, action.sites


def _change(sign: str, action: Action, said: str) -> Change:
    return Change(sign, action.step, action.sites, action.name, said)


def _given(primitive: Primitive) -> dict[str, object]:
    own = dataclasses.fields(primitive)  # type: ignore[arg-type]
    return {field.name: getattr(primitive, field.name) for field in own}


def _changed(old: Action, new: Action) -> Iterator[str]:
    """save: [linear] -> []"""
    before, after = _given(old.primitive), _given(new.primitive)
    for name, value in after.items():
        if before[name] != value:
            yield f"{name}: {shown(before[name])} -> {shown(value)}"


def _facts(old: Plan, new: Plan) -> Iterator[str]:
    if old.mesh != new.mesh:
        yield f"mesh {old.mesh} -> {new.mesh}"
    was = dict(old.decisions)
    for name, value in new.decisions:
        if name in was and was[name] != value:
            yield f"{name} {shown(was[name])} -> {shown(value)}"
    grades = [quoted(sorted(plan.gives_up)) or "nothing" for plan in (old, new)]
    if grades[0] != grades[1]:
        yield f"gives up {grades[0]} -> {grades[1]}"
