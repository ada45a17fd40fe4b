"""Repeats of key-value heads that the original makes, and a rank leaves out.

With one key-value head for each of its query heads a rank has nothing to repeat, and models skip
the calls then.  The calls of the original are told by their shapes: each head is repeated next to
itself, which is what makes a rank's one head the right one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from schedlang.placement import EVEN
from schedlang.runtime.following.notes import Note, Tag
from schedlang.runtime.following.trace import Call

if TYPE_CHECKING:
    from schedlang.runtime.following.follow import Follower

Shape = tuple[int, ...]
OPENS = ("__getitem__", "unsqueeze", "view", "reshape")
EXPANDS = ("expand", "expand_as", "broadcast_to", "repeat", "repeat_interleave")
MERGES = ("view", "reshape", "flatten")


@dataclass(frozen=True)
class Repeat:
    """So many calls of the original that repeat each index of a dim next to itself."""

    dim: int
    before: Shape
    after: Shape
    calls: int

    @property
    def times(self) -> int:
        """How often each index is repeated."""
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
    known = zip(chain, (OPENS, EXPANDS, MERGES))
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
    """May a call of these tensors be this one of the original?  Only split dims differ in size."""
    if not inputs or inputs[0].ndim != len(call.inputs[0]):
        return False
    split = {tag.dim for tag in follower.note(inputs[0]).tags.values()}
    sizes = enumerate(zip(inputs[0].shape, call.inputs[0]))
    return all(dim in split for dim, (a, b) in sizes if a != b)


def met(inputs: list[Tensor], expected: Call | None, follower: Follower) -> list[Tensor]:
    """The tensors of a call, those that the original has repeated noted as the original's."""
    if expected is None or not follower.left_out or len(expected.inputs) != len(inputs):
        return inputs
    found = []
    for tensor, whole in zip(inputs, expected.inputs):
        before = follower.note(tensor)
        note = _repeated(tensor, before, whole, follower)
        found.append(tensor if note is before else _stand_in(tensor))
        if note is not before:
            follower.put(found[-1], note)
    return found


def _repeated(tensor: Tensor, note: Note, whole: Shape, follower: Follower) -> Note:
    """What is known of a tensor for which the original's call is given one of this shape."""
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
