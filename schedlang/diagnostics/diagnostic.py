"""Diagnostics: what went wrong, where, why, and what to write instead; and the exceptions with
them.

`Refusal` is a user's mistake; `OwnError` is an error of schedlang itself.
"""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from types import FunctionType
from typing import ParamSpec, TypeVar

from schedlang.diagnostics.job_refusals import install_hook, is_in_job
from schedlang.diagnostics.source import NOWHERE, Source, Span, python_span
from schedlang.diagnostics.tables import DEFAULT_COLUMNS, wrap_text

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")
Spell = Callable[[str], str]
Facts = tuple[tuple[str, str], ...]
# spells helps for a caller in Python: `schedlang.language.lift` appends its function
HELP_SPELLERS: list[Spell] = []
# sources whose lines Python does not store, so that none can be shown
UNSTORED_SOURCES = {"<stdin>"}
MIN_SIMILARITY = 0.6  # minimal similarity of a guess
MAX_MESSAGES = 100  # messages shown at once
MAX_COLUMNS = 160  # columns shown of a line
MAX_SENTENCE = 1000  # characters of a sentence
MIN_LABEL_COLUMNS = 40  # minimal columns of a label below its marks
CONTROL = dict.fromkeys((*range(32), *range(127, 160)), "\ufffd") | {9: " "}


@dataclass(frozen=True)
class Label:
    """A place and a text about it."""

    span: Span = NOWHERE
    text: str = ""


@dataclass(frozen=True, repr=False)
class Diagnostic:
    """One message: a sentence, the place, further places, notes, remedies and facts.

    `facts` are names and values for programs that act on a message; facts are not printed. No
    program parses the sentences.
    """

    code: str
    title: str
    primary: Label = Label()
    also: tuple[Label, ...] = ()
    notes: tuple[str, ...] = ()
    helps: tuple[str, ...] = ()
    level: str = "error"
    facts: Facts = ()

    def fact(self, name: str) -> str | None:
        """Return the fact of this name, or None."""
        return dict(self.facts).get(name)

    def at(self, span: Span) -> Diagnostic:
        """Return the message placed at `span`, if it has no place yet."""
        if self.primary.span:
            return self
        return replace(self, primary=Label(span, self.primary.text))

    def __repr__(self) -> str:
        location = f" ({self.primary.span})" if self.primary.span else ""
        return f"<{self.level}[{self.code}]: {self.title}{location}>"

    def render(self, width: int | None = None) -> str:
        """Format the message as text, framed as rustc does; sentences are wrapped to `width`
        columns.

        Quoted source is never wrapped; without a width nothing is.
        """
        return "\n".join(_render(self, width))

    def to_json(self) -> dict[str, object]:
        """Return the message as plain values; places count lines and columns from 1."""
        return {
            "code": self.code,
            "level": self.level,
            "title": _shorten(self.title),
            "at": {**self.primary.span.to_json(), "label": _shorten(self.primary.text)},
            "also": [
                {**label.span.to_json(), "label": _shorten(label.text)} for label in self.also
            ],
            "notes": list(map(_shorten, self.notes)),
            "helps": list(map(_shorten, self.helps)),
            "facts": [[name, _shorten(value)] for name, value in self.facts],
        }


class Refusal(Exception):
    """A user's mistake, or several independent ones, sorted by place; at most the first
    `MAX_MESSAGES`."""

    def __init__(self, *diagnostics: Diagnostic) -> None:
        assert diagnostics, "a refusal says why"
        self.diagnostics: tuple[Diagnostic, ...] = limit_messages(
            sorted(diagnostics, key=_sort_key)
        )
        super().__init__(*self.diagnostics)

    @classmethod
    def of(
        cls,
        code: str,
        title: str,
        primary: Label = Label(),
        also: tuple[Label, ...] = (),
        notes: tuple[str, ...] = (),
        helps: tuple[str, ...] = (),
        *,
        facts: Facts = (),
    ) -> Refusal:
        """Return the refusal of one mistake, with the fields of a `Diagnostic`."""
        return cls(Diagnostic(code, title, primary, also, notes, helps, facts=facts))

    @classmethod
    def unknown(
        cls,
        code: str,
        title: str,
        word: str,
        options: Iterable[str],
        choose: str = "",
        primary: Label = Label(),
        notes: tuple[str, ...] = (),
    ) -> Refusal:
        """Return the refusal of a `word` that is none of `options`.

        Its help is the closest option, else all of them after `choose`.
        """
        names = list(options)
        has_help = names and choose or find_closest(word, names)
        helps = (suggest_name(word, names, choose),) if has_help else ()
        return cls.of(code, title, primary, (), notes, helps, facts=facts_of_unknown(word, names))

    @property
    def diagnostic(self) -> Diagnostic:
        """The first message."""
        return self.diagnostics[0]

    def at(self, span: Span) -> Refusal:
        """Return the refusal with its messages without a place placed at `span`."""
        return Refusal(*(d.at(span) for d in self.diagnostics))

    def render(self, width: int | None = None) -> str:
        """Format all messages, with a blank line between two."""
        return "\n\n".join(d.render(width) for d in self.diagnostics)

    def __str__(self) -> str:
        return "\n" + self.render(DEFAULT_COLUMNS)


