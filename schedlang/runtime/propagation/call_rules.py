"""Propagation rules for calls of torch: which dims stay split, meet, are padded or repeated.

* Which functions of torch look beyond one position, or one channel, of an activation.
* Do the parts that meet in a call meet as their wholes do? Shapes cannot tell: two tensors of
  which each rank holds as many elements may lie on the ranks in different orders, or be split
  along different dims of which each part has one element.  Calls that bring several tensors
  together say which dims of them meet; those must lie alike.
* What calls do to parts that several ranks hold, or that end in zeros, while they are followed.
  Key-value heads are fewer than the ranks: each is held by several, and the model repeats each
  head for its query heads.  A rank repeats its one head for its own query heads only, so the
  repeated dim is split evenly again.
* Repeats of key-value heads that the original makes, and a rank leaves out. With one key-value
  head for each of its query heads a rank has nothing to repeat, and models skip the calls then.
  The calls of the original are told by their shapes: each head is repeated next to itself, which
  is what makes a rank's one head the right one.
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
from schedlang.runtime.device import MOVERS
from schedlang.runtime.propagation.trace import Call, Note, Running, Tag
from schedlang.runtime.sharding.sizes import FILLS, PARTS

if TYPE_CHECKING:
    from schedlang.runtime.propagation.follow import Compared, Follower


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
IMAGES = ("unfold", "fold", "grid_sample", "pixel_shuffle", "pixel_unshuffle")  # of two dims
NORMS = ("group_norm", "batch_norm", "layer_norm", "rms_norm")
REACHING = {*WINDOWS, *NORMS, "pad", "interpolate", "upsample"}
FIRST = 2  # the first dim of positions of [batch, channels, positions...]


def reaches(
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    whole: tuple[int, ...],
    after: tuple[int, ...],
    integers: Sequence[int] = (),
) -> set[int]:
    """The dims of the main tensor along which a call mixes what stands at different places.

    `whole` and `after` are the original's shapes before and after it, `integers` its numbers.
    """
    if name in WINDOWS:
        return set(range(len(whole) - _positions(name, len(whole)), len(whole)))
    if name == "group_norm":  # a part of the channels is as many groups as the whole, cut across
        groups = kwargs.get("num_groups", args[1] if len(args) > 1 else None)
        return set(range(1 if groups == next(iter(integers), None) else FIRST, len(whole)))
    if name == "batch_norm":
        return {0, *range(FIRST, len(whole))}
    if name in ("layer_norm", "rms_norm"):
        shape = kwargs.get("normalized_shape", args[1] if len(args) > 1 else (0,))
        return set(range(len(whole) - len(tuple(shape)), len(whole)))
    if name == "pad":
        given = kwargs.get("pad", args[1] if len(args) > 1 else ())
        pairs = list(zip(given[::2], given[1::2]))
        return {len(whole) - 1 - at for at, pair in enumerate(pairs) if any(pair)}
    if name in ("interpolate", "upsample"):
        return _resized(args, kwargs, whole, after)
    return set()


def _positions(name: str, dims: int) -> int:
    """Return how many of so many dims are positions: the last ones, as rows may have no dim."""
    count = next((int(one) for one in name if one.isdigit()), 0)
    return count or (max(2, dims - FIRST) if name in IMAGES else dims - FIRST)


def _resized(
    args: Sequence[Any], kwargs: Mapping[str, Any], whole: tuple[int, ...], after: tuple[int, ...]
) -> set[int]:
    """All positions, unless each is only repeated, or every n-th is kept."""
    mode = kwargs.get("mode", args[3] if len(args) > 3 else "nearest")
    if mode not in ("nearest", "nearest-exact"):
        return set(range(FIRST, len(whole)))
    moved = range(FIRST, len(whole))
    return {d for d in moved if after[d] % whole[d] and whole[d] % after[d]}


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

# sums over a dim of both factors: where both are parts, each rank has its share of the sum
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
class Met:
    """One tensor of a call: its split over an axis, and its whole shape."""

    place: int  # among the tensors of the call
    tag: Tag
    whole: tuple[int, ...]

    @property
    def size(self) -> int:
        """The size of the whole dim."""
        return self.whole[self.tag.dim]

    def held(self, ranks: int, rank: int) -> list[int]:
        """The indices of the dim that a rank holds, in its order; -1 for zeros."""
        found = self.tag.positions(self.size, ranks, rank)
        return [index if index < self.size else -1 for index in found]


def check_meeting(step: Compared, axis: str) -> None:
    """Refuse parts that meet others than those that their wholes have beside them."""
    notes = [step.follower.of(tensor).tags.get(axis) for tensor in step.inputs]
    shapes = step.expected.inputs
    met = [Met(k, tag, shape) for k, (tag, shape) in enumerate(zip(notes, shapes)) if tag]
    how = _apart(step, met, step.follower.sizes[axis]) if len(met) > 1 else ""
    if how:
        raise step.follower.refuse(
            f"`{step.name}` gets tensors that are sharded over `{axis}` {how}",
            axis,
            "give the blocks of fused weights: `blocks=`",
            "gather one of them first: `output=R` on its row",
        )


def _apart(call: Running, met: Sequence[Met], ranks: int) -> str:
    """Describe how tensors split over one axis meet otherwise than their wholes do; "" if they do
    not."""
    dims = {meaning(call, one) for one in met}
    if len(met) < 2 or None in dims:
        return ""
    if len(dims) > 1:
        return "along different dims"
    alike = all(_alike(met[0], other, ranks) for other in met[1:])
    return "" if alike else "in different orders"


def meaning(call: Running, one: Met) -> object:
    """Return the role of a tensor's split dim in a call: equal for dims that meet; None: not
    known."""
    behind = one.tag.dim - len(one.whole)  # counted from the last
    name = call.name.strip("_").removeprefix("i" if call.name.startswith("__i") else "")
    if call.func is F.scaled_dot_product_attention:
        names = (("query", "size"), ("key", "size"), ("key", "size"), ("query", "key"))
        return behind if behind < -2 or one.place > 3 else names[one.place][behind]
    if name in ELEMENTWISE:
        return behind
    if name in JOINS:
        dim = call.kwargs.get("dim", call.args[1] if len(call.args) > 1 else 0)
        joined = isinstance(dim, int) and name != "stack" and dim % len(one.whole) == one.tag.dim
        return None if joined else behind
    if name in PRODUCTS:
        return _factor(one.place, behind, len(one.whole))
    if name == "baddbmm":
        return _factor(one.place - 1, behind, 3) if one.place else (-3, "left", "right")[behind]
    if name == "linear":
        if one.place:
            return ("out", "in")[behind] if one.place == 1 else "out"
        return "in" if behind == -1 else behind
    return _letter(call, one) if name == "einsum" else None


def _factor(place: int, behind: int, ndim: int) -> object:
    """Return the role of a dim in a product of matrices: of the batch, of the left or right, or
    summed."""
    if ndim == 1:
        return "sum"
    if behind < -2:
        return behind
    return (("left", "sum") if place == 0 else ("sum", "right"))[behind]


def _letter(call: Running, one: Met) -> object:
    """The letter of a dim in an einsum."""
    if not call.args or not isinstance(call.args[0], str) or "." in call.args[0]:
        return None
    terms = call.args[0].replace(" ", "").split("->")[0].split(",")
    return terms[one.place][one.tag.dim] if one.place < len(terms) else None


def _alike(a: Met, b: Met, ranks: int) -> bool:
    """Return whether each rank holds the same indices of both, or of one the head of each group."""
    if (a.tag.blocks, a.tag.uneven) == (b.tag.blocks, b.tag.uneven):
        return True
    few, many = sorted((a, b), key=lambda one: one.size)
    if not few.size or many.size % few.size:
        return False
    times = many.size // few.size
    for rank in range(ranks):
        heads, members = few.held(ranks, rank), many.held(ranks, rank)
        if len(members) % len(heads):
            return False
        each = len(members) // len(heads)
        if any(heads[at // each] != index // times for at, index in enumerate(members)):
            return False
    return True


EXPANDS = ("expand", "expand_as", "broadcast_to", "repeat")
MERGES = ("view", "reshape", "flatten")


def legal(step: Compared, axis: str) -> list[Uneven]:
    """Return the ways in which a dim of the result may lie on an axis; the shapes decide among
    them."""
    tags = _tags(step, axis)
    kinds = {tag.uneven for tag, _ in tags}
    if not kinds:
        return [EVEN, *step.follower.uneven_splits.get(axis, ())]
    if len(kinds) > 1:
        queries = tags[0][0].uneven  # which head each meets is checked where they meet
        grouped = step.func is F.scaled_dot_product_attention
        return [queries] if grouped and queries == EVEN else []
    (uneven,) = kinds
    merged = uneven.repeat > 1 and any(_merges(step, tag, whole) for tag, whole in tags)
    return [uneven, EVEN] if merged else [uneven]


def alike(step: Compared, local: tuple[int, ...], shape: tuple[int, ...]) -> int | None:
    """The dim of a result into which the parts that several ranks hold are repeated, if any."""
    for axis in step.follower.sizes:
        for tag, whole in _tags(step, axis):
            if tag.along is not None and shape == whole:
                return tag.along
            dim = tag.dim + 1 + len(shape) - len(whole)
            repeated = tag.uneven.repeat > 1 and step.name in EXPANDS and dim < len(shape)
            if repeated and local[dim] * tag.uneven.repeat == shape[dim]:
                return dim if whole[tag.dim + 1] == 1 else None
    return None


def opened(
    step: Compared, local: tuple[int, ...], shape: tuple[int, ...], differ: list[int]
) -> dict[str, Tag]:
    """The split of a result for which each rank repeats what all have whole less often."""
    if len(differ) != 1 or step.name not in (*EXPANDS, "repeat_interleave"):
        return {}
    (dim,), whole = differ, step.expected.inputs[0]
    before = dim - (len(shape) - len(whole))
    for axis in step.follower.of(step.inputs[0]).entered:
        alone = before < 0 or whole[before] == 1
        if alone and local[dim] * step.follower.sizes[axis] == shape[dim]:
            return {axis: Tag(dim, (shape[dim],))}
    return {}


def repeated(name: str, tag: Tag, before: int, after: int) -> tuple[int, ...]:
    """The blocks of a split dim that a call repeats; empty where it does not."""
    times, left = divmod(after, before)
    if left or times < 2:
        return ()
    if name in ("repeat", "tile"):
        return tag.blocks * times  # the whole of it again and again
    own = name == "repeat_interleave" and sum(tag.blocks) == before
    return tuple(block * times for block in tag.blocks) if own else ()


def mixed(notes: list[Note]) -> bool:
    """Do tensors meet that lie on the ranks in different ways?"""
    kinds = {tag.uneven for note in notes for tag in note.tags.values()}
    return len(kinds) > 1 or bool(kinds and any(note.entered for note in notes))


def _merges(step: Compared, tag: Tag, whole: tuple[int, ...]) -> bool:
    """Return whether the call repeats each part in place, next to itself."""
    if step.name == "repeat_interleave":
        dim: Any = step.kwargs.get("dim", step.args[2] if len(step.args) > 2 else None)
        return isinstance(dim, int) and dim % len(whole) == tag.dim
    if step.name not in MERGES or tag.along != tag.dim + 1:
        return False
    after = step.expected.outputs[0]
    outer, merged = math.prod(whole[: tag.dim]), whole[tag.dim] * whole[tag.along]
    return any(math.prod(after[:d]) == outer and n == merged for d, n in enumerate(after))


def _tags(step: Compared, axis: str) -> list[tuple[Tag, tuple[int, ...]]]:
    """The tags of the arguments on an axis, each with the whole shape of its argument."""
    shapes = step.expected.inputs
    notes = [step.follower.of(tensor).tags for tensor in step.inputs]
    return [(tags[axis], shape) for tags, shape in zip(notes, shapes) if axis in tags]


def met_whole(notes: list[Note], axis: str | None) -> int:
    """The size of the blocks of a split tensor among whole ones; 0 if all are split, or none."""
    tags = [note.tags.get(axis) for note in notes] if axis is not None else []
    found = next((tag.blocks[0] for tag in tags if tag is not None), 0)
    return found if None in tags and found > 1 else 0


def made_of(notes: list[Note], axis: str | None) -> tuple[frozenset[str], int]:
    """The parameters that whole tensors beside a split one are made of, and the size of its dim."""
    tags = [note.tags.get(axis) for note in notes] if axis is not None else []
    split = next((tag for tag in tags if tag is not None), None)
    roots = (note.roots for note, tag in zip(notes, tags) if tag is None)
    return frozenset().union(*roots), sum(split.blocks) if split is not None else 0


def factors(expected: Call, tag: Tag | None) -> tuple[int, ...]:
    """The sizes into which a reshape takes a split dim, slowest first: heads, in attention."""
    before, after = expected.inputs[0], expected.outputs[0]
    if tag is None:
        return ()
    outer, size = math.prod(before[: tag.dim]) * len(tag.blocks), before[tag.dim] // len(tag.blocks)
    for dim in range(len(after)):
        if math.prod(after[:dim]) == outer and after[dim] != 1:
            ends = (k for k in range(dim + 1, len(after) + 1) if math.prod(after[dim:k]) == size)
            return after[dim : next(ends, dim + 1)]
    return ()


def rows_joined(before: tuple[int, ...], tag: Tag, after: tuple[int, ...], dim: int) -> int:
    """Return the number of rows of heads that a reshape joins in a dim, one behind the other; 0:
    none."""
    outer, left = math.prod(before[: tag.dim]), math.prod(after[:dim])
    rows = outer // left if left else 0
    joined = len(tag.blocks) == 1 and rows > 1 and rows * before[tag.dim] == after[dim]
    return rows if joined else 0


def by(inputs: list[Tensor], axis: str | None) -> str:
    """The sharded module that split the first of some tensors over an axis, or over any."""
    tags = (tensor.__dict__.get("_schedlang_note", Note()).tags for tensor in inputs)
    return next((t.by for by in tags for a, t in by.items() if axis in (None, a) and t.by), "")


Shape = tuple[int, ...]
OPENS = ("__getitem__", "unsqueeze", "view", "reshape")
REPEATING = ("expand", "expand_as", "broadcast_to", "repeat", "repeat_interleave")


@dataclass(frozen=True)
class Repeat:
    """Calls of the original, `calls` of them, that repeat each index of a dim next to itself."""

    dim: int
    before: Shape
    after: Shape
    calls: int

    @property
    def times(self) -> int:
        """The number of times that each index is repeated."""
        return self.after[self.dim] // self.before[self.dim]


def repeat_at(calls: Sequence[Call]) -> Repeat | None:
    """The repeat that the first of some calls begins, if it begins one."""
    if not calls:
        return None
    first = calls[0]
    if first.name == "repeat_interleave" and _single(first):
        dim = _grown(first.inputs[0], first.outputs[0])
        return None if dim is None else Repeat(dim, first.inputs[0], first.outputs[0], 1)
    chain = calls[:3]
    known = zip(chain, (OPENS, REPEATING, MERGES))
    if len(chain) < 3 or not all(_single(one) and one.name in names for one, names in known):
        return None
    if any(a.outputs[0] != b.inputs[0] for a, b in zip(chain, chain[1:])):
        return None
    before, opened, wide, after = first.inputs[0], *(one.outputs[0] for one in chain)
    dim = _grown(before, after)
    if dim is None:
        return None
    times = after[dim] // before[dim]
    beside = (before[: dim + 1], before[dim + 1 :])
    right = opened == (*beside[0], 1, *beside[1]) and wide == (*beside[0], times, *beside[1])
    return Repeat(dim, before, after, 3) if right else None


def skipped(
    calls: Sequence[Call], name: str, inputs: Sequence[Tensor], follower: Follower
) -> list[Repeat]:
    """The repeats of the original at the head of its calls that a call of this name has passed."""
    found: list[Repeat] = []
    place = 0
    while repeat := repeat_at(calls[place : place + 3]):
        if calls[place].name == name and _fits(calls[place], inputs, follower):
            break
        found.append(repeat)
        place += repeat.calls
    agrees = place < len(calls) and calls[place].name == name
    return found if agrees else []


def _fits(call: Call, inputs: Sequence[Tensor], follower: Follower) -> bool:
    """Return whether a call of these tensors may be this one of the original: only split dims
    differ."""
    if not inputs or inputs[0].ndim != len(call.inputs[0]):
        return False
    split = {tag.dim for tag in follower.of(inputs[0]).tags.values()}
    sizes = enumerate(zip(inputs[0].shape, call.inputs[0]))
    return all(dim in split for dim, (a, b) in sizes if a != b)


def met(inputs: list[Tensor], expected: Call | None, follower: Follower) -> list[Tensor]:
    """The tensors of a call, those that the original has repeated noted as the original's."""
    if expected is None or len(expected.inputs) != len(inputs):
        return inputs
    found = []
    for tensor, whole in zip(inputs, expected.inputs):
        before = follower.of(tensor)
        note = _repeated(tensor, before, whole, follower)
        if note is before and _alone_whole(tensor, note, whole, follower):
            axis = next((a for other in inputs for a in follower.of(other).tags), None)
            raise follower.refuse(
                f"`{expected.name}` gets a tensor that is whole beside some that are sharded",
                axis,
                "shard the projection that makes it like those beside it: `shard(col, ...)`",
            )
        found.append(tensor if note is before else _stand_in(tensor))
        if note is not before:
            follower.put(found[-1], note)
    return found


