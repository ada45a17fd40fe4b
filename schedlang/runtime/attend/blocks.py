"""Which blocks of queries and keys there are to compute, and what holds for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from schedlang.runtime.attend import flash
from schedlang.runtime.attend.dropout import Dropout
from schedlang.runtime.attend.layout import Runs
from schedlang.runtime.attend.mask import Tags, pieces
from schedlang.runtime.attend.reach import Reach

BLOCK = 256  # tokens


@dataclass(frozen=True)
class Tokens:
    """Tokens of one place: where they lie in the sequence, and what else is known of them."""

    runs: Runs
    tags: Tags


@dataclass(frozen=True)
class Rules:
    """What holds for all blocks of a call; slopes and rows as in `Mask`."""

    reach: Reach
    scale: float
    cap: float | None = None
    slopes: Tensor | None = None
    rows: Tensor | None = None
    dropout: Dropout | None = None
    block: int = BLOCK


@dataclass(frozen=True)
class Pair:
    """A block of queries and a block of keys that see each other somewhere."""

    rows: slice
    cols: slice
    queries: range
    keys: range
    at: Tags
    to: Tags


@dataclass(frozen=True)
class Quick:
    """Runs of queries and of keys that torch's flash attention can do at once."""

    rows: slice
    cols: slice
    causal: bool


def parts(
    rules: Rules, queries: Tokens, keys: Tokens, quick: bool
) -> Iterator[Quick | Pair]:  # fmt: skip
    """What queries have to do with keys that they see; in blocks, or by flash where it can."""
    plain = not (
        rules.cap or rules.dropout or any(t is not None for t in (*keys.tags, *queries.tags))
    )
    quick = quick and plain and rules.slopes is None and rules.rows is None
    start = 0
    for run in queries.runs:
        first = 0
        for other in keys.runs:
            made = flash.form(rules.reach, run, other) if quick else None
            if made is not None:
                rows, cols, causal = made
                yield Quick(_moved(rows, start), _moved(cols, first), causal)
            else:
                yield from pairs(
                    rules, Tokens((run,), queries.tags), Tokens((other,), keys.tags), start, first
                )
            first += len(other)
        start += len(run)


def pairs(
    rules: Rules, queries: Tokens, keys: Tokens, start: int = 0, first: int = 0
) -> Iterator[Pair]:
    """All blocks that positions alone do not rule out; tokens begin at `start` and `first`."""
    columns = pieces(keys.runs, rules.block)
    for begin, where in pieces(queries.runs, rules.block):
        rows = _moved(slice(0, len(where)), start + begin)
        at = queries.tags.cut(rows.start, rows.stop)
        for begins, other in columns:
            if not rules.reach.nothing(where, other):
                cols = _moved(slice(0, len(other)), first + begins)
                yield Pair(rows, cols, where, other, at, keys.tags.cut(cols.start, cols.stop))


def _moved(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)
