"""The state in which statements are executed: names, rows so far, the arguments of a call.

* Arguments of a row and dtypes in the words of the language.
* What is known at one point of a schedule while its statements are executed in order.
* A row's call, before any module is looked at: arguments, what they name, and if they agree.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.diagnostic import Diagnostic, Label, Refusal, guess, unknown
from schedlang.diagnostics.other_systems import VERBS
from schedlang.diagnostics.source import Span
from schedlang.ir.features import Resolved
from schedlang.ir.limits import Limits
from schedlang.ir.mesh import Mesh
from schedlang.ir.primitive import Primitive, load_all, registry
from schedlang.language import nodes as n
from schedlang.language.kinds import Argument
from schedlang.language.knob import Knob
from schedlang.language.patterns import Pattern
from schedlang.language.value import UNKNOWN, Names, evaluate, shown

if TYPE_CHECKING:
    from schedlang.ir.model import ModelFacts
    from schedlang.ir.plan import Plan
    from schedlang.language.selector import Selector


SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


def arguments_text(primitive: Primitive) -> str:
    """Return the arguments that differ from the defaults, as written: `stage=1, over=dp`."""
    said = arguments_said(primitive)
    return ", ".join(f"{name}={value}" if name else value for name, value in said)


def arguments_said(primitive: Primitive) -> list[tuple[str, str]]:
    """The same as names and texts of values; "" for one that stands without its name."""
    said: list[tuple[str, str]] = []
    for one in dataclasses.fields(primitive):  # type: ignore[arg-type]
        value = getattr(primitive, one.name)
        if value == one.default:
            continue
        if is_rest(one.type):
            said += [(name, _word(each)) for name, each in value]
        elif one.kw_only:
            said.append((one.name, _word(value)))
        else:
            said += [("", _word(v)) for v in (value if isinstance(value, tuple) else (value,))]
    return said


def is_rest(kind: object) -> bool:
    """Return whether a field holds all other keywords that a row is given."""
    return str(kind).startswith("Rest[")


def _word(value: object) -> str:
    """A value as the language writes it; names stand without quotes, one of several alone."""
    if isinstance(value, str) and value.isidentifier():
        return str(value)
    if isinstance(value, tuple):
        names = all(isinstance(v, str) for v in value)
        if names and len(value) == 1:
            return _word(value[0])
        return f"[{', '.join(map(_word, value))}]"
    return shown(value)


def short(dtype: str) -> str:
    """f32 for float32."""
    word = dtype.rstrip("0123456789")
    return SHORT.get(word, word) + dtype[len(word) :]


# What a step may give up beyond rounding, which every step may.
RELAXABLE = ("dtype", "rng", "routing", "batch_stats", "staleness", "lossy", "updates", "model")


@dataclass(frozen=True)
class Settings:
    """The settings from outside the file: knobs, axis sizes, and the ranks that exist.

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
    limits: Limits = Limits()  # of a search for settings

    @property
    def axes(self) -> Mapping[str, int]:
        """Axes and views with their sizes."""
        return {name: self.mesh.size(name) for name in self.mesh.names} if self.mesh else {}

    @property
    def names(self) -> Names:
        """Return the meaning of names outside of any definition."""
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
    from schedlang.language.selector import Selector  # no module is selected without a model

    return Selector(plan.model)


def start(facts: ModelFacts | None, settings: Settings) -> State:
    """The state above the first statement."""
    if facts is None:
        return State(None, settings)
    from schedlang.ir.plan import Plan  # it needs torch, which checking without a model does not

    return State(facts, settings, plan=Plan.empty(facts))


def job_size() -> int | None:
    """The number of ranks that torchrun started, or None."""
    size = os.environ.get("WORLD_SIZE", "")
    return int(size) if size.isdigit() else None


def no_primitive(name: n.Name, state: State) -> Diagnostic:
    """S301: neither a primitive nor a definition above."""
    load_all()
    known = [*sorted(registry()), *state.defs]
    helps = VERBS.get(name.text) or (guess(name.text, known, "there are"),)
    label = Label(name.span, "neither a primitive nor a `def` above this line")
    title, facts = f"there is no primitive `{name.text}`", unknown(name.text)
    if name.text not in VERBS:
        facts = unknown(name.text, known)
    return Diagnostic("S301", title, label, helps=helps, facts=facts)


def arguments(call: n.Call, names: Names) -> list[Argument]:
    """The evaluated arguments of a call."""
    found = []
    for arg in call.args:
        inner = arg.value if isinstance(arg, n.Keyword) else arg
        name = arg.name if isinstance(arg, n.Keyword) else None
        word = inner.text if isinstance(inner, n.Name) else ""
        found.append(Argument(name, evaluate(inner, names), arg.span, inner.span, word))
    return found


def resolved(primitive: Primitive, state: State, span: Span) -> Primitive:
    """A row with the pattern that it names (S885); what only a model can tell stays open."""
    unknown = any(value is UNKNOWN for value in vars(primitive).values())
    if unknown or not isinstance(primitive, Resolved):
        return primitive
    try:
        return primitive.resolved(state.patterns)
    except Refusal as refusal:
        raise refusal.at(span) from None


def agreed(primitive: Primitive, state: State, span: Span) -> None:
    """Refuse arguments that do not go together, where all are known without a model."""
    if any(map(_open, vars(primitive).values())):
        return
    try:
        primitive.agree(tuple(state.axes))
    except Refusal as refusal:
        raise refusal.at(span) from None


def _open(value: Any) -> bool:
    """Return whether only a model can tell a value, or one of a list."""
    return value is UNKNOWN or (isinstance(value, tuple) and any(map(_open, value)))
