"""A plan as a value to print: its rows folded over equal modules, with what each one costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from schedlang.passes.costs.account import Account
from schedlang.passes.costs.sent import Collective
from schedlang.passes.reading.fold import alike, pattern
from schedlang.passes.reading.record import record
from schedlang.passes.reading.words import arguments, short
from schedlang.placement import Layout
from schedlang.plan import Action, Plan

if TYPE_CHECKING:
    from schedlang.model import ParameterFact

LAYOUTS, SHAPES = "placement", "shape"


@dataclass(frozen=True)
class Effect:
    """Collectives of one sort that a line brings, summed over its modules and microbatches."""

    kind: str
    axes: tuple[str, ...]
    what: str
    count: int
    bytes: int  # of all of them

    def to_json(self) -> dict[str, object]:
        """As plain values."""
        return {"kind": self.kind, "axes": list(self.axes), "what": self.what,
                "count": self.count, "bytes": self.bytes}  # fmt: skip


@dataclass(frozen=True)
class Line:
    """One row at modules that it treats alike.

    sign   `~` changed in place, `=` follows from another name of the same weight, `?` a check
    said   the layout of the parameters as a type, or the arguments of the row
    place  file, line and column of the row
    """

    sign: str
    pattern: str
    sites: tuple[str, ...]
    verb: str
    said: str
    row: int
    place: tuple[str, int, int]
    effects: tuple[Effect, ...] = ()

    def to_json(self) -> dict[str, object]:
        """As plain values."""
        return {
            "sign": self.sign, "pattern": self.pattern, "sites": list(self.sites),
            "do": self.verb, "said": self.said, "row": self.row, "from": list(self.place),
            "collectives": [effect.to_json() for effect in self.effects],
        }  # fmt: skip


@dataclass(frozen=True)
class Step:
    """The lines of one step; the name is empty outside of steps."""

    name: str
    relaxed: tuple[str, ...]
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class View:
    """Everything that a printed plan shows; `text` in show_text.py renders it."""

    title: str
    plan: Plan = field(repr=False)
    account: Account
    steps: tuple[Step, ...]

    @property
    def rows(self) -> int:
        """Rows that change something."""
        return len({line.row for line in self._lines() if line.sign != "?"})

    @property
    def changes(self) -> int:
        """Row by row, the modules changed."""
        return sum(len(line.sites) for line in self._lines() if line.sign != "?")

    @property
    def checks(self) -> int:
        """Rows that only check."""
        return len({line.row for line in self._lines() if line.sign == "?"})

    @property
    def grade(self) -> str:
        """How equal the result is: exact, rounding, or what else the plan gives up."""
        return ", ".join(sorted(self.plan.gives_up)) or "exact"

    def to_json(self) -> dict[str, Any]:
        """The plan's record and its account, and the lines as printed."""
        return {
            **record(self.plan),
            "title": self.title,
            "grade": self.grade,
            "parameters": sum(fact.numel for fact in self.plan.model.unique.values()),
            "steps": [
                {
                    "name": s.name,
                    "relaxed": list(s.relaxed),
                    "lines": [x.to_json() for x in s.lines],
                }
                for s in self.steps
            ],
            "account": self.account.to_json(),
        }

    def _lines(self) -> Iterator[Line]:
        for step in self.steps:
            yield from step.lines


def view(plan: Plan, account: Account, title: str = "", *, each: bool = False) -> View:
    """The plan to be printed; with `each`, one line for each module."""
    steps: list[Step] = []
    relaxed = dict(plan.relaxed)
    split: set[str] = set()  # parameters whose layout an earlier row has set
    for action in plan.actions:
        lines = tuple(_lines_of(plan, account, action, split, each))
        if "placement" in action.primitive.writes:
            split |= {f.name for s in action.sites for f in plan.model.sites[s].parameters.values()}
        if steps and steps[-1].name == action.step:
            known = steps.pop()
            lines = (*known.lines, *lines)
        steps.append(Step(action.step, relaxed.get(action.step, ()), lines))
    return View(title, plan, account, tuple(steps))


