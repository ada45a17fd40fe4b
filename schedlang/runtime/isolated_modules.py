"""Run each module of a rank's program on the original's inputs, and compare its results.

Used by proofs to find the first module that computes something wrong.

* `IsolatedModules` separates the modules of a forward, after the consistent generator of TTrace
  (arXiv 2506.09280): if every module gets the correct inputs, an error does not propagate, and a
  module with a wrong output is wrong itself. A module passes tensors on in two places: to the
  modules that it calls, and to its caller. The backward is separated likewise: each tensor that a
  module passes on gets a random cotangent; the gradients of its inputs (from its caller and from
  the modules that it called) and of its parameters then depend on this module alone.
* `OutputComparison` compares what the modules of a rank's program return in an ordinary run,
  `IsolatedComparison` in a run with separated modules.
"""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from schedlang.ir import pytree
from schedlang.ir.mesh import Mesh
from schedlang.runtime import scope
from schedlang.runtime.checkpointing.holdings import Holding, shard_of
from schedlang.runtime.comm import collectives
from schedlang.runtime.comm.collectives import Group
from schedlang.runtime.lazy_logits.lazy import LazyLogits
from schedlang.runtime.lazy_logits.vocab_parallel import ShardedLogits
from schedlang.runtime.pipeline.stage import as_graph_input
from schedlang.runtime.propagation.trace import Note

CallFrame = tuple[str, int]  # a module's name, and which of its calls in one pass over the model
# of one call. Inputs: ("input", its own frame, index) from its caller, ("output", the frame of a
# called module, index). Outputs: ("hands", the frame of a called module or its own, index)
TensorPlace = tuple[str, CallFrame, int]
# the first class of this rank's shard, for vocabulary-sharded logits
ShardStarts = list[int | None]


def describe_frame(frame: CallFrame) -> str:
    """Return a call as messages name it: the module, and the number of a second or later call."""
    name, call_index = frame
    return (name or "the model") + (f" (call {call_index + 1})" if call_index else "")


@dataclass
class OriginalCall:
    """One call of a module of the original: its inputs, outputs, and gradients."""

    inputs: list[Tensor]
    outputs: list[Tensor] = field(default_factory=list)
    # without those that are None
    gradients: dict[TensorPlace, Tensor] = field(default_factory=dict)
    # by name; gradients through this call only
    parameters: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class RunningCall:
    """A call that has not returned.

    received   the tensors that it got
    passed_on  those that it passed on
    starts     first classes of those that are vocabulary-sharded logits
    undo       restores what the containers of its arguments held before
    """

    frame: CallFrame
    module: nn.Module
    inputs: list[Tensor]
    received: dict[TensorPlace, Tensor] = field(default_factory=dict)
    passed_on: dict[TensorPlace, Tensor] = field(default_factory=dict)
    starts: dict[TensorPlace, int] = field(default_factory=dict)
    undo: pytree.Undo = field(default_factory=list)


