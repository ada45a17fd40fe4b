"""Elements that several ranks compute and one owns: what others send back there must be zero.

Experts, heads or a vocabulary that are split: each rank computes for all places, and those that are
another's are hidden forward. Where backward does not hide them, the sum over ranks has more terms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from schedlang.passes.judge.terms import Tape
from schedlang.passes.localize.diagnose import fits

MOST = 1 << 20  # numbers that a rank keeps
FEWEST = 8  # elements that tell it
CLOSE = 1e-9


@dataclass(frozen=True)
class Note:
    """A tensor that a rank gave a function, or got from one, and the gradient that came back."""

    value: Tensor
    gradient: Tensor


class Noting(Tape):
    """Notes the tensors of some shapes in a rank's step, as they are when they are met."""

    def __init__(self, wanted: frozenset[torch.Size]) -> None:
        super().__init__()
        self.wanted, self.left = wanted, MOST
        self.values: dict[int, Tensor] = {}

    def watch(self, tensor: Tensor) -> None:
        """Note a tensor's value, and its gradient when it comes."""
        size = tensor.numel()
        asked = tensor.shape in self.wanted and not tensor.is_leaf and size <= self.left
        if asked and id(tensor) not in self.gradients and not isinstance(tensor, DTensor):
            self.left -= size
            self.values[id(tensor)] = tensor.detach().clone()
        super().watch(tensor)

    @property
    def notes(self) -> list[Note]:
        """The ones that a gradient came back to, in the order in which they were met."""
        pairs = ((value, self.gradients[key]) for key, value in self.values.items())
        return [Note(value, gradient) for value, gradient in pairs if gradient.numel()]


def shapes(tape: Tape) -> frozenset[torch.Size]:
    """The shapes of what the functions of a step give."""
    return frozenset(one.shape for call in tape.calls for one in call.outputs)


def unmasked(tape: Tape, ranks: Sequence[Sequence[Note]]) -> str:
    """Name the first result whose elements are each right on one rank, and not zero on others."""
    if len(ranks) < 2:
        return ""
    for call in reversed(tape.calls):
        for tensor in call.outputs:
            want = tape.gradient(tensor)
            if want is None or int((want != 0).sum()) < FEWEST:
                continue
            value = tensor.detach()
            if any(t._version != v for t, v in call.given):
                continue
            for gradients in _together(value, ranks):
                if _owned(want, gradients):
                    return (
                        f"the gradient of what {call.name} gives: each element is right on one "
                        "rank, but others add something there, where zero is due: what they "
                        "compute for elements that are not theirs is not masked in backward"
                    )
    return ""


def _together(value: Tensor, ranks: Sequence[Sequence[Note]]) -> Iterator[list[Tensor]]:
    """Yield the gradients of a tensor by its values, the first that each rank has, the second..."""
    each = [
        [
            note.gradient
            for note in notes
            if note.value.shape == value.shape and fits(note.value, value)
        ]
        for notes in ranks
    ]
    for one in zip(*each):
        yield list(one)


def _owned(want: Tensor, gradients: Sequence[Tensor]) -> bool:
    """Whether each element is right on exactly one rank, and every rank adds to those of others."""
    near = CLOSE * float(want.abs().max())
    there = want.abs() > near
    right = [(one - want).abs() <= near for one in gradients]
    count = torch.stack(right).sum(0)
    others = [there & ~ok & (one.abs() > near) for one, ok in zip(gradients, right)]
    return (
        bool((count[there] == 1).all())
        and all(bool((ok & there).any()) for ok in right)
        and any(bool(one.any()) for one in others)
    )
