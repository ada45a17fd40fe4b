"""A chain of row-wise operators: its values, what it stores, and what is summed over all rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import fx

from schedlang.runtime.rowwise.roles import Grid

How = Literal["given", "point", "row", "column"]


@dataclass(frozen=True, eq=False)  # two are equal if they are one
class Value:
    """One value of a chain.

    how    `given`: a tensor, number `place`; `point`: an expression of the operands; `row`: a
           reduction along each row (`text` is sum, max or min); `column`: a sum over all rows
    rows   whether it differs from row to row
    cols   whether it differs from column to column
    """

    name: str
    how: How
    text: str
    operands: tuple[Value, ...]
    rows: bool
    cols: bool
    dtype: torch.dtype
    place: int = -1


@dataclass(frozen=True)
class Stored:
    """A result that the kernel writes."""

    value: Value
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class From:
    """Where an output of the graph comes from: `given`, `stored` or `tail` number `place`."""

    where: Literal["given", "stored", "tail", "none"]
    place: int = 0


@dataclass(frozen=True)
class Chain:
    """A graph as one kernel, and what torch does after it with the few sums over rows.

    tail   a graph of (the sums in order, given tensors numbered `wanted`); it is a few operators
           on tensors of one row: casts, sums of gradients
    """

    grid: Grid
    given: tuple[Value, ...]
    stored: tuple[Stored, ...]
    sums: tuple[Stored, ...]
    outputs: tuple[From, ...]
    tail: fx.Graph | None = field(default=None, repr=False)
    wanted: tuple[int, ...] = ()
