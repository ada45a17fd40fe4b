"""Measured times of a step's operations on this rank, to be compared with their timeline."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from schedlang.pipeline.timeline.table import Op
from schedlang.runtime.comm import world
from schedlang.runtime.device import synchronize


class Ran(NamedTuple):
    """One operation: when its turn came, when its inputs were there, and when it had ended.

    In seconds since a moment that all ranks have in common.
    """

    op: Op
    turn: float
    start: float
    end: float


@dataclass
class Watch:
    """Notes the operations of this rank's steps; `steps` has a list for each step watched.

    Where a rank waits is known from its mail: an operation takes what other ranks sent before it
    computes anything.
    """

    pipeline: Any
    device: torch.device

    def __post_init__(self) -> None:
        self.steps: list[list[Ran]] = []
        self.zeros: list[float] = []
        self._arrived = 0.0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time one step, on all ranks alike."""
        mail = self.pipeline.mail
        take = mail.take

        def timed(key: Any) -> Any:
            values = take(key)
            self._arrived = self._now()
            return values

        self.steps.append([])
        world.barrier()
        self.zeros.append(time.perf_counter())
        mail.take = timed
        try:
            yield
        finally:
            del mail.take  # the class's own again

    @contextmanager
    def around(self, op: Op, inner: AbstractContextManager[Any]) -> Iterator[None]:
        """Time one forward or backward."""
        turn = self._arrived = self._now()
        with inner:
            yield
        self.steps[-1].append(Ran(op, turn, self._arrived, self._now()))

    def _now(self) -> float:
        synchronize(self.device)
        return time.perf_counter() - self.zeros[-1]


def gathered(watch: Watch) -> list[list[list[Ran]]]:
    """[rank][step]: what every rank of the job has noted, on every rank.

    On one machine all ranks read one clock. Between machines the moment in common is the end of the
    barrier before each step.
    """
    own = platform.node(), watch.zeros, watch.steps
    found = world.all_gather_object(own)
    if len({node for node, _, _ in found}) > 1:
        return [steps for _, _, steps in found]
    first = [min(zeros) for zeros in zip(*(zeros for _, zeros, _ in found))]
    return [
        [_later(ran, zero - low) for ran, zero, low in zip(steps, zeros, first)]
        for _, zeros, steps in found
    ]


def _later(ran: list[Ran], by: float) -> list[Ran]:
    return [Ran(op, turn + by, start + by, end + by) for op, turn, start, end in ran]