def _repeated(tensor: Tensor, note: Note, whole: Shape, follower: Follower) -> Note:
    """Return the note of a tensor for which the original's call is given one of shape `whole`."""
    for repeat in follower.left_out:
        dim, times = repeat.dim, repeat.times
        if repeat.after != whole or tensor.ndim != len(whole):
            continue
        for axis, size in follower.sizes.items():
            tag = note.tags.get(axis)
            held = tag is not None and (tag.dim, tag.uneven.repeat) == (dim, times)
            alone = axis in note.entered and repeat.before[dim] == 1
            if (held or alone) and tensor.shape[dim] * size == whole[dim]:
                blocks = tuple(n * times for n in tag.blocks) if tag else (times,)
                made = Tag(dim, blocks, tag.by if tag else "", EVEN)
                tags = {**note.tags, axis: made}
                return replace(note, tags=tags, entered=note.entered - {axis})
    return note


def _alone_whole(tensor: Tensor, note: Note, whole: Shape, follower: Follower) -> bool:
    """Return whether a tensor is the original's as it was before a repeat that ranks leave out.

    A rank has all of its indices then, and each would meet another one than in the original: of as
    many as a rank has of the others, their number does not show it.
    """
    dims = {tag.dim for tag in note.tags.values()}
    return any(
        repeat.after == whole
        and tensor.ndim == len(whole)
        and tensor.shape[repeat.dim] == repeat.before[repeat.dim] > 1
        and repeat.dim not in dims
        for repeat in follower.left_out
    )


