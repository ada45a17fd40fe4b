"""Cursor: the modules of one path, and the calls that are made on them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from schedlang import lift
from schedlang import nodes as n
from schedlang.diagnostic import at_their_callers_lines
from schedlang.primitive import Primitive
from schedlang.source import python_span

if TYPE_CHECKING:
    from schedlang.schedule import Schedule


@at_their_callers_lines
@dataclass(frozen=True)
class Cursor:
    """The modules of one path: `sch["transformer.h.*"].checkpoint()`."""

    _schedule: Schedule
    _roots: tuple[str, ...]
    _path: n.Path

    @property
    def modules(self) -> tuple[str, ...]:
        """Their names, in model order."""
        return self._schedule._select(self._path, self._roots)

    def __getattr__(self, name: str) -> Caller:
        if name.startswith("_"):
            raise AttributeError(name)
        return Caller(self._schedule, self._roots, self._path, name)

    def do(self, primitive: Primitive) -> Cursor:
        """Apply a bound primitive; the typed way to say what `sch[...].name(...)` says."""
        call = lift.call_of(primitive, python_span())
        self._schedule._record_call(self._roots, self._path, call, python_span())
        return self


@at_their_callers_lines
@dataclass(frozen=True)
class Caller:
    """A primitive or a definition about to be called; a dotted name is one of a library."""

    _schedule: Schedule
    _roots: tuple[str, ...]
    _path: n.Path | None
    _name: str

    def __getattr__(self, name: str) -> Caller:
        if name.startswith("_"):
            raise AttributeError(name)
        return replace(self, _name=f"{self._name}.{name}")

    def __call__(self, *args: object, **named: object) -> None:
        """Check the row, add it to the plan and record it; or refuse and change nothing."""
        span = python_span()
        if self._name == "replace":
            name = self._schedule._facts.named
            args, named = tuple(map(name, args)), {k: name(v) for k, v in named.items()}
        call = lift.call(self._name, args, named, span)
        self._schedule._record_call(self._roots, self._path, call, span)
