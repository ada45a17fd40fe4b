"""What is known at one point of a schedule while its statements are executed in order."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from schedlang import nodes as n
from schedlang.knob import Knob
from schedlang.mesh import Mesh
from schedlang.patterns import Pattern
from schedlang.source import Span
from schedlang.value import Names

if TYPE_CHECKING:
    from schedlang.model import ModelFacts
    from schedlang.plan import Plan
    from schedlang.selector import Selector

# What a step may give up beyond rounding, which every step may.
RELAXABLE = ("dtype", "rng", "routing", "batch_stats", "staleness", "lossy", "updates", "model")


@dataclass(frozen=True)
class Settings:
    """What comes from outside the file: knobs, axis sizes, and the ranks that are there.

    `world` is the size of the running job, if there is one; `_` in a mesh takes what is left of it.
    """

    knobs: Mapping[str, Any] = field(default_factory=dict)
    mesh: Mapping[str, int] = field(default_factory=dict)
    world: int | None = None


@dataclass(frozen=True)
class Definition:
    """A `def` with what its body may use: definitions and patterns above it, knobs of its file."""

    node: n.Def
    above: Mapping[str, Definition] = field(repr=False)
    knobs: Mapping[str, Any]
    patterns: Mapping[str, Pattern] = field(default_factory=dict)


@dataclass(frozen=True)
class State:
    """An immutable value: executing a statement gives another one.

    Without `facts` (no model) rows are checked for their names and arguments only, and `plan` stays
    None.  `broken` are declared names whose declaration was refused: what uses them is not blamed.
    `idle` are the places of rows for which nothing was selected.
    """

    facts: ModelFacts | None
    settings: Settings = Settings()
    knobs: Mapping[str, Knob] = field(default_factory=dict)
    mesh: Mesh | None = None
    sized: Mapping[str, str] = field(default_factory=dict)  # axis -> the knob that is its size
    defs: Mapping[str, Definition] = field(default_factory=dict)
    patterns: Mapping[str, Pattern] = field(default_factory=dict)
    broken: frozenset[str] = frozenset()
    steps: tuple[str, ...] = ()
    step: n.Step | None = None
    plan: Plan | None = None
    idle: tuple[Span, ...] = ()  # rows that selected nothing

    @property
    def axes(self) -> Mapping[str, int]:
        """Axes and views with their sizes."""
        return {name: self.mesh.size(name) for name in self.mesh.names} if self.mesh else {}

    @property
    def names(self) -> Names:
        """What names mean outside of any definition."""
        values = {name: knob.value for name, knob in self.knobs.items()}
        return Names(values, self.axes, {}, self.facts)

    def with_mesh(self, mesh: Mesh) -> State:
        """The state on another mesh; the plan, which has no rows yet, moves to it."""
        plan = replace(self.plan, mesh=mesh) if self.plan else None
        return replace(self, mesh=mesh, plan=plan)

    def with_knob(self, knob: Knob) -> State:
        """The state with one more knob, which is one more decision of the plan."""
        knobs = {**self.knobs, knob.name: knob}
        plan = self.plan
        if plan:
            plan = replace(plan, decisions=tuple((k.name, k.value) for k in knobs.values()))
        return replace(self, knobs=knobs, plan=plan)

    def without(self, *names: str) -> State:
        """The state after the declaration of `names` was refused."""
        return replace(self, broken=self.broken | set(names))


def current(selector: Selector, state: State) -> Selector:
    """The selector of the modules that are there now: rows may have replaced some."""
    plan = state.plan
    if plan is None or selector.tree is plan.model or not plan.model.rewritten:
        return selector
    from schedlang.selector import Selector  # no module is selected without a model

    return Selector(plan.model)


def start(facts: ModelFacts | None, settings: Settings) -> State:
    """The state above the first statement."""
    if facts is None:
        return State(None, settings)
    from schedlang.plan import Plan  # it needs torch, which checking without a model does not

    return State(facts, settings, plan=Plan.empty(facts))


def job_size() -> int | None:
    """The number of ranks that torchrun started, or None."""
    size = os.environ.get("WORLD_SIZE", "")
    return int(size) if size.isdigit() else None