def _stand_in(tensor: Tensor) -> Tensor:
    """The same tensor to be noted otherwise: what the model holds keeps its own note."""
    with torch._C.DisableTorchFunction():
        return tensor.detach().requires_grad_(tensor.requires_grad)


def _single(call: Call) -> bool:
    return len(call.inputs) == len(call.outputs) == 1


def _grown(before: Shape, after: Shape) -> int | None:
    """The one dim that is a multiple of what it was."""
    if len(before) != len(after):
        return None
    found = [dim for dim, (a, b) in enumerate(zip(before, after)) if a != b]
    fits = len(found) == 1 and before[found[0]] and after[found[0]] % before[found[0]] == 0
    return found[0] if fits else None


# -- calls that a rule is about ------------------------------------------------------------------

ATTENTION = {"scaled_dot_product_attention", "flex_attention"}
MOVES = {
    *MOVERS,
    *("adjoint", "as_subclass", "broadcast_to", "copy_", "data", "detach", "H"),
    *("matrix_H", "mH", "moveaxis", "permute_copy", "requires_grad_", "reshape_as"),
    *("fill", "fill_", "floordiv", "invert", "mod", "truediv", "zero", "zero_"),
    *("swapdims", "type_as", "view_as", "unsafe_split", "int", "long", "bool"),
}
# sums and scores along a dim, of large tensors: by the dim that they name
DIMS = {"softmax", "log_softmax", "softmin", "cross_entropy", "nll_loss"}
# further rules of their own: of the dims that calls name, window or join
BY_RULE = {
    *(*ATTENTION, *DIMS, *FILLS, *JOINS, *LINEAR, *MERGES, *MOVES, *NORMS, *PARTS, *PRODUCTS),
    *(*REACHING, *REPEATING, *SUMMING),
}


