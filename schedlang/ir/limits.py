"""Limits of a search for settings: values that are pinned, forbidden, or a minimum.

From the `search` statements of a schedule and the options of `schedlang tune`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any, NoReturn

from schedlang.diagnostics.diagnostic import Refusal

Value = int | bool | str

COUNTS = ("dp", "pp", "tp", "cp", "ep", "rows", "micro", "chunks", "slices", "zero")
CHOICES = {  # names whose values are words
    "again": ("none", "some", "all"),  # units that are recomputed
    "offload": ("none", "activations", "optimizer", "both"),  # what is stored on the host
}
AXES = ("dp", "pp", "cp", "tp")  # of a mesh, in the usual order, slowest first
NAMES = (*COUNTS, "sequence", "order", "axes", *CHOICES)
PIN, FORBID, LEAST = "pin", "forbid", "at least"


@dataclass(frozen=True)
class Limits:
    """Bounds of a search, by the names of `NAMES`.

    pinned     the only values that a name may have
    forbidden  values that a name must not have
    least      the smallest count that a name may have
    """

    pinned: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    forbidden: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    least: Mapping[str, int] = field(default_factory=dict)

    def admits(self, name: str, value: Value) -> bool:
        """Return whether a name may have this value."""
        if name in self.pinned and value not in self.pinned[name]:
            return False
        if value in self.forbidden.get(name, ()):
            return False
        return name not in self.least or int(value) >= self.least[name]

    def filter_admitted(self, name: str, values: Iterable[Value]) -> list[Value]:
        """Return the values that a name may have, among these."""
        return [value for value in values if self.admits(name, value)]

    def combined_with(self, other: Limits) -> Limits:
        """Return both limits combined; a name that both pin is pinned as in `self`."""
        least = {
            name: max(self.least.get(name, 0), other.least.get(name, 0))
            for name in {**other.least, **self.least}
        }
        forbidden = {
            name: (*other.forbidden.get(name, ()), *self.forbidden.get(name, ()))
            for name in {**other.forbidden, **self.forbidden}
        }
        return Limits({**other.pinned, **self.pinned}, forbidden, least)

    def with_limit(self, kind: str, name: str, values: tuple[Any, ...]) -> Limits:
        """Return these limits and one more, as a schedule or an option gives it.

        Raises Refusal S106 for an unknown name, S109 for values that the name cannot have, and for
        a limit that leaves no value.
        """
        if name not in NAMES:
            raise Refusal.unknown("S106", f"a search has no `{name}`", name, NAMES, "it has")
        expanded = tuple(item for value in values for item in _expand_value(name, value))
        if kind == LEAST:
            if name not in COUNTS or len(expanded) > 1:
                _refuse(f"`{name}` has no least value", f"one number, of {', '.join(COUNTS)}")
            least = max(int(expanded[0]), self.least.get(name, 0))
            combined = replace(self, least={**self.least, name: least})
        elif kind == FORBID:
            excluded = (*self.forbidden.get(name, ()), *expanded)
            combined = replace(self, forbidden={**self.forbidden, name: excluded})
        else:
            left = tuple(item for item in expanded if self.admits(name, item))
            combined = replace(self, pinned={**self.pinned, name: left or expanded})
            if not left:
                _refuse(f"nothing is left of `{name}`: {combined.text()}", "leave one of them out")
        if name in combined.pinned and not combined.filter_admitted(name, combined.pinned[name]):
            _refuse(f"nothing is left of `{name}`: {combined.text()}", "leave one of them out")
        return combined

    def for_name(self, name: str) -> Limits:
        """Return the limits of one name alone."""
        return Limits(
            {key: values for key, values in self.pinned.items() if key == name},
            {key: values for key, values in self.forbidden.items() if key == name},
            {key: least for key, least in self.least.items() if key == name},
        )

    def text(self) -> str:
        """Format the limits: tp = 4, pp not 8, dp at least 2."""
        parts = [f"{name} = {_format_any(name, values)}" for name, values in self.pinned.items()]
        parts += [
            f"{name} not {_format_any(name, values)}" for name, values in self.forbidden.items()
        ]
        parts += [f"{name} at least {value}" for name, value in self.least.items()]
        return ", ".join(parts)


def axis_orders(text: str) -> tuple[Value, ...]:
    """Return every order of all axes that has the axes of `text`, for example `pp-dp`, in their
    order."""
    axes = text.split("-")
    orders = (order for order in permutations(AXES) if [a for a in order if a in axes] == axes)
    return tuple("-".join(order) for order in orders)


def _expand_value(name: str, value: Any) -> tuple[Value, ...]:
    """Return the values that a given value stands for."""
    if name != "axes":
        return (_check_value(name, value),)
    if not (orders := axis_orders(str(value))) or "-" not in str(value):
        legal = "some of dp, pp, cp and tp from the slowest on: `pp-dp`; experts lie along dp"
        _refuse(f"`axes` cannot be `{value}`", legal)
    return orders


def _check_value(name: str, value: Any) -> Value:
    """Return a legal value of a name; for an order, its name in the catalogue."""
    if name == "order":
        return _check_order(str(value))
    if name in CHOICES:
        if value not in CHOICES[name]:
            _refuse(f"`{name}` cannot be `{value}`", f"one of {', '.join(CHOICES[name])}")
        return str(value)
    if name == "sequence":
        if not isinstance(value, bool):
            _refuse(f"`sequence` cannot be `{value}`", "true or false")
        return value
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or value < (name != "zero"):
        _refuse(f"`{name}` cannot be `{value}`", "a whole number, at least 1")
    if name == "zero" and value > 3:
        _refuse(f"`zero` cannot be `{value}`", "a stage from 0 to 3")
    return int(value)


def _check_order(name: str) -> str:
    from schedlang.pipeline.schedules import OrderError, find_order

    try:
        return find_order(name).name
    except OrderError as error:
        _refuse(error.reason, error.legal)


def _refuse(title: str, legal: str) -> NoReturn:
    raise Refusal.of("S109", title, helps=(legal,))


def format_value(value: object) -> str:
    """Format a value as the command line accepts it: `true`, `4`, `1F1B`."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _format_any(name: str, values: Iterable[Value]) -> str:
    texts = [*map(format_value, values)]
    if name == "axes":  # in the shortest form
        orders = (axes for count in (2, 3) for axes in permutations(AXES, count))
        texts = next(
            ([order] for order in map("-".join, orders) if list(axis_orders(order)) == texts), texts
        )
    return " or ".join(texts)
