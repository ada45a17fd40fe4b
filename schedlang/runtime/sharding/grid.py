"""Products on a grid (SUMMA) or a cube (3-D) of ranks.

* Products on a grid of ranks: SUMMA, panel by panel (van de Geijn and Watts 1997). Rows of the
  grid see different rows of the batch, its columns hold different parts of the hidden dim of
  every activation.  A weight is split over both: its inner dim (that of the input) down the rows,
  its outer dim along the columns.  Step by step one panel of the input goes along each row of the
  grid and one panel of the weight down each column, so that no rank ever holds more than one
  panel besides its own parts (Optimus: Xu et al. 2021).  With replicas of the grid, 2.5-D
  (Tesseract: Wang et al. 2022).
* Products on a cube of ranks: 3-D tensor parallelism (Agarwal et al. 1995; Bian et al. 2021).
  Along the first axis ranks see different rows of the batch, and hold slices of each weight.  The
  inner dim of a weight (that of the input) lies along the third axis, its outer dim along the
  second; an activation comes with its hidden dim over (third, second), and leaves with it over
  (second, third), so that the next layer names the two in the other order.  Inputs are gathered
  along the second axis and weights along the first, results summed and scattered along the third.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.ir.placement import S
from schedlang.kernels.halves import asked
from schedlang.runtime.comm import collectives
from schedlang.runtime.comm.collectives import Group, all_gather, reduce_scatter
from schedlang.runtime.sharding.embedding import check_index
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
        return collectives.broadcast(self.of(part, dim), self.owner, self.group)

    def of(self, part: Tensor, dim: int) -> Tensor:
        """This rank's own piece at the panel's place."""
        return part.narrow(dim, self.start, self.length)

    def summed(self, term: Tensor, part: Tensor, dim: int) -> None:
        """Put the sum of all ranks' terms into the part of the rank that holds the panel."""
        total = collectives.reduce_to(term, self.owner, self.group)
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
        needed = asked(ctx, 2)
        by_x = torch.empty_like(flat) if needed[0] else None
        by_weight = torch.empty_like(weight) if needed[1] else None
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
        x = entry.enter(x) if entry is not None else x
        weight, bias = module._parameters["weight"], module._parameters.get("bias")
        assert weight is not None
        y = multiply(x, weight)
        y = y if bias is None else y + bias
        if leave is None:
            return y
        return head_of(y, leave) if leave.head else leave.exit(y)

    return forward


def projection(sharded: Sharded, own: Forward) -> Forward:
    """A Linear or Conv1D on a grid."""
    grid, edge = _grid(sharded.edges)
    inner = 1 if sharded.kind == "summa Linear" else 0

    def multiply(x: Tensor, weight: Tensor) -> Tensor:
        return cast(Tensor, Product.apply(x, weight, grid, inner))  # type: ignore[no-untyped-call]

    return product(sharded.module, multiply, edge, edge)


def embedding(sharded: Sharded, own: Forward) -> Forward:
    """An embedding on a grid."""
    module, (grid, edge) = sharded.module, _grid(sharded.edges)
    assert isinstance(module, nn.Embedding)

    def forward(ids: Tensor) -> Tensor:
        check_index(ids, module)
        out: Tensor = Lookup.apply(ids, module.weight, grid, module.padding_idx)  # type: ignore[no-untyped-call]
        return out if edge is None else edge.exit(out)

    return forward


