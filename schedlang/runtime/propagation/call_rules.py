"""Propagation rules for calls of torch: which dims stay split, are matched, padded or repeated.

* Dims along which a function mixes positions or channels of an activation.
* Operands that do not match.  Shapes cannot show this: ranks may hold equally many elements of two
  tensors in different orders, or the tensors may be split along different dims whose shards have
  one element.  A rule says which dims of the operands correspond; these must be split equally.
* Dims whose shards several ranks hold, or that end in zeros.  Where key-value heads are fewer than
  the ranks, several ranks hold each head, and the model repeats each head for its query heads.  A
  rank repeats its one head for its own query heads only, so the repeated dim is split evenly again.
* Repeats of key-value heads that the original makes, and a rank skips.  With one key-value head for
  each of its query heads a rank has nothing to repeat, and models skip the calls.  The original's
  calls are recognised by their shapes: each head is repeated next to itself, therefore the rank's
  one head is the right one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from schedlang.ir import pytree
from schedlang.ir.placement import EVEN, Uneven
from schedlang.runtime.device import DEVICE_METHODS
from schedlang.runtime.propagation.trace import Call, Note, RunningCall, Tag
from schedlang.runtime.sharding.module_sizes import FILLS, PARTS

if TYPE_CHECKING:
    from schedlang.runtime.propagation.follower import ComparedCall, Follower


WINDOWS = {
    *(f"conv{d}d" for d in (1, 2, 3)),
    *(f"conv_transpose{d}d" for d in (1, 2, 3)),
    *(
        f"{kind}_pool{d}d"
        for d in (1, 2, 3)
        for kind in ("max", "avg", "lp", "adaptive_avg", "adaptive_max")
    ),
    *(f"max_pool{d}d_with_indices" for d in (1, 2, 3)),
    "unfold",
    "fold",
    "grid_sample",
    "pixel_shuffle",
    "pixel_unshuffle",
    "instance_norm",
    "local_response_norm",
}
# functions of images: two dims of positions
IMAGES = ("unfold", "fold", "grid_sample", "pixel_shuffle", "pixel_unshuffle")
NORMS = ("group_norm", "batch_norm", "layer_norm", "rms_norm")
MIXING = {*WINDOWS, *NORMS, "pad", "interpolate", "upsample"}
FIRST_POSITION_DIM = 2  # the first dim of positions of [batch, channels, positions...]


def mixed_dims(
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    sizes: tuple[int, ...],
    after: tuple[int, ...],
    integers: Sequence[int] = (),
) -> set[int]:
    """Return the dims of the main tensor along which a call mixes elements.

    `sizes` and `after` are the original's shapes before and after the call, `integers` the
    integers among the original's arguments.
    """
    if name in WINDOWS:
        return set(range(len(sizes) - _positions(name, len(sizes)), len(sizes)))
    if name == "group_norm":  # a rank's channels as the full number of groups: smaller groups
        groups = kwargs.get("num_groups", args[1] if len(args) > 1 else None)
        return set(
            range(1 if groups == next(iter(integers), None) else FIRST_POSITION_DIM, len(sizes))
        )
    if name == "batch_norm":
        return {0, *range(FIRST_POSITION_DIM, len(sizes))}
    if name in ("layer_norm", "rms_norm"):
        shape = kwargs.get("normalized_shape", args[1] if len(args) > 1 else (0,))
        return set(range(len(sizes) - len(tuple(shape)), len(sizes)))
    if name == "pad":
        pads = kwargs.get("pad", args[1] if len(args) > 1 else ())
        pairs = list(zip(pads[::2], pads[1::2]))
        return {len(sizes) - 1 - position for position, pair in enumerate(pairs) if any(pair)}
    if name in ("interpolate", "upsample"):
        return _resized(args, kwargs, sizes, after)
    return set()


def _positions(name: str, dims: int) -> int:
    """Return how many of the last of `dims` dims are positions; the rows' dim may be missing."""
    count = next((int(character) for character in name if character.isdigit()), 0)
    return count or (
        max(2, dims - FIRST_POSITION_DIM) if name in IMAGES else dims - FIRST_POSITION_DIM
    )


def _resized(
    args: Sequence[Any], kwargs: Mapping[str, Any], shape: tuple[int, ...], after: tuple[int, ...]
) -> set[int]:
    """Return the dims of positions that a resize mixes.

    A dim is not mixed if each position is only repeated, or every n-th position is selected.
    """
    mode = kwargs.get("mode", args[3] if len(args) > 3 else "nearest")
    if mode not in ("nearest", "nearest-exact"):
        return set(range(FIRST_POSITION_DIM, len(shape)))
    dims = range(FIRST_POSITION_DIM, len(shape))
    return {d for d in dims if after[d] % shape[d] and shape[d] % after[d]}


