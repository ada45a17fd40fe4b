"""Knobs: the parameters of a schedule, their types, domains and settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from schedlang.diagnostics.diagnostic import Label, Refusal, facts_of_unknown, suggest_name
from schedlang.diagnostics.source import NOWHERE, Span
from schedlang.language import nodes as n
from schedlang.language import printer
from schedlang.language.value import (
    AxisSize,
    Choice,
    Names,
    Symbol,
    evaluate,
    quote_values,
    show_value,
)

TYPES = ("int", "float", "bool", "choice")
TYPE_HELPS: Mapping[str, str] = {
    "int": "an integer: `4`",
    "float": "a number: `0.5`",
    "bool": "`true` or `false`",
    "choice": "a name: `full`",
}
MAX_LISTED = 4096  # an interval with more members is not listed


@dataclass(frozen=True)
class Knob:
    """A parameter: its type, its domain (None: any value of the type) and its value."""

    name: str
    type: str
    value: Any
    choices: tuple[Any, ...] | None
    interval: tuple[Any, Any] | None
    span: Span

    @property
    def options(self) -> tuple[Any, ...]:
        """Every value that the knob may have, where the values can be listed."""
        if self.choices is not None:
            return self.choices
        if (
            self.interval
            and self.type == "int"
            and self.interval[1] - self.interval[0] < MAX_LISTED
        ):
            return tuple(range(self.interval[0], self.interval[1] + 1))
        return (False, True) if self.type == "bool" else ()

    def allows(self, value: Any) -> bool:
        """Return whether a value of the right type is in the domain."""
        if self.choices is not None:
            return value in self.choices
        return self.interval is None or self.interval[0] <= value <= self.interval[1]


def make_knob(node: n.Knob, names: Names, settings: Mapping[str, Any]) -> Knob:
    """Return the knob of a declaration, with its setting or its default as value.

    Refuses S102 (no such type, a value of another type), S103 (outside the domain) and S105 (no
    value). Settings from a command line are texts.
    """
    if node.type not in TYPES:
        title = f"a knob cannot be of type `{node.type}`"
        label = Label(node.span)
        raise Refusal.unknown("S102", title, node.type, TYPES, "choose one of", label)
    choices, interval = _evaluate_domain(node, names)
    knob = Knob(node.name, node.type, None, choices, interval, node.span)
    if node.name in settings:
        value, origin = _read_setting(knob, settings[node.name]), node.span
    elif node.default is not None:
        value, origin = _check_type(knob, evaluate(node.default, names), node.default.span), None
    else:
        title = f"`{node.name}` has no value"
        help_ = f"set it: `--knob {node.name}=...`, or give it a default"
        raise Refusal.of("S105", title, Label(node.span, "no default"), helps=(help_,))
    if not knob.allows(value):
        _refuse_outside(knob, node, value, from_setting=origin is not None)
    if knob.type == "choice":
        value = Choice.of(str(value), knob.name, [str(option) for option in knob.options])
    return Knob(node.name, node.type, value, choices, interval, node.span)


def _evaluate_domain(
    node: n.Knob, names: Names
) -> tuple[tuple[Any, ...] | None, tuple[Any, Any] | None]:
    blank = Knob(node.name, node.type, None, None, None, node.span)
    if node.domain is None:
        return None, None
    if isinstance(node.domain, n.Interval):
        low = _check_type(blank, evaluate(node.domain.low, names), node.domain.low.span)
        high = _check_type(blank, evaluate(node.domain.high, names), node.domain.high.span)
        if node.type not in ("int", "float") or low > high:
            reason = (
                "the first number is larger than the second"
                if node.type in ("int", "float")
                else "numbers only"
            )
            title = "an interval goes from the smaller to the larger number"
            helps: tuple[str, ...] = ("swap the two numbers: `in 1..8`",)
            if node.type not in ("int", "float"):
                helps = ("list the values: `in [...]`",)
            raise Refusal.of("S102", title, Label(node.domain.span, reason), helps=helps)
        return None, (low, high)
    values = evaluate(node.domain, names)
    if not isinstance(values, tuple) or not values:
        title = "the values of a knob are a list or an interval"
        helps = ("`in [1, 2, 4]`", "`in 1..8`")
        raise Refusal.of("S102", title, Label(node.domain.span), helps=helps)
    return tuple(_check_type(blank, value, node.domain.span) for value in values), None


def _check_type(knob: Knob, value: Any, span: Span) -> Any:
    """Return the value converted to the knob's type; refuses S102."""
    kinds: Mapping[str, Callable[[Any], bool]] = {
        "int": lambda v: isinstance(v, int) and not isinstance(v, bool),
        "float": lambda v: isinstance(v, int | float) and not isinstance(v, bool),
        "bool": lambda v: isinstance(v, bool),
        "choice": lambda v: isinstance(v, str | AxisSize),
    }
    if not kinds[knob.type](value):
        title = f"`{knob.name}` must be of type {knob.type}"
        helps: tuple[str, ...] = (f"give it {TYPE_HELPS[knob.type]}",)
        if kind_name := next((name for name, fits in kinds.items() if fits(value)), None):
            helps = (*helps, f"or declare it so: `knob {knob.name}: {kind_name}`")
        raise Refusal.of("S102", title, Label(span, f"this is {show_value(value)}"), helps=helps)
    if knob.type == "choice":
        return Symbol(value.name if isinstance(value, AxisSize) else value)
    return {"int": int, "float": float, "bool": bool}[knob.type](value)