def limit_messages(diagnostics: Sequence[Diagnostic]) -> tuple[Diagnostic, ...]:
    """Return the first `MAX_MESSAGES` messages; the last one notes that there are more."""
    if len(diagnostics) <= MAX_MESSAGES:
        return tuple(diagnostics)
    *first, last = diagnostics[:MAX_MESSAGES]
    return (
        *first,
        replace(
            last,
            notes=(*last.notes, f"there are more messages; the first {MAX_MESSAGES} are shown"),
        ),
    )


def refuse_at_caller() -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator: refusals without a place get the caller's line of Python."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def placed(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except Refusal as refusal:
                if is_in_job():
                    install_hook()
                raise refusal.at(python_span()) from refusal.__cause__

        return placed

    return decorate


def refuse_methods_at_caller(cls: type[T]) -> type[T]:
    """Decorate a class: refusals of its public methods and properties get the caller's line of
    Python."""
    for name, member in list(vars(cls).items()):
        if name.startswith("_") and name != "__call__":
            continue
        if isinstance(member, FunctionType):
            setattr(cls, name, refuse_at_caller()(member))
        elif isinstance(member, property) and member.fget is not None:
            placed = refuse_at_caller()(member.fget)
            setattr(cls, name, property(placed, member.fset, member.fdel, member.__doc__))
    return cls


def find_closest(word: str, options: Iterable[str]) -> str | None:
    """Return the option most similar to `word`, or None if none is similar enough."""
    choices = sorted(set(options))
    low = {option.lower(): option for option in reversed(choices)}
    hits = difflib.get_close_matches(word.lower(), list(low), 1, MIN_SIMILARITY)
    return low[hits[0]] if hits else None


