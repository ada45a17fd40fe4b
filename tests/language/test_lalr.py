"""The generated table: it is the grammar's, and reads as lark reads with the grammar itself."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lark import Token, Tree
from lark.exceptions import UnexpectedCharacters, UnexpectedToken

from schedlang.lalr import Reader, Unread
from tests import grammar_table
from tests.grammar_table import STARTS, grammar
from tests.samples import SAMPLES
from tests.strategies import damaged

ROOT = Path(__file__).parents[2]
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


class Plain:
    """Of every rule its name, its place and its parts."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda place, *parts: (name[1:], _place(*place), parts)


def _place(first: Any, last: Any) -> tuple[int, ...]:
    return first.line, first.col, last.end_line, last.end_col


def _ours(text: str, start: str) -> Any:
    """What the reader makes of a text, or where and why it stops."""
    try:
        return _said(Reader(text, Plain()).read(start))
    except Unread as stop:
        kind = stop.token.type if stop.token else None
        return _stopped(kind, stop.line, stop.col, stop.accepts)


def _stopped(kind: str | None, line: int, col: int, accepts: Any) -> Any:
    """Where a reading ended; the end of the text has no place of its own."""
    return "stopped", kind, (line, col) if kind != "$END" else None, frozenset(accepts)


def _said(part: Any) -> Any:
    if isinstance(part, tuple) and hasattr(part, "end_col"):
        return str(part), part.type, _place(part, part)
    if isinstance(part, tuple):
        name, place, parts = part
        return name, place, tuple(map(_said, parts))
    return part


def _larks(text: str, start: str) -> Any:
    """The same of lark's tree, and of its mistake."""
    try:
        return _told(grammar().parse(text, start=start))
    except UnexpectedCharacters as stop:
        return _stopped(None, stop.line, stop.column, ())
    except UnexpectedToken as stop:
        return _stopped(stop.token.type, stop.token.line, stop.token.column, stop.accepts)


def _told(part: Any) -> Any:
    if isinstance(part, Token):
        return str(part), part.type, (part.line, part.column, part.end_line, part.end_column)
    if isinstance(part, Tree):
        meta = part.meta
        place = (meta.line, meta.column, meta.end_line, meta.end_column)
        return str(part.data), place, tuple(map(_told, part.children))
    return part


def _schedules() -> Iterator[str]:
    yield from SAMPLES.values()
    for file in sorted((ROOT / "examples").rglob("*.sched")):
        yield file.read_text()


def test_table_is_the_grammars() -> None:
    """The committed table is what lark makes of the grammar: `python -m tests.grammar_table`."""
    assert grammar_table.TABLE.read_text() == grammar_table.text()


def test_reads_as_lark() -> None:
    """Every sample and example becomes the same tree with the same places."""
    for text in _schedules():
        made = _ours(text, "start")
        assert made == _larks(text, "start") and made[0] == "start", text


@QUICK
@given(st.sampled_from(sorted(SAMPLES)).flatmap(lambda name: damaged(SAMPLES[name])))
def test_stops_as_lark(text: str) -> None:
    """A damaged text is read alike, or is given up at the same token, with the same hopes."""
    assert _ours(text, "start") == _larks(text, "start")


@pytest.mark.parametrize("start", STARTS)
def test_stops_as_lark_anywhere(start: str) -> None:
    """So is every beginning of a text, and texts of tokens put together at random."""
    chance = random.Random(7)
    words = 'schedule 1 for at a.b step "s" { } ( ) [ ] : . , = + - * ** ? in or not `x` 2GiB\n# c'
    pieces = [*words.split(" "), "\n", " ", "\\", "1e-5", "true", "{a,b}"]
    sample = SAMPLES["gpt2_tp.sched"]
    texts = [sample[: chance.randrange(len(sample))] for _ in range(30)]
    texts += [" ".join(chance.choices(pieces, k=chance.randrange(9))) for _ in range(300)]
    for text in texts:
        assert _ours(text, start) == _larks(text, start), text
