"""Products on a grid of ranks: SUMMA, panel by panel (van de Geijn and Watts 1997).

Rows of the grid see different rows of the batch, its columns hold different parts of the hidden
dim of every activation.  A weight is split over both: its inner dim (that of the input) down the
rows, its outer dim along the columns.  Step by step one panel of the input goes along each row of
the grid and one panel of the weight down each column, so that no rank ever holds more than one
panel besides its own parts (Optimus: Xu et al. 2021).  With replicas of the grid, 2.5-D
(Tesseract: Wang et al. 2022).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.runtime.collectives import collective
from schedlang.runtime.collectives.collective import Group
from schedlang.runtime.sharding.crossing import shared
from schedlang.runtime.sharding.shard import Edge, Forward, head_of

if TYPE_CHECKING:
    from schedlang.runtime.sharding.leaf import Sharded

Multiply = Callable[[Tensor, Tensor], Tensor]  # an input, a weight

ALONE = Group((), (0,), 0)


@dataclass(frozen=True)
class Grid:
    """A rank's row and column: `along` are the ranks of its row, `down` those of its column."""

    along: Group
    down: Group

    @property
    def panels(self) -> int:
        """The steps of a product: panels of the inner dim, each held by one column and one row."""
        return math.lcm(self.along.size, self.down.size)

    def cuts(self, inner: int) -> Iterator[tuple[Panel, Panel]]:
        """Each panel as it lies in the parts along a row, and in the parts down a column.

        `inner` is the size of the whole dim.
        """
        count = self.panels
        assert inner % count == 0, (inner, count)
        for place in range(count):
            yield (
                _panel(place, count // self.along.size, inner // count, self.along),
                _panel(place, count // self.down.size, inner // count, self.down),
            )


@dataclass(frozen=True)
class Panel:
    """One panel of a dim: which rank of a group holds it, and where in that rank's part."""

    owner: int
    start: int
    length: int
    group: Group

    def sent(self, part: Tensor, dim: int) -> Tensor:
        """The panel, from the rank that holds it to all of the group."""
        return collective.broadcast(self.of(part, dim), self.owner, self.group)

    def of(self, part: Tensor, dim: int) -> Tensor:
        """This rank's own piece at the panel's place."""
        return part.narrow(dim, self.start, self.length)

    def summed(self, term: Tensor, part: Tensor, dim: int) -> None:
        """Put the sum of all ranks' terms into the part of the rank that holds the panel."""
        total = collective.reduce_to(term, self.owner, self.group)
        if total is not None:
            self.of(part, dim).copy_(total)


def _panel(place: int, each: int, length: int, group: Group) -> Panel:
    owner, at = divmod(place, each)
    return Panel(owner, at * length, length, group)


# -- y = x W --------------------------------------------------------------------------------------


class InParts(torch.autograd.Function):
    """A function of an input and a weight on a grid, whose backward sums its gradients itself."""

    @staticmethod
    def summed(ctx: Any) -> tuple[Group, ...]:
        """The groups over which the backward has to sum."""
        along, down = ctx.grid.along, ctx.grid.down
        groups = zip((along, down), ctx.needs_input_grad)
        return tuple(group for group, needed in groups if needed)


class Product(InParts):
    """The product of an input and a weight, both in parts; only these are kept for backward.

    `inner` is the dim of the weight that meets the input.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, grid: Grid, inner: int) -> Tensor:
        """Add up the products of the panels."""
        ctx.save_for_backward(x, weight)
        ctx.grid, ctx.inner = grid, inner
        flat, out = x.reshape(-1, x.shape[-1]), None
        for mine, theirs in grid.cuts(weight.shape[inner] * grid.down.size):
            panels = mine.sent(flat, 1), turned(theirs.sent(weight, inner), inner)
            # a new tensor each time: a recomputation may keep what a product gave
            out = torch.mm(*panels) if out is None else torch.addmm(out, *panels)
        assert out is not None
        return out.view(*x.shape[:-1], out.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """Panels of both gradients, each summed to the rank that holds it."""
        (x, weight), grid, inner = ctx.saved_tensors, ctx.grid, ctx.inner
        flat, grad = (
            x.reshape(-1, x.shape[-1]),
            grads[0].reshape(-1, grads[0].shape[-1]).to(weight.dtype),
        )
        by_x = torch.empty_like(flat) if ctx.needs_input_grad[0] else None
        by_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for mine, theirs in grid.cuts(weight.shape[inner] * grid.down.size):
            if by_x is not None:
                panel = turned(theirs.sent(weight, inner), inner)
                mine.summed(grad @ panel.t(), by_x, 1)
            if by_weight is not None:
                term = mine.sent(flat, 1).t() @ grad
                theirs.summed(turned(term, inner), by_weight, inner)
        return by_x.view(x.shape) if by_x is not None else None, by_weight, None, None


def turned(panel: Tensor, inner: int) -> Tensor:
    """A weight as (inner, outer), or back."""
    return panel if inner == 0 else panel.t()


# -- rows of a table, in parts of the hidden dim --------------------------------------------------


class Lookup(InParts):
    """Rows of a table whose words are split along a row of the grid, its hidden dim down a column.

    A tied output layer holds its weight so.  Each column looks up its own words for one panel of
    the hidden dim, and the sum goes to the column that holds the panel.
    """

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, grid: Grid, skip: int | None) -> Tensor:
        """Panel by panel; `skip` is the word of padding, whose row has no gradient."""
        local, mine = own_words(ids, weight, grid.along)
        ctx.save_for_backward(local, mine & (ids != skip) if skip is not None else mine)
        ctx.grid, ctx.shape = grid, weight.shape
        hidden = weight.shape[1] * grid.down.size
        out = weight.new_empty(*ids.shape, hidden // grid.along.size)
        for to, source in grid.cuts(hidden):
            rows = F.embedding(local, source.sent(weight, 1)) * mine[..., None]
            to.summed(rows, out, out.ndim - 1)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None, None]:
        """The gradient of each panel goes along the row, then each column's sum to its holder."""
        (local, mine), grid, (words, width) = ctx.saved_tensors, ctx.grid, ctx.shape
        grad = grads[0]
        by_weight = grad.new_empty(words, width)
        for to, source in grid.cuts(width * grid.down.size):
            panel = to.sent(grad, grad.ndim - 1) * mine[..., None]
            term = grad.new_zeros(words, panel.shape[-1])
            term.index_add_(0, local.reshape(-1), panel.reshape(-1, panel.shape[-1]))
            source.summed(term, by_weight, 1)
        return None, by_weight, None, None


def own_words(ids: Tensor, weight: Tensor, along: Group) -> tuple[Tensor, Tensor]:
    """The places of words in this rank's part of the table, and which of them are there."""
    words = weight.shape[0]
    local = ids - along.rank * words
    mine = (local >= 0) & (local < words)
    return local.clamp(0, words - 1), mine


# -- forwards of modules --------------------------------------------------------------------------


def _grid(edges: tuple[Edge, ...]) -> tuple[Grid, Edge | None]:
    """The grid of a module, and the edge that its activations cross (None: one column)."""
    roles = {edge.told: edge for edge in edges}
    along, down = roles.get("along"), roles.get("down")
    groups = (edge.group if edge is not None else ALONE for edge in (along, down))
    return Grid(*groups), along


def product(
    module: nn.Module, multiply: Multiply, entry: Edge | None, leave: Edge | None
) -> Forward:
    """A Linear or Conv1D whose product is taken in parts: enter, multiply, add the bias, leave."""

    def forward(x: Tensor) -> Any:
        x = shared(entry.entry(), x) if entry is not None else x
        weight, bias = module._parameters["weight"], module._parameters.get("bias")
        assert weight is not None
        y = multiply(x, weight)
        y = y if bias is None else y + bias
        if leave is None:
            return y
        return head_of(y, leave) if leave.head else leave.exit()(y)

    return forward


def projection(sharded: Sharded) -> Forward:
    """A Linear or Conv1D on a grid."""
    grid, edge = _grid(sharded.edges)
    inner = 1 if sharded.kind == "summa Linear" else 0

    def multiply(x: Tensor, weight: Tensor) -> Tensor:
        return cast(Tensor, Product.apply(x, weight, grid, inner))  # type: ignore[no-untyped-call]

    return product(sharded.module, multiply, edge, edge)


def embedding(sharded: Sharded) -> Forward:
    """An embedding on a grid."""
    module, (grid, edge) = sharded.module, _grid(sharded.edges)
    assert isinstance(module, nn.Embedding)

    def forward(ids: Tensor) -> Tensor:
        out: Tensor = Lookup.apply(ids, module.weight, grid, module.padding_idx)  # type: ignore[no-untyped-call]
        return out if edge is None else edge.exit()(out)

    return forward