ELEMENTWISE = {
    *("add", "sub", "rsub", "mul", "div", "true_divide", "floor_divide", "remainder", "fmod"),
    *("pow", "maximum", "minimum", "fmax", "fmin", "atan2", "lerp", "addcmul", "addcdiv", "where"),
    *("masked_fill", "copy", "xlogy", "hypot", "logaddexp", "logaddexp2", "ldexp", "mse_loss"),
    *("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "logical_and", "logical_or"),
    *("logical_xor", "bitwise_and", "bitwise_or", "bitwise_xor", "multiply", "subtract", "divide"),
    *("radd", "rmul", "rdiv", "rpow"),
}
JOINS = {"cat", "concat", "concatenate", "stack"}
PRODUCTS = {"matmul", "bmm", "mm", "mv", "dot"}

# sums over a dim of both factors: where both are shards, each rank has a partial sum
SUMMING = {
    *("linear", "matmul", "mm", "bmm", "einsum", "addmm", "baddbmm", "__matmul__", "conv1d"),
    *("conv2d", "conv3d", "tensordot"),
}
BIASED = {"linear": 2, "addmm": 0, "baddbmm": 0, "conv1d": 2, "conv2d": 2, "conv3d": 2}
ADDS = {
    *("add", "sub", "__add__", "__radd__", "__sub__", "__rsub__", "__iadd__", "__isub__", "add_"),
    *("sub_", "stack", "cat", "concat"),
}
TIMES = frozenset(["mul", "__mul__", "__rmul__", "__imul__", "mul_", "multiply"])
LINEAR = {
    *("view", "reshape", "flatten", "unflatten", "transpose", "permute", "contiguous", "clone"),
    *("to", "type", "float", "double", "half", "bfloat16", "__getitem__", "squeeze", "unsqueeze"),
    *("expand", "expand_as", "view_as", "sum", "mean", "neg", "__neg__", "div", "__truediv__"),
    *("div_", "movedim", "swapaxes", "t", "T", "mT", "narrow", "select", "split", "chunk"),
    *("unbind", "moved"),
}


@dataclass(frozen=True)
class SplitOperand:
    """A tensor of a call that is split over an axis: its split, and its full shape."""

    place: int  # among the tensors of the call
    tag: Tag
    full_shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The full size of the split dim."""
        return self.full_shape[self.tag.dim]

    def local_indices(self, ranks: int, rank: int) -> list[int]:
        """Return the indices of the split dim that a rank holds, in local order; -1 for zeros."""
        indices = self.tag.positions(self.size, ranks, rank)
        return [index if index < self.size else -1 for index in indices]


def check_operands(step: ComparedCall, axis: str) -> None:
    """Raise Mismatch if tensors that are split over an axis do not match in a call.

    They match if each rank's shards hold corresponding elements of the full tensors.
    """
    notes = [step.follower.of(tensor).tags.get(axis) for tensor in step.inputs]
    shapes = step.expected.inputs
    cuts = [SplitOperand(k, tag, shape) for k, (tag, shape) in enumerate(zip(notes, shapes)) if tag]
    text = _describe_difference(step, cuts, step.follower.sizes[axis]) if len(cuts) > 1 else ""
    if text:
        raise step.follower.refuse(
            f"`{step.name}` gets tensors that are sharded over `{axis}` {text}",
            axis,
            "give the blocks of fused weights: `blocks=`",
            "gather one of them first: `output=R` on its row",
        )


def _describe_difference(call: RunningCall, cuts: Sequence[SplitOperand], ranks: int) -> str:
    """Describe how the splits of a call's tensors over one axis differ; "" if they match."""
    dims = {role_of_dim(call, split) for split in cuts}
    if len(cuts) < 2 or None in dims:
        return ""
    if len(dims) > 1:
        return "along different dims"
    all_equal = all(_same_indices(cuts[0], other, ranks) for other in cuts[1:])
    return "" if all_equal else "in different orders"


def role_of_dim(call: RunningCall, split: SplitOperand) -> object:
    """Return the role of a tensor's split dim in a call; None if it is not known.

    The roles of dims that correspond to each other are equal.
    """
    behind = split.tag.dim - len(split.full_shape)  # counted from the last dim
    name = call.name.strip("_").removeprefix("i" if call.name.startswith("__i") else "")
    if call.func is F.scaled_dot_product_attention:
        names = (("query", "size"), ("key", "size"), ("key", "size"), ("query", "key"))
        return behind if behind < -2 or split.place > 3 else names[split.place][behind]
    if name in ELEMENTWISE:
        return behind
    if name in JOINS:
        dim = call.kwargs.get("dim", call.args[1] if len(call.args) > 1 else 0)
        joined = (
            isinstance(dim, int)
            and name != "stack"
            and dim % len(split.full_shape) == split.tag.dim
        )
        return None if joined else behind
    if name in PRODUCTS:
        return _factor(split.place, behind, len(split.full_shape))
    if name == "baddbmm":
        return _factor(split.place - 1, behind, 3) if split.place else (-3, "left", "right")[behind]
    if name == "linear":
        if split.place:
            return ("out", "in")[behind] if split.place == 1 else "out"
        return "in" if behind == -1 else behind
    return _einsum_letter(call, split) if name == "einsum" else None


def _factor(index: int, behind: int, ndim: int) -> object:
    """Return the role of a dim in a product of matrices: batch, left, right or summed."""
    if ndim == 1:
        return "sum"
    if behind < -2:
        return behind
    return (("left", "sum") if index == 0 else ("sum", "right"))[behind]


def _einsum_letter(call: RunningCall, split: SplitOperand) -> object:
    """Return the letter of a split dim in an einsum; None if it is not known."""
    if not call.args or not isinstance(call.args[0], str) or "." in call.args[0]:
        return None
    terms = call.args[0].replace(" ", "").split("->")[0].split(",")
    return terms[split.place][split.tag.dim] if split.place < len(terms) else None


def _same_indices(a: SplitOperand, b: SplitOperand, ranks: int) -> bool:
    """Return whether each rank holds the same indices of both split dims.

    A dim may have fewer indices (key-value heads): then each rank must hold, for each index of the
    larger dim, the index of its group.
    """
    if (a.tag.blocks, a.tag.uneven) == (b.tag.blocks, b.tag.uneven):
        return True
    few, many = sorted((a, b), key=lambda operand: operand.size)
    if not few.size or many.size % few.size:
        return False
    times = many.size // few.size
    for rank in range(ranks):
        heads, members = few.local_indices(ranks, rank), many.local_indices(ranks, rank)
        if len(members) % len(heads):
            return False
        share = len(members) // len(heads)
        if any(heads[k // share] != index // times for k, index in enumerate(members)):
            return False
    return True


EXPANDS = ("expand", "expand_as", "broadcast_to", "repeat")
MERGES = ("view", "reshape", "flatten")
CASTS = ("type_as", "to")  # of a second tensor only the dtype and the device count


def legal_splits(step: ComparedCall, axis: str) -> list[Uneven]:
    """Return the rules by which an axis may split a dim of the result; the shapes decide later."""
    tags = _tags(step, axis)
    kinds = {tag.uneven for tag, _ in tags}
    if not kinds:
        return [EVEN, *step.follower.uneven_splits.get(axis, ())]
    if len(kinds) > 1:
        queries = tags[0][0].uneven  # `check_operands` compares the heads
        grouped = step.func is F.scaled_dot_product_attention
        return [queries] if grouped and queries == EVEN else []
    (uneven,) = kinds
    merged = uneven.repeat > 1 and any(_merges(step, tag, full) for tag, full in tags)
    return [uneven, EVEN] if merged else [uneven]


def find_repeated_dim(
    step: ComparedCall, local: tuple[int, ...], shape: tuple[int, ...]
) -> int | None:
    """Return the dim of a result along which a shard held by several ranks is repeated, if any."""
    for axis in step.follower.sizes:
        for tag, full in _tags(step, axis):
            if tag.along is not None and shape == full:
                return tag.along
            dim = tag.dim + 1 + len(shape) - len(full)
            repeated = tag.uneven.repeat > 1 and step.name in EXPANDS and dim < len(shape)
            if repeated and local[dim] * tag.uneven.repeat == shape[dim]:
                return dim if full[tag.dim + 1] == 1 else None
    return None


def find_expanded_split(
    step: ComparedCall, local: tuple[int, ...], shape: tuple[int, ...], differ: list[int]
) -> dict[str, Tag]:
    """Return the tags of a result for which each rank repeats a full tensor less often."""
    if len(differ) != 1 or step.name not in (*EXPANDS, "repeat_interleave"):
        return {}
    (dim,), full = differ, step.expected.inputs[0]
    source_dim = dim - (len(shape) - len(full))
    for axis in step.follower.of(step.inputs[0]).entered:
        single = source_dim < 0 or full[source_dim] == 1
        if single and local[dim] * step.follower.sizes[axis] == shape[dim]:
            return {axis: Tag(dim, (shape[dim],))}
    return {}


def repeat_blocks(name: str, tag: Tag, before: int, after: int) -> tuple[int, ...]:
    """Return the blocks of a split dim after a call that repeats it; empty if it does not."""
    times, remainder = divmod(after, before)
    if remainder or times < 2:
        return ()
    if name in ("repeat", "tile"):
        return tag.blocks * times  # the full dim is repeated as one piece
    in_place = name == "repeat_interleave" and sum(tag.blocks) == before
    return tuple(block * times for block in tag.blocks) if in_place else ()


def has_mixed_splits(notes: list[Note]) -> bool:
    """Return whether a call's tensors are split over the ranks by different rules."""
    kinds = {tag.uneven for note in notes for tag in note.tags.values()}
    return len(kinds) > 1 or bool(kinds and any(note.entered for note in notes))


def _merges(step: ComparedCall, tag: Tag, full: tuple[int, ...]) -> bool:
    """Return whether the call repeats each part in place, next to itself."""
    if step.name == "repeat_interleave":
        dim: Any = step.kwargs.get("dim", step.args[2] if len(step.args) > 2 else None)
        return isinstance(dim, int) and dim % len(full) == tag.dim
    if step.name not in MERGES or tag.along != tag.dim + 1:
        return False
    after = step.expected.outputs[0]
    outer, merged = math.prod(full[: tag.dim]), full[tag.dim] * full[tag.along]
    return any(math.prod(after[:d]) == outer and n == merged for d, n in enumerate(after))


def _tags(step: ComparedCall, axis: str) -> list[tuple[Tag, tuple[int, ...]]]:
    """Return the tags of the arguments over an axis, each with the full shape of its argument."""
    shapes = step.expected.inputs
    notes = [step.follower.of(tensor).tags for tensor in step.inputs]
    return [(tags[axis], shape) for tags, shape in zip(notes, shapes) if axis in tags]


def unmatched_block_size(notes: list[Note], axis: str | None) -> int:
    """Return the block size of the split tensor if other tensors are full; 0 if there is no mix."""
    tags = [note.tags.get(axis) for note in notes] if axis is not None else []
    block_size = next((tag.blocks[0] for tag in tags if tag is not None), 0)
    return block_size if None in tags and block_size > 1 else 0


def find_full_parameters(notes: list[Note], axis: str | None) -> tuple[frozenset[str], int]:
    """Return the parameters from which the full tensors are computed, and the split dim's size."""
    tags = [note.tags.get(axis) for note in notes] if axis is not None else []
    split = next((tag for tag in tags if tag is not None), None)
    roots = (note.roots for note, tag in zip(notes, tags) if tag is None)
    return frozenset().union(*roots), sum(split.blocks) if split is not None else 0


def reshape_factors(expected: Call, tag: Tag | None) -> tuple[int, ...]:
    """Return the sizes into which a reshape splits a sharded dim, slowest first (e.g. heads)."""
    before, after = expected.inputs[0], expected.outputs[0]
    if tag is None:
        return ()
    outer, size = math.prod(before[: tag.dim]) * len(tag.blocks), before[tag.dim] // len(tag.blocks)
    for dim in range(len(after)):
        if math.prod(after[:dim]) == outer and after[dim] != 1:
            ends = (k for k in range(dim + 1, len(after) + 1) if math.prod(after[dim:k]) == size)
            return after[dim : next(ends, dim + 1)]
    return ()


def count_joined_rows(before: tuple[int, ...], tag: Tag, after: tuple[int, ...], dim: int) -> int:
    """Return how many rows of heads a reshape concatenates in a dim; 0 if it does not."""
    outer, outer_after = math.prod(before[: tag.dim]), math.prod(after[:dim])
    rows = outer // outer_after if outer_after else 0
    joined = len(tag.blocks) == 1 and rows > 1 and rows * before[tag.dim] == after[dim]
    return rows if joined else 0


def splitting_module(inputs: list[Tensor], axis: str | None) -> str:
    """Return the sharded module that split the first split tensor over `axis` (None: any axis)."""
    tags = (tensor.__dict__.get("_schedlang_note", Note()).tags for tensor in inputs)
    return next((t.by for by in tags for a, t in by.items() if axis in (None, a) and t.by), "")


Shape = tuple[int, ...]
OPENS = ("__getitem__", "unsqueeze", "view", "reshape")
REPEATING = ("expand", "expand_as", "broadcast_to", "repeat", "repeat_interleave")


@dataclass(frozen=True)
class Repeat:
    """A chain of `calls` calls of the original that repeats each index of a dim next to itself."""

    dim: int
    before: Shape
    after: Shape
    calls: int

    @property
    def times(self) -> int:
        """The number of copies of each index."""
        return self.after[self.dim] // self.before[self.dim]


def find_repeat(calls: Sequence[Call]) -> Repeat | None:
    """Return the repeat that begins at the first of some calls, if there is one."""
    if not calls:
        return None
    first = calls[0]
    if first.name == "repeat_interleave" and _single(first):
        dim = _grown(first.inputs[0], first.outputs[0])
        return None if dim is None else Repeat(dim, first.inputs[0], first.outputs[0], 1)
    chain = calls[:3]
    expected = zip(chain, (OPENS, REPEATING, MERGES))
    if len(chain) < 3 or not all(_single(call) and call.name in names for call, names in expected):
        return None
    if any(a.outputs[0] != b.inputs[0] for a, b in zip(chain, chain[1:])):
        return None
    before, opened, expanded, after = first.inputs[0], *(call.outputs[0] for call in chain)
    dim = _grown(before, after)
    if dim is None:
        return None
    times = after[dim] // before[dim]
    around = (before[: dim + 1], before[dim + 1 :])
    fits = opened == (*around[0], 1, *around[1]) and expanded == (*around[0], times, *around[1])
    return Repeat(dim, before, after, 3) if fits else None


def find_skipped_repeats(
    calls: Sequence[Call], name: str, inputs: Sequence[Tensor], follower: Follower
) -> list[Repeat]:
    """Return the repeats of the original that are skipped before a call named `name`.

    `calls` are the original's next calls, `inputs` the tensors of the call on this rank.  Empty
    where the next call behind the repeats has another name.
    """
    skipped: list[Repeat] = []
    index = 0
    while repeat := find_repeat(calls[index : index + 3]):
        if calls[index].name == name and _fits(calls[index], inputs, follower):
            break
        skipped.append(repeat)
        index += repeat.calls
    agrees = index < len(calls) and calls[index].name == name
    return skipped if agrees else []


def _fits(call: Call, inputs: Sequence[Tensor], follower: Follower) -> bool:
    """Return whether `inputs` fit a call of the original: only split dims differ in size."""
    if not inputs or inputs[0].ndim != len(call.inputs[0]):
        return False
    split = {tag.dim for tag in follower.of(inputs[0]).tags.values()}
    sizes = enumerate(zip(inputs[0].shape, call.inputs[0]))
    return all(dim in split for dim, (a, b) in sizes if a != b)


def apply_repeats(inputs: list[Tensor], expected: Call | None, follower: Follower) -> list[Tensor]:
    """Return the tensors of a call; those of skipped repeats get the note of the repeated tensor.

    Raises Mismatch if a full tensor that the original repeats is used beside split tensors.
    """
    if expected is None or len(expected.inputs) != len(inputs):
        return inputs
    results = []
    for tensor, full in zip(inputs, expected.inputs):
        old_note = follower.of(tensor)
        note = _repeated(tensor, old_note, full, follower)
        if note is old_note and _is_unrepeated(tensor, note, full, follower):
            axis = next((a for operand in inputs for a in follower.of(operand).tags), None)
            raise follower.refuse(
                f"`{expected.name}` gets a replicated tensor together with sharded ones",
                axis,
                "shard the projection that computes it in the same way: `shard(col, ...)`",
            )
        results.append(tensor if note is old_note else _stand_in(tensor))
        if note is not old_note:
            follower.put(results[-1], note)
    return results


def _repeated(tensor: Tensor, note: Note, full: Shape, follower: Follower) -> Note:
    """Return the note of a tensor in whose place the original's call gets one of shape
    `full`."""
    for repeat in follower.left_out:
        dim, times = repeat.dim, repeat.times
        if repeat.after != full or tensor.ndim != len(full):
            continue
        for axis, size in follower.sizes.items():
            tag = note.tags.get(axis)
            is_held = tag is not None and (tag.dim, tag.uneven.repeat) == (dim, times)
            single = axis in note.entered and repeat.before[dim] == 1
            if (is_held or single) and tensor.shape[dim] * size == full[dim]:
                blocks = tuple(n * times for n in tag.blocks) if tag else (times,)
                new_tag = Tag(dim, blocks, tag.by if tag else "", EVEN)
                tags = {**note.tags, axis: new_tag}
                return replace(note, tags=tags, entered=note.entered - {axis})
    return note


def _is_unrepeated(tensor: Tensor, note: Note, full: Shape, follower: Follower) -> bool:
    """Return whether a tensor is the original's full tensor before a repeat that ranks skip.

    Such a rank has all indices, and would combine them with other indices than the original does.
    The shapes do not show this where the rank has equally many indices of the other tensors.
    """
    dims = {tag.dim for tag in note.tags.values()}
    return any(
        repeat.after == full
        and tensor.ndim == len(full)
        and tensor.shape[repeat.dim] == repeat.before[repeat.dim] > 1
        and repeat.dim not in dims
        for repeat in follower.left_out
    )


def _stand_in(tensor: Tensor) -> Tensor:
    """Return an alias that can get another note: the model's own tensor keeps its note."""
    with torch._C.DisableTorchFunction():
        return tensor.detach().requires_grad_(tensor.requires_grad)


def _single(call: Call) -> bool:
    return len(call.inputs) == len(call.outputs) == 1


def _grown(before: Shape, after: Shape) -> int | None:
    """Return the only dim whose size changed, if the new size is a multiple of the old one."""
    if len(before) != len(after):
        return None
    changed = [dim for dim, (a, b) in enumerate(zip(before, after)) if a != b]
    fits = len(changed) == 1 and before[changed[0]] and after[changed[0]] % before[changed[0]] == 0
    return changed[0] if fits else None


# -- calls that have a rule -----------------------------------------------------------------------

ATTENTION = {"scaled_dot_product_attention", "flex_attention"}
MOVES = {
    *DEVICE_METHODS,
    *("adjoint", "as_subclass", "broadcast_to", "copy_", "data", "detach", "H"),
    *("matrix_H", "mH", "moveaxis", "permute_copy", "requires_grad_", "reshape_as"),
    *("fill", "fill_", "floordiv", "invert", "mod", "truediv", "zero", "zero_"),
    *("swapdims", "type_as", "view_as", "unsafe_split", "int", "long", "bool"),
}
# sums and scores along the dim that is an argument
DIMS = {"softmax", "log_softmax", "softmin", "cross_entropy", "nll_loss"}
# calls with other rules: of dims that are arguments, windows or joins
BY_RULE = {
    *(*ATTENTION, *DIMS, *FILLS, *JOINS, *LINEAR, *MERGES, *MOVES, *NORMS, *PARTS, *PRODUCTS),
    *(*MIXING, *REPEATING, *SUMMING),
}


def has_rule(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether there is a rule for what a call of this name does along each dim."""
    if name == "__getitem__":  # indices in a list or a tensor refer to the full dim
        return not any(isinstance(value, Tensor | list) for value in pytree.tree_leaves(args[1:]))
    if name == "repeat_interleave":  # without a dim all dims are flattened
        dim = args[2] if len(args) > 2 else kwargs.get("dim")
        return dim is not None
    bare_name = name.strip("_")
    names = {name, bare_name}
    if name.startswith("__") and bare_name[:1] in ("i", "r"):  # in place, or from the right
        names.add(bare_name[1:])
    return any(value in BY_RULE or value in ELEMENTWISE or _elementwise(value) for value in names)


def is_elementwise(name: str) -> bool:
    """Return whether calls of this name are elementwise; also in-place and reflected operators."""
    bare_name = name.strip("_")
    names = {name, bare_name}
    if name.startswith("__") and bare_name[:1] in ("i", "r"):
        names.add(bare_name[1:])
    return any(candidate in ELEMENTWISE or _elementwise(candidate) for candidate in names)


@cache
def _elementwise(name: str) -> bool:
    """Return whether torch tags all of its operators of this name as pointwise."""
    packet = getattr(torch.ops.aten, name.partition(".")[0], None)
    if packet is None or not hasattr(packet, "overloads"):
        return False
    names = [op for op in packet.overloads() if not op.endswith("out")]
    ops = [op for op in (getattr(packet, o) for o in names) if op._schema.arguments]
    on_tensors = [op for op in ops if str(op._schema.arguments[0].type) == "Tensor"]
    return bool(on_tensors) and all(torch.Tag.pointwise in op.tags for op in on_tensors)
