"""Measured times of the operations of a step on each rank, to be compared with the timeline."""

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


class MeasuredOp(NamedTuple):
    """One operation: times when its turn came, when its inputs were there, and when it ended.

    In seconds since a moment that is common to all ranks.
    """

    op: Op
    turn: float
    start: float
    end: float


@dataclass
class StepTimer:
    """Times the operations of this rank's steps; `steps` has a list for each step.

    The time when inputs have arrived is known from the mail: an operation takes the messages of
    other ranks before it computes anything.
    """

    pipeline: Any
    device: torch.device

    def __post_init__(self) -> None:
        self.steps: list[list[MeasuredOp]] = []
        self.origins: list[float] = []
        self._inputs_at = 0.0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time one step; all ranks must enter together."""
        mail = self.pipeline.mail
        original_take = mail.take

        def timed(key: Any) -> Any:
            values = original_take(key)
            self._inputs_at = self._now()
            return values

        self.steps.append([])
        world.barrier()
        self.origins.append(time.perf_counter())
        mail.take = timed
        try:
            yield
        finally:
            del mail.take  # back to the method of the class

    @contextmanager
    def around(self, op: Op, inner: AbstractContextManager[Any]) -> Iterator[None]:
        """Time one forward or backward."""
        turn = self._inputs_at = self._now()
        with inner:
            yield
        self.steps[-1].append(MeasuredOp(op, turn, self._inputs_at, self._now()))

    def _now(self) -> float:
        synchronize(self.device)
        return time.perf_counter() - self.origins[-1]


def gather_times(timer: StepTimer) -> list[list[list[MeasuredOp]]]:
    """Return [rank][step]: the measured operations of every rank, on every rank.

    On one machine all ranks read one clock. Between machines, the common moment is the end of the
    barrier before each step.
    """
    local_times = platform.node(), timer.origins, timer.steps
    all_times = world.all_gather_object(local_times)
    if len({node for node, _, _ in all_times}) > 1:
        return [steps for _, _, steps in all_times]
    starts = [min(zeros) for zeros in zip(*(zeros for _, zeros, _ in all_times))]
    return [
        [_shift(ops, zero - start) for ops, zero, start in zip(steps, zeros, starts)]
        for _, zeros, steps in all_times
    ]


def _shift(ops: list[MeasuredOp], shift: float) -> list[MeasuredOp]:
    return [
        MeasuredOp(op, turn + shift, start + shift, end + shift) for op, turn, start, end in ops
    ]
