"""Run one rank's rows of a timeline: forwards, backwards and transfers of a training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree as pytree

from schedlang.runtime.graph import Token, refusal
from schedlang.runtime.mail import Layout, Mail, layout_of
from schedlang.runtime.split import SplitBackward
from schedlang.runtime.stage import Stage, enter, signature
from schedlang.timeline import Kind, Op, Timeline, check, with_transfers
from schedlang.timeline import timeline as make_timeline

BACKWARD = (Kind.B, Kind.I, Kind.W)


class Result(NamedTuple):
    """Of one microbatch, on the rank of the last stage: the loss (unscaled) and the output."""

    loss: torch.Tensor | None
    output: Any


class Event(NamedTuple):
    """An operation that is about to run; `last`: the last backward of its stage in this step."""

    op: Op
    last: bool


@dataclass
class _Flight:
    """One microbatch between its forward and its backward on one stage."""

    leaves: dict[Token, torch.Tensor]
    edges: Mapping[Token, GradientEdge]
    layouts: dict[int, Layout]
    loss: torch.Tensor | None = None
    split: SplitBackward | None = None


class Pipeline:
    """The stages that this rank runs, in the order of a timeline.

    `stages`: this rank's stages by number; `stage_ranks`: global rank of every stage. Transfers go
    over `group` (and `down`, see Mail); with one rank none is made. Receives are posted `lookahead`
    operations early, so that they run beside the computation. Without a cut (one stage) this
    is a plain loop over microbatches.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        timeline: Timeline,
        stage_ranks: Mapping[int, int],
        *,
        group: dist.ProcessGroup | None = None,
        down: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        lookahead: int = 1,
    ) -> None:
        self.stages = dict(stages)
        cut = next(iter(stages.values())).cut
        assert timeline.stages == cut.stages, f"{timeline.stages} stages in time, {cut.stages} cut"
        self.timeline = timeline.with_edges(cut.edges)
        self.stage_ranks = dict(stage_ranks)
        self.rank = int(self.timeline.stage_rank[next(iter(stages))])
        pairs = {(self.stage_ranks[a], self.stage_ranks[b]) for a, b in self.timeline.edges}
        self.mail = Mail(group, down, torch.device(device), pairs)
        self.lookahead = lookahead
        self._orders: dict[tuple[int, bool], tuple[Event, ...]] = {}
        self._layouts: dict[Any, Layout] = {}

    def run(
        self,
        microbatches: Sequence[Mapping[str, Any]],
        scale: Sequence[float] | None = None,
        *,
        train: bool = True,
        around: Callable[[int], AbstractContextManager[Any]] = lambda microbatch: nullcontext(),
        on_op: Callable[[Event], None] = lambda event: None,
        keep_outputs: bool = False,
    ) -> list[Result] | None:
        """One step: gradients are added to the parameters' `.grad`; parameters do not change.

        Every rank gets the same `microbatches`. The gradient is that of the sum of loss * scale.
        `around(microbatch)` is entered around each forward and backward; `on_op` is called before
        each operation. Results on the rank of the last stage, None elsewhere.
        """
        step = _Step(self, microbatches, scale, train, keep_outputs)
        with torch.set_grad_enabled(train):
            for event in self._order(len(microbatches), train):
                on_op(event)
                kind = event.op.kind
                if kind in (Kind.F, *BACKWARD):
                    with around(event.op.microbatch):
                        step.run(event.op)
                else:
                    step.transfer(event.op)
        self.mail.finish()
        return step.answer()

    def _order(self, count: int, train: bool) -> tuple[Event, ...]:
        """This rank's rows for a number of microbatches; another number than planned: forwards."""
        if (count, train) not in self._orders:
            order = self.timeline if train else _evaluation(self.timeline, count)
            assert order.microbatches == count, f"planned for {order.microbatches}, got {count}"
            order = with_transfers(order, self.lookahead)
            check(order)
            rows = order.rows(self.rank)
            last = {op.stage: k for k, op in enumerate(rows) if self._works(op)}
            events = (Event(op, last.get(op.stage) == k) for k, op in enumerate(rows))
            self._orders[(count, train)] = tuple(events)
        return self._orders[(count, train)]

    def _works(self, op: Op) -> bool:
        """Whether an operation is a backward that does something on its stage."""
        return op.kind in BACKWARD and (op.kind is not Kind.W or self.stages[op.stage].split)