def _read_setting(knob: Knob, setting: Any) -> Any:
    """Return a setting from outside the file; a text is parsed as the knob's type."""
    value = setting
    if isinstance(setting, str) and knob.type != "choice":
        readers: Mapping[str, Callable[[str], Any]] = {
            "int": int,
            "float": float,
            "bool": _parse_bool,
        }
        try:
            value = readers[knob.type](setting)
        except ValueError:
            title = f"`{knob.name}` cannot be `{setting}`"
            label = Label(knob.span, f"is of type {knob.type}")
            helps = (f"give it {TYPE_HELPS[knob.type]}",)
            raise Refusal.of("S102", title, label, helps=helps) from None
    return _check_type(knob, value, knob.span)


def _parse_bool(text: str) -> bool:
    values = {"true": True, "false": False, "1": True, "0": False}
    if text.lower() not in values:
        raise ValueError(text)
    return values[text.lower()]


def _refuse_outside(knob: Knob, node: n.Knob, value: Any, from_setting: bool) -> None:
    assert node.domain is not None
    domain = printer.expr(node.domain)
    choice_hint = (
        f"set `{knob.name}` to one of {domain}" if knob.choices else f"choose from {domain}"
    )
    title = f"`{knob.name}` cannot be {show_value(value).strip('`')}"
    also = () if from_setting or node.default is None else (Label(node.default.span, "default"),)
    label = Label(node.domain.span, "its allowed values")
    raise Refusal.of("S103", title, label, also, helps=(choice_hint,))


def refuse_unknown_settings(
    settings: Iterable[str], knobs: Mapping[str, Knob], span: Span = NOWHERE
) -> None:
    """Refuse (S106) a setting of a knob that the schedule does not have."""
    for name in settings:
        if name not in knobs:
            help_ = suggest_name(name, knobs, "its knobs are") if knobs else "it has no knobs"
            title = f"the schedule has no knob `{name}`"
            facts = facts_of_unknown(name, knobs)
            raise Refusal.of("S106", title, Label(span), helps=(help_,), facts=facts)


def find_alternatives(
    knobs: Mapping[str, Knob], holds: Callable[[Mapping[str, Any]], bool]
) -> list[str]:
    """Return, as text, values of single knobs that would make a requirement hold."""
    alternatives = []
    for knob in knobs.values():
        options = [
            v for v in knob.options if v != knob.value and _holds_with(holds, {knob.name: v})
        ]
        if options:
            alternatives.append(f"`{knob.name}` may be {quote_values(options[:6])}")
    return alternatives


def _holds_with(holds: Callable[[Mapping[str, Any]], bool], changed: Mapping[str, Any]) -> bool:
    try:
        return holds(changed)
    except Refusal:
        return False


def format_settings(knobs: Mapping[str, Knob]) -> str:
    """Format the settings of the knobs: tp = 4, pp = 2."""
    return ", ".join(f"{k.name} = {show_value(k.value).strip('`')}" for k in knobs.values())
