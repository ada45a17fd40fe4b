"""Sums of gradients that begin in the last backward of a stage, bucket by bucket."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from schedlang.runtime.storage.leaving import leaves
from schedlang.runtime.summing.gradient import (
    Bucket,
    Sum,
    begin,
    begin_one,
    in_buckets,
    local_gradient,
)

Started = tuple[Bucket, Any]
LATER = (
    "a gradient changed after its sum had begun: the last backward of its stage took another way"
)


@dataclass
class EarlySums:
    """Splits the sums of a step in those of one stage, and the rest, which wait for its end.

    stages   parameter -> the stages of this rank that hold it
    A parameter is summed early where one stage of this rank holds it and its first sum is its only
    one.  All ranks of a group have the same stages in the same order, so they agree.
    """

    parameters: Mapping[str, nn.Parameter]
    sums: Sequence[Sum]
    stages: Mapping[str, frozenset[int]]
    _running: list[Started] = field(default_factory=list)
    _armed: Armed | None = None
    _often: dict[int, Counter[int]] = field(default_factory=dict)  # by stage

    def __post_init__(self) -> None:
        times: dict[str, int] = {}
        for one in self.sums:
            for name in one.names:
                # copies of a stage end on their ranks in orders of their own
                times[name] = times.get(name, 0) + (2 if one.kind == "tied" else 1)
        self._early = {n for n, k in times.items() if k == 1 and len(self.stages[n]) == 1}

    @property
    def rest(self) -> list[Sum]:
        """The sums that are left for the end of the step."""
        return self._of(lambda name: name not in self._early)

    def before(self, stage: int, last: bool) -> None:
        """An operation of a stage is about to run; `last`: it ends the stage's backwards."""
        self._close()
        if last:
            mine = self._of(lambda name: name in self._early and stage in self.stages[name])
            self._armed = Armed(self.parameters, mine, self._often.setdefault(stage, Counter()))

    def finish(self) -> None:
        """Begin what is left of the early ones, and wait for all."""
        self._close()
        for bucket, work in self._running:
            if work is not None:
                work.wait()
            bucket.unpack()
        self._running = []

    def _close(self) -> None:
        """Whatever ran last has ended: all its sums begin."""
        if self._armed is not None:
            self._running += self._armed.close()
            self._armed = None

    def _of(self, wanted: Any) -> list[Sum]:
        kept = [replace(one, names=tuple(filter(wanted, one.names))) for one in self.sums]
        return [one for one in kept if one.names]


class Armed:
    """The sums of a stage while its last backward runs: each bucket begins when it is full.

    The last parameters come first, as backwards give them, and no bucket begins before the one that
    stands before it, so that all ranks begin them in one order (DDP, Li et al. 2020).  How often a
    parameter's gradient is added to in this backward is learned in the first step (`often`), in
    which nothing begins before its end; so it is for gradients that leave the device.  Where more
    is added than in the step before, close() says so: no wrong sum is kept.  Other sums than those
    over replicas begin at the end.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], sums: Sequence[Sum], often: Counter[int]
    ) -> None:
        self.parameters = parameters
        self.others = [one for one in sums if one.kind != "replicas"]
        self.waiting = [
            (one, members)
            for one in reversed([one for one in sums if one.kind == "replicas"])
            for members in reversed(in_buckets([parameters[n] for n in one.names], one.bucket))
        ]
        self.often, self.seen = often, Counter[int]()
        self.started: list[tuple[Started, list[tuple[Any, int]]]] = []
        here = [p for _, members in self.waiting for p in members if not leaves(p)]
        self.hooks = [p.register_post_accumulate_grad_hook(self._added) for p in here]  # type: ignore[no-untyped-call]

    def _added(self, parameter: nn.Parameter) -> None:
        self.seen[id(parameter)] += 1
        while self.waiting and all(map(self._whole, self.waiting[0][1])):
            self._begin()

    def _whole(self, parameter: nn.Parameter) -> bool:
        """Has all been added that was added in the step before?"""
        wanted = self.often[id(parameter)]
        return 0 < wanted <= self.seen[id(parameter)]

    def _begin(self) -> None:
        one, members = self.waiting.pop(0)
        begun = begin_one(one.group, members)
        self.started.append((begun, [_state(p) for p in members]))

    def close(self) -> list[Started]:
        """Begin what is left; all that was begun."""
        for hook in self.hooks:
            hook.remove()
        for (bucket, _), states in self.started:
            if [_state(p) for p in bucket.parameters] != states:
                raise RuntimeError(LATER)
        while self.waiting:
            self._begin()
        self.often.clear()
        self.often.update(self.seen)
        return [*(begun for begun, _ in self.started), *begin(self.parameters, self.others)]


def _state(parameter: nn.Parameter) -> tuple[int, int]:
    """Which gradient a parameter has, and how often it was written."""
    grad = local_gradient(parameter)
    return (0, 0) if grad is None else (grad.data_ptr(), grad._version)
