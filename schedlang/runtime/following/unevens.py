"""What calls do to parts that several ranks hold, or that end in zeros, while they are followed.

Key-value heads are fewer than the ranks: each is held by several, and the model repeats each head
for its query heads.  A rank repeats its one head for its own query heads only, so the repeated dim
is split evenly again.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import functional as F

from schedlang.placement import EVEN, Uneven
from schedlang.runtime.following.notes import Note, Tag
from schedlang.runtime.following.trace import Call

if TYPE_CHECKING:
    from schedlang.runtime.following.follow import Step

EXPANDS = ("expand", "expand_as", "broadcast_to", "repeat")
MERGES = ("view", "reshape", "flatten")


def legal(step: Step, axis: str) -> list[Uneven]:
    """How a dim of the result may lie on an axis; the shapes decide among them."""
    tags = _tags(step, axis)
    kinds = {tag.uneven for tag, _ in tags}
    if not kinds:
        return [EVEN, *step.follower.unevens.get(axis, ())]
    if len(kinds) > 1:
        queries = tags[0][0].uneven  # which head each meets is checked where they meet
        grouped = step.func is F.scaled_dot_product_attention
        return [queries] if grouped and queries == EVEN else []
    (uneven,) = kinds
    merged = uneven.repeat > 1 and any(_merges(step, tag, whole) for tag, whole in tags)
    return [uneven, EVEN] if merged else [uneven]


def alike(step: Step, local: tuple[int, ...], shape: tuple[int, ...]) -> int | None:
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
    step: Step, local: tuple[int, ...], shape: tuple[int, ...], differ: list[int]
) -> dict[str, Tag]:
    """The split of a result for which each rank repeats what all have whole less often."""
    if (
        step.expected is None
        or len(differ) != 1
        or step.name not in (*EXPANDS, "repeat_interleave")
    ):
        return {}
    (dim,), whole = differ, step.expected.inputs[0]
    before = dim - (len(shape) - len(whole))
    for axis in step.follower.note(step.inputs[0]).entered:
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


def _merges(step: Step, tag: Tag, whole: tuple[int, ...]) -> bool:
    """Is each part repeated in place here, next to itself?"""
    if step.name == "repeat_interleave":
        dim: Any = step.kwargs.get("dim", step.args[2] if len(step.args) > 2 else None)
        return isinstance(dim, int) and dim % len(whole) == tag.dim
    if step.name not in MERGES or tag.along != tag.dim + 1 or step.expected is None:
        return False
    after = step.expected.outputs[0]
    outer, merged = math.prod(whole[: tag.dim]), whole[tag.dim] * whole[tag.along]
    return any(math.prod(after[:d]) == outer and n == merged for d, n in enumerate(after))


def _tags(step: Step, axis: str) -> list[tuple[Tag, tuple[int, ...]]]:
    """The tags of the arguments on an axis, each with the whole shape of its argument."""
    shapes = step.expected.inputs if step.expected is not None else ()
    notes = [step.follower.note(tensor).tags for tensor in step.inputs]
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
    """How many rows of heads a reshape puts one behind the other in a dim; 0: none."""
    outer, left = math.prod(before[: tag.dim]), math.prod(after[:dim])
    rows = outer // left if left else 0
    joined = len(tag.blocks) == 1 and rows > 1 and rows * before[tag.dim] == after[dim]
    return rows if joined else 0


def by(inputs: list[Tensor], axis: str | None) -> str:
    """The sharded module that split the first of some tensors over an axis, or over any."""
    tags = (tensor.__dict__.get("_schedlang_note", Note()).tags for tensor in inputs)
    return next((t.by for by in tags for a, t in by.items() if axis in (None, a) and t.by), "")
