"""Gradient reductions that begin in the last backward of a stage, bucket by bucket."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from schedlang.runtime.grad_reduction.gradient import (
    FlatGradients,
    GradientReduction,
    LocalParameters,
    StartedSum,
    as_local_parameters,
    begin_bucket,
    begin_sums,
    local_gradient,
)
from schedlang.runtime.storage.offloaded_gradients import offloads_gradient

Members = FlatGradients | Sequence[nn.Parameter]
CHANGED_AFTER_SUM = (
    "a gradient changed after its sum had begun: the last backward of its stage ran differently"
)


@dataclass
class OverlappedReduction:
    """Splits the reductions of a step into those of each stage, and the rest at the end of the
    step.

    stages   parameter -> the stages of this rank that hold it

    A parameter is reduced early if one stage of this rank holds it, and its first reduction is its
    only one. All ranks of a group have the same stages in the same order, so they agree.
    """

    parameters: Mapping[str, nn.Parameter]
    sums: Sequence[GradientReduction]
    stages: Mapping[str, frozenset[int]]
    _running: list[StartedSum] = field(default_factory=list)
    _armed: RunningBuckets | None = None

    def __post_init__(self) -> None:
        times: dict[str, int] = {}
        for reduction in self.sums:
            for name in reduction.names:
                # copies of a stage end in different orders on their ranks
                times[name] = times.get(name, 0) + (2 if reduction.kind == "tied" else 1)
        early = {n for n, k in times.items() if k == 1 and len(self.stages[n]) == 1}
        # the sums at the end of the step
        self.rest = self._sums_of({name for name in times if name not in early})
        local_parameters = as_local_parameters(self.parameters)
        self._by_stage: dict[int, StageBuckets] = {}
        for stage in sorted({stage for name in early for stage in self.stages[name]}):
            stage_sums = self._sums_of({name for name in early if stage in self.stages[name]})
            local_parameters.flatten(stage_sums)
            self._by_stage[stage] = StageBuckets(local_parameters, stage_sums)

    def prepare(self, stage: int, last: bool) -> None:
        """Prepare for an operation of a stage; `last`: it ends the backwards of the stage."""
        if self._armed is not None:
            self._close()
        if last and stage in self._by_stage:
            self._armed = RunningBuckets(self._by_stage[stage])

    def finish(self) -> None:
        """Begin the early reductions that have not begun, and wait for all."""
        self._close()
        for bucket, work in self._running:
            if work is not None:
                work.wait()
            bucket.unpack()
        self._running = []

    def end_broken_step(self) -> None:
        """Wait for the reductions that a step had begun when an exception ended it."""
        started, self._running = self._running, []
        if self._armed is not None:
            started += self._armed.stop()
            self._armed = None
        for _, work in started:
            if work is not None:
                work.wait()

    def _close(self) -> None:
        """Begin all reductions of the operation that ran last."""
        if self._armed is not None:
            self._running += self._armed.close()
            self._armed = None

    def _sums_of(self, names: Container[str]) -> list[GradientReduction]:
        """Return the reductions, restricted to these parameters."""
        restricted = [
            replace(item, names=tuple([n for n in item.names if n in names])) for item in self.sums
        ]
        return [item for item in restricted if item.names]


class StageBuckets:
    """The reductions of a stage, and what its last backward in the previous step has shown.

    waiting  the buckets in the order in which they begin: the last parameters first, as in backward
    others   reductions that begin when the backward has ended
    writes   for each bucket, how often that backward wrote into each gradient; empty: not known
    last     for each bucket, the index of the gradient that was written last
    """

    def __init__(self, parameters: LocalParameters, sums: Sequence[GradientReduction]) -> None:
        self.held = parameters
        self.others = [item for item in sums if item.kind != "replicas"]
        self.waiting: list[tuple[GradientReduction, Members]] = [
            (item, members)
            for item in reversed([item for item in sums if item.kind == "replicas"])
            for members in reversed(parameters.buckets(item.names, item.bucket))
        ]
        self.writes: list[list[int]] = [[] for _ in self.waiting]
        self.last: dict[int, int] = {}


class RunningBuckets:
    """The reductions of a stage while its last backward runs: each bucket begins when it is full.

    No bucket begins before its predecessor, so that all ranks begin them in one order (DDP, Li et
    al. 2020). The first step begins nothing early: it learns how often this backward writes into
    each gradient, and which gradient of a bucket comes last. The same holds for gradients that
    leave the device. From then on, only the last gradients are watched. If more is added than in
    the step before, close() raises, so that no wrong sum is kept; if a bucket was full without
    notice, its order is learned again.
    """

    def __init__(self, learned: StageBuckets) -> None:
        self.learned = learned
        self.begun: list[StartedSum] = []
        self.states: list[list[Any]] = []  # of the gradients when their bucket began
        # by id of the watched parameters, in order of the last write
        self.added: dict[int, int] = {}
        self.before = [_writes(members) for _, members in learned.waiting]
        watched = [p for index in range(len(learned.waiting)) for p in self._watched(index)]
        self.hooks = [p.register_post_accumulate_grad_hook(self._added) for p in watched]  # type: ignore[no-untyped-call]

    def _watched(self, index: int) -> list[nn.Parameter]:
        members = self.learned.waiting[index][1]
        if not isinstance(members, FlatGradients):
            return [p for p in members if not offloads_gradient(p)]
        last = self.learned.last.get(index)
        return members.parameters if last is None else [members.parameters[last]]

    def _added(self, parameter: nn.Parameter) -> None:
        self.added[id(parameter)] = self.added.pop(id(parameter), 0) + 1
        while self._full():
            self._begin()

    def _full(self) -> bool:
        """Return whether the next bucket got as many writes as in the step before."""
        index = len(self.begun)
        if index == len(self.learned.waiting):
            return False
        members, writes = self.learned.waiting[index][1], self.learned.writes[index]
        if not isinstance(members, FlatGradients):
            added = [self.added.get(id(p), 0) for p in members]
            return bool(writes) and all(0 < w <= n for w, n in zip(writes, added))
        first_writes = self.before[index]
        if not (writes and first_writes and all(writes)) or _writes(members) is None:
            return False
        return members.write_counts() == [b + w for b, w in zip(first_writes, writes)]

    def _begin(self) -> None:
        reduction, members = self.learned.waiting[len(self.begun)]
        self.begun.append(begin_bucket(reduction.group, members))
        self.states.append(_states(members))

    def stop(self) -> list[StartedSum]:
        """Watch no more gradients; return the reductions that have begun."""
        for hook in self.hooks:
            hook.remove()
        return self.begun

    def close(self) -> list[StartedSum]:
        """Begin the remaining buckets; return all reductions that have begun."""
        self.stop()
        for (_, members), states in zip(self.learned.waiting, self.states):
            if _states(members) != states:
                raise RuntimeError(CHANGED_AFTER_SUM)
        if self._full():
            self.learned.last.pop(len(self.begun), None)
        for index in range(len(self.learned.waiting)):
            self._learn(index)
        while len(self.begun) < len(self.learned.waiting):
            self._begin()
        return [*self.begun, *begin_sums(self.learned.held, self.learned.others)]

    def _learn(self, index: int) -> None:
        members, first_writes = self.learned.waiting[index][1], self.before[index]
        if not isinstance(members, FlatGradients):
            self.learned.writes[index] = [self.added.get(id(p), 0) for p in members]
            return
        last_writes, writes = _writes(members), list[int]()
        if index not in self.learned.last:  # all gradients were watched
            order = {key: k for k, key in enumerate(self.added)}
            positions = [order.get(id(p), -1) for p in members.parameters]
            if max(positions) >= 0:
                self.learned.last[index] = positions.index(max(positions))
            writes = [self.added.get(id(p), 0) for p in members.parameters]
        if first_writes is not None and last_writes is not None:
            writes = [n - b for n, b in zip(last_writes, first_writes)]
        self.learned.writes[index] = writes


def _writes(members: Members) -> list[int] | None:
    """Return the number of writes into each gradient of a bucket; None if it is not in one
    buffer."""
    return (
        members.write_counts()
        if isinstance(members, FlatGradients) and members.is_in_place()
        else None
    )


def _states(members: Members) -> list[Any]:
    """Return the identity and the number of writes of each gradient of a bucket."""
    if isinstance(members, FlatGradients):
        return [*members.write_counts(), members.is_in_place()]
    grads = [local_gradient(p) for p in members]
    return [(0, 0) if g is None else (g.data_ptr(), g._version) for g in grads]