def known(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether the name of a call tells what it does along each dim."""
    if name == "__getitem__":  # a list or a tensor of indices names places of the whole
        return not any(isinstance(one, Tensor | list) for one in pytree.tree_leaves(args[1:]))
    if name == "repeat_interleave":  # without a dim it takes all of them as one
        dim = args[2] if len(args) > 2 else kwargs.get("dim")
        return dim is not None
    plain = name.strip("_")
    names = {name, plain}
    if name.startswith("__") and plain[:1] in ("i", "r"):  # in place, or from the right
        names.add(plain[1:])
    return any(one in BY_RULE or one in ELEMENTWISE or _elementwise(one) for one in names)


def elementwise(name: str) -> bool:
    """Return whether a call of this name, in place or from the right too, is elementwise."""
    plain = name.strip("_")
    names = {name, plain}
    if name.startswith("__") and plain[:1] in ("i", "r"):
        names.add(plain[1:])
    return any(one in ELEMENTWISE or _elementwise(one) for one in names)


@cache
def _elementwise(name: str) -> bool:
    """Return whether torch itself says that all of its operators of this name are elementwise."""
    packet = getattr(torch.ops.aten, name.partition(".")[0], None)
    if packet is None or not hasattr(packet, "overloads"):
        return False
    some = [one for one in packet.overloads() if not one.endswith("out")]
    every = [one for one in (getattr(packet, o) for o in some) if one._schema.arguments]
    mine = [one for one in every if str(one._schema.arguments[0].type) == "Tensor"]
    return bool(mine) and all(torch.Tag.pointwise in one.tags for one in mine)
