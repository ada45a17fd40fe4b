"""The timeline of a pipeline as a table: operations of each rank as columns, and their
dependencies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.int32]
Rows = NDArray[np.int64]
Edge = tuple[int, int]


class Kind(IntEnum):
    """The kind of an operation; B is the full backward, I and W are its two halves.

    EVICT sends the activations of a microbatch to another rank, where HOLD receives them; GIVE
    sends them back and LOAD receives them. STEP makes a version of a stage's weights.
    """

    F = 0
    B = 1
    I = 2  # noqa: E741  (the literature's letter for the input gradient)
    W = 3
    SEND_F = 4
    RECV_F = 5
    SEND_B = 6
    RECV_B = 7
    RECOMPUTE = 8
    OFFLOAD = 9
    RELOAD = 10
    EVICT = 11
    HOLD = 12
    GIVE = 13
    LOAD = 14
    UNSHARD = 15
    RESHARD = 16
    REDUCE = 17
    STEP = 18
    BARRIER = 19


TRANSFER_KINDS = (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)
PARTNER_KINDS = (Kind.HOLD, Kind.GIVE)  # operations for a stage of another rank
# one unit is the forward of one stage; a full backward costs two (Narayanan et al. 2021, §2.2)
UNIT_TIMES: Mapping[Kind, float] = {Kind.F: 1.0, Kind.I: 1.0, Kind.W: 1.0, Kind.B: 2.0}


class TimelineError(ValueError):
    """A timeline that cannot run; the message names the operation."""


class Op(NamedTuple):
    """One operation.

    `peer` is the stage at the other end of a transfer; for EVICT, HOLD, GIVE and LOAD the other
    rank; else -1. `version` counts the updates of the stage's weights within the step: the version
    that F, B, I and W read, or that STEP makes (0: the weights at the beginning of the step).
    """

    kind: Kind
    stage: int
    microbatch: int
    replica: int = 0
    slice: int = 0
    version: int = 0
    peer: int = -1

    def __str__(self) -> str:
        name = f"{self.stage}{self.kind.name}{self.microbatch}"
        return f"{name}~{self.peer}" if self.peer >= 0 else name


def chain_edges(stages: int) -> tuple[Edge, ...]:
    """Return the transfers of a plain pipeline: every stage sends to the next."""
    return tuple((s, s + 1) for s in range(stages - 1))


@dataclass(frozen=True, eq=False)
class Timeline:
    """Operations as int32 columns of equal length, sorted by rank, each rank in its own order.

    `edges` are the forward transfers (from stage, to stage); gradients go back along them.
    """

    rank: Column
    kind: Column
    stage: Column
    replica: Column
    microbatch: Column
    slice: Column
    version: Column
    peer: Column
    ranks: int
    edges: tuple[Edge, ...]

    def __post_init__(self) -> None:
        for name in COLUMNS:
            column = getattr(self, name)
            # a read-only column that owns its data is immutable: large timelines are not copied
            is_owned = column.flags.owndata and not column.flags.writeable
            if not is_owned or column.dtype != np.int32:
                column = np.array(column, dtype=np.int32)
                column.setflags(write=False)
                object.__setattr__(self, name, column)
        if len(self.rank) and (np.any(np.diff(self.rank) < 0) or self.rank[-1] >= self.ranks):
            raise TimelineError("rows are not sorted by rank, or name a rank that does not exist")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Timeline):
            return NotImplemented
        same_shape = self.ranks == other.ranks and self.edges == other.edges
        return same_shape and all(
            np.array_equal(getattr(self, c), getattr(other, c)) for c in COLUMNS
        )

    def __hash__(self) -> int:
        return hash((self.ranks, self.edges, self.kind.tobytes(), self.microbatch.tobytes()))

    def __len__(self) -> int:
        return len(self.rank)

    @cached_property
    def stages(self) -> int:
        """The number of stages over all ranks."""
        return int(self.stage.max()) + 1 if len(self) else 0

    @cached_property
    def microbatches(self) -> int:
        """The number of microbatches."""
        return int(self.microbatch.max()) + 1 if len(self) else 0

    @cached_property
    def starts(self) -> Rows:
        """The first row of each rank; one more entry than ranks."""
        return np.searchsorted(self.rank, np.arange(self.ranks + 1)).astype(np.int64)

    @cached_property
    def replicas(self) -> int:
        """The number of copies of the stages; each microbatch goes through one of them."""
        return int(self.replica.max()) + 1 if len(self) else 0

    @cached_property
    def slices(self) -> int:
        """The number of slices of the sequence into which each microbatch is split."""
        return int(self.slice.max()) + 1 if len(self) else 0

    @cached_property
    def stale(self) -> bool:
        """Whether weights are updated inside the step."""
        return bool((self.kind == Kind.STEP).any() or self.version.any())

    @cached_property
    def replica_ranks(self) -> Column:
        """[replica, stage]: the rank that runs it, -1 where it has no rows."""
        ranks = np.full((self.replicas, self.stages), -1, dtype=np.int32)
        computing = ~np.isin(self.kind, (*PARTNER_KINDS, Kind.BARRIER))
        ranks[self.replica[computing], self.stage[computing]] = self.rank[computing]
        return ranks

    @property
    def stage_rank(self) -> Column:
        """The rank of every stage of replica 0."""
        first: Column = self.replica_ranks[0]
        return first

    def rows(self, rank: int) -> tuple[Op, ...]:
        """Return the operations of one rank, in order."""
        part = slice(int(self.starts[rank]), int(self.starts[rank + 1]))
        lists = [getattr(self, name)[part].tolist() for name in COLUMNS[1:]]
        return tuple(Op(Kind(k), s, m, r, c, v, p) for k, s, r, m, c, v, p in zip(*lists))

    def pick(self, rows: NDArray[Any]) -> Timeline:
        """Return the timeline of some rows only (an index array or a mask)."""
        columns = {name: getattr(self, name)[rows] for name in COLUMNS}
        for column in columns.values():
            column.setflags(write=False)
        return replace(self, **columns)

    def compute(self) -> Timeline:
        """Return the timeline without the rows that `with_transfers` adds: sends, receives, HOLD,
        GIVE."""
        added = np.isin(self.kind, (*TRANSFER_KINDS, *PARTNER_KINDS))
        return self.pick(~added) if added.any() else self

    def with_edges(self, edges: Iterable[Edge]) -> Timeline:
        """Return the same operations over another transfer graph."""
        return replace(self, edges=tuple(sorted(set(edges))))

    def with_copies(self, turn: Rows, *copies: tuple[Rows, Rows, Mapping[str, Any]]) -> Timeline:
        """Add changed copies of some rows; all rows are sorted by their turns.

        turn    of each row; turns rise from rank to rank
        copies  rows that are copied, the turns of the copies, and the columns that differ

        Of equal turns the original rows come first, then the copies in the given order.
        """
        source = np.concatenate([np.arange(len(self)), *(rows for rows, _, _ in copies)])
        order = np.argsort(
            np.concatenate([turn, *(positions for _, positions, _ in copies)]), kind="stable"
        )
        changed = {name for _, _, columns in copies for name in columns}
        sorted_columns: dict[str, Any] = {}
        for name in COLUMNS:
            column = getattr(self, name)
            if name in changed:
                parts = (columns.get(name, column[rows]) for rows, _, columns in copies)
                parts = (np.broadcast_to(p, len(r)) for p, (r, _, _) in zip(parts, copies))
                column = np.concatenate([column, *parts], dtype=np.int32, casting="unsafe")
                sorted_columns[name] = column[order]
            else:
                sorted_columns[name] = column[source[order]]
            sorted_columns[name].setflags(write=False)
        return replace(self, **sorted_columns)

    def text(self, width: int | None = None) -> str:
        """Format one line per rank, `F0 F1 B0`; with several stages on a rank `2F0` names the
        stage.

        `width` (characters) shortens long lines in the middle.
        """
        show_stage = bool(np.any(np.bincount(self.stage_rank.clip(0), minlength=1) > 1))
        lines = []
        for rank in range(self.ranks):
            low, high = int(self.starts[rank]), int(self.starts[rank + 1])
            ends = [(low, high)]
            if width is not None and high - low > 2 * width:  # a word has at least two characters
                ends = [(low, low + width), (high - width, high)]
            words = [word for end in ends for word in self._words(*end, show_stage)]
            lines.append(f"rank {rank}: {_shorten(words, width)}")
        return "\n".join(lines)

    def _words(self, low: int, high: int, show_stage: bool) -> list[str]:
        part = slice(low, high)
        columns = (self.kind[part], self.stage[part], self.microbatch[part], self.slice[part])
        sliced = self.slices > 1
        return [
            f"{s if show_stage else ''}{Kind(k).name}{m}{f'.{c}' if sliced else ''}"
            for k, s, m, c in zip(*(x.tolist() for x in columns))
        ]


COLUMNS = tuple(f.name for f in fields(Timeline) if f.name not in ("ranks", "edges"))


def _shorten(words: list[str], width: int | None) -> str:
    line = " ".join(words)
    if width is None or len(line) <= width:
        return line
    head, tail = "", ""
    for k in range(len(words)):
        longer = " ".join([*words[: k + 1], "..", *words[len(words) - k - 1 :]])
        if len(longer) > width:
            break
        head, tail = " ".join(words[: k + 1]), " ".join(words[len(words) - k - 1 :])
    return f"{head} .. {tail}"


def timeline_from_rows(
    rows: Sequence[Sequence[Op]], edges: Iterable[Edge] | None = None
) -> Timeline:
    """Build a timeline from one list of operations per rank; `edges` default to a chain of
    stages."""
    flat = [(rank, *op) for rank, ops in enumerate(rows) for op in ops]
    table = np.array(flat, dtype=np.int32).reshape(len(flat), 8)
    rank, kind, stage, microbatch, replica, slice_, version, peer = table.T
    stages = int(stage.max()) + 1 if len(flat) else 0
    return Timeline(
        rank,
        kind,
        stage,
        replica,
        microbatch,
        slice_,
        version,
        peer,
        ranks=len(rows),
        edges=chain_edges(stages) if edges is None else tuple(sorted(set(edges))),
    )


# the order of a plan without a pipeline row: a forward, then its backward
SINGLE_STAGE = timeline_from_rows([[Op(Kind.F, 0, 0), Op(Kind.B, 0, 0)]])


def split_backwards(timeline: Timeline) -> Timeline:
    """Replace every B by I and W; gradients are sent after the I."""
    full = timeline.kind == Kind.B
    first = replace(timeline, kind=np.where(full, Kind.I, timeline.kind))
    rows = np.flatnonzero(full)
    return first.with_copies(2 * np.arange(len(timeline)), (rows, 2 * rows + 1, {"kind": Kind.W}))


# -- dependencies: the rows that must have ended before each operation -----------------------------


COMPUTE_GROUPS = ((Kind.F,), (Kind.B, Kind.I), (Kind.W,))
BACKWARD_KINDS = COMPUTE_GROUPS[1]
COMPUTE_KINDS = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.RECOMPUTE)
# kinds that must come between a forward and its backward, in this order, where they exist
MEMORY_GROUPS = ((Kind.EVICT, Kind.LOAD), (Kind.OFFLOAD, Kind.RELOAD), (Kind.RECOMPUTE,))


class RowIndex:
    """Finds the row of an operation: arrays [replica, stage, microbatch, slice] of row numbers."""

    def __init__(self, timeline: Timeline) -> None:
        self.t = timeline
        names = ("replica", "stage", "microbatch", "slice")
        self.where = tuple(getattr(timeline, name) for name in names)
        self.shape = tuple(int(c.max(initial=0)) + 1 for c in self.where)

    def rows_of(self, *kinds: Kind) -> Rows:
        """Return row numbers of these kinds, -1 where there is none; refuses two at one place."""
        rows = np.flatnonzero(np.isin(self.t.kind, kinds))
        index = np.full(self.shape, -1, dtype=np.int64)
        cell = tuple(column[rows] for column in self.where)
        index[cell] = rows
        twice = index[cell] != rows
        if twice.any():
            row = int(rows[np.argmax(twice)])
            raise TimelineError(f"{describe_row(self.t, row)} is there twice")
        return index

    def name(self, flat: Any) -> str:
        """Describe a place of the table."""
        replica, stage, microbatch, part = np.unravel_index(int(flat), self.shape)
        text = f"stage {stage}, microbatch {microbatch}"
        text += f", slice {part}" if self.shape[3] > 1 else ""
        return text + (f", replica {replica}" if self.shape[0] > 1 else "")


def dependencies(timeline: Timeline) -> tuple[Rows, Rows]:
    """Return pairs of compute rows (made, used): the second needs the result of the first.

    Pairs on different ranks are the transfers. Slices of one stage and microbatch go forward in
    order, because they pass on keys and values, and backward in reverse.
    """
    table = RowIndex(timeline)
    forward, backward, weight = (table.rows_of(*kinds) for kinds in COMPUTE_GROUPS)
    source = np.array([s for s, _ in timeline.edges], dtype=np.int64)
    target = np.array([d for _, d in timeline.edges], dtype=np.int64)
    inside = (source < table.shape[1]) & (target < table.shape[1])
    source, target = source[inside], target[inside]
    pairs = [
        (forward[:, source], forward[:, target]),
        (backward[:, target], backward[:, source]),
        (forward, backward),
        (backward, weight),
    ]
    if table.shape[3] > 1:
        pairs += [(forward[..., :-1], forward[..., 1:]), (backward[..., 1:], backward[..., :-1])]
    present = set(np.flatnonzero(np.bincount(timeline.kind, minlength=len(Kind))).tolist())
    for kinds in MEMORY_GROUPS:
        steps = [forward, *(table.rows_of(k) for k in kinds if k in present), backward]
        pairs += list(zip(steps[:-1], steps[1:])) if len(steps) > 2 else []
    row_pairs = [_both(a, b) for a, b in pairs]
    if present & {Kind.UNSHARD, Kind.REDUCE}:
        row_pairs += [_latest(timeline, (Kind.UNSHARD,), COMPUTE_KINDS)]
        row_pairs += [_latest(timeline, (Kind.REDUCE,), (Kind.STEP,))]
    return np.concatenate([a for a, _ in row_pairs]), np.concatenate([b for _, b in row_pairs])


def _both(before: Rows, after: Rows) -> tuple[Rows, Rows]:
    exists = (before >= 0) & (after >= 0)
    return before[exists], after[exists]


def _latest(t: Timeline, makers: tuple[Kind, ...], users: tuple[Kind, ...]) -> tuple[Rows, Rows]:
    """Return the users, and for each the latest maker of its stage before it on its rank."""
    key = t.rank.astype(np.int64) * max(1, t.stages) + t.stage
    maker_rows, user_rows = (np.flatnonzero(np.isin(t.kind, kinds)) for kinds in (makers, users))
    latest = latest_before(key, maker_rows, user_rows)
    return latest[latest >= 0], user_rows[latest >= 0]


def latest_before(key: Rows, makers: Rows, users: Rows) -> Rows:
    """Return, for each user (row), the latest maker of the same key before it, or -1."""
    if not len(makers):
        return np.full(len(users), -1, dtype=np.int64)
    width = len(key) + 1
    sorted_keys = np.sort(key[makers] * width + makers)
    index = np.searchsorted(sorted_keys, key[users] * width + users) - 1
    latest = sorted_keys[index.clip(0)]
    matches = (index >= 0) & (latest // width == key[users])
    return np.where(matches, latest % width, -1)


def barrier_waits(t: Timeline, copies: Any) -> tuple[tuple[Rows, Rows], tuple[Rows, Rows]]:
    """Return the waits of barriers: pairs (before, barrier of the first rank), and (that one,
    others).

    Barrier k of the first rank waits for the rows before barrier k of every rank; those of the
    other ranks start together with it. `copies` marks rows on a stream of their own. Raises
    TimelineError where ranks have different numbers of barriers.
    """
    rows = np.flatnonzero(t.kind == Kind.BARRIER)
    count = np.bincount(t.rank[rows], minlength=t.ranks)
    if count.min() != count.max():
        few, many = int(count.argmin()), int(count.argmax())
        raise TimelineError(
            f"rank {few} has {count[few]} barriers and rank {many} has {count[many]}: "
            f"{describe_row(t, int(rows[t.rank[rows] == many][count[few]]))} waits for rank {few}"
        )
    table = rows.reshape(t.ranks, -1)
    before, waits = [], []
    for is_copy in (False, True):
        stream = np.flatnonzero(copies == is_copy)
        index = np.searchsorted(stream, table) - 1
        exists = index >= 0
        last = np.where(exists, stream[index], 0) if len(stream) else np.zeros_like(table)
        exists &= t.rank[last] == np.arange(t.ranks)[:, None]
        before.append(last[exists])
        waits.append(np.broadcast_to(table[0], table.shape)[exists])
    first = np.broadcast_to(table[0], table[1:].shape)
    return (np.concatenate(before), np.concatenate(waits)), (first.ravel(), table[1:].ravel())


def describe_row(timeline: Timeline, row: int) -> str:
    """Describe an operation, for messages."""
    op = timeline.pick(np.array([row]))
    kind = Kind(int(op.kind[0])).name
    text = f"{kind} of stage {op.stage[0]}, microbatch {op.microbatch[0]}"
    text += f", slice {op.slice[0]}" if timeline.slices > 1 else ""
    text += f", replica {op.replica[0]}" if timeline.replicas > 1 else ""
    if int(op.kind[0]) in TRANSFER_KINDS:
        text += f", {'to' if kind.startswith('SEND') else 'from'} stage {op.peer[0]}"
    return f"{text} (rank {op.rank[0]})"
