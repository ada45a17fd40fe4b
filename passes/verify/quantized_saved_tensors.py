"""The original with saved tensors in fewer bits, and recomputation from them: `relax(lossy)`.

This is the oracle of activation compression, written independently of the runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from schedlang.ir.annotations import ActivationCoding
from schedlang.ir.plan import Plan
from schedlang.ir.pytree import tree_leaves
from schedlang.passes.analyze.compressed_activations import bits_by_number
from schedlang.passes.analyze.prepare import Prepared
from schedlang.passes.propagate.saved_splits import (
    SavedPlace,
    SavedSplits,
    Turn,
    WeightAndTokenSplits,
    WeightSplits,
    experts_of,
    next_turn,
    partial_modules,
    recomputed_modules,
)
from schedlang.remat import RecomputedRegion
from schedlang.runtime.activation_memory.quantized import NearTieMap, tie_margin
from schedlang.runtime.activation_memory.repeat_checks import SavedResults, pass_through_hooks
from schedlang.runtime.device import RestoredGenerators, module_generators
from schedlang.runtime.pipeline.argument_templates import fill_template, split_tensors
from schedlang.runtime.rng.logical_dropout import stream_numbers, stream_of
from schedlang.runtime.scope import capture_scope, current, current_site
from schedlang.runtime.submodules import modules_in
from schedlang.runtime.tracing.meta_runs import tensors_in

# ---- Recomputation from inputs in fewer bits.
# Independent of the programs' code (`recompute.py` and `selective.py` of
# `runtime/activation_memory`): here the second run follows at once, and backward uses its saved
# tensors. Both share the names of single operators.


def add_recomputation(plan: Plan, module: nn.Module, prepared: Prepared | None) -> None:
    """Let modules of a copy of the original recompute from inputs that are stored in fewer bits."""
    parts = partial_modules(prepared.traced) if prepared is not None else ()
    for recomputed in recomputed_modules(plan, prepared.chains if prepared is not None else {}):
        region = _Region(recomputed, parts)
        for index, fqn in enumerate(recomputed.modules):
            part: Any = module.get_submodule(fqn)
            part.forward = partial(_run_twice, region, index, part, part.forward)


@dataclass
class _Values:
    """Values that replace tensors, valid until the tensors are written to."""

    alike: Callable[[Tensor, Tensor], bool]
    known: list[tuple[Tensor, int, Tensor]] = field(default_factory=list)  # version, value

    def note(self, tensor: Tensor, value: Tensor) -> None:
        """Let a value replace a tensor from now on."""
        self.known.append((tensor, tensor._version, value))

    def of(self, tensor: Tensor) -> Tensor | None:
        """Return the first value recorded for an equal tensor."""
        for known_tensor, version, value in self.known:
            if version == tensor._version and self.alike(known_tensor, tensor):
                return value
        return None


@dataclass
class _Region:
    """Modules that are recomputed as one region, and what replaces tensors in the second run."""

    again: RecomputedRegion
    summed: tuple[str, ...]  # modules with partial sums on ranks, stored unrounded
    next: int = 0
    known: _Values = field(default_factory=lambda: _Values(_is_same_view))

    def enter(self, index: int) -> None:
        """Begin a call of a module of the region; a call out of order starts a new pass."""
        if index == 0 or index != self.next:
            self.known = _Values(_is_same_view)
        self.next = index + 1

    def given(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the second run's inputs: its own results where it has them, else stored values."""
        if not self.again.dedupe_inputs:
            return [
                _restride(source, fresh)
                for source, fresh in zip(tensors, pass_through_hooks(tensors))
            ]
        fresh: list[Tensor] = []
        for tensor in tensors:
            if self.known.of(tensor) is None and not any(
                _is_same_view(tensor, known) for known in fresh
            ):
                fresh.append(tensor)
        for tensor, value in zip(fresh, pass_through_hooks(fresh)):
            self.known.note(tensor, value)
        known_values = [(tensor, self.known.of(tensor)) for tensor in tensors]
        return [_restride(tensor, value) for tensor, value in known_values if value is not None]

    def made(self, output: Any, second: Any) -> None:
        """Record the results of a call in both runs."""
        for first, second_run in zip(tree_leaves(output), tree_leaves(second), strict=True):
            if self.again.dedupe_inputs and isinstance(first, Tensor):
                self.known.note(first, second_run.detach())


