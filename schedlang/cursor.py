"""Cursors: the modules of one path (`sch["h.*"]`), and the calls of primitives on them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from schedlang.diagnostics.diagnostic import (
    Label,
    Refusal,
    facts_of_unknown,
    find_closest,
    kind_of,
    refuse_methods_at_caller,
)
from schedlang.diagnostics.source import python_span
from schedlang.diagnostics.tables import format_count, html_table
from schedlang.ir.primitive import Primitive, registry
from schedlang.language import lift, manual, printer
from schedlang.language import nodes as n
from schedlang.language.syntax import parse_path

if TYPE_CHECKING:
    from schedlang.schedule import Schedule


MOST, MOST_SHOWN = 3, 20  # names shown in a repr, and modules in a notebook


@refuse_methods_at_caller
@dataclass(frozen=True, repr=False)
class Cursor:
    """The modules of one path: `sch["transformer.h.*"].checkpoint()`."""

    _schedule: Schedule
    _roots: tuple[str, ...]
    _path: n.Path

    @property
    def modules(self) -> tuple[str, ...]:
        """The names of the modules, in model order."""
        return self._schedule._select(self._path, self._roots)

    def __getitem__(self, path: str | int | slice) -> Cursor:
        """Return modules inside of these: `sch["transformer"]["h"][0]`,
        `sch["transformer.h"][:2]`."""
        return replace(self, _path=join_path(self._path, path))

    def __iter__(self) -> Iterator[Cursor]:
        """Refuse: a row is for all modules at once."""
        path = printer.path(self._path)
        title = f'`sch["{path}"]` are modules that a row names together, not one by one'
        helps = (f'their names: `sch["{path}"].modules`',)
        raise Refusal.of("S202", title, Label(python_span()), helps=helps)

    def __getattr__(self, name: str) -> PendingCall:
        if name.startswith("_"):
            raise AttributeError(name)
        return PendingCall(self._schedule, self._roots, self._path, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *registry()})

    def row(self, verb: str, *args: object, **kwargs: object) -> None:
        """Add the row of a verb by its name: `sch["h.*"].row("checkpoint")`."""
        record_call(PendingCall(self._schedule, self._roots, self._path, verb), args, kwargs)

    def __repr__(self) -> str:
        path_text = printer.path(self._path)
        try:
            modules = self.modules
        except Refusal as refusal:
            return f'<sch["{path_text}"]: {refusal.diagnostic.title}>'
        kinds = dict.fromkeys(self._schedule._facts.sites[fqn].class_name for fqn in modules)
        count = f"{len(modules)} modules" if len(modules) != 1 else "1 module"
        shown = ", ".join(name or "the model" for name in modules[:MOST])
        suffix = f", .. {modules[-1]}" if len(modules) > MOST else ""
        return f'<sch["{path_text}"]: {count} ({", ".join(kinds)}): {shown}{suffix}>'

    def _repr_html_(self) -> str:
        """Return the modules as a table for notebooks: class, size, and the rows that act on
        each."""
        try:
            modules = self.modules
        except Refusal:
            return html_table(repr(self), ())
        plan = self._schedule.plan()
        rows = [
            (
                name or "the model",
                plan.model.sites[name].class_name,
                format_count(plan.model.numel(name)),
                ", ".join(
                    str(action.primitive) for action in plan.rows_at(name) if action.has_effect
                ),
            )
            for name in modules[:MOST_SHOWN]
        ]
        if len(modules) > MOST_SHOWN:
            rows.append((f"and {len(modules) - MOST_SHOWN} more", "", "", ""))
        title = f'sch["{printer.path(self._path)}"]'
        return html_table(title, rows, ("module", "class", "parameters", "rows that act on it"))

    def do(self, primitive: Primitive) -> Cursor:
        """Apply a bound primitive; the typed form of `sch[...].name(...)`."""
        call = lift.call_of(primitive, python_span())
        self._schedule._record_call(self._roots, self._path, call)
        return self


@refuse_methods_at_caller
@dataclass(frozen=True, repr=False)
class PendingCall:
    """A primitive or a definition to be called; a dotted name is one of a library."""

    _schedule: Schedule
    _roots: tuple[str, ...]
    _path: n.Path | None
    _name: str

    def __post_init__(self) -> None:
        if (page := _page(self._name)) is not None:  # for `help` and notebooks
            object.__setattr__(self, "__doc__", page)

    def __getattr__(self, name: str) -> PendingCall:
        if name.startswith("_"):
            raise AttributeError(name)
        return replace(self, _name=f"{self._name}.{name}")

    def __getitem__(self, path: object) -> Cursor:
        """Refuse: modules are selected by a string."""
        title = f"`{self._name}` adds a row when it is called; modules are selected by a string"
        helps = (f'select them: `sch["{self._name}.{path}"]`',)
        raise Refusal.of("S301", title, Label(python_span()), helps=helps)

    def __call__(self, *args: object, **kwargs: object) -> None:
        """Check the row, add it to the plan and record it; or refuse and change nothing."""
        record_call(self, args, kwargs)

    def __repr__(self) -> str:
        receiver = "sch" if self._path is None else f'sch["{printer.path(self._path)}"]'
        return f"<{receiver}.{self._name}: call it to add the row>"


@cache
def _page(verb: str) -> str | None:
    """Return the page of `schedlang explain` for a verb."""
    primitive = registry().get(verb)
    return None if primitive is None else manual.explain(primitive)


def record_call(pending: PendingCall, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    """Check the row of a call, add it to the plan and record it; or refuse and change nothing."""
    span = python_span()
    if pending._name == "replace":
        name = pending._schedule._facts.register_replacement
        args, kwargs = tuple(map(name, args)), {k: name(v) for k, v in kwargs.items()}
    if isinstance(kwargs.get("axis"), str) and "over" not in kwargs:  # as torch and numpy name it
        kwargs = {"over" if key == "axis" else key: value for key, value in kwargs.items()}
    call = lift.call(pending._name, args, kwargs, span)
    try:
        pending._schedule._record_call(pending._roots, pending._path, call)
    except Refusal as refusal:
        first = refusal.diagnostic
        public = (name for name in dir(type(pending._schedule)) if not name.startswith("_"))
        closest = (
            find_closest(pending._name, public)
            if first.code == "S301" and pending._path is None
            else None
        )
        if closest is None or first.fact("meant") is not None:
            raise
        help_ = f"did you mean `sch.{closest}`?"  # not a verb, but a method of the schedule
        facts = facts_of_unknown(pending._name, (closest,))
        raise Refusal(replace(first, helps=(help_,), facts=facts)) from None


def parse_selector(text: object) -> n.Path:
    """Parse the path in a text; refuses other types."""
    span = python_span()
    if not isinstance(text, str):
        title = f"modules are selected by a text, not by {kind_of(text)}"
        helps = ('select them by their path: `sch["h.0"]`, `sch["h.*"]`',)
        raise Refusal.of("S202", title, Label(span), helps=helps)
    return parse_path(text, span)


def join_path(path: n.Path, inner: str | int | slice) -> n.Path:
    """Return the path of the modules `inner` inside of those of `path`; numbers index children."""
    span = python_span()
    if not isinstance(inner, int | slice):
        tail = parse_selector(inner)
        return replace(tail, segs=(*path.segs, *tail.segs), optional=path.optional or tail.optional)
    *before, last = path.segs
    if last.index:  # h[:2][0]: rows cannot say it
        title = "modules selected by index cannot be indexed again"
        helps = ('select one by its path: `sch["h.0"]`',)
        raise Refusal.of("S202", title, Label(span), helps=helps)
    if isinstance(inner, int):
        return replace(path, segs=(*before, replace(last, index=(str(inner),))))
    bounds = ((None if b is None else str(b)) for b in (inner.start, inner.stop, inner.step))
    return replace(path, segs=(*before, replace(last, index=(n.Slice(*bounds),))))
