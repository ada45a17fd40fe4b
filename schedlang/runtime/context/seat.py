"""The tokens of one microbatch that one rank has, and how its queries meet the keys of others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from schedlang.runtime import scope
from schedlang.runtime.attend import Layout, Mask
from schedlang.runtime.collectives.collective import Group


@dataclass(frozen=True)
class How:
    """How one attention exchanges keys and values: the method, and the groups, outermost first."""

    method: str
    groups: tuple[Group, ...] = ()


@dataclass(frozen=True)
class Call:
    """One call of an attention: [rows, heads, own tokens, size] each, and what else it is given.

    drawn  what `Seat.draw` gave, where the model's own dropout of weights was asked first
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
    drawn: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the result."""
        return (*self.query.shape[:-1], self.value.shape[-1])


class Exchange(Protocol):
    """How queries meet the keys of other ranks."""

    def __call__(self, seat: Seat, how: How, call: Call) -> Tensor:
        """The attention of the tokens of a seat to those of the whole sequence."""

    def drawn(self, seat: Seat, p: float, rows: int, heads: int) -> Any:
        """Which weights are dropped by what the module that runs now would draw."""


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

    def draw(self, p: float, rows: int, heads: int) -> Any:
        """Which weights a call of attention will drop, for `Call.drawn`."""
        return None if self.exchange is None else self.exchange.drawn(self, p, rows, heads)


def seated() -> Seat | None:
    """The seat that this thread runs a model for; None where sequences are whole."""
    found: Any = scope.visit()
    return found if isinstance(found, Seat) else None
