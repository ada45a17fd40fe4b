"""One microbatch between its forward and its backward on one stage: who it is, what it keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.graph import GradientEdge

from schedlang.runtime.recording.graph import Token
from schedlang.runtime.staging.bag import Bag
from schedlang.runtime.staging.split import SplitBackward
from schedlang.timeline import Op


class Work(NamedTuple):
    """A slice of a microbatch on a replica of a stage: what one forward and one backward are of."""

    stage: int
    replica: int
    microbatch: int
    slice: int


def work_of(op: Op) -> Work:
    """What an operation works on."""
    return Work(op.stage, op.replica, op.microbatch, op.slice)


class Message(NamedTuple):
    """The name of a message between two stages; `back`: gradients, along the edge backwards."""

    back: bool
    source: int
    target: int
    replica: int
    microbatch: int
    slice: int


class Carried(Protocol):
    """What slices of one microbatch hand to each other within a stage, beside the messages.

    `leaves()` came from earlier slices; they get a gradient in the backward, and `returned()` is
    called when they have it. `roots()` are what later slices took, with the gradients they gave.
    """

    def leaves(self) -> Sequence[torch.Tensor]:
        """What came from earlier slices."""

    def roots(self) -> tuple[Sequence[Any], Sequence[torch.Tensor]]:
        """What later slices took, and the gradients that they gave."""

    def returned(self) -> None:
        """The leaves have their gradients."""


@dataclass
class Flight:
    """What a stage keeps of a microbatch from its forward to its backward.

    leaves   what was received, where gradients go back from
    edges    where the gradients of what was sent enter
    split    the second half of a backward that was begun
    bag      what its forward saved, where that is carried away in between
    """

    leaves: dict[Token, torch.Tensor]
    edges: Mapping[Token, GradientEdge]
    loss: torch.Tensor | None = None
    split: SplitBackward | None = None
    carried: Carried | None = None
    bag: Bag | None = None
