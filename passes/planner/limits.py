"""Limits of a search, as one asks for them: values pinned, forbidden, or the least there may be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from schedlang.diagnostics.diagnostic import Refusal, guess, unknown
from schedlang.passes.planner.values import Setting

Value = int | bool | str

COUNTS = ("dp", "pp", "tp", "cp", "ep", "rows", "micro", "chunks", "zero")
AGAIN = ("none", "some", "all")  # units that are computed again
NAMES = (*COUNTS, "sequence", "order", "again")


@dataclass(frozen=True)
class Limits:
    """Bounds within which a search looks for a setting, by the names of `NAMES`.

    pinned     the only values that a name may have
    forbidden  values that it must not have
    least      the smallest count that it may have
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

    def admitted(self, name: str, values: Iterable[Value]) -> list[Value]:
        """Return those of some values that a name may have."""
        return [value for value in values if self.admits(name, value)]

    def admit(self, setting: Setting) -> bool:
        """Return whether a setting keeps all limits."""
        return all(self.admits(*pair) for pair in told(setting).items())

    def within(self, other: Limits) -> Limits:
        """Both at once.  What both pin is pinned as this one has it."""
        least = {
            name: max(self.least.get(name, 0), other.least.get(name, 0))
            for name in {**other.least, **self.least}
        }
        forbidden = {
            name: (*other.forbidden.get(name, ()), *self.forbidden.get(name, ()))
            for name in {**other.forbidden, **self.forbidden}
        }
        return Limits({**other.pinned, **self.pinned}, forbidden, least)

    def text(self) -> str:
        """tp = 4, pp not 8, dp at least 2"""
        parts = [f"{name} = {_any(values)}" for name, values in self.pinned.items()]
        parts += [f"{name} not {_any(values)}" for name, values in self.forbidden.items()]
        parts += [f"{name} at least {value}" for name, value in self.least.items()]
        return ", ".join(parts)


def told(setting: Setting) -> dict[str, Value]:
    """Every name that limits know, with its value in a setting that has its cuts."""
    one, again = setting.placement, sum(setting.again)
    return {
        "dp": setting.dp,
        "pp": setting.pp,
        "tp": one.tp,
        "cp": one.cp,
        "ep": one.ep,
        "rows": one.rows,
        "micro": setting.micro,
        "chunks": setting.chunks,
        "zero": setting.zero,
        "sequence": one.sequence,
        "order": setting.order,
        "again": "none" if not again else "all" if setting.again == setting.cuts else "some",
    }


def limits_of(
    pin: Iterable[str] = (), forbid: Iterable[str] = (), least: Iterable[str] = ()
) -> Limits:
    """The limits of options as they are written: `tp=4`, of several values `tp=2,4`.

    Raises Refusal S106 for a name that there is not, S109 for what cannot be read or met.
    """
    pinned = dict(_read("--pin", text) for text in pin)
    forbidden: dict[str, tuple[Value, ...]] = {}
    for text in forbid:
        name, values = _read("--forbid", text)
        forbidden[name] = (*forbidden.get(name, ()), *values)
    bounds = dict(_bound(text) for text in least)
    limits = Limits(pinned, forbidden, bounds)
    for name, values in pinned.items():
        if not limits.admitted(name, values):
            title = f"nothing is left of `{name}`: {limits.text()}"
            raise Refusal.of("S109", title, helps=("leave one of them out",))
    return limits


def asked(text: str) -> Limits:
    """The limits of a question: `tp=4`, or several of them, `tp=4 order=GPipe`."""
    return limits_of(pin=text.split())


def _read(option: str, text: str) -> tuple[str, tuple[Value, ...]]:
    name, equals, values = (part.strip() for part in text.partition("="))
    if not equals or not values:
        _unread(option, text, "an axis or a size, and its value")
    if name not in NAMES:
        title = f"a search has no `{name}`"
        help_ = guess(name, NAMES, "it has")
        raise Refusal.of("S106", title, helps=(help_,), facts=unknown(name, NAMES))
    return name, tuple(_value(option, text, name, value.strip()) for value in values.split(","))


def _value(option: str, text: str, name: str, value: str) -> Value:
    if name == "order":
        return _order(option, text, value)
    if name == "again":
        if value not in AGAIN:
            _unread(option, text, f"`again` is {', '.join(AGAIN)}")
        return value
    if name == "sequence":
        if value not in ("true", "false"):
            _unread(option, text, "`sequence` is true or false")
        return value == "true"
    if not value.isdecimal() or (int(value) < 1 and name != "zero"):
        _unread(option, text, "a whole number, at least 1")
    if name == "zero" and int(value) > 3:
        _unread(option, text, "`zero` is a stage from 0 to 3")
    return int(value)


def _order(option: str, text: str, value: str) -> str:
    from schedlang.pipeline.schedules import OrderError, find

    try:
        return find(value).name
    except OrderError as error:
        _unread(option, text, error.legal)


def _bound(text: str) -> tuple[str, int]:
    name, values = _read("--least", text)
    if name not in COUNTS or len(values) > 1:
        _unread("--least", text, f"one number of one of {', '.join(COUNTS)}")
    return name, int(values[0])


def _unread(option: str, text: str, legal: str) -> NoReturn:
    title = f"cannot read `{option} {text}`"
    raise Refusal.of("S109", title, notes=(legal,), helps=(f"write `{option} tp=4`",))


def _any(values: Iterable[Value]) -> str:
    shown = [str(one).lower() if isinstance(one, bool) else str(one) for one in values]
    return " or ".join(shown)
