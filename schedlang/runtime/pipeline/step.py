"""One step of a pipeline on one rank: its forwards, backwards and the messages between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir import pytree
from schedlang.runtime.adapters.torch_tensor import run_backward
from schedlang.runtime.batch import bad_loss_diagnostic, is_loss, no_loss_diagnostic
from schedlang.runtime.batch_weights import Number, filled_like
from schedlang.runtime.device import is_meta
from schedlang.runtime.lazy_logits.lazy import LazyLogits
from schedlang.runtime.pipeline.in_flight import (
    InFlight,
    SavedStorages,
    SliceCarry,
    StageMessage,
    WorkItem,
    storage_key,
)
from schedlang.runtime.pipeline.p2p import MessageLayout, layout_of
from schedlang.runtime.pipeline.recomputed_forward import RecomputeInputs
from schedlang.runtime.pipeline.split_backward import SplitBackward
from schedlang.runtime.pipeline.stage import ForwardResult, Stage, as_graph_input, signature
from schedlang.runtime.scope import last_memo
from schedlang.runtime.storage.saved_tensors_slot import ModuleAddresses
from schedlang.runtime.tracing.stage_graph import Token

if TYPE_CHECKING:
    from schedlang.runtime.pipeline.executor import Pipeline


class MicrobatchResult(NamedTuple):
    """The result of a microbatch on the rank of the last stage: unscaled loss, and output."""

    loss: torch.Tensor | None
    output: Any


class PipelineStep:
    """The state of one step; the handlers of operations read and change it.

    flights           state of each microbatch between forward and backward, by work
    recompute_inputs  inputs of forwards without a graph, which run again before their backward
    host_copies       activations in host memory, with the device that they came from
    layouts           layouts of gradients to receive, by the message that sent the values
    local_messages    messages between two stages of this rank
    outbox            messages that wait to be sent; messages of values with their layout
    results           results of the microbatches whose last stage is on this rank
    """

    def __init__(
        self,
        pipe: Pipeline,
        batches: Sequence[Mapping[str, Any]],
        scale: Sequence[Number] | None,
        train: bool,
        keep_outputs: bool,
    ) -> None:
        self.pipe, self.batches, self.train, self.keep = pipe, batches, train, keep_outputs
        self.scale: list[Number] = [1.0] * len(batches) if scale is None else list(scale)
        assert len(self.scale) == len(batches), "one scale per microbatch"
        is_single = len(pipe.timeline.edges) == 0
        self.signatures = [None if is_single else (train, signature(batch)) for batch in batches]
        self.flights: dict[WorkItem, InFlight] = {}
        self.recompute_inputs: dict[WorkItem, RecomputeInputs] = {}
        self.host_copies: dict[WorkItem, list[tuple[torch.Tensor, torch.device]]] = {}
        self.layouts: dict[StageMessage, MessageLayout] = {}
        self.local_messages: dict[StageMessage, list[torch.Tensor]] = {}
        self.outbox: dict[StageMessage, tuple[list[torch.Tensor], MessageLayout | None]] = {}
        self.results: dict[int, MicrobatchResult] = {}

    def run(
        self, stage: Stage, work: WorkItem, received: Mapping[Token, torch.Tensor]
    ) -> tuple[ForwardResult, SliceCarry | None]:
        """Run the forward of a stage on one microbatch, or on one slice of it."""
        return stage.forward(self.batches[work.microbatch], received, self.train), None

    def weight(self, work: WorkItem) -> Number:
        """Return the factor of the loss in backward."""
        return self.scale[work.microbatch]

    def store_result(self, work: WorkItem, loss: torch.Tensor | None, output: Any) -> None:
        """Store the result of the last stage."""
        self.results[work.microbatch] = MicrobatchResult(loss, output)

    # -- forward -----------------------------------------------------------------------------------

    def forward(self, work: WorkItem) -> None:
        """Run a stage on the values of earlier stages; store the values for later stages to be
        sent."""
        stage, route = self.pipe.stages[work.stage], self.pipe.route(work)
        received: dict[Token, torch.Tensor] = {}
        for name, tokens in route.incoming:
            received.update(zip(tokens, self.receive(name)))
        if self.train and work in self.pipe.recomputed:
            self.recompute_inputs[work] = RecomputeInputs.capture(
                received, stage.model, self.pipe.mail.device
            )
            # the second run must get the same inputs as the first
            inputs = {t: v.clone() if t in route.written else v for t, v in received.items()}
            with torch.no_grad():
                result, _ = self.run(stage, work, inputs)
            self.recompute_inputs[work].memo = last_memo()
            self.recompute_inputs[work].before.store_changes(type(stage.model).__name__)
        else:
            result = self.run_forward(work, received)
        values_of = result.values
        for name, is_local, tokens, awaited in route.outgoing:
            if is_local:  # each stage of this rank writes into its own copy
                self.local_messages[name] = [
                    (values_of[t].clone() if t in route.written else values_of[t]).detach()
                    for t in tokens
                ]
                continue
            values = [values_of[token] for token in tokens]
            layout = layout_of(values)
            self.outbox[name] = values, layout
            if self.train:
                equal = awaited == tokens
                self.layouts[name] = layout if equal else layout_of([values_of[t] for t in awaited])
        if stage.last:
            if self.train and (result.loss is None or not is_loss(result.loss)):
                batch = self.batches[work.microbatch]
                has_loss = stage.loss is not None
                raise Refusal(
                    bad_loss_diagnostic(result.loss, stage.model, batch)
                    if has_loss
                    else no_loss_diagnostic(stage.model, result.output, batch)
                )
            loss = None if result.loss is None else result.loss.detach()
            output = _detach_output(result.output, stage.model) if self.keep else None
            self.store_result(work, loss, output)

    def run_forward(self, work: WorkItem, received: Mapping[Token, torch.Tensor]) -> ForwardResult:
        """Run the forward of a stage, and store what the backward needs."""
        stage, route = self.pipe.stages[work.stage], self.pipe.route(work)
        leaves: dict[Token, torch.Tensor] = {}
        entered = received
        for token in route.leaves if self.train else ():
            leaves[token] = value = received[token].requires_grad_()
            if token in route.written:  # a leaf must not be written into
                entered = {**entered, token: as_graph_input(value)}
        bag = self.make_bag(stage, work) if work in self.pipe.offloaded else None
        if bag is None:
            result, carried = self.run(stage, work, entered)
        else:
            with self.pipe.collect_into(bag):
                result, carried = self.run(stage, work, entered)
            bag.close(leaves.values())
        if self.train:
            loss = result.loss if stage.last else None
            self.flights[work] = InFlight(leaves, result.edges, loss, carried=carried, bag=bag)
        return result

    def make_bag(self, stage: Stage, work: WorkItem) -> SavedStorages:
        """Return a bag for the tensors that a forward saves, except weights, buffers and model
        inputs."""
        inputs = pytree.tree_leaves(dict(self.batches[work.microbatch]))
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        stays = ModuleAddresses(stage.model, storage_key, tensors)
        return SavedStorages(stays, on_meta=is_meta(self.pipe.mail.device))

    # -- backward ----------------------------------------------------------------------------------

    def backward(self, work: WorkItem) -> None:
        """Compute all gradients of a stage: of inputs and of weights."""
        flight = self.flights[work]
        roots, grads = self.gradient_roots(flight, work)
        del self.flights[work]
        if roots:
            (torch.autograd.backward if self.pipe.plain else run_backward)(roots, grads)
        self.return_gradients(flight, work)

    def input_backward(self, work: WorkItem) -> None:
        """Compute the gradients of a stage's inputs; those of the weights may wait."""
        stage = self.pipe.stages[work.stage]
        if not stage.split:
            self.backward(work)
            return
        flight = self.flights[work]
        roots, grads = self.gradient_roots(flight, work)
        leaves = [*flight.leaves.values(), *(flight.carried.leaves() if flight.carried else ())]
        flight.split = SplitBackward(roots, grads, leaves, stage.is_deferred)
        for leaf, grad in zip(leaves, flight.split.backward_inputs()):
            if grad is not None:  # several later slices may each add a gradient
                leaf.grad = grad if leaf.grad is None else leaf.grad + grad
        self.return_gradients(flight, work)

    def weight_backward(self, work: WorkItem) -> None:
        """Compute the gradients of a stage's weights that the input backward has deferred."""
        if self.pipe.stages[work.stage].split:
            flight = self.flights.pop(work)
            assert flight.split is not None
            flight.split.backward_weights()

    def gradient_roots(self, flight: InFlight, work: WorkItem) -> tuple[list[Any], list[Any]]:
        """Return the graph edges where gradients enter this stage, and these gradients."""
        if flight.bag is not None:
            flight.bag.restore()
        total: dict[Token, torch.Tensor] = {}
        for name, sent, tokens in self.pipe.route(work).awaited:
            values = self.receive(name)
            self.pipe.mail.free(sent)
            self.layouts.pop(sent, None)
            for token, value in zip(tokens, values):
                total[token] = total[token] + value if token in total else value
        reached = [token for token in total if token in flight.edges]
        roots: list[Any] = [flight.edges[token] for token in reached]
        grads: list[Any] = [total[token] for token in reached]
        if flight.loss is not None and flight.loss.requires_grad:
            roots.append(flight.loss)
            grads.append(filled_like(flight.loss, self.weight(work)))
        if flight.carried is not None:
            carried_roots, carried_grads = flight.carried.roots()
            roots, grads = [*roots, *carried_roots], [*grads, *carried_grads]
        return roots, grads

    def return_gradients(self, flight: InFlight, work: WorkItem) -> None:
        """Send the gradients of the received values back to their stages."""
        for name, is_local, tokens in self.pipe.route(work).returned:
            grads = []
            for token in tokens:
                leaf = flight.leaves[token]
                grads.append(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
                leaf.grad = None
            if is_local:
                self.local_messages[name] = [grad.detach() for grad in grads]
            else:
                self.outbox[name] = grads, None
        if flight.carried is not None:
            flight.carried.release()

    # -- between stages ----------------------------------------------------------------------------

    def receive(self, name: StageMessage) -> list[torch.Tensor]:
        """Return the values of a message from another stage."""
        return (
            self.local_messages.pop(name)
            if name in self.local_messages
            else self.pipe.mail.take(name)
        )


def _detach_output(output: Any, model: torch.nn.Module) -> Any:
    """Return the output without graph; lazy logits are computed.

    A parameter of the model in the output is copied, because gathered weights will be freed.
    """
    stored = {key for p in model.parameters() if (key := _storage_address(p)) is not None}

    def made(leaf: Any) -> Any:
        leaf = leaf.full() if isinstance(leaf, LazyLogits) else leaf
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach().clone() if _storage_address(leaf) in stored else leaf.detach()

    with torch.no_grad():
        return pytree.tree_map(made, output)


def _storage_address(tensor: torch.Tensor) -> int | None:
    """Return the address of the storage of a plain tensor; None for others, or without values."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        return None
    return tensor.untyped_storage().data_ptr() or None