def _restride(tensor: Tensor, value: Tensor) -> Tensor:
    """Return a value in a tensor's memory order, because products choose what they save by it."""
    with torch.no_grad():
        same_stride = value.stride() == tensor.stride()
        restrided = value.detach() if same_stride else torch.empty_like(tensor).copy_(value)
    return restrided.requires_grad_(tensor.requires_grad)


def _is_same_view(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are the same view of the same memory."""
    views = ((t.data_ptr(), t.shape, t.stride(), t.dtype) for t in (a, b))
    return next(views) == next(views)


def _run_twice(
    region: _Region,
    index: int,
    module: nn.Module,
    inner: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a module on its real inputs; its backward is that of a second run on stored ones."""
    if not torch.is_grad_enabled():
        return inner(*args, **kwargs)
    region.enter(index)
    tensors: list[Tensor] = []
    template = split_tensors((args, kwargs), tensors)
    inputs, call_start = region.given(tensors), _CallStart(module)
    results = SavedResults(region.again, region.summed)
    resaved: list[Tensor] = []
    places = count()
    with saved_tensors_hooks(lambda tensor: next(places), lambda index: resaved[index]):
        output = results.run_first(inner, *args, **kwargs)
    results.save()
    new_args, new_kwargs = fill_template(template, inputs)
    second = call_start.run(resaved, partial(results.run_second, inner, *new_args, **new_kwargs))
    assert len(resaved) == next(places), "a second run saves as many tensors"
    region.made(output, second)
    return output


class _CallStart:
    """The state at the start of a call, so that a second run draws and counts the same."""

    def __init__(self, module: nn.Module) -> None:
        self.place = capture_scope()
        self.draws = RestoredGenerators(
            [torch.default_generator, *module_generators(modules_in(module))]
        )

    def run(self, saved: list[Tensor], call: Callable[[], Any]) -> Any:
        """Run a call; append what autograd would save to a list."""

        def note(tensor: Tensor) -> Tensor:
            saved.append(tensor.detach())
            return tensor

        with self.place(), self.draws, saved_tensors_hooks(note, lambda tensor: tensor):
            return call()


# ---- Saved tensors in fewer bits.
# Independent of the programs' code (`runtime/activation_memory/quantized.py`): codes are not packed
# here, and the choice of tensors is made again. Both share the hash of random draws.


def quantize_saved_tensors(
    plan: Plan, module: nn.Module, prepared: Prepared | None, tipped: NearTieMap | None = None
) -> nn.Module:
    """Let modules of a copy of the original store what the plan says in fewer bits.

    `prepared` says how ranks divide saved tensors (each rank rounds its own part), the bits of
    single tensors, and the recomputed regions. `tipped` holds the ranks' choices for numbers that
    lie midway between two codes.
    """
    for fqn in experts_of(plan):
        experts: Any = module.get_submodule(fqn)
        experts.forward = partial(_mark_experts, experts.forward)
    # the inner wrapper: its inputs are quantised too
    add_recomputation(plan, module, prepared)
    for row in plan.activation_codings:
        assert prepared is not None, "a plan is prepared before it is compared"
        part: Any = module.get_submodule(row.fqn)
        bits = bits_by_number(prepared.bits, row.fqn)
        saved = _SavedTensors(row, part, prepared.traced.saved_splits, tipped or {}, bits)
        part.forward = partial(_run_quantized, saved, part.forward)
    return module


@dataclass
class _SavedTensors:
    """One module: the position of its calls, and the tensors saved in the current call."""

    row: ActivationCoding
    module: nn.Module
    parts: SavedSplits | None = None
    tipped: NearTieMap = field(default_factory=dict)
    bits: dict[int, int] = field(default_factory=dict)  # of single tensors, by number
    place: tuple[int, tuple[int, ...]] = (-1, ())
    calls: int = 0
    numbers: int = 0
    rows: list[tuple[int, ...]] = field(default_factory=list)
    given: list[Tensor] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)  # of the tensors saved so far in this call
    # values of parts; None: unrounded
    made: dict[Turn, list[Tensor | None]] = field(default_factory=dict)
    seen: _Values = field(default_factory=lambda: _Values(_reads_same_memory))

    def begin(self, arguments: Any) -> None:
        """Begin a call; calls within one part of a step are counted from 0."""
        scope = current()
        assert scope is not None, "the original runs in a scope"
        sample_place = scope.step, scope.samples
        self.calls = self.calls + 1 if sample_place == self.place else 0
        self.place, self.numbers, self.rows = sample_place, 0, []
        self.turns, self.made = [], {}
        self.seen = _Values(_reads_same_memory)
        input_tensors = tensors_in(arguments)
        self.given = [t for t in input_tensors if not t.requires_grad or isinstance(t, Parameter)]

    @property
    def weights(self) -> WeightSplits | None:
        """Division of saved tensors over ranks that divide weights; None if there is none."""
        parts = self.parts.weights if isinstance(self.parts, WeightAndTokenSplits) else self.parts
        return parts if isinstance(parts, WeightSplits) else None

    def count(self, tensor: Tensor) -> None:
        """Count one saved tensor, of this call and of the module that saves it."""
        self.numbers += 1
        parts, site = self.weights, current_site()
        split = parts is not None and parts.split_dim(self.row.fqn, site, tensor) is not None
        self.turns.append(next_turn(self.turns, site, split))

    def elsewhere(self) -> tuple[bool, Turn | None]:
        """Return whether ranks identify this tensor otherwise than the model, and with which."""
        same_turns: Mapping[Any, Turn | None] = (
            self.weights.same_turns if self.weights is not None else {}
        )
        key = self.row.fqn, self.turns[-1]
        return key in same_turns, same_turns.get(key)

    def value(self, tensor: Tensor) -> Tensor:
        """Return what backward sees of a saved tensor."""
        is_full = tensor.dim() > 2 and tuple(tensor.shape) in self.rows
        self.rows.append(tuple(tensor.shape[:-1]))
        if is_full and self.elsewhere()[1] not in self.made:
            return tensor
        rounded = partial(self.rounded, held=tensor.untyped_storage().nbytes())
        if self.parts is None:
            return rounded(tensor)
        turn_count = sum(turn[0] == current_site() for turn in self.turns)
        place = SavedPlace(self.row.fqn, current_site(), turn_count, len(self.place[1]))
        return self.parts.change_shards(place, tensor.detach(), rounded)

    def rounded(self, part: Tensor, held: int) -> Tensor:
        """Round a part as its rank does; a part that was saved before gets its earlier value."""
        is_elsewhere, first_turn = self.elsewhere()
        values = self.made.setdefault(self.turns[-1], [])
        first_values = (
            self.made.get(first_turn, [])[len(values) : len(values) + 1] if first_turn else []
        )
        earlier = None if is_elsewhere else self.seen.of(part)
        if first_values and first_values[0] is not None and first_values[0].numel() == part.numel():
            earlier = first_values[0]
        value = self.coded(part, held) if earlier is None else earlier.reshape(part.shape)
        values.append(None if value is part else value)
        if earlier is None and value is not part:
            self.seen.note(part, value)
        return value

    def coded(self, part: Tensor, storage_bytes: int) -> Tensor:
        """Quantise a part, if that takes fewer bytes than `storage_bytes`."""
        row = replace(self.row, bits=self.bits.get(self.numbers, self.row.bits))
        if part.numel() < row.block or part.shape[-1] == 1:
            return part
        block_bytes = row.block * row.bits // 8 + 2 * max(4, part.element_size())
        if -(-part.numel() // row.block) * block_bytes >= storage_bytes:
            return part
        stream_key = self.row.fqn, self.calls, *self.place, self.numbers
        return quantize(part, row, stream_of(*stream_key), self.tipped)

    def counts(self, tensor: Tensor) -> bool:
        """Return whether a tensor is an activation.

        Not activations: weights, also cast ones; inputs without a gradient; tensors of experts that
        are divided over ranks.
        """
        if _experts.get():
            return False
        own_tensors = [*self.module.parameters(), *self.module.buffers()]
        pointer = tensor.untyped_storage().data_ptr()
        if any(
            value.untyped_storage().data_ptr() == pointer for value in (*own_tensors, *self.given)
        ):
            return False
        floats = tensor.is_floating_point() and tensor.numel() > 0 and _has_no_placeholders(tensor)
        return floats and not any(_is_cast(value, tensor) for value in own_tensors)


_experts: ContextVar[bool] = ContextVar("experts", default=False)  # whether experts run


def _mark_experts(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    token = _experts.set(True)
    try:
        return inner(*args, **kwargs)
    finally:
        _experts.reset(token)


@contextmanager
def _quantizing(saved: _SavedTensors) -> Iterator[None]:
    """Replace saved tensors by their stored values; the same view is quantised once."""
    rounded_values = _Values(_reads_same_memory)

    def pack(tensor: Tensor) -> Tensor:
        if not saved.counts(tensor):
            return tensor
        saved.count(tensor)
        is_elsewhere, _ = saved.elsewhere()
        if not is_elsewhere and (rounded_before := rounded_values.of(tensor)) is not None:
            return rounded_before.reshape(tensor.shape)
        value = saved.value(tensor)
        if value is not tensor:
            rounded_values.note(tensor, value)
        return value

    with saved_tensors_hooks(pack, lambda value: value):
        yield


def _has_no_placeholders(tensor: Tensor) -> bool:
    """Return whether a tensor has no placeholder values, as the minimum in a score mask is."""
    return bool((tensor.detach().abs() < torch.finfo(tensor.dtype).max / 4).all())


def _is_cast(weight: Tensor, tensor: Tensor) -> bool:
    """Return whether a tensor is this weight, or its transpose, in fewer bits."""
    if tensor.dtype.itemsize != 2 or weight.dtype.itemsize != 4 or weight.dim() != tensor.dim():
        return False
    cast_weight = weight.detach().to(tensor.dtype)
    candidates = [cast_weight, cast_weight.mT] if cast_weight.dim() == 2 else [cast_weight]
    return any(cast.shape == tensor.shape and bool((cast == tensor).all()) for cast in candidates)


def _reads_same_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors read the same memory in the same order."""
    if (a.data_ptr(), a.numel(), a.dtype) != (b.data_ptr(), b.numel(), b.dtype):
        return False
    return bool((_memory_offsets(a) == _memory_offsets(b)).all())


def _memory_offsets(tensor: Tensor) -> Tensor:
    """Return the memory offsets of all elements, relative to the first."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return torch.arange(last + 1).as_strided(tensor.shape, tensor.stride()).flatten()


def _run_quantized(
    saved: _SavedTensors, inner: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    if not torch.is_grad_enabled():
        return inner(*args, **kwargs)
    saved.begin((args, kwargs))
    with _quantizing(saved):
        return inner(*args, **kwargs)


def quantize(
    tensor: Tensor, row: ActivationCoding, stream: int, tipped: NearTieMap | None = None
) -> Tensor:
    """Quantise a tensor: each block has a minimum, a step, and whole numbers of steps."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        work_dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        digits = 53 if work_dtype == torch.float64 else 24
        flat = tensor.detach().to(work_dtype).reshape(-1)
        draws = stream_numbers(torch.arange(1, flat.numel() + 1), torch.tensor(stream)) >> (
            53 - digits
        )
        uniform = draws.to(work_dtype) / 2**digits
        end = flat.numel() // row.block * row.block  # the last block may be shorter
        minimum, step, shifted = (
            torch.cat(parts)
            for parts in zip(
                _quantize_blocks(flat[:end].view(-1, row.block), uniform[:end], row),
                _quantize_blocks(
                    flat[end:].view(-1, max(1, flat.numel() - end)), uniform[end:], row
                ),
            )
        )
        numbers = _round_down(shifted, row, (tipped or {}).get(stream))
        quantized = minimum + step * numbers.clamp(0, 2**row.bits - 1)
        return quantized.to(tensor.dtype).view(tensor.shape)


def _quantize_blocks(
    values: Tensor, uniform: Tensor, row: ActivationCoding
) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each element of blocks (one a row): minimum, step, value to round down."""
    minimum, maximum = values.min(1, keepdim=True)[0], values.max(1, keepdim=True)[0]
    step = (maximum - minimum) / (2**row.bits - 1)
    steps = torch.where(step > 0, (values - minimum) / step, 0.0)
    shifted = steps.flatten() + uniform
    return minimum.expand_as(values).flatten(), step.expand_as(values).flatten(), shifted


def _round_down(
    shifted: Tensor, row: ActivationCoding, noted: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Round down; where a value is midway, take the number that a rank took."""
    numbers = torch.floor(shifted)
    if noted is not None:
        places, noted_values = (noted_tensor[noted[0] < shifted.numel()] for noted_tensor in noted)
        is_tie = (noted_values - shifted[places]).abs() <= tie_margin(2**row.bits - 1)
        numbers[places[is_tie]] = noted_values[is_tie].floor().to(numbers.dtype)
    return numbers
