"""Weight gradients put off into the gaps of an order: what ZB-H1 does to 1F1B, for any order."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from schedlang.pipeline.cost import Number
from schedlang.pipeline.schedules.chain import Chain, F, I, W
from schedlang.pipeline.timeline import Kind, Timeline

Unit = tuple[int, int, int]  # (kind, stage, microbatch)


def filled(
    chain: Chain, order: Timeline, limit: Number | None, *, whole_gaps: bool
) -> Timeline | None:
    """The forwards and input gradients of an order, with W where the rank would wait.

    W runs in gaps that it fits into (`whole_gaps`) or in any, before a forward for which there is
    no room, and at the end. None if there is no room even so, or the order never ends.
    """
    return _Filling(chain, order, limit, whole_gaps).all()


class _Filling:
    """The state of one filling; every rank goes on until it needs what is not there yet."""

    def __init__(
        self, chain: Chain, order: Timeline, limit: Number | None, whole_gaps: bool
    ) -> None:
        self.chain, self.limit, self.whole = chain, limit, whole_gaps
        self.micro = order.microbatches
        self.queues = [_units(order, rank) for rank in range(chain.ranks)]
        self.late: list[deque[Unit]] = [deque() for _ in range(chain.ranks)]
        self.free: list[Number] = [0] * chain.ranks
        self.held: list[Number] = [0] * chain.ranks
        self.end: dict[Unit, Number] = {}
        self.rows: list[list[int]] = [[] for _ in range(chain.ranks)]

    def all(self) -> Timeline | None:
        """Round after round, while any rank goes on."""
        moved = True
        while moved:
            moved = False
            for rank in range(self.chain.ranks):
                while (queue := self.queues[rank]) and (ready := self._ready(rank, queue[0])) >= 0:
                    if not self._step(rank, queue.popleft(), ready):
                        return None
                    moved = True
        if any(self.queues):
            return None
        for rank, late in enumerate(self.late):
            while late:
                self._run(rank, late.popleft(), self.free[rank])
        return self.chain.timeline(self.rows, self.micro)

    def _ready(self, rank: int, unit: Unit) -> Number:
        """When the input of an operation is there; -1: not known yet."""
        kind, stage, microbatch = unit
        before = stage - 1 if kind == F else stage + 1
        if not 0 <= before < self.chain.stages:
            return 0
        end = self.end.get((kind, before, microbatch))
        if end is None:
            return -1
        return end + (self.chain.comm if self.chain.homes[before] != rank else 0)

    def _step(self, rank: int, unit: Unit, ready: Number) -> bool:
        """Weight gradients as far as they fit, then the operation; False: there is no room."""
        kind, stage, _ = unit
        late, gain = self.late[rank], self.chain.gains[kind][stage]
        while late and self.free[rank] < ready:
            if self.whole and ready - self.free[rank] < self.chain.times[W][late[0][1]]:
                break
            self._run(rank, late.popleft(), self.free[rank])
        while self.limit is not None and gain > 0 and self.held[rank] + gain > self.limit:
            if not late:
                return False
            self._run(rank, late.popleft(), self.free[rank])
        self._run(rank, unit, ready)
        if kind == I:
            late.append((W, *unit[1:]))
        return True

    def _run(self, rank: int, unit: Unit, ready: Number) -> None:
        kind, stage, microbatch = unit
        end = max(self.free[rank], ready) + self.chain.times[kind][stage]
        self.free[rank] = self.end[unit] = end
        self.held[rank] += self.chain.gains[kind][stage]
        self.rows[rank].append((kind * self.chain.stages + stage) * self.micro + microbatch)


def _units(order: Timeline, rank: int) -> deque[Unit]:
    roles: dict[int, int] = {Kind.F: F, Kind.I: I, Kind.B: I}
    part = slice(int(order.starts[rank]), int(order.starts[rank + 1]))
    columns: Sequence[list[int]] = [
        column[part].tolist() for column in (order.kind, order.stage, order.microbatch)
    ]
    return deque((roles[k], s, m) for k, s, m in zip(*columns) if k in roles)