class _Step:
    """One step of a pipeline on this rank."""

    def __init__(
        self, pipe: Pipeline, batches: Any, scale: Any, train: bool, keep_outputs: bool
    ) -> None:
        self.pipe, self.batches, self.train, self.keep = pipe, batches, train, keep_outputs
        self.scale = [1.0] * len(batches) if scale is None else list(scale)
        assert len(self.scale) == len(batches), "one scale per microbatch"
        alone = len(pipe.timeline.edges) == 0
        self.signatures = [None if alone else (train, signature(batch)) for batch in batches]
        self.flights: dict[tuple[int, int], _Flight] = {}
        self.here: dict[Any, list[torch.Tensor]] = {}  # between two stages of this rank
        self.outbox: dict[Any, list[torch.Tensor]] = {}
        self.results: dict[int, Result] = {}

    def run(self, op: Op) -> None:
        """One compute operation."""
        if op.kind is Kind.F:
            self._forward(self.pipe.stages[op.stage], op.microbatch)
        elif op.kind is Kind.B:
            self._backward(self.pipe.stages[op.stage], op.microbatch)
        elif op.kind is Kind.I:
            self._input_backward(self.pipe.stages[op.stage], op.microbatch)
        else:
            self._weight_backward(self.pipe.stages[op.stage], op.microbatch)

    def transfer(self, op: Op) -> None:
        """A send, or the posting of a receive."""
        peer, stage = self.pipe.stage_ranks[op.peer], self.pipe.stages[op.stage]
        sends, back = op.kind in (Kind.SEND_F, Kind.SEND_B), op.kind in (Kind.SEND_B, Kind.RECV_B)
        key = self._key(back, *(op.stage, op.peer) if sends else (op.peer, op.stage), op.microbatch)
        known = self.pipe._layouts
        size = (op.stage, op.peer) if sends else (op.peer, op.stage)
        shape = (size, self.signatures[op.microbatch])
        if op.kind is Kind.SEND_F:
            tensors = self.outbox.pop(key)
            layout = layout_of(tensors)
            assert known.get(shape, layout) == layout, "shapes between stages depend on values"
            self.pipe.mail.send(peer, key, tensors, header=shape not in known)
            known[shape] = layout
        elif op.kind is Kind.SEND_B:
            self.pipe.mail.send(peer, key, self.outbox.pop(key), header=False)
        elif op.kind is Kind.RECV_F:
            count = len(stage.incoming[op.peer])
            learn = known.__setitem__
            self.pipe.mail.post(
                peer, key, count, lambda: known.get(shape), lambda layout: learn(shape, layout)
            )
        else:
            place = (op.stage, op.microbatch)
            count = len(_diff(stage, stage.outgoing[op.peer]))
            self.pipe.mail.post(peer, key, count, lambda: self._grad_layout(place, op.peer))

    def answer(self) -> list[Result] | None:
        """The results in the order of the microbatches."""
        if not any(stage.last for stage in self.pipe.stages.values()):
            return None
        return [self.results[k] for k in range(len(self.batches))]

    def _forward(self, stage: Stage, microbatch: int) -> None:
        leaves: dict[Token, torch.Tensor] = {}
        received: dict[Token, torch.Tensor] = {}
        for source, tokens in stage.incoming.items():
            values = self._collect(False, source, stage.index, microbatch)
            for token, value in zip(tokens, values):
                if self.train and stage.differentiable(token):
                    leaves[token] = value.requires_grad_()
                    received[token] = enter(value)
                else:
                    received[token] = value
        done = stage.forward(self.batches[microbatch], received)
        layouts = {}
        for target, tokens in stage.outgoing.items():
            values = [done.made[token] for token in tokens]
            if self.train:
                layouts[target] = layout_of([done.made[t] for t in _diff(stage, tokens)])
            self._deliver(False, stage.index, target, microbatch, values)
        if stage.last:
            if self.train and done.loss is None:
                raise refusal("S615", "", "the model gives no loss", "give `loss(output, batch)`")
            loss = None if done.loss is None else done.loss.detach()
            output = _detached(done.output) if self.keep else None
            self.results[microbatch] = Result(loss, output)
        if self.train:
            flight = _Flight(leaves, done.edges, layouts, done.loss if stage.last else None)
            self.flights[(stage.index, microbatch)] = flight

    def _backward(self, stage: Stage, microbatch: int) -> None:
        flight = self.flights[(stage.index, microbatch)]  # tells what gradients look like
        roots, grads = self._roots(stage, flight, microbatch)
        del self.flights[(stage.index, microbatch)]
        if roots:
            torch.autograd.backward(roots, grads)
        self._return(stage, flight, microbatch)

    def _input_backward(self, stage: Stage, microbatch: int) -> None:
        flight = self.flights[(stage.index, microbatch)]
        if not stage.split:
            self._backward(stage, microbatch)
            return
        roots, grads = self._roots(stage, flight, microbatch)
        leaves = list(flight.leaves.values())
        flight.split = SplitBackward(roots, grads, leaves, stage.waits)
        for leaf, grad in zip(flight.leaves.values(), flight.split.inputs()):
            leaf.grad = grad
        self._return(stage, flight, microbatch)

    def _weight_backward(self, stage: Stage, microbatch: int) -> None:
        if stage.split:
            flight = self.flights.pop((stage.index, microbatch))
            assert flight.split is not None
            flight.split.weights()

    def _roots(self, stage: Stage, flight: _Flight, microbatch: int) -> tuple[list[Any], list[Any]]:
        """Where gradients enter this stage, and the gradients."""
        total: dict[Token, torch.Tensor] = {}
        for target, tokens in stage.outgoing.items():
            values = self._collect(True, target, stage.index, microbatch)
            self.pipe.mail.free(self._key(False, stage.index, target, microbatch))
            for token, value in zip(_diff(stage, tokens), values):
                total[token] = total[token] + value if token in total else value
        there = [token for token in total if token in flight.edges]
        roots: list[Any] = [flight.edges[token] for token in there]
        grads: list[Any] = [total[token] for token in there]
        if flight.loss is not None and flight.loss.requires_grad:
            roots.append(flight.loss)
            grads.append(torch.full_like(flight.loss, self.scale[microbatch]))
        return roots, grads

    def _return(self, stage: Stage, flight: _Flight, microbatch: int) -> None:
        """Send back the gradients of what was received."""
        for source, tokens in stage.incoming.items():
            grads = []
            for token in _diff(stage, tokens):
                leaf = flight.leaves[token]
                grads.append(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
                leaf.grad = None
            self._deliver(True, stage.index, source, microbatch, grads)

    def _key(self, back: bool, source: int, target: int, microbatch: int) -> Any:
        return (back, source, target, microbatch)

    def _deliver(self, back: bool, source: int, target: int, microbatch: int, values: Any) -> None:
        key = self._key(back, source, target, microbatch)
        if self.pipe.stage_ranks[target] == self.pipe.stage_ranks[source]:
            self.here[key] = [value.detach() for value in values]
        else:
            self.outbox[key] = values

    def _collect(self, back: bool, source: int, target: int, microbatch: int) -> Any:
        key = self._key(back, source, target, microbatch)
        return self.here.pop(key) if key in self.here else self.pipe.mail.take(key)

    def _grad_layout(self, place: tuple[int, int], target: int) -> Layout | None:
        """The layout of gradients is that of the values sent; unknown before the forward."""
        flight = self.flights.get(place)
        return None if flight is None else flight.layouts[target]


def _diff(stage: Stage, tokens: Sequence[Token]) -> list[Token]:
    return [token for token in tokens if stage.differentiable(token)]


def _detached(output: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, output)


def _evaluation(timeline: Timeline, count: int) -> Timeline:
    """Forwards of any number of microbatches, in groups that keep every rank at work."""
    rows: list[list[Op]] = [[] for _ in range(timeline.ranks)]
    units = [(m // timeline.ranks, s, m) for m in range(count) for s in range(timeline.stages)]
    for _, stage, microbatch in sorted(units):
        rows[int(timeline.stage_rank[stage])].append(Op(Kind.F, stage, microbatch))
    return make_timeline(rows, timeline.edges)