def kind_of(value: object) -> str:
    """Return the class of a value with its article: `an int`, `a Tensor`; or `None`."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"an {name}" if name[:1] in "AEIOaeio" else f"a {name}"


def quote_names(names: Iterable[str], most: int = 8) -> str:
    """Format names in code marks, at most `most` of them: `a`, `b`, `c`."""
    all_names = list(names)
    text = ", ".join(f"`{name}`" for name in all_names[:most])
    return text if len(all_names) <= most else f"{text} and {len(all_names) - most} more"


def suggest_name(word: str, options: Iterable[str], choose: str) -> str:
    """Return the help for an unknown `word`: the closest option, else all options."""
    choices = list(options)
    closest = find_closest(word, choices)
    return f"did you mean `{closest}`?" if closest else f"{choose} {quote_names(choices)}"


def facts_of_unknown(word: str, options: Iterable[str] = ()) -> Facts:
    """Return the facts for an unknown `word`: the word, and the closest option."""
    closest = find_closest(word, options)
    return (("unknown", word), *((("meant", closest),) if closest else ()))


def _sort_key(d: Diagnostic) -> tuple[str, int, int]:
    return d.primary.span.source.name, d.primary.span.line, d.primary.span.col


def _display_width(text: str) -> int:
    """Return the columns that a terminal needs for `text`."""
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def _shorten(text: str) -> str:
    """Shorten a sentence that quotes something very long."""
    return text if len(text) <= MAX_SENTENCE else f"{text[:MAX_SENTENCE]}..."


def _frame_line(label: Label, sign: str) -> tuple[str, str]:
    """Return a label's source line (of a very long one, the part around the label), and its ^^^ or
    ---."""
    span = label.span
    row = span.source.line(span.line).translate(CONTROL)
    end = span.end_col if span.end_line == span.line else len(row) + 1
    missing = max(0, span.col - 1 - len(row))  # columns from the line's end to a span behind it
    first = max(0, span.col - MAX_COLUMNS // 4) if len(row) > MAX_COLUMNS else 0
    last = first + MAX_COLUMNS if len(row) > MAX_COLUMNS else len(row)
    left, right = "..." if first else "", "..." if last < len(row) else ""
    before, under = left + row[first : span.col - 1], row[span.col - 1 : min(end - 1, last)]
    marks = f"{' ' * (_display_width(before) + missing)}{sign * max(1, _display_width(under))}"
    return f"{left}{row[first:last]}{right}", marks


def _label_lines(marks: str, text: str, width: int | None) -> list[str]:
    """Return the marks with their text after them, or below them where both do not fit a line."""
    if not text or width is None or len(marks) + 1 + len(text) <= width:
        return [f"{marks} {text}".rstrip()]
    left = len(marks) - len(marks.lstrip())
    return [
        marks,
        *wrap_text(text, width, " " * max(0, min(left, width - MIN_LABEL_COLUMNS)), None),
    ]


def _frame_source(
    labels: list[Label], primary: Label, gutter: int, width: int | None
) -> Iterable[str]:
    """Yield the marked lines of one source, `...` where lines are left out."""
    room = None if width is None else max(width - gutter - len(" | "), MIN_LABEL_COLUMNS)
    last, shown = None, ""
    for label in sorted(labels, key=lambda x: (x.span.line, x.span.col)):
        number = label.span.line
        row, marks = _frame_line(label, "^" if label is primary else "-")
        if last is not None and number > last + 1:
            yield "..."
        if number != last or row != shown:
            yield f"{number:>{gutter}} | {row}".rstrip()
        last, shown = number, row
        for line in _label_lines(marks, _shorten(label.text), room):
            yield f"{' ' * gutter} | {line}"


def _render(d: Diagnostic, width: int | None) -> Iterator[str]:
    yield from wrap_text(_shorten(d.title), width, f"{d.level}[{d.code}]: ", None)
    placed = [label for label in (d.primary, *d.also) if label.span]
    gutter = len(str(max((label.span.line for label in placed), default=0)))
    by_source: dict[Source, list[Label]] = {}
    for label in placed:
        by_source.setdefault(label.span.source, []).append(label)
    for number, (source, labels) in enumerate(by_source.items()):
        first = d.primary.span if number == 0 and d.primary.span else labels[0].span
        arrow = "-->" if number == 0 else ":::"
        if source.name not in UNSTORED_SOURCES or source.text:
            yield f"{' ' * gutter}{arrow} {source.name}:{first.line}:{first.col}"
        if source.text:
            yield f"{' ' * gutter} |"
            yield from _frame_source(labels, d.primary, gutter, width)
            yield f"{' ' * gutter} |"
    extra_notes = [] if d.primary.span.source.text else [d.primary.text]
    extra_notes += [
        f"{label.span}: {_shorten(label.text)}"
        for label in d.also
        if label.span and label.text and not label.span.source.text
    ]
    entries = [("note", note) for note in (*extra_notes, *d.notes) if note]
    for kind, text in (*entries, *(("help", text) for text in _spell_helps(d))):
        yield from wrap_text(_shorten(text), width, f"{' ' * gutter} = {kind}: ", None)


def _spell_helps(d: Diagnostic) -> Iterator[str]:
    """Yield the helps of a diagnostic, spelled for its reader: as a schedule, or as Python."""
    speller = HELP_SPELLERS[-1] if HELP_SPELLERS and d.primary.span.source.python else str
    yield from map(speller, d.helps)


class OwnError(AssertionError):
    """An error of schedlang, detected before it is blamed on the user's model."""

    def __init__(self, error: str, *facts: str) -> None:
        from schedlang import __version__

        details = (f"schedlang {__version__}", *facts, "the model file, and the schedule")
        super().__init__(
            f"an error of schedlang, not of the model: {error}\nplease report it, with\n"
            + "\n".join(f"  {fact}" for fact in details)
        )
