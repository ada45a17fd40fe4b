"""Run one rank's rows of a timeline: forwards, backwards and transfers of a training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

from schedlang.runtime.collectives import comm
from schedlang.runtime.recording.graph import refusal
from schedlang.runtime.slicing.sliced import Slices
from schedlang.runtime.staging.bag import Bag
from schedlang.runtime.staging.flight import Work, work_of
from schedlang.runtime.staging.mail import Mail
from schedlang.runtime.staging.operations import HANDLERS, Handler
from schedlang.runtime.staging.parking import Groups, Parking
from schedlang.runtime.staging.sizes import Sizes
from schedlang.runtime.staging.sliced_step import SlicedStep
from schedlang.runtime.staging.stage import Stage
from schedlang.runtime.staging.step import Result, Step
from schedlang.runtime.weights import Number
from schedlang.timeline import Kind, Op, Timeline, check, check_queues, with_gathers, with_transfers
from schedlang.timeline import timeline as make_timeline

BACKWARD = (Kind.B, Kind.I, Kind.W)
COMPUTE = (Kind.F, *BACKWARD, Kind.RECOMPUTE)


class Event(NamedTuple):
    """An operation that is about to run; `last`: the last backward of its stage on this rank.

    `reduces` is false of a backward whose gradients a later one of the same run reduces with its
    own.
    """

    op: Op
    last: bool
    reduces: bool = True


class Pipeline:
    """The stages that this rank runs, in the order of a timeline.

    `stages`: this rank's stages by number, of all replicas (two of one stage share it); none on a
    rank that the order leaves idle. `ranks`: the global rank of every place of the timeline,
    `place` this rank's. Transfers go over `group` (and `down`, see Mail), with one rank none.
    Receives are posted `lookahead` operations early, so that they run beside the computation.
    `handlers` do rows of further kinds, or in another way; with one for UNSHARD, training gathers
    sliced weights once for a run of operations of a stage. Without a cut (one stage) this is a
    plain loop over microbatches. `slices` cut each microbatch along its sequence in training.
    `parks` are the groups for what is parked on partners; where it is `picked`, that is what some
    modules save (`keeping.lodged`), and not all that a forward does.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        timeline: Timeline,
        ranks: Sequence[int] = (0,),
        place: int = 0,
        *,
        group: comm.ProcessGroup | None = None,
        down: comm.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        lookahead: int = 1,
        handlers: Mapping[Kind, Handler] | None = None,
        slices: Slices | None = None,
        parks: Groups = (),
        picked: bool = False,
    ) -> None:
        assert timeline.slices == (slices.slicing.count if slices else 1), "slices are not cut so"
        self.slices = slices
        self.stages, self.ranks, self.place = dict(stages), tuple(ranks), place
        self.timeline = timeline
        for stage in self.stages.values():
            assert timeline.stages == stage.cut.stages, "more or fewer stages than were cut"
            self.timeline = timeline.with_edges(stage.cut.edges)
        self._homes = self.timeline.homes.tolist()
        pairs = {
            (self.rank_of(a, replica), self.rank_of(b, replica))
            for a, b in self.timeline.edges
            for replica in range(self.timeline.replicas)
        }
        self.mail = Mail(group, down, torch.device(device), pairs)
        sent = timeline.pick(timeline.kind == Kind.EVICT)
        partners = {(self.ranks[a], self.ranks[b]) for a, b in zip(sent.rank, sent.peer)}
        self.parking: Parking = Parking(parks, self.mail.device, partners)
        self.away, self.picked = self._planned(Kind.EVICT, Kind.OFFLOAD), picked
        self.again = self._planned(Kind.RECOMPUTE)
        if slices is not None and (self.away or self.again):
            reason = "slices share keys and values: they can be neither offloaded nor recomputed"
            raise refusal(
                "S608", "", reason, "leave `slices` out, or keep activations on the device"
            )
        self.sizes = Sizes()
        self.lookahead = lookahead
        self.handlers = {**HANDLERS, **(handlers or {})}
        self._orders: dict[tuple[int, bool], tuple[Event, ...]] = {}

    def home(self, stage: int, replica: int = 0) -> int:
        """The place that runs a replica of a stage."""
        place: int = self._homes[replica][stage]
        return place

    def rank_of(self, stage: int, replica: int = 0) -> int:
        """The global rank that runs a replica of a stage."""
        return self.ranks[self.home(stage, replica)]

    def fills(self, bag: Bag) -> AbstractContextManager[Any]:
        """Around a forward whose activations leave: what goes into the bag."""
        return bag.at_hand() if self.picked else bag.collecting()

    def _planned(self, *kinds: Kind) -> frozenset[Work]:
        """What this rank does one of these kinds of operations to."""
        t = self.timeline
        mine = t.pick((t.rank == self.place) & np.isin(t.kind, kinds))
        return frozenset(work_of(op) for op in mine.rows(self.place))

    def run(
        self,
        microbatches: Sequence[Mapping[str, Any]],
        scale: Sequence[Number] | None = None,
        *,
        train: bool = True,
        around: Callable[[Op], AbstractContextManager[Any]] = lambda op: nullcontext(),
        on_op: Callable[[Event], None] = lambda event: None,
        keep_outputs: bool = False,
    ) -> dict[int, Result]:
        """One step: gradients are added to the parameters' `.grad`; parameters do not change.

        Every rank gets the same `microbatches`. The gradient is that of the sum of loss * scale.
        `around(op)` is entered around each forward and backward; `on_op` is called before each
        operation. Results of the microbatches whose last stage this rank runs, in their order.
        """
        kind = SlicedStep if self.slices is not None and train else Step
        step = kind(self, microbatches, scale, train, keep_outputs)
        with torch.set_grad_enabled(train):
            for event in self._order(len(microbatches), train):
                on_op(event)
                op = event.op
                if op.kind is Kind.STEP:
                    continue  # whoever is told of operations updates the weights
                if op.kind in COMPUTE:
                    self.parking.make_room()
                    with around(op):
                        self.handlers[op.kind](step, op)
                else:
                    self.handlers[op.kind](step, op)
        self.mail.finish()
        self.parking.finish()
        return dict(sorted(step.results.items()))

    def _order(self, count: int, train: bool) -> tuple[Event, ...]:
        """This rank's rows for a number of microbatches; another number than planned: forwards."""
        if not self.stages:
            return ()
        if (count, train) not in self._orders:
            order = self.timeline if train else _evaluation(self.timeline, count)
            assert order.microbatches == count, f"planned for {order.microbatches}, got {count}"
            order = with_transfers(order, self.lookahead)
            if train and Kind.UNSHARD in self.handlers:
                order = with_gathers(order)
            check(order)
            if self.mail.queues:
                check_queues(order, one_way=self.mail.down is not self.mail.group)
            rows = order.rows(self.place)
            last = {op.stage: k for k, op in enumerate(rows) if self._works(op)}
            waits = _unreduced(rows)
            self._orders[(count, train)] = tuple(
                Event(op, last.get(op.stage) == k, k not in waits) for k, op in enumerate(rows)
            )
        return self._orders[(count, train)]

    def _works(self, op: Op) -> bool:
        """Whether an operation is a backward that does something on its stage."""
        return op.kind in BACKWARD and (op.kind is not Kind.W or self.stages[op.stage].split)


def _unreduced(rows: Sequence[Op]) -> set[int]:
    """The backwards of a run that holds weights, but for the one right before its REDUCE."""
    found: dict[int, list[int]] = {}  # by stage: backwards since its last UNSHARD
    waits: set[int] = set()
    for k, op in enumerate(rows):
        if op.kind is Kind.UNSHARD:
            found[op.stage] = []
        elif op.kind is Kind.REDUCE:
            waits.update(found.pop(op.stage)[:-1])
        elif op.kind in BACKWARD and op.stage in found:
            found[op.stage].append(k)
    return waits


def _evaluation(timeline: Timeline, count: int) -> Timeline:
    """Forwards of any number of microbatches, by replica 0, in groups that keep ranks at work."""
    rows: list[list[Op]] = [[] for _ in range(timeline.ranks)]
    units = [(m // timeline.ranks, s, m) for m in range(count) for s in range(timeline.stages)]
    for _, stage, microbatch in sorted(units):
        rows[int(timeline.stage_rank[stage])].append(Op(Kind.F, stage, microbatch))
    return make_timeline(rows, timeline.edges)