class IsolatedModules(ABC):
    """Hooks on all modules of a model that replace the tensors passed between modules.

    Subclasses implement `replace_inputs` and `replace_outputs`, which get the tensors that one
    module passes on, and return the tensors that the other module gets instead: detached, so that
    each graph is limited to one module's own code.
    """

    def __init__(self, model: nn.Module, opaque: Collection[str] = ()) -> None:
        """Put hooks on the modules of a model, except modules inside `opaque` ones."""
        self.running: list[RunningCall] = []
        self.turns: dict[str, int] = {}
        self.handles: list[Any] = []
        for name, module in modules_outside(model, opaque):
            pre_handle = module.register_forward_pre_hook(self._before(name), with_kwargs=True)
            post_handle = module.register_forward_hook(self._after, with_kwargs=True)
            self.handles += [pre_handle, post_handle]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()

    # -- what differs between the original and a program -------------------------------------------

    @abstractmethod
    def replace_inputs(
        self, frame: CallFrame, tensors: list[Tensor], starts: ShardStarts
    ) -> list[Tensor]:
        """Return the inputs that a module gets instead of those that its caller passes."""

    @abstractmethod
    def replace_outputs(
        self, call: RunningCall, tensors: list[Tensor], starts: ShardStarts
    ) -> list[Tensor]:
        """Return the outputs that a caller gets instead of those that the module returns."""

    @abstractmethod
    def cotangent(self, key: TensorPlace, value: Tensor) -> Tensor:
        """Return the gradient to use for a tensor that a module passes on."""

    # -- the hooks ---------------------------------------------------------------------------------

    def _before(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if not name:  # a pass may have ended by an exception: forget it
                self.running.clear()
                self.turns.clear()
            frame = name, self.turns.get(name, 0)
            self.turns[name] = frame[1] + 1
            tensors, starts, spec = tensors_of((args, kwargs))
            if self.running:
                self._hand(self.running[-1], frame, tensors, starts)
            inputs = self.replace_inputs(frame, tensors, starts)
            call = RunningCall(frame, module, inputs, _by_place("input", frame, inputs))
            self.running.append(call)
            replaced = pytree.tree_unflatten(replace_tensors(spec[0], inputs), spec[1])
            # in-place changes of a container must be visible to the caller
            return pytree.write_back((args, kwargs), replaced, call.undo)

        return hook

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        while self.running and self.running[-1].module is not module:
            self.running.pop()
        if not self.running:
            return output
        call = self.running[-1]
        tensors, starts, spec = tensors_of(output)
        self._hand(call, call.frame, tensors, starts)
        outputs = self.replace_outputs(call, tensors, starts)
        self.running.pop()
        for put_back in reversed(call.undo):
            put_back()
        if self.running:
            self.running[-1].received |= _by_place("output", call.frame, outputs)
            self.running[-1].starts |= _starts_by_place("output", call.frame, starts)
        return pytree.tree_unflatten(replace_tensors(spec[0], outputs), spec[1])

    def _hand(
        self, call: RunningCall, frame: CallFrame, tensors: list[Tensor], starts: ShardStarts
    ) -> None:
        call.passed_on |= _by_place("hands", frame, tensors)
        call.starts |= _starts_by_place("hands", frame, starts)

    # -- backward of one call ----------------------------------------------------------------------

    def gradients(self, call: RunningCall) -> tuple[dict[TensorPlace, Tensor], dict[str, Tensor]]:
        """Return the gradients of a call's inputs and of its own parameters, for the cotangents."""
        passed_on = {p: t for p, t in call.passed_on.items() if t.requires_grad}
        inputs_by_place = {p: t for p, t in call.received.items() if t.requires_grad}
        named_params = call.module.named_parameters(recurse=False)
        parameters = {n: p for n, p in named_params if p.requires_grad}
        if not passed_on or not (inputs_by_place or parameters) or not torch.is_grad_enabled():
            return {}, {}
        cotangents = [self.cotangent(key, value) for key, value in passed_on.items()]
        inputs = [*inputs_by_place.values(), *parameters.values()]
        grads = torch.autograd.grad([*passed_on.values()], inputs, cotangents, allow_unused=True)
        input_grads = {p: g for p, g in zip(inputs_by_place, grads) if g is not None}
        param_grads = grads[len(inputs_by_place) :]
        return input_grads, {n: g for n, g in zip(parameters, param_grads) if g is not None}


def _by_place(kind: str, frame: CallFrame, tensors: Sequence[Tensor]) -> dict[TensorPlace, Tensor]:
    return {(kind, frame, k): tensor for k, tensor in enumerate(tensors)}


def _starts_by_place(kind: str, frame: CallFrame, starts: ShardStarts) -> dict[TensorPlace, int]:
    return {(kind, frame, k): start for k, start in enumerate(starts) if start is not None}


def modules_outside(model: nn.Module, opaque: Collection[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a model by name, without those inside opaque modules."""
    for name, module in model.named_modules():
        if not any(name.startswith(f"{opaque_name}.") for opaque_name in opaque):
            yield name, module


def tensors_of(tree: Any) -> tuple[list[Tensor], ShardStarts, tuple[list[Any], Any]]:
    """Return the tensors of a nest, first classes of sharded logits, and what rebuilds the nest.

    Vocabulary-sharded logits count as this rank's shard without padding.
    """
    leaves, spec = pytree.tree_flatten(tree, is_leaf=lambda v: isinstance(v, ShardedLogits))
    # a head that runs alone passes on its logits
    full = lambda v: isinstance(v, LazyLogits) or isinstance(v, ShardedLogits) and v.is_written()  # noqa: E731
    leaves = [leaf.full() if full(leaf) else leaf for leaf in leaves]  # type: ignore[no-untyped-call]
    tensors: list[Tensor] = []
    starts: list[int | None] = []
    for leaf in leaves:
        if isinstance(leaf, ShardedLogits):
            width = leaf.local.shape[-1]
            valid = max(0, min(width, leaf.classes - leaf.group.rank * width))
            tensors.append(leaf.local[..., :valid])
            starts.append(leaf.group.rank * width)
        elif isinstance(leaf, Tensor):
            tensors.append(leaf)
            starts.append(None)
    return tensors, starts, (leaves, spec)


def replace_tensors(leaves: Sequence[Any], tensors: Sequence[Tensor]) -> list[Any]:
    """Replace the tensors among leaves; as a module's outputs, they may be modified in place."""
    out: list[Any] = []
    remaining = iter(tensors)
    for leaf in leaves:
        if isinstance(leaf, ShardedLogits):
            tensor = as_graph_input(next(remaining))
            padding = leaf.local.detach()[..., tensor.shape[-1] :]
            local = torch.cat([tensor, padding], -1) if padding.shape[-1] else tensor
            out.append(ShardedLogits(local, leaf.group, leaf.classes))
        else:
            out.append(as_graph_input(next(remaining)) if isinstance(leaf, Tensor) else leaf)
    return out


def detached_copy(value: Tensor, needs_grad: bool) -> Tensor:
    """Return a detached copy, a leaf of a new graph if it `needs_grad` a gradient."""
    copy = value.detach().clone()
    return copy.requires_grad_() if needs_grad and copy.is_floating_point() else copy


def random_cotangent(key: TensorPlace, value: Tensor) -> Tensor:
    """Return a random cotangent for a full tensor; it depends on the place and shape alone."""
    seed = zlib.crc32(repr(key).encode())
    # not by torch: the modes of a proof refuse random draws that are not the model's
    numbers = numpy.random.default_rng(seed).standard_normal(tuple(value.shape))
    return torch.as_tensor(numbers, dtype=value.dtype)


class CallRecorder(IsolatedModules):
    """Records the calls of the original in one pass, in the order in which they return."""

    def __init__(self, model: nn.Module, opaque: Collection[str] = ()) -> None:
        super().__init__(model, opaque)
        self.calls: dict[CallFrame, OriginalCall] = {}
        self._inputs: dict[CallFrame, list[Tensor]] = {}

    def replace_inputs(
        self, frame: CallFrame, tensors: list[Tensor], starts: ShardStarts
    ) -> list[Tensor]:
        """Record the inputs; return detached copies."""
        self._inputs[frame] = [copy_with_flag(tensor) for tensor in tensors]
        return [copy_with_flag(tensor) for tensor in tensors]

    def replace_outputs(
        self, call: RunningCall, tensors: list[Tensor], starts: ShardStarts
    ) -> list[Tensor]:
        """Record the outputs and the gradients of the call; return detached copies."""
        outputs = [copy_with_flag(tensor) for tensor in tensors]
        to_args, grads = self.gradients(call)
        self.calls[call.frame] = OriginalCall(self._inputs.pop(call.frame), outputs, to_args, grads)
        return [copy_with_flag(tensor) for tensor in tensors]

    def cotangent(self, key: TensorPlace, value: Tensor) -> Tensor:
        """Return the cotangent of the full tensor."""
        return random_cotangent(key, value)


def copy_with_flag(tensor: Tensor) -> Tensor:
    """Return a detached copy that requires a gradient if the tensor does."""
    return detached_copy(tensor, tensor.requires_grad)


OriginalCalls = Mapping[CallFrame, OriginalCall]


RTOL = 1e-9
FLOOR = 1e-12  # relative to the largest norm of its kind in the pass


@dataclass(frozen=True)
class RankView:
    """The shards of the original's values that a rank has.

    layouts   as in `Traced`
    partial   parameter -> axes over which its gradient is still to be reduced
    stages    call -> the stage that makes it; empty without a pipeline
    spanning  calls that run in several stages, so that no rank sees all of their backward
    names     (module, attribute) -> the first name of a parameter
    """

    mesh: Mesh
    rank: int
    groups: Mapping[str, Group]
    layouts: Mapping[CallFrame, Sequence[tuple[Note, ...] | None]]
    holdings: Mapping[str, Holding]
    partial: Mapping[str, frozenset[str]]
    stages: Mapping[CallFrame, int]
    spanning: frozenset[CallFrame]
    names: Mapping[tuple[str, str], str]

    def layout_of(self, frame: CallFrame, is_input: bool, index: int) -> Note | None:
        """Return the layout of an input (`is_input`) or output of a call; None if unknown."""
        if not self.layouts or not frame[0]:
            return Note()
        notes = self.layouts.get(frame, (None, None))[0 if is_input else 1]
        return notes[index] if notes is not None and index < len(notes) else None

    def shard_of(self, full: Tensor, note: Note, start: int | None, local: Tensor) -> Tensor:
        """Return this rank's shard of a full tensor; of sharded logits the classes of `local`."""
        full = full.detach()
        if start is not None:
            return full[..., start : start + local.shape[-1]]
        for axis, tag in note.tags.items():
            index = self.mesh.index(self.rank, axis)
            positions = tag.positions(full.shape[tag.dim], self.mesh.size(axis), index)
            full = _select_padded(full, tag.dim, positions, local)
        return full

    def all_reduce(self, value: Tensor, axes: frozenset[str]) -> Tensor:
        """All-reduce a tensor over some axes; all ranks of these axes must call this."""
        for axis in sorted(axes):
            if self.groups[axis].size > 1:
                value = collectives.all_reduce(value, self.groups[axis])
        return value


def _select_padded(full: Tensor, dim: int, positions: Sequence[int], local: Tensor) -> Tensor:
    """Select indices of a dim; those behind its end are padding, with the values of `local`."""
    size = full.shape[dim]
    in_range = torch.tensor([index < size for index in positions])
    chosen = full.index_select(dim, torch.tensor([min(i, size - 1) for i in positions]))
    if chosen.shape != local.shape or bool(in_range.all()):
        return chosen
    return torch.where(
        in_range.view([-1] + [1] * (chosen.ndim - 1 - dim % chosen.ndim)), chosen, local
    )


@dataclass(frozen=True)
class Finding:
    """A wrong result of a call: `what` in words, `in_backward` if in backward; error and values."""

    frame: CallFrame
    what: str
    error: float
    in_backward: bool = False
    got: Tensor | None = None
    want: Tensor | None = None


@dataclass
class OutputComparison:
    """Compares what every module returns in an ordinary run."""

    view: RankView
    calls: Sequence[OriginalCalls]  # of the original, for each microbatch of this rank
    stage: int = 0
    # (microbatch, call) -> its error, and whether it is within the tolerance
    errors: dict[tuple[int, CallFrame], tuple[float, bool]] = field(default_factory=dict)
    turns: dict[str, int] = field(default_factory=dict)
    opaque: frozenset[str] = frozenset()

    def add_hooks(self, model: nn.Module, opaque: Collection[str]) -> None:
        """Put hooks on all modules except those inside opaque ones."""
        self.opaque = frozenset(opaque)
        for name, module in modules_outside(model, opaque):
            module.register_forward_pre_hook(self._before(name))
            module.register_forward_hook(self._after(name))

    def _before(self, name: str) -> Any:
        def hook(*_: Any) -> None:
            if not name:
                self.turns.clear()
            self.turns[name] = self.turns.get(name, -1) + 1

        return hook

    def _after(self, name: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            current = scope.current()
            frame = name, self.turns.get(name, 0)
            microbatch = current.microbatch if current is not None else 0
            call = self.calls[microbatch].get(frame)
            elsewhere = self.view.stages.get(frame, self.stage) != self.stage
            # a recomputation repeats a call of the original: only the first counts
            if call is None or elsewhere or (microbatch, frame) in self.errors:
                return
            tensors, starts, _ = tensors_of(output)
            self.errors[microbatch, frame] = self._worst(frame, call, tensors, starts)

        return hook

    def _worst(
        self, frame: CallFrame, call: OriginalCall, tensors: list[Tensor], starts: ShardStarts
    ) -> tuple[float, bool]:
        worst = 0.0
        if len(tensors) != len(call.outputs) and frame[0] not in self.opaque:
            return math.inf, False
        scale = largest_norm(call.outputs)
        for k, (value, exact, start) in enumerate(zip(tensors, call.outputs, starts)):
            note = self.view.layout_of(frame, False, k)
            if note is not None or start is not None:
                shard = self.view.shard_of(exact, note or Note(), start, value)
                worst = max(worst, relative_error(value.detach(), shard, scale))
        return worst, worst <= RTOL


def largest_norm(tensors: Iterable[Tensor]) -> float:
    """Return the largest norm among floating-point tensors, without entries that are not finite."""
    floats = (t.detach() for t in tensors if t.is_floating_point())
    norms = (float(torch.where(t.abs() < 1e30, t, 0).double().norm()) for t in floats)
    return max(norms, default=0.0)


def relative_error(value: Tensor, exact: Tensor, scale: float) -> float:
    """Return the relative error; infinite for another shape or for values that are not finite."""
    if value.shape != exact.shape:
        return math.inf
    if not value.is_floating_point():
        return float((value != exact).any())
    # masks contain -inf; the mean over no label is NaN
    equal = (value == exact) | ~exact.isfinite()
    gap = torch.where(equal, 0, value - exact).double()
    size = float(torch.where(exact.isfinite(), exact, 0).double().norm())
    error = float(gap.norm())
    if not math.isfinite(error):
        return math.inf
    size += FLOOR / RTOL * scale
    return error / size if size else math.inf if error else 0.0


class IsolatedComparison(IsolatedModules):
    """Gives every module the original's inputs, and records its wrong results."""

    def __init__(
        self,
        model: nn.Module,
        view: RankView,
        calls: Sequence[OriginalCalls],
        opaque: Collection[str],
    ) -> None:
        super().__init__(model, opaque)
        self.opaque = frozenset(opaque)
        self.view, self.references, self.stage = view, calls, 0
        self.findings: list[Finding] = []
        self.judged: set[str] = set()
        self.unknown: set[str] = set()
        self._blind = False  # something of the running call is unknown

    def _reference(self, frame: CallFrame) -> OriginalCall | None:
        current = scope.current()
        call = self.references[current.microbatch if current is not None else 0].get(frame)
        elsewhere = self.view.stages.get(frame, self.stage) != self.stage
        return None if elsewhere else call

    def _compare(
        self, frame: CallFrame, what: str, value: Tensor, exact: Tensor, scale: float, back: bool
    ) -> None:
        error = relative_error(value.detach(), exact, scale)
        if not error <= RTOL:
            # values are stored for the first of each kind
            reported = any(finding.in_backward == back for finding in self.findings)
            values = (None, None) if reported else (value.detach().clone(), exact.clone())
            self.findings.append(Finding(frame, what, error, back, *values))

    # -- forward -----------------------------------------------------------------------------------

    def replace_inputs(
        self, frame: CallFrame, tensors: list[Tensor], starts: ShardStarts
    ) -> list[Tensor]:
        """Return the original's inputs; another value is a fault of the caller."""
        call = self._reference(frame)
        if call is None or len(call.inputs) != len(tensors):
            return tensors
        caller = self.running[-1].frame if self.running else None
        what = f"what it hands to {frame[0]}"
        return self._forced(caller, frame, what, call.inputs, tensors, starts, True)

    def replace_outputs(
        self, call: RunningCall, tensors: list[Tensor], starts: ShardStarts
    ) -> list[Tensor]:
        """Return the original's outputs; another value is a fault of this module."""
        original = self._reference(call.frame)
        if original is None:
            return tensors
        same_count = len(original.outputs) == len(tensors)
        if not same_count and call.frame[0] not in self.opaque:
            self.findings.append(Finding(call.frame, "its outputs are others", math.inf))
            return tensors
        self.judged.add(call.frame[0])
        frame, outputs = call.frame, original.outputs
        forced = self._forced(frame, frame, "its output", outputs, tensors, starts, False)
        if same_count and frame not in self.view.spanning:
            self._backward(call, original)
        return [*forced, *tensors[len(forced) :]]

    def _forced(
        self,
        caller: CallFrame | None,
        frame: CallFrame,
        what: str,
        references: Sequence[Tensor],
        tensors: Sequence[Tensor],
        starts: ShardStarts,
        are_inputs: bool,
    ) -> list[Tensor]:
        forced, scale = [], largest_norm(references)
        for k, (value, full, start) in enumerate(zip(tensors, references, starts)):
            note = self.view.layout_of(frame, are_inputs, k)
            if note is None and start is None:
                self.unknown.add(frame[0])
                forced.append(value)
                continue
            exact = self.view.shard_of(full, note or Note(), start, value)
            if caller is not None:
                self._compare(caller, what, value, exact, scale, False)
                flows = full.requires_grad and torch.is_grad_enabled()
                if flows and not value.requires_grad and caller not in self.view.spanning:
                    self.findings.append(Finding(caller, f"{what} is detached", math.inf, True))
            same_shape = exact.shape == value.shape
            forced.append(detached_copy(exact if same_shape else value, full.requires_grad))
        return forced

    # -- backward ----------------------------------------------------------------------------------

    def cotangent(self, key: TensorPlace, value: Tensor) -> Tensor:
        """Return this rank's shard of the cotangent; where shards are added, a share of it."""
        _, frame, k = key
        output = bool(self.running) and frame == self.running[-1].frame
        original = self._reference(frame)
        if original is None:
            return torch.zeros_like(value)  # the original has no such module
        full = random_cotangent(key, original.outputs[k] if output else original.inputs[k])
        note, start = self.view.layout_of(frame, not output, k), self.running[-1].starts.get(key)
        part = self.view.shard_of(full, note or Note(), start, value)
        if (note is None and start is None) or part.shape != value.shape:
            self._blind = True
            return torch.zeros_like(value)
        entered = note.entered if note is not None else frozenset()
        return part / math.prod(self.view.mesh.size(axis) for axis in entered)

    def _backward(self, call: RunningCall, original: OriginalCall) -> None:
        self._blind = False
        grads, param_grads = self.gradients(call)
        if self._blind:
            self.unknown.add(call.frame[0])
            return
        scale = max((float(g.double().norm()) for g in original.gradients.values()), default=0.0)
        for key, full_grad in original.gradients.items():
            leaf, start = call.received.get(key), call.starts.get(key)
            note = self.view.layout_of(key[1], key[0] == "input", key[2])
            if leaf is None or (note is None and start is None):
                continue
            note = note or Note()
            value = self.view.all_reduce(grads.get(key, torch.zeros_like(leaf)), note.entered)
            what = f"the gradient of {_tensor_text(key, call.frame)}"
            exact = self.view.shard_of(full_grad, note, start, value)
            self._compare(call.frame, what, value, exact, scale, True)
        parameters = dict(call.module.named_parameters(recurse=False))
        for name, full_grad in original.parameters.items():
            if name not in parameters:
                continue  # another module is here
            primary_name = self.view.names[call.frame[0], name]
            holding = replace(self.view.holdings[primary_name], sliced=())
            part = shard_of(full_grad, holding, self.view.mesh, self.view.rank)
            local = param_grads.get(name, torch.zeros_like(part))
            value = self.view.all_reduce(local, self.view.partial.get(primary_name, frozenset()))
            self._compare(call.frame, f"the gradient of {name}", value, part, scale, True)


def _tensor_text(key: TensorPlace, call: CallFrame) -> str:
    kind, frame, k = key
    return f"its input {k}" if frame == call and kind == "input" else f"the output of {frame[0]}"


def worst_findings(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Yield one finding for each module and text, with its largest error, in order."""
    by_module: dict[tuple[str, str], Finding] = {}
    for f in findings:
        earlier = by_module.setdefault((f.frame[0], f.what), f)
        by_module[f.frame[0], f.what] = replace(earlier, error=max(earlier.error, f.error))
    yield from by_module.values()