def _lines_of(
    plan: Plan, account: Account, action: Action, split: set[str], each: bool
) -> Iterator[Line]:
    def key(site: str) -> tuple[str, str]:
        sign, said = _sign(plan, action, site, split), _said(plan, action, site)
        return (sign, f"{said}\n{site}") if each else (sign, said)

    mine = [one for one in account.collectives or () if one.row == action.row]
    groups = alike(action.sites, key)
    for place, ((_, (sign, said)), sites) in enumerate(groups.items()):
        last = place == len(groups) - 1  # what belongs to none stands with the last
        taken = [one for one in mine if last or _belongs(one, sites)]
        mine = [one for one in mine if one not in taken]
        yield Line(
            sign, pattern(sites, plan.model.sites), sites, action.name, said.split("\n")[0],
            action.row, _place(action), _effects(taken),
        )  # fmt: skip


def _belongs(one: Collective, sites: Sequence[str]) -> bool:
    """Does a collective happen at these modules, below one, or where they are gathered for?"""
    return any(
        one.fqn == site or not site or one.fqn.startswith(f"{site}.")
        or site.startswith(f"{one.fqn}.") or not one.fqn
        for site in sites
    )  # fmt: skip


def _place(action: Action) -> tuple[str, int, int]:
    span = action.span
    return (span.source.name, span.line, span.col) if span else ("", 0, 0)


def _effects(found: Sequence[Collective]) -> tuple[Effect, ...]:
    sums: dict[tuple[str, tuple[str, ...], str], list[int]] = {}
    for one in found:
        what = one.what.split(" to stage")[0].removeprefix("to stage").strip()
        what = "output" if one.what.startswith("to stage") else what
        what = "output grad" if one.what.startswith("grad to stage") else what
        entry = sums.setdefault((one.kind, one.axes, what), [0, 0])
        entry[0], entry[1] = entry[0] + one.count, entry[1] + one.total
    return tuple(Effect(*key, count, size) for key, (count, size) in sums.items())


def _sign(plan: Plan, action: Action, site: str, split: set[str]) -> str:
    if not action.primitive.writes:
        return "?"
    own = {fact.name for fact in plan.model.sites[site].parameters.values()}
    tied = "placement" in action.primitive.writes and own and own <= split
    return "=" if tied and _tied_to(plan, site) else "~"


def _tied_to(plan: Plan, site: str) -> str:
    """The module whose weight this is another name of."""
    for local, fact in plan.model.sites[site].parameters.items():
        name = f"{site}.{local}" if site else local
        if fact.name != name:
            return plan.model.owner(fact.name).fqn
    return ""


def _said(plan: Plan, action: Action, site: str) -> str:
    """What a row makes of a module: a type where it changes a layout, else its arguments."""
    writes, facts = action.primitive.writes, plan.model.sites[site].parameters
    if SHAPES in writes or LAYOUTS in writes:
        tied = _tied_to(plan, site)
        if tied and LAYOUTS in writes:
            return f"tied to {tied}"
        changed = [f for f in facts.values() if plan.layout(f.name) != _whole(f)]
        if changed:
            return _type(plan, changed[0].name, padding=SHAPES in writes)
        edges = plan.boundaries.get(site, ())
        if edges:
            return ", ".join(f"{_edge(e.input)} -> {_edge(e.output)} over {e.axis}" for e in edges)
    return arguments(action.primitive)


def _whole(fact: ParameterFact) -> Layout:
    return Layout.whole(fact.shape)


def _edge(placement: Any) -> str:
    return "as it comes" if placement is None else str(placement)


def _type(plan: Plan, name: str, padding: bool = False) -> str:
    """f32[768, 2304@tp]; with `padding`, f32[50257 -> 50304, 768]."""
    layout, dtype = plan.layout(name), short(plan.model.parameters[name].dtype)
    if not padding:
        return dtype + layout.show()
    pairs = zip(layout.shape, layout.padded)
    return f"{dtype}[{', '.join(str(a) if a == b else f'{a} -> {b}' for a, b in pairs)}]"
