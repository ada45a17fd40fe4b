"""Layout propagation: which tensors of the sharded model differ by rank, in a forward on meta.

Every call is compared with the same call of the original: a dim that is smaller by the number of
ranks is split, all other dims must be equal.  So the shapes themselves prove where a split goes.
What shapes cannot prove (a reduction along the split, a leading factor that is not the first) is
checked by rule, and a call without a rule is tried with numbers.  Where several axes have the same
size, each axis is followed alone to find the dim that it splits.  Gradients follow the rules of the
R, V and P types of spmd_types.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from schedlang.ir.model import is_inside
from schedlang.ir.placement import EVEN, Placement, Uneven
from schedlang.runtime.comm.collectives import Group
from schedlang.runtime.propagation import call_rules, shard_trials
from schedlang.runtime.propagation.call_rules import check_operands, mixed_dims
from schedlang.runtime.propagation.parameter_access import calling_function
from schedlang.runtime.propagation.pending_sums import check_pending, check_region_call, sums_over
from schedlang.runtime.propagation.shard_trials import infer_shard_shapes
from schedlang.runtime.propagation.trace import (
    Call,
    Frame,
    Lattice,
    Mismatch,
    ModuleStack,
    Note,
    RunningCall,
    Tag,
)
from schedlang.runtime.rng.logical_functions import draws_logically
from schedlang.runtime.sharding.edges import RedistributionCache
from schedlang.runtime.sharding.module_sizes import (
    FILLS,
    PARTS,
    dims_of_call,
    factors_of,
    index_at,
    sliced_block,
)
from schedlang.runtime.tracing.meta_runs import tensors_in
from schedlang.runtime.tracing.model_lines import line_of

Shape = tuple[int, ...]
RESHAPES = {"view", "reshape", "flatten", "unflatten", "view_as", "reshape_as"}


def list_assignments(
    axes: Sequence[str], dims: Sequence[int], fits: Callable[[str, int], bool]
) -> list[dict[str, int]]:
    """List all assignments of axes to the dims whose sizes differ from the original's.

    `fits(axis, dim)`: whether the axis can split the dim.
    """
    return [
        dict(zip(axes, order))
        for order in itertools.permutations(dims)
        if all(fits(axis, d) for axis, d in zip(axes, order))
    ]


def find_reshaped_dim(before: Shape, tag: Tag, after: Shape, dims: Sequence[int]) -> int | None:
    """Return the dim of a reshape's result that holds the slowest shards of a split dim."""
    outer = math.prod(before[: tag.dim])
    for outer_now in (outer, outer * len(tag.blocks)):
        candidates = [d for d in dims if math.prod(after[:d]) == outer_now]
        if len(candidates) == 1:
            return candidates[0]
    return None


def filter_assignments(
    options: list[dict[str, int]], step: ComparedCall, full: Shape, index: int
) -> list[dict[str, int]]:
    """Return the assignments that hold when each axis alone is followed through the call.

    `full`: the shape of the original's result, `index` its number among the results.
    """
    for axis in options[0]:
        if len(options) > 1:
            dims = sorted({option[axis] for option in options})
            dim = _dim_split_alone(step, axis, full, dims, index)
            options = [option for option in options if dim is None or option[axis] == dim]
    return options


def _dim_split_alone(
    step: ComparedCall, axis: str, full: Shape, dims: Sequence[int], index: int
) -> int | None:
    """Return the dim of the result that one axis splits; None where this is not known."""
    tags = [step.follower.of(tensor).tags.get(axis) for tensor in step.inputs]
    shapes = step.expected.inputs
    split_input = next(((tag, shape) for tag, shape in zip(tags, shapes) if tag is not None), None)
    if split_input is None:
        return None
    tag, input_shape = split_input
    if step.name in RESHAPES:
        return find_reshaped_dim(input_shape, tag, full, dims)
    if tag.uneven != EVEN:
        return None
    size = step.follower.sizes[axis]
    shards = infer_shard_shapes(step, shapes, [t.dim if t else None for t in tags], size)
    if shards is None or len(shard := shards[index]) != len(full):
        return tag.dim if len(input_shape) == len(full) and tag.dim in dims else None
    fits = [d for d in dims if shard[d] * size == full[d]]
    return fits[0] if len(fits) == 1 else None


ATTENTION = "scaled_dot_product_attention"
GATHER = "gather the logits: `output=R` on the row of their module"


