"""Dry run of a step of a built program: its parameters and batch are on the meta device.

The simulator uses this to record the messages and memory of one rank without values.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from schedlang.garbage_collection import ProcessState, without_collector
from schedlang.runtime.assembly import Assembly
from schedlang.runtime.batch import Batch, BatchPart, row_count
from schedlang.runtime.batch_weights import Number
from schedlang.runtime.modes import enter_modes
from schedlang.runtime.pipeline.executor import Pipeline, ScheduledOp
from schedlang.runtime.pipeline.in_flight import StageMessage
from schedlang.runtime.pipeline.p2p import PeerChannel
from schedlang.runtime.pipeline.stage import Stub, is_same_for_equal_units, signature
from schedlang.runtime.pipeline.step import MicrobatchResult
from schedlang.runtime.program import Program
from schedlang.runtime.propagation.stand_ins import FusedAttention
from schedlang.runtime.sequence_pipelining.carried_keys import SliceSpan
from schedlang.runtime.storage.footprint import Footprint
from schedlang.runtime.tracing.meta_runs import (
    MetaMode,
    meta_batch,
    run_cached,
    storage,
    tensors_in,
)
from schedlang.runtime.tracing.stage_graph import StageSplit

# functions that multiply (True) or divide in place
SCALES: dict[Any, bool] = {
    Tensor.mul_: True,
    Tensor.__imul__: True,
    Tensor.div_: False,
    Tensor.__itruediv__: False,
}


VALUE_READS = (Tensor.cpu, Tensor.tolist, Tensor.__float__, Tensor.__bool__)


class InventedValues(TorchFunctionMode):
    """A mode that answers for values that meta tensors lack, and records concatenated gradients.

    `together`: id of a flat result of `torch.cat` -> the tensors, and the parameters whose
    gradients it contains and where. It is recorded at once: later a gradient may be elsewhere, and
    another tensor in its place.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.parameters = parameters
        # the tensors are kept alive: another tensor could get the same id
        self.together: dict[int, tuple[list[Tensor], Mapping[str, tuple[int, int]]]] = {}
        # where a tensor is -> its factor from outside of the model
        self.scaled: dict[tuple[int, int], float] = {}
        self.outside = True  # of the model: no values are known there

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the call, or invent its answer."""
        kwargs = dict(kwargs or {})
        first = args[0] if args else None
        if func in VALUE_READS and isinstance(first, Tensor) and first.is_meta:
            if func is Tensor.cpu:
                return first
            if func is Tensor.tolist:
                return torch.ones(first.shape, device="cpu").tolist()
            if func is Tensor.__float__ and self.outside:
                return 1.0
            if func is Tensor.__bool__ and self.outside:
                return False  # no overflow
        if self.outside and func in SCALES and isinstance(args[1], int | float):
            place, factor = storage_place(args[0]), float(args[1])
            times = factor if SCALES[func] else 1 / factor
            self.scaled[place] = self.scaled.get(place, 1.0) * times
        out = func(*args, **kwargs)
        if func is torch.cat and self.parameters and out.is_meta and out.dim() == 1:
            parts = list(tensors_in(args[0]))
            self.together[id(out)] = [out, *parts], self._gradients_in(parts)
        return out

    def _gradients_in(self, parts: Sequence[Tensor]) -> dict[str, tuple[int, int]]:
        """Return the parameters whose gradients begin at the start of one of these tensors."""
        with torch._C.DisableTorchFunction():
            places = {storage_place(part) for part in parts}
            grads = [(name, parameter.grad) for name, parameter in self.parameters.items()]
            grad_places = {name: storage_place(grad) for name, grad in grads if grad is not None}
            return {
                name: grad_place for name, grad_place in grad_places.items() if grad_place in places
            }


@dataclass(frozen=True)
class SimulatedMessage:
    """A message between stages, as the pipeline issues it: its ranks, its name, and number of
    tensors."""

    ranks: tuple[int, int]
    sends: bool
    key: StageMessage
    tensors: int


def storage_place(tensor: Tensor) -> tuple[int, int]:
    """Return where a tensor begins: its storage, and its offset."""
    return storage(tensor), int(tensor.storage_offset())


@dataclass
class DryRunProgram(Program):
    """A program whose microbatches lose their values when they enter the pipeline.

    `weights` are the weights that the last step gave its microbatches; `messages` the messages that
    it sent to other stages and expected from them.
    """

    weights: list[float] = field(default_factory=list)
    messages: list[SimulatedMessage] = field(default_factory=list)
    invented: InventedValues = field(default_factory=lambda: InventedValues({}))
    footprint: Footprint | None = None  # is told what runs, and which gradients exist

    def _run(
        self, parts: Sequence[BatchPart], scale: Sequence[Number] | None, *, train: bool
    ) -> dict[int, MicrobatchResult]:
        pipeline = self.assembly.pipeline
        original_run = pipeline.run

        def run(batches: Any, scale: Any = None, **options: Any) -> Any:
            self.weights = list(scale or ())
            original_on_op = options.pop("on_op")

            def on_op(event: ScheduledOp) -> None:
                self._mark(event.op)
                if original_on_op is not None:
                    original_on_op(event)

            return original_run(batches, scale, **options, on_op=on_op)

        meta_parts = [replace(part, inputs=meta_batch(part.inputs)) for part in parts]
        vars(pipeline)["run"] = run
        self.invented.outside = False
        try:
            with torch._C.DisableTorchFunction():  # the inputs are real, not on the meta device
                mode = MetaMode([p.inputs for p in parts], [p.inputs for p in meta_parts])
            with mode:
                return super()._run(meta_parts, scale, train=train)
        finally:
            del vars(pipeline)["run"]
            self.invented.outside = True
            self._mark(None)

    def _mark(self, op: Any) -> None:
        """Tell the footprint which operation begins."""
        if self.footprint is not None:
            gc.collect()
            parameters = self.assembly.parameters.values()
            with torch._C.DisableTorchFunction():  # outside of all modes
                gradients = [p.grad for p in parameters if p.grad is not None]
            self.footprint.set_class("gradients", gradients)
            self.footprint.begin_segment(op)


def dry_run(
    program: Program,
    cut: StageSplit,
    batch: Batch,
    footprint: Footprint | None = None,
    dealings: dict[object, Any] | None = None,
    unit_kinds: Sequence[object] = (),
) -> DryRunProgram:
    """Run one training step without values; `batch` is the full batch, with real values.

    With a footprint, the step of the program's optimizer runs too. Dry runs of one plan on one
    batch share `dealings`, so that the batch is split and weighted once. `unit_kinds` are equal
    for units of the pipeline with equal computation: of those that run on other stages one of each
    kind is run for its outputs' shapes.
    """
    assembly = replace(program.assembly, dropout=None, split_batches=dealings)
    optimizer = program.optimizer if footprint is not None else None
    answers = InventedValues(assembly.parameters if footprint is None else {})
    dry = DryRunProgram(
        assembly, optimizer, footprint=footprint, invented=answers, known_training=program._training
    )
    pipeline = assembly.pipeline
    pipeline.mail.device = torch.device("meta")
    pipeline.sizes.varying = False  # no other rank sends a header
    if pipeline.parking is not None:
        for mail in (pipeline.parking.out, pipeline.parking.home):
            mail.device = torch.device("meta")
        vars(pipeline.parking)["receive_sizes"] = lambda source: ()  # no other rank exists
    _record_messages(pipeline.mail, dry.messages)
    parts, _, _ = dry._parts(batch, local=False)
    shard, split = parts[0].token_shard, assembly.tokens

    def full_sizes(part: BatchPart) -> Callable[[Any], tuple[int, ...]]:
        if split is None:
            return tuple
        rows = row_count(part.inputs)
        return split.sizes(batch, shard.place, _copies_of_rows(assembly), rows)

    for edge, tokens in cut.routes.items():  # as after the first step, when sizes are known
        leaves = [cut.graph.leaves[token] for token in tokens]
        for part, replica in product(parts, range(pipeline.timeline.replicas)):
            shape = (True, signature(meta_batch(part.inputs)))
            for index, resized in enumerate(_slice_shapes(pipeline, part, full_sizes(part))):
                layout = tuple((getattr(torch, leaf.dtype), resized(leaf.shape)) for leaf in leaves)
                pipeline.sizes.store(shape, StageMessage(False, *edge, replica, 0, index), layout)
    watched: tuple[Any, ...] = ()
    if footprint is not None:
        footprint.operator = run_cached
        watched = _collect_at_marks(), enter_modes(FusedAttention()), footprint
        for stub in {stage.stub for stage in pipeline.stages.values() if not stage.whole}:
            run_on_meta = partial(Stub._run_on_meta, stub)
            if unit_kinds:
                run_on_meta = partial(_run_one_of_each_kind, stub, unit_kinds, {})
            vars(stub)["_run_on_meta"] = footprint.without_watching(run_on_meta)
    with ExitStack() as stack:
        for mode in (torch.device("meta"), dry.invented, *watched):
            stack.enter_context(mode)
        dry.train_step(batch)
        dry._mark(None)
    return dry


def _run_one_of_each_kind(
    stub: Stub,
    kinds: Sequence[object],
    outputs: dict[object, Any],
    unit: int,
    args: Any,
    kwargs: Any,
    module: Any,
) -> Any:
    """Return the outputs of a unit of another stage: those of an equal unit, called alike."""
    call = signature({"args": args, "kwargs": kwargs})
    key = kinds[unit], stub.training[unit], torch.get_default_dtype(), call
    if key in outputs:
        return outputs[key]
    output = Stub._run_on_meta(stub, unit, args, kwargs, module)
    if is_same_for_equal_units(output):
        outputs[key] = output
    return output


def _copies_of_rows(assembly: Assembly) -> int:
    """Return the number of ranks with the same stage, the same rows and the same tokens."""
    mesh = assembly.ranks.mesh
    return mesh.world // (mesh.size(assembly.replicas) * mesh.size(assembly.stage_axis or ()))


@contextmanager
def _collect_at_marks() -> Iterator[None]:
    """Collect garbage only at marks, so that cycles of objects are freed at known points.

    Each collection looks only at new objects: a model and its modules are very many.
    """
    # a command has frozen its imports; otherwise the caller disables the collector
    # (the count visits all frozen objects)
    leaves = ProcessState.left_frozen is not None
    freezes = ProcessState.own or not (ProcessState.keeps_frozen or gc.get_freeze_count())
    with without_collector():
        if leaves or freezes:
            gc.freeze()
        try:
            yield
        finally:
            if ProcessState.left_frozen is not None:
                ProcessState.left_frozen += 1
            elif freezes:
                gc.unfreeze()


def _slice_shapes(
    pipeline: Pipeline, part: BatchPart, full_sizes: Callable[[Any], tuple[int, ...]]
) -> list[Callable[[Any], tuple[int, ...]]]:
    """Return, for each slice of a part, a function from the shape of a full value to the slice's
    shape."""
    if pipeline.slices is None:
        return [full_sizes]

    def along(span: SliceSpan) -> Callable[[Any], tuple[int, ...]]:
        def resized(shape: Any) -> tuple[int, ...]:
            tokens = len(shape) > 1 and shape[1] == span.total
            return (shape[0], span.length, *shape[2:]) if tokens else tuple(shape)

        return resized

    return [along(part_slice.piece.span) for part_slice in pipeline.slices.split_batch(part.inputs)]


def _record_messages(channel: PeerChannel, messages: list[SimulatedMessage]) -> None:
    """Record every message where the pipeline sends or posts it, in order."""
    send, post = channel.send, channel.post

    def sending(target: int, key: Any, tensors: Sequence[Tensor], *, header: bool) -> None:
        messages.append(SimulatedMessage((channel.rank, target), True, key, len(tensors)))
        send(target, key, tensors, header=header)

    def posting(source: int, key: Any, count: int, *rest: Any) -> None:
        messages.append(SimulatedMessage((source, channel.rank), False, key, count))
        post(source, key, count, *rest)

    vars(channel).update(send=sending, post=posting)
