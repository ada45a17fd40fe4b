"""The one timeline of a pipeline: per rank a list of operations, held as columns."""

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
    """The kind of an operation; B is the whole backward, I and W are its two halves.

    EVICT sends the activations of a microbatch to another rank, where HOLD takes them in; GIVE
    sends them back and LOAD takes them home. STEP makes a version of a stage's weights.
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


TRANSFERS = (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)
AWAY = (Kind.HOLD, Kind.GIVE)  # done for a stage of another rank
# one unit is the forward of one stage; a whole backward costs two (Narayanan et al. 2021, §2.2)
UNIT: Mapping[Kind, float] = {Kind.F: 1.0, Kind.I: 1.0, Kind.W: 1.0, Kind.B: 2.0}


class TimelineError(ValueError):
    """A timeline that cannot be run; the message names the operation."""


class Op(NamedTuple):
    """One operation.

    `peer` is the stage at the other end of a transfer; of EVICT, HOLD, GIVE and LOAD the other
    rank; else -1. `version` counts the updates of the stage's weights within the step: that which
    F, B, I and W read, and that which STEP makes (0: the weights as the step began).
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


def chain(stages: int) -> tuple[Edge, ...]:
    """The transfers of a plain pipeline: every stage sends to the next."""
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
            # a read-only column of its own is a value already: large timelines are not copied
            if not _is_value(column):
                column = np.array(column, dtype=np.int32)
                column.setflags(write=False)
                object.__setattr__(self, name, column)
        if len(self.rank) and (np.any(np.diff(self.rank) < 0) or self.rank[-1] >= self.ranks):
            raise TimelineError("rows are not sorted by rank, or name a rank that does not exist")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Timeline):
            return NotImplemented
        same = self.ranks == other.ranks and self.edges == other.edges
        return same and all(np.array_equal(getattr(self, c), getattr(other, c)) for c in COLUMNS)

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
        """Into how many runs of the sequence each microbatch is cut."""
        return int(self.slice.max()) + 1 if len(self) else 0

    @cached_property
    def homes(self) -> Column:
        """[replica, stage]: the rank that runs it, -1 where it has no rows."""
        found = np.full((self.replicas, self.stages), -1, dtype=np.int32)
        own = ~np.isin(self.kind, (*AWAY, Kind.BARRIER))
        found[self.replica[own], self.stage[own]] = self.rank[own]
        return found

    @property
    def stage_rank(self) -> Column:
        """The rank of every stage of replica 0."""
        first: Column = self.homes[0]
        return first

    def rows(self, rank: int) -> tuple[Op, ...]:
        """The operations of one rank, in order."""
        part = slice(int(self.starts[rank]), int(self.starts[rank + 1]))
        lists = [getattr(self, name)[part].tolist() for name in COLUMNS[1:]]
        return tuple(Op(Kind(k), s, m, r, c, v, p) for k, s, r, m, c, v, p in zip(*lists))

    def pick(self, rows: NDArray[Any]) -> Timeline:
        """The timeline of some rows only (an index array or a mask)."""
        columns = {name: getattr(self, name)[rows] for name in COLUMNS}
        for column in columns.values():
            column.setflags(write=False)
        return replace(self, **columns)

    def compute(self) -> Timeline:
        """Without what `with_transfers` adds: sends, receives and the partner's side of EVICT."""
        added = np.isin(self.kind, (*TRANSFERS, *AWAY))
        return self.pick(~added) if added.any() else self

    def forward_only(self) -> Timeline:
        """The forwards alone, for evaluation."""
        return self.pick(self.kind == Kind.F)

    def with_edges(self, edges: Iterable[Edge]) -> Timeline:
        """The same operations over another transfer graph."""
        return replace(self, edges=tuple(sorted(set(edges))))

    def text(self, width: int | None = None) -> str:
        """One line per rank, `F0 F1 B0`; with several stages on a rank `2F0` names the stage.

        `width` (characters) shortens long lines in the middle.
        """
        several = bool(np.any(np.bincount(self.stage_rank.clip(0), minlength=1) > 1))
        lines = []
        for rank in range(self.ranks):
            low, high = int(self.starts[rank]), int(self.starts[rank + 1])
            ends = [(low, high)]
            if width is not None and high - low > 2 * width:  # a word has two characters at least
                ends = [(low, low + width), (high - width, high)]
            words = [word for end in ends for word in self._words(*end, several)]
            lines.append(f"rank {rank}: {_shorten(words, width)}")
        return "\n".join(lines)

    def _words(self, low: int, high: int, several: bool) -> list[str]:
        part = slice(low, high)
        columns = (self.kind[part], self.stage[part], self.microbatch[part], self.slice[part])
        sliced = self.slices > 1
        return [
            f"{s if several else ''}{Kind(k).name}{m}{f'.{c}' if sliced else ''}"
            for k, s, m, c in zip(*(x.tolist() for x in columns))
        ]


COLUMNS = tuple(f.name for f in fields(Timeline) if f.name not in ("ranks", "edges"))


def _is_value(column: Column) -> bool:
    return column.dtype == np.int32 and not column.flags.writeable and column.flags.owndata


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


def timeline(rows: Sequence[Sequence[Op]], edges: Iterable[Edge] | None = None) -> Timeline:
    """A timeline from one list of operations per rank; `edges` default to a chain of stages."""
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
        edges=chain(stages) if edges is None else tuple(sorted(set(edges))),
    )


def halved(timeline: Timeline) -> Timeline:
    """The same order with I and W in place of every B; what is sent back follows the I."""
    whole = timeline.kind == Kind.B
    rows = np.repeat(np.arange(len(timeline)), np.where(whole, 2, 1))
    columns = {name: getattr(timeline, name)[rows] for name in COLUMNS}
    second = np.diff(rows, prepend=-1) == 0
    kind = columns["kind"].copy()
    kind[whole[rows]] = Kind.I
    kind[second] = Kind.W
    return replace(timeline, **{**columns, "kind": kind})