@dataclass(eq=False)
class _SharedArrivals(RedistributionCache):
    """Redistributions of one forward; records which modules share a redistributed tensor.

    by  id of a redistributed tensor -> the tensor, and the module that redistributed it
    """

    by: dict[int, tuple[Tensor, str]] = field(default_factory=dict)
    sharing: set[str] = field(default_factory=set)

    def redistribute(
        self, x: Tensor, source: Placement, target: Placement, group: Group, differ: bool
    ) -> Tensor:
        """Return the tensor in its new placement."""
        crossed = super().redistribute(x, source, target, group, differ)
        if crossed is not x:
            _, first_label = self.by.setdefault(id(crossed), (crossed, group.label))
            self.sharing |= {first_label, group.label} if first_label != group.label else set()
        return crossed


class Follower(Lattice):
    """Layouts of the sharded copy's tensors; raises Mismatch at the first disagreement.

    `frames`: the recorded calls of the original, `sizes` the number of ranks of each axis.
    `draws`: whether the masks of random draws are recorded, `tried` a cache of tried calls.
    """

    mark, nothing = "_schedlang_note", Note()

    def __init__(
        self,
        frames: Mapping[Frame, Sequence[Call]],
        stack: ModuleStack,
        sizes: Mapping[str, int],
        splits: Mapping[str, Sequence[str]],
        draws: bool = True,
        tried: shard_trials.TrialCache | None = None,
    ) -> None:
        self.frames, self.stack, self.sizes, self.draws = frames, stack, sizes, draws
        self.splits = splits  # sharded module -> the axes that split it
        self.places: dict[Frame, int] = {}
        self.after_logits = False  # from the split logits on, calls cannot be compared one by one
        self.agreed = 0
        # parameter -> axes over which its gradient is partial
        self.partial: dict[str, set[str]] = {}
        self.used: dict[str, frozenset[str]] = {}  # parameter -> these axes in its first use
        self.masks: dict[Frame, tuple[tuple[int, ...], Mapping[str, Tag]]] = {}
        self.draw_counts: dict[str, int] = {}
        self.uneven_splits: dict[str, set[Uneven]] = {}  # by axis, of all tensors that are split
        self.repeats = False  # whether several ranks hold the same shard
        # frames that repeat key-value heads; a rank with one head of each kind skips these calls
        self.repeating = {
            frame
            for frame, calls in frames.items()
            if any(call.name in call_rules.REPEATING for call in calls)
        }
        self.left_out: list[call_rules.Repeat] = []
        self.tokens: set[tuple[str, str]] = set()  # (module, axis) that split rows or tokens
        self._expects: Call | None = None  # the original's call that corresponds to the running one
        self.summing: dict[str, frozenset[str]] = {}  # module -> axes over which its output is full
        self.regions: set[str] = set()  # modules that inputs enter, or in which partial sums arise
        self.arrivals = _SharedArrivals()
        self.tried: shard_trials.TrialCache = {} if tried is None else tried

    @classmethod
    def has_note(cls, tensor: Tensor) -> bool:
        """Return whether a tensor has a note."""
        return cls.mark in tensor.__dict__

    def before_call(self, call: RunningCall) -> None:
        """Find the original's call; refuse a split tensor that is used after split logits."""
        if self.stack.muted:
            return
        if self.after_logits:
            for axis in (axis for tensor in call.inputs for axis in self.of(tensor).tags):
                reason = f"`{call.name}` uses a tensor sharded over `{axis}` after sharded logits"
                raise self.refuse(reason, axis, GATHER)
            return
        calls, index = self.frames.get(call.frame, []), self.places.get(call.frame, 0)
        if call.frame in self.repeating:
            skipped = call_rules.find_skipped_repeats(calls[index:], call.name, call.inputs, self)
            index += sum(repeat.calls for repeat in skipped)
            self.places[call.frame] = index
            self.left_out += [repeat for repeat in skipped if repeat not in self.left_out]
        self._expects = calls[index] if index < len(calls) else None

    def after_call(self, call: RunningCall) -> None:
        """Compare the call with the original's, and note the layouts of its results."""
        if self.regions and not self.stack.muted:
            check_region_call(call, self)
        if self.stack.muted or self.after_logits or not call.outputs:
            return
        if self.left_out:
            call.inputs = call_rules.apply_repeats(call.inputs, self._expects, self)
        if call.name in call_rules.CASTS:
            call.inputs = call.inputs[:1]
        expected = self._expects
        try:
            if expected is None or expected.name != call.name:
                integers = expected.integers if expected is not None else ()
                reason = f"`{call.name}` is called where the original calls another operator"
                raise Mismatch(call.frame, reason, None, integers, self.agreed)
            ComparedCall(**vars(call), follower=self, expected=expected).finish()
        except Mismatch as failure:
            raise self._add_operands(failure, call, call.name) from None
        self.places[call.frame] = self.places.get(call.frame, 0) + 1
        self.agreed += 1

    def on_failure(self, call: RunningCall, error: Exception) -> None:
        """Raise Mismatch for a call that does not run on shards."""
        if not isinstance(error, (RuntimeError, ValueError, IndexError, AssertionError)):
            return
        if self.stack.muted or self.after_logits:
            raise self._shard_failure(error) from error
        raise self._call_failure(call, error) from error

    def refuse(self, reason: str, axis: str | None, *helps: str) -> Mismatch:
        """Return a mismatch in the running frame that dividing an integer cannot mend."""
        return Mismatch(self.stack.frames[-1], reason, axis, (), self.agreed, helps)

    def run_muted(self, cross: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return `cross(x)`, without comparing its calls: the model does not make them."""
        self.stack.muted += 1
        crossed = cross(x)
        self.stack.muted -= 1
        return crossed

    def _shard_failure(self, error: Exception) -> Mismatch:
        """Return the mismatch of a module whose shards do not fit its input."""
        help_ = "leave out `input=` and `output=`: a style sets placements that fit together"
        failure = self.refuse(str(error).split("\n")[0], None, help_)
        failure.raw = True
        return failure

    def module_failure(self, error: Exception, frame: Frame, call_inputs: Any) -> Mismatch:
        """Return the mismatch of a module that raised `error` itself, and not a call in it."""
        inputs = list(tensors_in(call_inputs))
        axis = next((axis for tensor in inputs for axis in self.of(tensor).tags), None)
        failure = self.refuse(str(error).split("\n")[0], axis)
        failure.frame, failure.raw, failure.line = frame, True, line_of(error)
        failure.by = call_rules.splitting_module(inputs, axis)
        return failure

    def _call_failure(self, call: RunningCall, error: Exception) -> Mismatch:
        expected, notes = self._expects, [self.of(tensor) for tensor in call.inputs]
        axis = next((axis for note in notes for axis in note.tags), None)
        integers = expected.integers if expected is not None and axis is not None else ()
        failure = Mismatch(call.frame, str(error).split("\n")[0], axis, integers, self.agreed)
        failure.raw, failure.unit = True, call_rules.unmatched_block_size(notes, axis)
        if expected is not None and axis is not None and expected.name in RESHAPES:
            failure.counted = call_rules.reshape_factors(expected, notes[0].tags.get(axis))
        return self._add_operands(failure, call, expected.name if expected is not None else "")

    def _add_operands(self, failure: Mismatch, call: RunningCall, name: str) -> Mismatch:
        """Add to a failure how the tensors of its call are split."""
        notes = [self.of(tensor) for tensor in call.inputs]
        failure.by, failure.call = call_rules.splitting_module(call.inputs, failure.axis), name
        failure.mixed = call_rules.has_mixed_splits(notes)
        failure.made = call_rules.find_full_parameters(notes, failure.axis)
        return failure

    def note_use(self, name: str, parts: Set[str]) -> None:
        """Note that a parameter is used where its gradient is partial over the axes in `parts`.

        Raises Mismatch if the gradient of an earlier use is full over one of these axes, or the
        other way round: one sum over the ranks would count a full gradient once for each rank.
        """
        if parts:
            self.partial.setdefault(name, set()).update(parts)
        first_parts = self.used.setdefault(name, frozenset(parts))
        for axis in sorted(first_parts ^ parts):
            reason = (
                f"`{name}` is used with full activations and with activations split over `{axis}`;"
                " no all-reduce over its ranks is right for both gradients"
            )
            raise self.refuse(
                reason, axis, "use it in the same way in both places: leave `input=...` out"
            )


@dataclass(kw_only=True)
class ComparedCall(RunningCall):
    """A call of the sharded copy that is compared with the original's call."""

    follower: Follower
    expected: Call
    summed: frozenset[str] = frozenset()  # axes over which the call makes partial sums

    def fail(self, reason: str, axis: str | None = None, *helps: str) -> Mismatch:
        """Return a mismatch that dividing one of the original call's integers might mend."""
        integers, agreed = self.expected.integers, self.follower.agreed
        return Mismatch(self.frame, reason, axis, integers, agreed, helps)

    def finish(self) -> None:
        """Note the layout of every output; raise Mismatch if the original's shapes forbid one."""
        outputs, notes = self.outputs, [self.follower.of(t) for t in self.inputs]
        axes = {axis for note in notes for axis in note.tags}
        pending = check_pending(self) if any(note.pending for note in notes) else frozenset()
        if len(self.expected.outputs) != len(outputs):
            raise self.fail(f"`{self.name}` returns {len(outputs)} tensors", next(iter(axes), None))
        roots = frozenset(name for note in notes for name in note.roots)
        data = any(note.data for note in notes)
        entered = frozenset(axis for note in notes for axis in note.entered)
        with torch._C.DisableTorchFunction():  # not seen by function modes
            learns = [t.requires_grad and t.is_floating_point() for t in self.inputs]
            shapes = [tuple(t.shape) for t in outputs]
        needs_graph = not torch.is_grad_enabled() and bool(calling_function())
        if needs_graph:  # torch builds none in the forward of a function of the user's
            learns = [learned or note.learns for learned, note in zip(learns, notes)]
        for learned, note in zip(learns, notes):
            if not (learned and (needs_graph or torch.is_grad_enabled())):
                continue
            # a full tensor beside a split one gets only a part of its gradient on each rank
            parts = (axes | entered | pending) - note.entered - note.tags.keys() - note.pending
            if parts and (note.data or not note.roots):
                raise self._mixed_failure(min(parts))
            for name in note.roots if data or parts else ():
                self.follower.note_use(name, parts)
        for axis in sorted(axes):
            if sum(axis in note.tags for note in notes) > 1:
                check_operands(self, axis)
        if factors_of(self.name, self.args) != self.expected.factors:
            raise self._factor_failure(next(iter(axes), None))
        pairs = enumerate(zip(shapes, self.expected.outputs))
        all_tags = [self._tags(local, shape, axes, index) for index, (local, shape) in pairs]
        self._check_by_parts(axes - self.summed, all_tags)
        pending |= self.summed
        for tensor, tags in zip(outputs, all_tags):
            kept_roots = frozenset() if tags or data or pending else roots
            learned = needs_graph and any(learns)
            still_entered = entered - tags.keys() - pending
            output_note = Note(tags, kept_roots, data, still_entered, learned, pending)
            self.follower.put(tensor, output_note)
        if self.follower.draws and draws_logically(self.func, self.args, self.kwargs):
            self._remember_mask()

    # -- shapes ----------------------------------------------------------------------------------

    def _tags(self, local: Shape, shape: Shape, axes: set[str], index: int) -> dict[str, Tag]:
        if len(local) != len(shape):
            raise self._shape_failure(local, shape)
        differ = [dim for dim in range(len(shape)) if local[dim] != shape[dim]]
        if not axes and differ and self.name not in FILLS:
            opened = call_rules.find_expanded_split(self, local, shape, differ)
            if not opened:
                raise self._shape_failure(
                    local, shape, None, ": it takes its size from a sharded tensor"
                )
            return opened
        if not differ:
            if axes and self._carries_values():
                if sums_over(self, axes):
                    self.summed = frozenset(axes)
                    return {}
                axis = min(axes)
                raise self.fail(
                    f"`{self.name}` reduces over a dim that is sharded over `{axis}`", axis
                )
            return {}
        split_axes = sorted(axes) if axes else self._axes_for(differ, local, shape)
        along = call_rules.find_repeated_dim(self, local, shape) if self.follower.repeats else None
        differ = [dim for dim in differ if dim != along]
        if len(differ) != len(split_axes):
            raise self._shape_failure(local, shape, next(iter(split_axes), None))
        dims = dict(zip(split_axes, differ))
        if len(dims) > 1:
            dims = self._resolve_axes(split_axes, differ, local, shape, index)
        tags = {}
        for axis, dim in sorted(dims.items(), key=lambda item: item[1]):
            uneven = self._fits(axis, local[dim], shape[dim])
            if uneven is None:
                raise self._shape_failure(local, shape, axis)
            blocks = self._blocks(axis, dim, shape, index)
            tags[axis] = Tag(
                dim, blocks, call_rules.splitting_module(self.inputs, axis), uneven, along
            )
        return tags

    def _axes_for(self, differ: list[int], local: Any, shape: Any) -> list[str]:
        """Return the axes of a fill, which has no split input: those that split a nearby module."""
        chosen_axes: list[str] = []
        names = self.frame[0].split(".")
        around = [".".join(names[:depth]) for depth in range(len(names), -1, -1)]
        splits = self.follower.splits.items()
        within = (
            split_axes for fqn in around for name, split_axes in splits if is_inside(name, fqn)
        )
        axes = dict.fromkeys(axis for split_axes in within for axis in split_axes)
        for d in differ:
            fits = (a for a in axes if self._fits(a, local[d], shape[d]))
            chosen_axes.append(next((a for a in fits if a not in chosen_axes), "?"))
        return chosen_axes

    def _resolve_axes(
        self, axes: list[str], differ: list[int], local: Any, shape: Any, index: int
    ) -> dict[str, int]:
        """Return the dim that each axis splits; axes of equal size are followed one by one."""

        def fits(axis: str, dim: int) -> bool:
            return self._fits(axis, local[dim], shape[dim]) is not None

        options = list_assignments(axes, differ, fits)
        if len(options) > 1:
            options = filter_assignments(options, self, shape, index)
        if len(options) != 1 and not (options and self.name in FILLS):  # a fill is equal everywhere
            raise self._shape_failure(local, shape, axes[0])
        return options[0]

    def _fits(self, axis: str, local: int, full: int) -> Uneven | None:
        """Return the rule that splits a dim of size `full` into `local` for each rank, or None."""
        total = local * self.follower.sizes.get(axis, 0)
        return next(
            (u for u in call_rules.legal_splits(self, axis) if total == full * u.wide), None
        )

    def _mixed_failure(self, axis: str) -> Mismatch:
        reason = (
            f"`{self.name}` mixes a tensor sharded over `{axis}` with a"
            " replicated one, whose gradient nothing would sum over the ranks"
        )
        enter = f"let it enter `{self.frame[0]}`: `input=R` on a row of this module"
        helps = "shard the module that computes it", *([f"or {enter}"] if self.frame[0] else [])
        return self.follower.refuse(reason, axis, *helps)

    def _factor_failure(self, axis: str | None) -> Mismatch:
        """Return the mismatch of a shard's size used as the full size: `h / h.shape[-1]`."""
        local, full = factors_of(self.name, self.args), self.expected.factors
        factors = " and ".join(f"{n:g}" for n in local), " and ".join(f"{n:g}" for n in full)
        reason = "`{}` takes {} where the original takes {}: it counts a part"
        return self.follower.refuse(
            reason.format(self.name, *factors),
            axis,
            "gather it first: `output=R` on the row before",
        )

    def _shape_failure(
        self, local: Shape, shape: Shape, axis: str | None = None, explanation: str = ""
    ) -> Mismatch:
        shapes = f"{list(local)} where the original returns {list(shape)}{explanation}"
        return self.fail(f"`{self.name}` returns {shapes}", axis)

    def _carries_values(self) -> bool:
        return self.name not in FILLS and self.name not in ("shape", "size", "stride", "device")

    # -- rules for what shapes cannot tell ---------------------------------------------------------

    def _blocks(self, axis: str, dim: int, shape: tuple[int, ...], index: int) -> tuple[int, ...]:
        tags = [self.follower.of(tensor).tags for tensor in self.inputs]
        operands = list(zip(tags, self.expected.inputs))
        source = next(
            ((own_tags[axis], shape) for own_tags, shape in operands if axis in own_tags), None
        )
        if source is None:
            return (shape[dim],)
        tag, full = source
        self._check_along(axis, tag, full)
        if self.name in RESHAPES:
            return self._reshape_blocks(axis, tag, dim, full, shape)
        if self.name in PARTS and shape[dim] != full[tag.dim]:
            return self._chunk_blocks(axis, tag, shape[dim], index)
        narrowed = self.name == "narrow" or self.name == "__getitem__" and len(shape) == len(full)
        if narrowed and shape[dim] != full[tag.dim]:
            return self._slice_blocks(axis, tag, dim)
        if self.name in ("cat", "concat", "concatenate") and shape[dim] != full[tag.dim]:
            return tuple(
                size
                for own_tags, s in operands
                for size in (own_tags[axis].blocks if axis in own_tags else (s[dim],))
            )
        if shape[dim] > full[tag.dim]:
            repeated = call_rules.repeat_blocks(self.name, tag, full[tag.dim], shape[dim])
            if repeated:
                return repeated
        return tag.blocks if sum(tag.blocks) == shape[dim] else (shape[dim],)

    def _reshape_blocks(
        self, axis: str, tag: Tag, dim: int, before: tuple[int, ...], after: tuple[int, ...]
    ) -> tuple[int, ...]:
        ranks = self.follower.sizes[axis]
        outer_before, outer_after = math.prod(before[: tag.dim]), math.prod(after[:dim])
        count = len(tag.blocks)
        if outer_after == outer_before and (count == 1 or after[dim] == before[tag.dim]):
            return tag.blocks if after[dim] == before[tag.dim] else (after[dim],)
        if count > 1 and len(set(tag.blocks)) == 1 and outer_after == outer_before * count:
            return (after[dim],)
        rows = call_rules.count_joined_rows(before, tag, after, dim)
        if rows:
            return (before[tag.dim],) * rows  # the heads of all rows, concatenated
        if count > 1 and outer_after == outer_before:
            raise self.fail(
                f"`{self.name}` of {list(before)} to {list(after)} does not follow"
                f" its {count} blocks",
                axis,
            )
        raise self.fail(
            f"`{self.name}` of {list(before)} to {list(after)} would cut across the shards of the"
            f" {ranks} ranks of `{axis}`",
            axis,
        )

    def _chunk_blocks(self, axis: str, tag: Tag, size: int, index: int) -> tuple[int, ...]:
        if index < len(tag.blocks) and tag.blocks[index] == size:
            return (size,)
        sizes = [shape[tag.dim] for shape in self.expected.outputs]
        new_blocks = len(sizes) if len(set(sizes)) == 1 else sizes
        failure = self.follower.refuse(
            f"`{self.name}` takes {len(sizes)} parts out of a dim that is split over"
            f" `{axis}` as {len(tag.blocks)} block{'s' * (len(tag.blocks) > 1)}",
            axis,
            f"give the blocks that are side by side: `blocks={new_blocks}`",
        )
        failure.row_arguments = (("blocks", str(new_blocks)),)
        raise failure

    def _slice_blocks(self, axis: str, tag: Tag, dim: int) -> tuple[int, ...]:
        if self.name == "narrow":
            start, length = self.argument(2, "start"), self.argument(3, "length")
            cut: Any = slice(int(start), int(start) + int(length))
        else:
            cut = index_at(self.args[1], dim, self.inputs[0].ndim)
        size = sliced_block(cut, tag.blocks, self.follower.sizes[axis])
        if size is None:
            raise self.fail(f"a slice cuts across the shards of the ranks of `{axis}`", axis)
        return (size,)

    def _check_along(self, axis: str, tag: Tag, full: tuple[int, ...]) -> None:
        """Refuse a call that computes along the split dim: it needs the other ranks' shards."""
        dims = dims_of_call(self.name, self.args, self.kwargs, len(full))
        if self.name == ATTENTION:
            dims = {len(full) - 1, len(full) - 2}
        after = self.expected.outputs[0]
        dims |= mixed_dims(self.name, self.args, self.kwargs, full, after, self.expected.integers)
        if tag.dim in dims:
            reason = f"`{self.name}` computes along a dim that is sharded over `{axis}`"
            raise self.follower.refuse(
                reason, axis, "gather it first: `output=R` on the row before"
            )

    def _check_by_parts(self, axes: set[str], all_tags: Sequence[Mapping[str, Tag]]) -> None:
        """Refuse a call without a rule whose results on shards are not shards of its result."""
        arguments = self.args, self.kwargs
        if call_rules.has_rule(self.name, *arguments) or draws_logically(self.func, *arguments):
            return
        notes = [self.follower.of(tensor).tags for tensor in self.inputs]
        for axis in sorted(axes):
            sources, results = (
                [tags.get(axis) for tags in tag_maps] for tag_maps in (notes, all_tags)
            )
            fault = shard_trials.find_shard_fault(self, axis, sources, results, self.follower.tried)
            if fault:
                raise self.follower.refuse(
                    fault, axis, "gather it first: `output=R` on the row before"
                )

    def _remember_mask(self) -> None:
        site = self.frame[0]
        call_number = self.follower.draw_counts.get(site, 0)
        self.follower.draw_counts[site] = call_number + 1
        tags = self.follower.of(self.outputs[0]).tags
        self.follower.masks[site, call_number] = (self.expected.outputs[0], tags)
