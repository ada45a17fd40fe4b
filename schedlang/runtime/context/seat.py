"""The tokens of one microbatch that one rank has, and how its queries meet the keys of others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from schedlang.runtime import scope
from schedlang.runtime.attend import Layout, Mask
from schedlang.runtime.collective import Group


@dataclass(frozen=True)
class How:
    """How one attention exchanges keys and values: the method, and the groups, outermost first."""

    method: str
    groups: tuple[Group, ...] = ()


@dataclass(frozen=True)
class Call:
    """One call of an attention: [rows, heads, own tokens, size] each, and what else it is given.

    blind  what a query that sees no key gives: nothing, or the mean of all values (`eager`
           attention of transformers, which masks by very low numbers)
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask
    scale: float | None = None
    dropout: float = 0.0
    blind: Literal["zero", "mean"] = "zero"

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the result."""
        return (*self.query.shape[:-1], self.value.shape[-1])


Exchange = Callable[["Seat", How, Call], Tensor]


@dataclass(frozen=True, eq=False)
class Seat:
    """The place of a rank in a sequence: its tokens, in the order in which it has them.

    documents  integers [rows, own tokens]: which of several in a row a token is of; None: one
    more       the output of the model's head gets one more row, for labels that are shifted
    exchange   None: for shapes only
    """

    layout: Layout
    place: int
    exchange: Exchange | None = None
    documents: Tensor | None = None
    more: bool = False

    @property
    def index(self) -> int:
        """Which of the parts of the sequence this is."""
        return self.place

    @property
    def length(self) -> int:
        """How many tokens there are here."""
        return self.layout.counts[self.place]

    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        """Where in the sequence they stand."""
        return self.layout.positions(self.place, device)

    def hollow(self) -> Seat:
        """The same for shapes only: nothing is exchanged."""
        return replace(self, exchange=None)

    def attend(self, how: How, call: Call) -> Tensor:
        """Attention of the tokens here to those of the whole sequence."""
        if self.exchange is None:
            return call.query.new_empty(call.shape)
        return self.exchange(self, how, call)


def seated() -> Seat | None:
    """The seat that this thread runs a model for; None where sequences are whole."""
    found: Any = scope.visit()
    return found if isinstance(found, Seat) else None
