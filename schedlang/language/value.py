"""The values of the language, and what a name means at one place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from schedlang.diagnostics.diagnostic import Facts, quoted, unknown
from schedlang.ir.placement import R

UNITS: Mapping[str, float] = {
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
}


class Symbol(str):
    """A bare name that is no knob, axis or argument; whoever takes it has a closed list of them."""

    __slots__ = ()


def bare(value: Any) -> Facts:
    """The facts of a value that is a bare word, or has some in it: names that nothing knows."""
    every = value if isinstance(value, tuple) else (value,)
    return tuple(fact for one in every if isinstance(one, str) for fact in unknown(one))


class Choice(Symbol):
    """The value of a knob of type choice, with the symbols it could have been."""

    knob: str
    options: tuple[str, ...]

    @staticmethod
    def of(value: str, knob: str, options: Sequence[str]) -> Choice:
        """A choice of the knob `knob` among `options` (none: any)."""
        made = Choice(value)
        made.knob, made.options = knob, tuple(options)
        return made


class AxisSize(int):
    """The size of an axis that remembers the axis: a number to arithmetic, a name to `over=`."""

    name: str

    @staticmethod
    def of(name: str, size: int) -> AxisSize:
        """The size of the axis `name`."""
        made = AxisSize(size)
        made.name = name
        return made


class Bytes(int):
    """A number of bytes, written 40GiB."""


class Seconds(float):
    """A time in seconds, written 180ms."""


@dataclass(frozen=True)
class Symbolic:
    """A call that stands for itself, such as group(4), for whoever takes it."""

    name: str
    args: tuple[Any, ...] = ()
    keywords: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        named = [f"{key}={value}" for key, value in self.keywords]
        return f"{self.name}({', '.join([*map(str, self.args), *named])})"


class Unknown:
    """A value that cannot be known without the model; anything computed from it is unknown too."""

    def __repr__(self) -> str:
        return "unknown"


UNKNOWN = Unknown()


class Reader(Protocol):
    """The part of a model that evaluation reads: plain attributes of one module."""

    def attribute(self, fqn: str, name: str) -> object:
        """The attribute, or AttributeError."""

    def attributes(self, fqn: str) -> Sequence[str]:
        """The public names of a module's own attributes."""


class Missing(Exception):
    """Raised in a `where` for a name that is no attribute of the module."""


@dataclass(frozen=True)
class Names:
    """The meaning of names at one place: arguments of a def, then knobs and axes; `model.` its
    facts.

    `here` gives the attributes of one module, inside a `where`.
    """

    knobs: Mapping[str, Any] = field(default_factory=dict)
    axes: Mapping[str, int] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    model: Reader | None = None
    here: Callable[[str], object] | None = None

    def known(self) -> list[str]:
        """Every name with a meaning."""
        return [*self.arguments, *self.axes, *self.knobs]

    def lookup(self, name: str) -> Any:
        """The meaning of a bare name; a Symbol where it has none."""
        if name in self.arguments:
            return self.arguments[name]
        if name in self.axes:
            return AxisSize.of(name, self.axes[name])
        if name in self.knobs:
            return self.knobs[name]
        if self.here is not None:
            try:
                return self.here(name)
            except AttributeError:
                return Symbol(name)
        return R if name == "R" else Symbol(name)


def literal(text: str) -> Any:
    """The value of a literal as written."""
    if text.startswith('"'):
        return text[1:-1]
    if text in ("true", "false"):
        return text == "true"
    digits = text.rstrip("KMGTiBusm")
    if digits != text:
        unit = text[len(digits) :]
        amount = float(digits) * UNITS[unit]
        return Bytes(amount) if unit.endswith("B") else Seconds(amount)
    return int(text) if text.isdigit() else float(text)


def shown(value: object) -> str:
    """A value as the language writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, AxisSize):
        return f"the axis `{value.name}`"
    if isinstance(value, Symbol):
        return f"`{value}`"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return f"[{', '.join(map(shown, value))}]"
    return str(value)


def listed(values: Sequence[object]) -> str:
    """Values in code marks."""
    return quoted(shown(value).strip("`") for value in values)
