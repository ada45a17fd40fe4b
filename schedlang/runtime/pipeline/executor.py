"""Run the rows of one rank of a timeline: forwards, backwards and transfers of a training step.

`Pipeline.run` executes a step; `MessageLayouts` holds the layouts of messages between stages,
which a receiver gets once per shape of the batch; `SlicedStep` runs microbatches that are split
along their sequences, one slice after the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from schedlang.pipeline.timeline.proof import check_queues, check_timeline, with_transfers
from schedlang.pipeline.timeline.table import SINGLE_STAGE, Kind, Op, Timeline, timeline_from_rows
from schedlang.runtime.batch_weights import Number
from schedlang.runtime.comm import world
from schedlang.runtime.device import on_host
from schedlang.runtime.pipeline import evicted_activations
from schedlang.runtime.pipeline.evicted_activations import Groups, PartnerEviction
from schedlang.runtime.pipeline.in_flight import (
    MessageRoute,
    SavedStorages,
    StageMessage,
    Transfer,
    WorkItem,
    make_message,
    work_of,
)
from schedlang.runtime.pipeline.p2p import MessageLayout, PeerChannel
from schedlang.runtime.pipeline.recomputed_forward import recompute
from schedlang.runtime.pipeline.stage import ForwardResult, Stage
from schedlang.runtime.pipeline.step import MicrobatchResult, PipelineStep
from schedlang.runtime.sequence_pipelining.carried_keys import CarriedKeys
from schedlang.runtime.sequence_pipelining.slices import SliceRunner, join_outputs, whole_loss
from schedlang.runtime.tracing.stage_graph import Token, refusal


class _Slice:
    """The values that one slice uses of earlier slices, and their gradients; see flight.Carried."""

    def __init__(self, carried: CarriedKeys, index: int) -> None:
        self.carried, self.index = carried, index

    def leaves(self) -> Sequence[torch.Tensor]:
        return self.carried.earlier_leaves(self.index)

    def roots(self) -> tuple[Sequence[Any], Sequence[torch.Tensor]]:
        return self.carried.backward_roots(self.index)

    def release(self) -> None:
        self.carried.free(self.index)


class SlicedStep(PipelineStep):
    """A step whose microbatches are split into slices: forward in order, backward in reverse.

    The losses of the slices add up.
    """

    def __init__(self, pipe: Any, batches: Any, *rest: Any) -> None:
        super().__init__(pipe, batches, *rest)
        self.slices: SliceRunner = pipe.slices
        self.batch_slices = self.slices.split_batches(batches)
        self.carried: dict[WorkItem, CarriedKeys] = defaultdict(CarriedKeys)
        self.slice_results: dict[int, list[tuple[torch.Tensor | None, Any]]] = defaultdict(list)

    def run(
        self, stage: Stage, work: WorkItem, received: Mapping[Token, torch.Tensor]
    ) -> tuple[ForwardResult, Any]:
        """Run the forward of a stage on one slice; its attention sees the keys of earlier
        slices."""
        carried = self.carried[work._replace(slice=0)]
        part = self.batch_slices[work.microbatch][work.slice]
        with self.slices.forward(part, carried) as inputs:
            return stage.forward(inputs, received, self.train), _Slice(carried, work.slice)

    def weight(self, work: WorkItem) -> Number:
        """Return the weight of the loss of a slice: its share of that of its microbatch."""
        share: Number = self.batch_slices[work.microbatch][work.slice].share
        weight: Number = self.scale[work.microbatch] * share
        return weight

    def store_result(self, work: WorkItem, loss: torch.Tensor | None, output: Any) -> None:
        """Store the result of a slice; join the slices after the last one."""
        results, parts = self.slice_results[work.microbatch], self.batch_slices[work.microbatch]
        results.append((loss, output))
        if len(results) < len(parts):
            return
        losses = [value for value, _ in results if value is not None]
        full_loss = whole_loss(losses, parts) if losses else None
        output = join_outputs([output for _, output in results], parts) if self.keep else None
        self.results[work.microbatch] = MicrobatchResult(full_loss, output)
        del self.slice_results[work.microbatch]


FIXED = (
    "let shapes depend only on the shapes of the batch",
    "or cut at another module, so that these values stay within one stage",
)


@dataclass(eq=False)
class MessageLayouts:
    """Layouts of the values that go forward along each edge, by signature of the microbatch.

    Each replica of an edge has one sender and one receiver; both keep the same table. `varying`:
    layouts depend on the microbatches of other ranks too, so that a header comes before each
    message.
    """

    varying: bool = False
    _layouts: dict[Any, MessageLayout] = field(default_factory=dict)

    def find(self, signature: Any, name: StageMessage) -> MessageLayout | None:
        """Return the layout of a message, or None if this rank does not know the layout yet."""
        return None if self.varying else self._layouts.get(_key(signature, name))

    def store(self, signature: Any, name: StageMessage, layout: MessageLayout) -> None:
        """Store the layout that a header has brought."""
        self._layouts[_key(signature, name)] = layout

    def store_sent(self, signature: Any, name: StageMessage, layout: MessageLayout) -> bool:
        """Store the layout of a message to be sent; return whether the receiver needs a header
        first.

        Raises Refusal S612 if the layout differs from an earlier one: the receiver would not know.
        """
        if self.varying:
            return True
        known_layout = self._layouts.setdefault(_key(signature, name), layout)
        if known_layout is not layout and known_layout != layout:
            reason = f"stage {name.source} sends tensors whose shapes depend on values"
            raise refusal("S612", "", reason, *FIXED, note="the receiving stage must know them")
        return known_layout is layout


def _key(signature: Any, name: StageMessage) -> Any:
    return (name.source, name.target, name.replica, name.slice, signature)


# -- handlers: one per kind of operation ----------------------------------------------------------


Handler = Callable[[PipelineStep, Any], None]  # second: what `Pipeline._handler_argument` returns


def _send(step: PipelineStep, message: Transfer) -> None:
    """Send the values or gradients for another stage, with a header before the first of a
    layout."""
    name = message.name
    tensors, layout = step.outbox.pop(name)
    header = layout is not None and step.pipe.sizes.store_sent(
        step.signatures[name.microbatch], name, layout
    )
    step.pipe.mail.send(message.rank, name, tensors, header=header)


def _receive(step: PipelineStep, message: Transfer) -> None:
    """Post the receive of a message from another stage.

    Gradients have the layout of the values that were sent; it is unknown before the forward.
    """
    name, mail = message.name, step.pipe.mail
    if name.back:
        mail.post(
            message.rank, name, message.size, partial(step.layouts.get, message.layout_source)
        )
        return
    sizes, signature = step.pipe.sizes, step.signatures[name.microbatch]
    mail.post(
        message.rank,
        name,
        message.size,
        partial(sizes.find, signature, name),
        partial(sizes.store, signature, name),
    )


def _parking_of(step: PipelineStep) -> PartnerEviction:
    assert step.pipe.parking is not None, "an order that parks has partners"
    return step.pipe.parking


HANDLERS: Mapping[Kind, Handler] = {
    Kind.F: lambda step, work: step.forward(work),
    Kind.B: lambda step, work: step.backward(work),
    Kind.I: lambda step, work: step.input_backward(work),
    Kind.W: lambda step, work: step.weight_backward(work),
    Kind.SEND_F: _send,
    Kind.SEND_B: _send,
    Kind.RECV_F: _receive,
    Kind.RECV_B: _receive,
    Kind.RECOMPUTE: recompute,
    Kind.EVICT: lambda step, op: _parking_of(step).evict(step, op),
    Kind.HOLD: lambda step, op: _parking_of(step).hold(step, op),
    Kind.GIVE: lambda step, op: _parking_of(step).give(step, op),
    Kind.LOAD: lambda step, op: _parking_of(step).load(step, op),
    Kind.OFFLOAD: evicted_activations.offload,
    Kind.RELOAD: evicted_activations.reload,
}


# -- the executor ----------------------------------------------------------------------------------


FORWARD = (Kind.F, Kind.RECOMPUTE)
BACKWARD = (Kind.B, Kind.I, Kind.W)
COMPUTE = (*FORWARD, *BACKWARD)
TRANSFERS = (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)


class ScheduledOp(NamedTuple):
    """An operation that is about to run; `last`: the last backward of its stage on this rank.

    `reduces` is False for a backward whose gradients a later backward of the same run reduces with
    its own. `before_last_forward` is True until the last forward of this rank has run. `argument`
    is the argument of the handler.
    """

    op: Op
    last: bool
    reduces: bool
    before_last_forward: bool
    computes: bool
    argument: Any


class Pipeline:
    """The stages that this rank runs, in the order of a timeline.

    `stages`: this rank's stages by number, of all replicas (two replicas of one stage share it);
    empty on a rank without operations. `ranks`: the global rank of every place of the timeline;
    `place`: the place of this rank. Transfers use `group` (and `down`, see Mail); with one rank
    there are none. Receives are posted `lookahead` operations early, so that they overlap with
    computation; on the host, unless `lookahead` is 0, one operation earlier still. `handlers` add
    or replace handlers of kinds of operations. `gathers` adds the rows of a training step that
    gather sharded weights. An unsplit model (one stage) runs as a plain loop over microbatches.
    `slices` split each microbatch along its sequence in training. `parks` are the process groups
    for activations that are parked on partners; if `picked`, only activations that some modules
    save are parked (`offload.saved_tensors`), else all of a forward. `varying`: see
    `MessageLayouts`.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        timeline: Timeline,
        ranks: Sequence[int] = (0,),
        place: int = 0,
        *,
        group: world.ProcessGroup | None = None,
        down: world.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        lookahead: int = 1,
        handlers: Mapping[Kind, Handler] | None = None,
        gathers: Callable[[Timeline], Timeline] | None = None,
        slices: SliceRunner | None = None,
        parks: Groups = (),
        picked: bool = False,
        varying: bool = False,
    ) -> None:
        self.stages, self.ranks, self.place = dict(stages), tuple(ranks), place
        self.timeline, self.slices, self.picked = timeline, slices, picked
        # one rank, one forward and its backward: no edges to add and no order to check
        self.plain = plain = timeline.ranks == 1 and timeline.rank.size <= SINGLE_STAGE.rank.size
        pairs = set() if plain else self._pairs()
        self.mail = PeerChannel(group, down, torch.device(device), pairs)
        self.parking = None if plain else self._make_parking(parks)
        self.offloaded = frozenset() if plain else self._work_with(Kind.EVICT, Kind.OFFLOAD)
        self.recomputed = frozenset() if plain else self._work_with(Kind.RECOMPUTE)
        if slices is not None and (self.offloaded or self.recomputed):
            reason = "slices share keys and values: they can be neither offloaded nor recomputed"
            raise refusal(
                "S608", "", reason, "leave `slices` out, or keep activations on the device"
            )
        self.sizes = MessageLayouts(varying)
        self.lookahead, self.gathers = lookahead, gathers
        self.handlers = {**HANDLERS, **(handlers or {})}
        self._orders: dict[tuple[int, bool], tuple[ScheduledOp, ...]] = {}
        self._routes: dict[WorkItem, MessageRoute] = {}

    def _pairs(self) -> set[tuple[int, int]]:
        """Return the pairs of ranks that exchange tensors; give the timeline the edges of the
        stages."""
        slice_count = self.slices.slicing.count if self.slices is not None else 1
        assert self.timeline.slices == slice_count, "slices are not cut so"
        for stage in self.stages.values():
            assert self.timeline.stages == stage.cut.stages, "more or fewer stages than were cut"
            if stage.cut.edges != self.timeline.edges:
                self.timeline = self.timeline.with_edges(stage.cut.edges)
        return {
            (self.rank_of(a, replica), self.rank_of(b, replica))
            for a, b in self.timeline.edges
            for replica in range(self.timeline.replicas)
        }

    def _make_parking(self, parks: Groups) -> PartnerEviction | None:
        """Return the parking of activations on other ranks; None if the timeline has no EVICT."""
        t = self.timeline
        evicts = t.kind == Kind.EVICT
        if not evicts.any():
            return None
        partners = {(self.ranks[a], self.ranks[b]) for a, b in zip(t.rank[evicts], t.peer[evicts])}
        return PartnerEviction(parks, self.mail.device, partners)

    @cached_property
    def _places(self) -> list[list[int]]:
        places: list[list[int]] = self.timeline.replica_ranks.tolist()
        return places

    def place_of(self, stage: int, replica: int = 0) -> int:
        """Return the place that runs a replica of a stage."""
        return self._places[replica][stage]

    def rank_of(self, stage: int, replica: int = 0) -> int:
        """Return the global rank that runs a replica of a stage."""
        return self.ranks[self.place_of(stage, replica)]

    def route(self, work: WorkItem) -> MessageRoute:
        """Return the messages of some work; they are named once."""
        if (message_route := self._routes.get(work)) is not None:
            return message_route
        stage, number = self.stages[work.stage], work.stage

        def is_local(stage_index: int) -> bool:
            return self.place_of(stage_index, work.replica) == self.place

        tokens = {
            token
            for route in (stage.incoming, stage.outgoing)
            for edge_tokens in route.values()
            for token in edge_tokens
        }
        outgoing = {end: make_message(False, number, end, work) for end in stage.outgoing}
        returned = [
            (make_message(True, number, end, work), is_local(end), edge_tokens)
            for end, edge_tokens in stage.returned.items()
        ]
        self._routes[work] = message_route = MessageRoute(
            tuple(
                (make_message(False, end, number, work), edge_tokens)
                for end, edge_tokens in stage.incoming.items()
            ),
            tuple(
                (name, is_local(end), stage.outgoing[end], stage.awaited[end])
                for end, name in outgoing.items()
            ),
            tuple(
                (make_message(True, end, number, work), name, stage.awaited[end])
                for end, name in outgoing.items()
            ),
            tuple(returned),
            frozenset(filter(stage.mutated, tokens)),
            tuple(token for edge_tokens in stage.returned.values() for token in edge_tokens),
        )
        return message_route

    def _handler_argument(self, op: Op) -> Any:
        """Return the argument of the handler of an operation."""
        if op.kind in (Kind.F, *BACKWARD):
            return work_of(op)
        if op.kind not in TRANSFERS:
            return op
        back, sends = op.kind in (Kind.SEND_B, Kind.RECV_B), op.kind in (Kind.SEND_F, Kind.SEND_B)
        source, target = (op.stage, op.peer) if sends else (op.peer, op.stage)
        stage = self.stages[op.stage]
        tokens = () if sends else (stage.awaited if back else stage.incoming)[op.peer]
        sent = make_message(False, op.stage, op.peer, op)
        name = make_message(back, source, target, op)
        return Transfer(name, self.rank_of(op.peer, op.replica), len(tokens), sent)

    def collect_into(self, bag: SavedStorages) -> AbstractContextManager[Any]:
        """Return a context that collects activations of a forward, which will be offloaded, in a
        bag."""
        return bag.offer() if self.picked else bag.collect()

    def _work_with(self, *kinds: Kind) -> frozenset[WorkItem]:
        """Return the work for which this rank has operations of these kinds."""
        t = self.timeline
        planned = np.isin(t.kind, kinds)
        if not planned.any():
            return frozenset()
        local_ops = t.pick((t.rank == self.place) & planned)
        return frozenset(work_of(op) for op in local_ops.rows(self.place))

    def run(
        self,
        microbatches: Sequence[Mapping[str, Any]],
        scale: Sequence[Number] | None = None,
        *,
        train: bool = True,
        around: Callable[[Op], AbstractContextManager[Any]] = lambda op: nullcontext(),
        on_op: Callable[[ScheduledOp], None] | None = None,
        keep_outputs: bool = False,
    ) -> dict[int, MicrobatchResult]:
        """Run one step: add gradients to the `.grad` of the parameters; parameters do not change.

        Every rank passes the same `microbatches`. The gradient is that of the sum of loss * scale.
        `around(op)` is entered around each forward and backward; `on_op` is called before each
        operation. Returns the results of the microbatches whose last stage this rank runs, in
        order. Without `train` no graph is made, unless the caller enables gradients.
        """
        kind = SlicedStep if self.slices is not None and train else PipelineStep
        step = kind(self, microbatches, scale, train, keep_outputs)
        with torch.set_grad_enabled(train or torch.is_grad_enabled()):
            for event in self._order(len(microbatches), train):
                if on_op is not None:
                    on_op(event)
                op = event.op
                if op.kind is Kind.STEP:
                    continue  # `on_op` updates the weights
                if event.computes:
                    if self.parking is not None:
                        self.parking.make_room()
                    with around(op):
                        self.handlers[op.kind](step, event.argument)
                else:
                    self.handlers[op.kind](step, event.argument)
        self.mail.finish()
        if self.parking is not None:
            self.parking.finish()
        return dict(sorted(step.results.items()))

    def _order(self, count: int, train: bool) -> tuple[ScheduledOp, ...]:
        """Return this rank's operations for a number of microbatches.

        Evaluation takes any number of microbatches, training the planned one.
        """
        if not self.stages:
            return ()
        if (count, train) not in self._orders:
            order = self.timeline if train else _evaluation_order(self.timeline, count)
            assert order.microbatches == count, f"planned for {order.microbatches}, got {count}"
            if not self.plain:
                order = self._check_order(order, train)
            rows = order.rows(self.place)
            # else W does nothing
            halves = {stage for stage, local_stage in self.stages.items() if local_stage.split}
            last = {
                op.stage: k
                for k, op in enumerate(rows)
                if op.kind in BACKWARD and (op.kind is not Kind.W or op.stage in halves)
            }
            waits = _unreduced_backwards(rows) if self.gathers is not None else ()
            forward = max((k for k, op in enumerate(rows) if op.kind in FORWARD), default=-1)
            self._orders[(count, train)] = tuple(
                ScheduledOp(
                    op,
                    last.get(op.stage) == k,
                    k not in waits,
                    k <= forward,
                    op.kind in COMPUTE,
                    work_of(op) if self.plain else self._handler_argument(op),
                )
                for k, op in enumerate(rows)
            )
        return self._orders[(count, train)]

    def _check_order(self, order: Timeline, train: bool) -> Timeline:
        """Return the order with its transfers and gathers; raises TimelineError if it would
        deadlock."""
        # gloo sends at once if the receive is posted, and else asks the receiver first
        earlier = bool(self.lookahead) and on_host(self.mail.device)
        order = with_transfers(order, self.lookahead + earlier)
        if train and self.gathers is not None:
            order = self.gathers(order)
        check_timeline(order)
        if self.mail.queues:
            check_queues(order, one_way=self.mail.down is not self.mail.group)
        return order


def _unreduced_backwards(rows: Sequence[Op]) -> set[int]:
    """Return the rows of backwards between UNSHARD and REDUCE, except the last one of each."""
    open_rows: dict[int, list[int]] = {}  # by stage: backwards since its last UNSHARD
    waits: set[int] = set()
    for k, op in enumerate(rows):
        if op.kind is Kind.UNSHARD:
            open_rows[op.stage] = []
        elif op.kind is Kind.REDUCE:
            waits.update(open_rows.pop(op.stage)[:-1])
        elif op.kind in BACKWARD and op.stage in open_rows:
            open_rows[op.stage].append(k)
    return waits


def _evaluation_order(timeline: Timeline, count: int) -> Timeline:
    """Return forwards of `count` microbatches, by replica 0, in groups that keep all ranks busy."""
    rows: list[list[Op]] = [[] for _ in range(timeline.ranks)]
    units = [(m // timeline.ranks, s, m) for m in range(count) for s in range(timeline.stages)]
    for _, stage, microbatch in sorted(units):
        rows[int(timeline.stage_rank[stage])].append(Op(Kind.F, stage, microbatch))
    return timeline_from_rows(rows, timeline.edges)
