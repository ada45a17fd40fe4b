"""What a schedule may grow to while it is executed: rows, calls inside calls, used files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from schedlang.diagnostic import Diagnostic, Label, Refusal
from schedlang.source import Span

ROWS = 20_000  # definitions that call definitions double them: 25 lines are 30 million rows
DEEPEST = 100  # blocks and calls inside one another
USED = 2**21  # bytes of used files, each as often as it is read
SMALLEST = 2**10  # what a file counts at least

_used: ContextVar[list[int] | None] = ContextVar("bytes of used files", default=None)


@contextmanager
def counted() -> Iterator[None]:
    """Count the used files that are read inside, together with those of what stands around."""
    if _used.get() is not None:
        yield
        return
    token = _used.set([0])
    try:
        yield
    finally:
        _used.reset(token)


def use(text: str, span: Span) -> None:
    """One more file that is used; S116 where they are too much."""
    count = _used.get()
    if count is None:
        return
    count[0] += max(len(text), SMALLEST)
    if count[0] > USED:
        title = f"this schedule uses more than {USED // 2**20} MiB of other files"
        helps = ("a file counts each time it is used: use it once, at the top",)
        raise Refusal(
            Diagnostic("S116", title, Label(span, "the limit is passed here"), helps=helps)
        )


def statement(rows: int, depth: int, span: Span) -> None:
    """One more statement that is executed, inside of so many others; S116 where it is too much."""
    if rows > ROWS:
        title = f"this schedule has more than {ROWS:,} rows"
        helps = ("use fewer rows: one selector with `*` selects many modules",)
        label = Label(span, "including the rows of all definitions that are called")
        raise Refusal(Diagnostic("S116", title, label, helps=helps))
    if depth > DEEPEST:
        title = f"blocks and calls are nested more than {DEEPEST} deep"
        helps = ("call definitions one after another, not each from another",)
        raise Refusal(Diagnostic("S116", title, Label(span), helps=helps))
