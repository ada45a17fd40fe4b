"""Base schedules: the items of a used file replace its `use`; `override` and `drop` change steps.

This file also holds the limits of a schedule while it is executed: rows, nesting of calls and
blocks, and bytes of used files (S116).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path

from schedlang.diagnostics.diagnostic import (
    Diagnostic,
    Label,
    Refusal,
    facts_of_unknown,
    suggest_name,
)
from schedlang.diagnostics.source import Span
from schedlang.language import nodes as n
from schedlang.language.syntax import parse, read

HELP_CYCLE = "remove one of these `use` lines"
MAX_ROWS = 20_000  # definitions that call definitions double them: 25 lines are 30 million rows
MAX_DEPTH = 100  # blocks and calls inside one another
MAX_USED_BYTES = 2**21  # bytes of used files; a file counts as often as it is used
MIN_FILE_BYTES = 2**10  # bytes that a file counts at least

SCHEDULE_START = re.compile(r"(?:\s|#.*)*schedule[ \t]+\d")  # the start of a schedule file


@dataclass
class UsedFiles:
    """The parsed files that one schedule uses, by their displayed names, and their total bytes."""

    size: int = 0
    files: dict[str, n.File] = field(default_factory=dict)


_reading: ContextVar[UsedFiles | None] = ContextVar("used files", default=None)


@contextmanager
def counting_used_files() -> Iterator[None]:
    """Cache used files and count their bytes inside the context; an outer context is shared."""
    if _reading.get() is not None:
        yield
        return
    token = _reading.set(UsedFiles())
    try:
        yield
    finally:
        _reading.reset(token)


def path_of_use(use: n.Use, above: tuple[Path, ...]) -> Path:
    """Return the path of the file of a `use`.

    `above` are the files that are being read now; refuses (S112) a `use` of one of these.
    """
    folder = Path(use.span.source.name).parent if use.span else Path()
    used_path = (folder / use.path).resolve()
    if used_path in above:
        chain = " -> ".join(path.name for path in (*above, used_path))
        label = Label(use.span, chain)
        raise Refusal.of("S112", "these files use each other", label, helps=(HELP_CYCLE,))
    return used_path


def tree_of_use(use: n.Use, path: Path) -> n.File:
    """Return the syntax tree of a used file, parsed once per schedule.

    Refuses (S003) a file that does not begin as a schedule does, without showing its text. `read`
    and `parse` may refuse, too.
    """
    folder = Path(use.span.source.name).parent if use.span else Path()
    name, used_files = str(folder / use.path), _reading.get()
    if used_files is not None and name in used_files.files:
        return used_files.files[name]
    source = read(path, name)
    if not SCHEDULE_START.match(source.text):
        help_ = "a schedule begins with its version and its model: `schedule 1 for Class`"
        label = Label(use.span, "used here")
        raise Refusal.of("S003", f"`{use.path}` is not a schedule", label, helps=(help_,))
    file = parse(source)
    if used_files is not None:
        used_files.files[name] = file
    return file


def count_use(text: str, span: Span) -> None:
    """Count one more used file; refuse (S116) too many bytes of used files."""
    used_files = _reading.get()
    if used_files is None:
        return
    used_files.size += max(len(text), MIN_FILE_BYTES)
    if used_files.size > MAX_USED_BYTES:
        title = f"this schedule uses more than {MAX_USED_BYTES // 2**20} MiB of other files"
        helps = ("a file counts each time it is used: use it once, at the top",)
        raise Refusal.of("S116", title, Label(span, "the limit is passed here"), helps=helps)


def limit_refusal(rows: int, span: Span) -> Refusal:
    """Return the refusal S116: too many rows, or else nested too deep."""
    if rows > MAX_ROWS:
        title = f"this schedule has more than {MAX_ROWS:,} rows"
        helps = ("use fewer rows: one selector with `*` selects many modules",)
        label = Label(span, "including the rows of all definitions that are called")
        return Refusal.of("S116", title, label, helps=helps)
    title = f"blocks and calls are nested more than {MAX_DEPTH} deep"
    helps = ("call definitions one after another, not each from another",)
    return Refusal.of("S116", title, Label(span), helps=helps)


LIBRARY_ITEMS = (n.Knob, n.Require, n.Def, n.Use, n.Pattern)  # the items that a library may have


@dataclass(frozen=True)
class SplicedFile:
    """The items and headers of a file and its bases, and problems of overrides and drops."""

    items: tuple[n.Item, ...] = ()
    headers: tuple[n.Header, ...] = ()
    problems: tuple[Diagnostic, ...] = ()


def splice_file(file: n.File) -> SplicedFile:
    """Return the items of a file in which the items of its bases replace each `use` of a base.

    Nodes keep their spans, so that a mistake is shown in the file where it is written. The `use`
    of an unreadable file stays, and is refused when it is executed.
    """
    name = file.span.source.name if file.span else ""
    splicer = _Splicer((Path(name).resolve(),) if name else ())
    for item in file.items:
        try:
            splicer.add_item(item)
        except Refusal as refusal:
            splicer.problems += refusal.diagnostics
    headers = (file.header, *splicer.headers)
    return SplicedFile(tuple(splicer.items), headers, tuple(splicer.problems))


def open_base(use: n.Use, above: tuple[Path, ...]) -> SplicedFile:
    """Return a base with its knobs set by the `use`; no items for a library or unreadable file.

    Refuses files that use each other (S112), a base with `as` (S115), an unknown knob (S106).
    """
    path = path_of_use(use, above)
    try:
        file = tree_of_use(use, path)
    except Refusal:
        return SplicedFile()
    count_use(file.span.source.text, use.span)
    splicer = _Splicer((*above, path))
    for item in file.items:
        splicer.add_item(item)
    if all(isinstance(item, LIBRARY_ITEMS) for item in splicer.items):
        return SplicedFile()
    if use.alias is not None:
        title = f"`{use.path}` is a base schedule: it has steps or rows"
        label = Label(use.span, "a base schedule is used without `as`")
        raise Refusal.of("S115", title, label, helps=(f'write `use "{use.path}"`',))
    return SplicedFile(_with_knobs(use, splicer.items), (file.header, *splicer.headers))


def is_base(use: n.Use) -> bool:
    """Return whether the file of a `use` has steps or rows. May raise Refusal."""
    with counting_used_files():
        return bool(open_base(use, ()).items)


class _Splicer:
    """The collector of one file's items, in order, with the items of its bases."""

    def __init__(self, above: tuple[Path, ...]) -> None:
        self.above = above
        self.items: list[n.Item] = []
        self.headers: list[n.Header] = []
        self.problems: list[Diagnostic] = []
        self._steps: dict[str, int] = {}  # steps of bases: name -> index in `items`
        self._changed: dict[str, n.Override | n.Drop] = {}

    def add_item(self, item: n.Item) -> None:
        """Add an item: splice in a base, apply an `override` or a `drop`, or append."""
        match item:
            case n.Use():
                base = open_base(item, self.above)
                self.headers += base.headers
                for base_item in base.items:
                    if isinstance(base_item, n.Step):
                        self._steps[base_item.name] = len(self.items)
                    self.items.append(base_item)
                if not base.items:
                    self.items.append(item)
            case n.Override(step):
                self.items[self._changed_step(item, step.name)] = step
            case n.Drop(name):
                index = self._changed_step(item, name)
                del self.items[index]
                self._steps = {
                    step_name: position - (position > index)
                    for step_name, position in self._steps.items()
                    if step_name != name
                }
            case _:
                self.items.append(item)

    def _changed_step(self, item: n.Override | n.Drop, name: str) -> int:
        """Return the index of the base's step that an item changes (S114, S101)."""
        verb = "override" if isinstance(item, n.Override) else "drop"
        earlier = self._changed.get(name)
        if earlier is not None:
            earlier_label = (Label(earlier.span, "first changed here"),)
            title = f"the step `{name}` is changed twice"
            raise Refusal.of("S101", title, Label(item.span), earlier_label, (), ("keep one",))
        self._changed[name] = item
        if name in self._steps:
            return self._steps[name]
        is_own = any(isinstance(spliced, n.Step) and spliced.name == name for spliced in self.items)
        if is_own:
            label = Label(item.span, "this file defines it itself")
            help_ = "change the step where it is written"
        else:
            any_step = bool(self._steps)
            label = Label(
                item.span, "" if any_step else f"no `use` above brings in a step to {verb}"
            )
            suggestion = suggest_name(name, self._steps, "the bases' steps are")
            help_ = suggestion if any_step else 'use a base schedule above: `use "base.sched"`'
        title = f"no base has a step `{name}`"
        facts = facts_of_unknown(name, () if is_own else self._steps)
        raise Refusal.of("S114", title, label, helps=(help_,), facts=facts)


def _with_knobs(use: n.Use, items: Sequence[n.Item]) -> tuple[n.Item, ...]:
    """Return the items, with the values of a `use` as the new defaults of knobs (S106)."""
    values = {arg.name: arg.value for arg in _keywords(use)}
    knobs = [item.name for item in items if isinstance(item, n.Knob)]
    for arg in _keywords(use):
        if arg.name not in knobs:
            title = f"the schedule has no knob `{arg.name}`"
            help_ = suggest_name(arg.name, knobs, "its knobs are") if knobs else "it has no knobs"
            facts = facts_of_unknown(arg.name, knobs)
            raise Refusal.of("S106", title, Label(arg.span), helps=(help_,), facts=facts)
    return tuple(
        replace(item, default=values[item.name])
        if isinstance(item, n.Knob) and item.name in values
        else item
        for item in items
    )


def _keywords(use: n.Use) -> Iterator[n.Keyword]:
    for arg in use.args or ():
        if not isinstance(arg, n.Keyword):
            label = Label(arg.span, "`(tp=4)`")
            raise Refusal.of("S302", "a base's knobs are set by name", label)
        yield arg
