"""Values of rows for very many modules: each is kept once for its row, and made when asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from schedlang.alike import above, holders
from schedlang.model import inside

T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """One value for some modules: for each of them with its name as `fqn`."""

    value: Any
    sites: tuple[str, ...]

    @cached_property
    def _here(self) -> frozenset[str]:
        return frozenset(self.sites)

    @cached_property
    def _above(self) -> frozenset[str]:
        return above(self.sites)

    def __iter__(self) -> Iterator[Any]:
        return (replace(self.value, fqn=fqn) for fqn in self.sites)

    def near(self, fqn: str) -> Iterator[Any]:
        """The values at a module, at what holds it and at what it holds."""
        for site in (fqn, *holders(fqn)):
            if site in self._here:
                yield replace(self.value, fqn=site)
        if fqn in self._above:
            held = (site for site in self.sites if site != fqn and inside(site, fqn))
            yield from (replace(self.value, fqn=site) for site in held)


class Spread(Sequence[T]):
    """The parts one after the other; equal to a tuple of all their values."""

    def __init__(self, parts: tuple[Part, ...]) -> None:
        self.parts = parts

    def __iter__(self) -> Iterator[T]:
        return (value for part in self.parts for value in part)

    def __len__(self) -> int:
        return sum(len(part.sites) for part in self.parts)

    def __getitem__(self, place: Any) -> Any:
        return tuple(self)[place]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (tuple, Spread)) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(tuple(self))


def parts(values: Sequence[Any]) -> tuple[Part, ...]:
    """Values, spread or each by itself, as parts."""
    if isinstance(values, Spread):
        return values.parts
    return tuple(Part(value, (value.fqn,)) for value in values)


def near(values: Sequence[T], fqn: str) -> Iterator[T]:
    """Those of values that are for a module, for what holds it or for what it holds."""
    if isinstance(values, Spread):
        return (value for part in values.parts for value in part.near(fqn))
    return (v for v in values if inside(v.fqn, fqn) or inside(fqn, v.fqn))  # type: ignore[attr-defined]