@dataclass(frozen=True)
class Cube:
    """A rank's lines through the cube: `down` the first axis, `along` the second, `deep` the third.

    `blocks` lie side by side in the outer dim, and are scattered one by one.
    """

    down: Group
    along: Group
    deep: Group
    blocks: tuple[int, ...] = ()

    def scattered(self, x: Tensor) -> Tensor:
        """This rank's part of the sum over the third axis, block by block."""
        if self.deep.size == 1:
            return x
        return reduce_scatter(self._turned(x, inward=True), x.ndim - 1, self.deep)

    def gathered(self, x: Tensor) -> Tensor:
        """The opposite: the parts along the third axis, with each block in one piece."""
        if self.deep.size == 1:
            return x
        return self._turned(all_gather(x, x.ndim - 1, self.deep), inward=False)

    def _turned(self, x: Tensor, inward: bool) -> Tensor:
        """Reorder the last dim from block by block to part by part, or back."""
        if len(self.blocks) < 2:
            return x
        parts, whole = self.deep.size, sum(self.blocks)
        sizes = [x.shape[-1] * block // whole // parts for block in self.blocks]
        lengths = [size for size in sizes for _ in range(parts)] if inward else sizes * parts
        pieces = torch.split(x, lengths, -1)
        step = parts if inward else len(sizes)
        return torch.cat([piece for at in range(step) for piece in pieces[at::step]], -1)


class CubeProduct(InParts):
    """The product of an input and a weight on a cube; only this rank's parts are kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, grid: Cube, inner: int) -> Tensor:
        """Gather both, multiply, sum and scatter."""
        ctx.save_for_backward(x, weight)
        ctx.grid, ctx.inner = grid, inner
        whole = _gathered(x.reshape(-1, x.shape[-1]), 1, grid.along)
        out = grid.scattered(whole @ turned(_gathered(weight, inner, grid.down), inner))
        return out.view(*x.shape[:-1], out.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """Each factor is gathered again for the other's gradient."""
        (x, weight), grid, inner = ctx.saved_tensors, ctx.grid, ctx.inner
        grad = grid.gathered(grads[0].reshape(-1, grads[0].shape[-1]).to(weight.dtype))
        by_x = by_weight = None
        needed = asked(ctx, 2)
        if needed[0]:
            whole = turned(_gathered(weight, inner, grid.down), inner)
            by_x = _summed(grad @ whole.t(), 1, grid.along).view(x.shape)
        if needed[1]:
            whole = _gathered(x.reshape(-1, x.shape[-1]), 1, grid.along)
            by_weight = _summed(turned(whole.t() @ grad, inner), inner, grid.down)
        return by_x, by_weight, None, None


class CubeLookup(InParts):
    """Rows of a table on a cube: words along the second axis, the hidden dim along the third."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, grid: Cube, skip: int | None) -> Tensor:
        """Look up the words that are here, sum and scatter along the second axis."""
        local, mine = own_words(ids, weight, grid.along)
        ctx.save_for_backward(local, mine & (ids != skip) if skip is not None else mine)
        ctx.grid, ctx.words = grid, weight.shape[0]
        rows = F.embedding(local, _gathered(weight, 1, grid.down)) * mine[..., None]
        return _summed(rows, rows.ndim - 1, grid.along)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None, None]:
        """Gather along the second axis, add up by word, sum and scatter along the first."""
        (local, mine), grid = ctx.saved_tensors, ctx.grid
        grad = _gathered(grads[0], grads[0].ndim - 1, grid.along) * mine[..., None]
        term = grad.new_zeros(ctx.words, grad.shape[-1])
        term.index_add_(0, local.reshape(-1), grad.reshape(-1, grad.shape[-1]))
        return None, _summed(term, 1, grid.down), None, None


def _gathered(x: Tensor, dim: int, group: Group) -> Tensor:
    return x if group.size == 1 else all_gather(x, dim, group)


def _summed(x: Tensor, dim: int, group: Group) -> Tensor:
    return x if group.size == 1 else reduce_scatter(x, dim, group)


# -- forwards of modules --------------------------------------------------------------------------


def _lines(sharded: Sharded) -> tuple[Cube, dict[str, Edge]]:
    """The cube of a module, and its edges by what they are for."""
    edges = {edge.told: edge for edge in sharded.edges}
    groups = {role: edge.group for role, edge in edges.items()}
    computes = edges["out"].computes if "out" in edges else None
    blocks = computes.blocks if isinstance(computes, S) else ()
    down, along, deep = (groups.get(role, ALONE) for role in ("down", "along", "deep"))
    return Cube(down, along, deep, (1,) * blocks if isinstance(blocks, int) else blocks), edges


def cube_projection(sharded: Sharded, own: Forward) -> Forward:
    """A Linear or Conv1D on a cube."""
    cube, edges = _lines(sharded)
    inner = 1 if sharded.kind == "cube Linear" else 0

    def multiply(x: Tensor, weight: Tensor) -> Tensor:
        return cast(Tensor, CubeProduct.apply(x, weight, cube, inner))  # type: ignore[no-untyped-call]

    return product(sharded.module, multiply, edges.get("in"), edges.get("out"))


def cube_embedding(sharded: Sharded, own: Forward) -> Forward:
    """An embedding on a cube."""
    module, (cube, edges) = sharded.module, _lines(sharded)
    leave = edges.get("out")
    assert isinstance(module, nn.Embedding)

    def forward(ids: Tensor) -> Tensor:
        check_index(ids, module)
        pad = module.padding_idx
        out: Tensor = CubeLookup.apply(ids, module.weight, cube, pad)  # type: ignore[no-untyped-call]
        return out if leave is None else leave.exit(out)

    return forward
