"""The state in which statements are executed: declared names, the plan so far, settings.

`State` is an immutable value; `expand` replaces it after each statement. This file also evaluates
and checks the arguments of a call before any module is selected, and prints arguments and dtypes
in the syntax of the language.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.diagnostic import (
    Diagnostic,
    Label,
    Refusal,
    facts_of_unknown,
    suggest_name,
)
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
from schedlang.language.value import UNKNOWN, Names, evaluate, show_value

if TYPE_CHECKING:
    from schedlang.ir.model import ModelFacts
    from schedlang.ir.plan import Plan
    from schedlang.language.selector import Selector


SHORT_DTYPES = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


def arguments_text(primitive: Primitive) -> str:
    """Return the arguments that differ from the defaults, as written: `stage=1, over=dp`."""
    pairs = argument_texts(primitive)
    return ", ".join(f"{name}={value}" if name else value for name, value in pairs)


def argument_texts(primitive: Primitive) -> list[tuple[str, str]]:
    """Return (name, value as text) of the arguments that differ from the defaults.

    The name of a positional argument is "".
    """
    pairs: list[tuple[str, str]] = []
    for member in dataclasses.fields(primitive):  # type: ignore[arg-type]
        value = getattr(primitive, member.name)
        if value == member.default:
            continue
        if str(member.type).startswith("Rest["):
            pairs += [(name, _value_text(item)) for name, item in value]
        elif member.kw_only:
            pairs.append((member.name, _value_text(value)))
        else:
            pairs += [
                ("", _value_text(v)) for v in (value if isinstance(value, tuple) else (value,))
            ]
    return pairs


def _value_text(value: object) -> str:
    """Return a value in the syntax of the language.

    Names have no quotes; a tuple of one name is written without brackets.
    """
    if isinstance(value, str) and value.isidentifier():
        return str(value)
    if isinstance(value, tuple):
        names = all(isinstance(v, str) for v in value)
        if names and len(value) == 1:
            return _value_text(value[0])
        return f"[{', '.join(map(_value_text, value))}]"
    return show_value(value)


def short_dtype(dtype: str) -> str:
    """Return the short name of a dtype: f32 for float32."""
    prefix = dtype.rstrip("0123456789")
    return SHORT_DTYPES.get(prefix, prefix) + dtype[len(prefix) :]


# what `relax(...)` of a step may name; `rounding` is always allowed
RELAXABLE = ("dtype", "rng", "routing", "batch_stats", "staleness", "lossy", "updates", "model")


@dataclass(frozen=True)
class Settings:
    """Settings from outside the file: values of knobs, sizes of axes, and the number of ranks.

    `world` is the number of ranks of the running job, or None. An axis of size `_` in a mesh gets
    `world` divided by the sizes of the other axes.
    """

    knobs: Mapping[str, Any] = field(default_factory=dict)
    mesh: Mapping[str, int] = field(default_factory=dict)
    world: int | None = None


@dataclass(frozen=True)
class Definition:
    """A `def` and the names that its body may use.

    These are the definitions and patterns above the `def`, and the knobs of its file.
    """

    node: n.Def
    earlier_defs: Mapping[str, Definition] = field(repr=False)
    knobs: Mapping[str, Any]
    patterns: Mapping[str, Pattern] = field(default_factory=dict)


@dataclass(frozen=True)
class State:
    """An immutable state of execution; executing a statement returns a new State.

    Without `facts` (no model) only names and arguments of rows are checked, and `plan` stays None.
    `refused_names` holds declared names whose declaration was refused: statements that use these
    names raise no further error. `empty_rows` holds the places of rows whose selector matched no
    module.
    """

    facts: ModelFacts | None
    settings: Settings = Settings()
    knobs: Mapping[str, Knob] = field(default_factory=dict)
    mesh: Mesh | None = None
    axis_knobs: Mapping[str, str] = field(default_factory=dict)  # axis -> the knob that is its size
    defs: Mapping[str, Definition] = field(default_factory=dict)
    patterns: Mapping[str, Pattern] = field(default_factory=dict)
    refused_names: frozenset[str] = frozenset()
    steps: tuple[str, ...] = ()
    step: n.Step | None = None
    plan: Plan | None = None
    empty_rows: tuple[Span, ...] = ()  # rows that selected nothing
    limits: Limits = Limits()  # of a search for settings

    @property
    def axes(self) -> Mapping[str, int]:
        """Return the sizes of axes and views by name."""
        return {name: self.mesh.size(name) for name in self.mesh.names} if self.mesh else {}

    @property
    def names(self) -> Names:
        """Return the values of all names outside of definitions."""
        values = {name: knob.value for name, knob in self.knobs.items()}
        return Names(values, self.axes, {}, self.facts)

    def with_mesh(self, mesh: Mesh) -> State:
        """Return the state with a mesh; the plan, which has no rows yet, gets the mesh, too."""
        plan = replace(self.plan, mesh=mesh) if self.plan else None
        return replace(self, mesh=mesh, plan=plan)

    def with_knob(self, knob: Knob) -> State:
        """Return the state with one more knob; its value is a further decision of the plan."""
        knobs = {**self.knobs, knob.name: knob}
        plan = self.plan
        if plan:
            plan = replace(plan, decisions=tuple((k.name, k.value) for k in knobs.values()))
        return replace(self, knobs=knobs, plan=plan)

    def with_refused(self, *names: str) -> State:
        """Return the state after the declaration of `names` was refused."""
        return replace(self, refused_names=self.refused_names | set(names))


def current_selector(selector: Selector, state: State) -> Selector:
    """Return a selector over the present modules of the plan: rows may have replaced modules."""
    plan = state.plan
    if plan is None or selector.tree is plan.model or not plan.model.has_rewrites:
        return selector
    from schedlang.language.selector import Selector  # only needed with a model

    return Selector(plan.model)


def initial_state(facts: ModelFacts | None, settings: Settings) -> State:
    """Return the state before the first statement."""
    if facts is None:
        return State(None, settings)
    from schedlang.ir.plan import Plan  # imports torch, which `check` avoids

    return State(facts, settings, plan=Plan.empty(facts))


def job_size() -> int | None:
    """Return the number of ranks that torchrun started, or None."""
    size = os.environ.get("WORLD_SIZE", "")
    return int(size) if size.isdigit() else None


def unknown_primitive(name: n.Name, state: State) -> Diagnostic:
    """Return diagnostic S301: the name is neither a primitive nor a definition above."""
    load_all()
    known_names = [*sorted(registry()), *state.defs]
    helps = VERBS.get(name.text) or (suggest_name(name.text, known_names, "there are"),)
    label = Label(name.span, "neither a primitive nor a `def` above this line")
    title, facts = f"there is no primitive `{name.text}`", facts_of_unknown(name.text)
    if name.text not in VERBS:
        facts = facts_of_unknown(name.text, known_names)
    return Diagnostic("S301", title, label, helps=helps, facts=facts)


def evaluate_arguments(call: n.Call, names: Names) -> list[Argument]:
    """Return the evaluated arguments of a call."""
    arguments = []
    for arg in call.args:
        inner = arg.value if isinstance(arg, n.Keyword) else arg
        name = arg.name if isinstance(arg, n.Keyword) else None
        word = inner.text if isinstance(inner, n.Name) else ""
        arguments.append(Argument(name, evaluate(inner, names), arg.span, inner.span, word))
    return arguments


def resolve_pattern(primitive: Primitive, state: State, span: Span) -> Primitive:
    """Return a row with the pattern that it names (S885 where there is no such pattern).

    Returns the row unchanged where an argument is unknown without a model.
    """
    unknown = any(value is UNKNOWN for value in vars(primitive).values())
    if unknown or not isinstance(primitive, Resolved):
        return primitive
    try:
        return primitive.resolved(state.patterns)
    except Refusal as refusal:
        raise refusal.at(span) from None


def check_agreement(primitive: Primitive, state: State, span: Span) -> None:
    """Refuse arguments that do not agree with each other.

    Skips the check where an argument is unknown without a model.
    """
    if any(map(_is_unknown, vars(primitive).values())):
        return
    try:
        primitive.agree(tuple(state.axes))
    except Refusal as refusal:
        raise refusal.at(span) from None


def _is_unknown(value: Any) -> bool:
    """Return whether a value, or an item of a tuple, is unknown without a model."""
    return value is UNKNOWN or (isinstance(value, tuple) and any(map(_is_unknown, value)))
