"""Elements that several ranks compute and one owns: what others send back there must be zero.

Experts, heads or a vocabulary that are split: each rank computes for all places, and those that are
another's are hidden forward. Where backward does not hide them, the sum over ranks has more terms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from schedlang.ir import pytree
from schedlang.passes.judge.terms import Tape
from schedlang.passes.localize.diagnose import fits
from schedlang.runtime.modes import ATTRIBUTE

MOST = 1 << 20  # numbers that a rank keeps
FEWEST = 8  # elements that tell it
CLOSE = 1e-9


@dataclass
class Note:
    """A tensor that a rank gave a function, or got from one, and the gradient that came back."""

    value: Tensor
    gradient: Tensor | None = None


@dataclass
class Notes:
    """The tensors of some shapes in a rank's step, in the order in which they were met."""

    shapes: frozenset[torch.Size]
    found: list[Note] = field(default_factory=list)
    left: int = MOST


class Noting(TorchFunctionMode):
    """Notes the tensors of a step that gradients come back to."""

    def __init__(self, notes: Notes) -> None:
        super().__init__()
        self.into = notes
        self._known: dict[int, Tensor] = {}  # by identity

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note what a function takes, run it, and note what it gives."""
        kwargs = kwargs or {}
        if type(func) is ATTRIBUTE or func is torch.Tensor.backward:
            return func(*args, **kwargs)
        self._note((args, kwargs))
        made = func(*args, **kwargs)
        self._note(made)
        return made

    def _note(self, tree: Any) -> None:
        for leaf in pytree.tree_flatten(tree)[0]:
            if not isinstance(leaf, Tensor) or isinstance(leaf, DTensor) or id(leaf) in self._known:
                continue
            size = leaf.shape.numel()
            if not leaf.requires_grad or leaf.is_leaf or leaf.shape not in self.into.shapes:
                continue
            if not leaf.is_floating_point() or size > self.into.left:
                continue
            self.into.left -= size
            self._known[id(leaf)] = leaf  # kept, so that no other has its identity
            note = Note(leaf.detach().clone())
            self.into.found.append(note)
            leaf.register_hook(_kept(note))  # type: ignore[no-untyped-call]


def _kept(note: Note) -> Any:
    def keep(gradient: Tensor) -> None:
        new = gradient.detach().clone()
        note.gradient = new if note.gradient is None else note.gradient + new

    return keep


def shapes(tape: Tape) -> frozenset[torch.Size]:
    """The shapes of what the functions of a step give."""
    return frozenset(one.shape for call in tape.calls for one in call.outputs)


def unmasked(tape: Tape, ranks: Sequence[Notes]) -> str:
    """Name the first result whose elements are each right on one rank, and not zero on others."""
    if len(ranks) < 2:
        return ""
    for call in reversed(tape.calls):
        for tensor in call.outputs:
            want = tape.gradient(tensor)
            if want is None or int((want != 0).sum()) < FEWEST:
                continue
            value = tensor.detach()
            if call.given and any(t._version != v for t, v in call.given):
                continue
            for gradients in _together(value, ranks):
                if _owned(want, gradients):
                    return (
                        f"the gradient of what {call.name} gives: each element is right on one "
                        "rank, but others add something there, where zero is due: what they "
                        "compute for elements that are not theirs is not masked in backward"
                    )
    return ""


def _together(value: Tensor, ranks: Sequence[Notes]) -> Iterator[list[Tensor]]:
    """Yield the gradients of a tensor by its values, the first that each rank has, the second..."""
    each = [
        [
            note.gradient
            for note in notes.found
            if note.gradient is not None
            and note.value.shape == value.shape
            and fits(note.value, value)
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
