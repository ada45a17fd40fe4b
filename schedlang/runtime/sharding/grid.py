"""Matrix products and lookups on a grid (SUMMA) or a cube (3-D) of ranks.

* On a grid: SUMMA, panel by panel (van de Geijn and Watts 1997).  Rows of the grid have different
  rows of the batch, columns have different shards of the hidden dim of every activation.  A weight
  is split over both: its inner dim (that of the input) down the rows, its outer dim along the
  columns.  In each step one panel of the input is broadcast along each row of the grid and one
  panel of the weight down each column, so a rank holds at most one panel besides its own shards
  (Optimus: Xu et al. 2021).  With replicas of the grid: 2.5-D (Tesseract: Wang et al. 2022).
* On a cube: 3-D tensor parallelism (Agarwal et al. 1995; Bian et al. 2021).  Along the first axis
  ranks have different rows of the batch, and hold slices of each weight.  The inner dim of a weight
  is split over the third axis, its outer dim over the second.  An activation arrives with its
  hidden dim split over (third, second), and leaves with it split over (second, third): the next
  layer names the two axes in the other order.  Inputs are all-gathered along the second axis and
  weights along the first; results are reduce-scattered along the third.
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
from schedlang.kernels.backward_halves import needed_gradients
from schedlang.runtime.comm import collectives
from schedlang.runtime.comm.collectives import Group, all_gather, reduce_scatter
from schedlang.runtime.sharding.edges import Edge, Forward, shard_logits
from schedlang.runtime.sharding.embedding import check_index

if TYPE_CHECKING:
    from schedlang.runtime.sharding.sharded_layer import ShardedLayer


Multiply = Callable[[Tensor, Tensor], Tensor]  # an input, a weight

SINGLE_RANK = Group((), (0,), 0)


@dataclass(frozen=True)
class Grid:
    """A rank's place in a grid: `along` is the group of its row, `down` the group of its column."""

    along: Group
    down: Group

    @property
    def panels(self) -> int:
        """The number of steps of a product, one for each panel of the inner dim.

        One column holds a panel of the input, one row a panel of the weight.
        """
        return math.lcm(self.along.size, self.down.size)

    def list_panels(self, inner: int) -> Iterator[tuple[Panel, Panel]]:
        """Yield each panel of a dim twice: in the shards along a row, in the shards down a column.

        `inner` is the full size of the dim.
        """
        count = self.panels
        assert inner % count == 0, (inner, count)
        for index in range(count):
            yield (
                _panel(index, count // self.along.size, inner // count, self.along),
                _panel(index, count // self.down.size, inner // count, self.down),
            )


@dataclass(frozen=True)
class Panel:
    """A panel of a dim: the rank of a group that holds it, and its place in that rank's shard."""

    owner: int
    start: int
    length: int
    group: Group

    def broadcast_from(self, part: Tensor, dim: int) -> Tensor:
        """Broadcast the panel from the rank that holds it to the group."""
        return collectives.broadcast(self.slice_of(part, dim), self.owner, self.group)

    def slice_of(self, part: Tensor, dim: int) -> Tensor:
        """Return the slice of this rank's shard at the panel's place."""
        return part.narrow(dim, self.start, self.length)

    def reduce_into(self, term: Tensor, part: Tensor, dim: int) -> None:
        """Reduce `term` over the group into the shard of the rank that holds the panel."""
        total = collectives.reduce_to(term, self.owner, self.group)
        if total is not None:
            self.slice_of(part, dim).copy_(total)


def _panel(index: int, per_rank: int, length: int, group: Group) -> Panel:
    owner, position = divmod(index, per_rank)
    return Panel(owner, position * length, length, group)


# -- y = x W --------------------------------------------------------------------------------------


class GridFunction(torch.autograd.Function):
    """Base of functions of an input and a weight on a grid; their backward reduces gradients."""

    @staticmethod
    def reduced_groups(ctx: Any) -> tuple[Group, ...]:
        """Return the groups over which the backward reduces gradients."""
        along, down = ctx.grid.along, ctx.grid.down
        groups = zip((along, down), ctx.needs_input_grad)
        return tuple(group for group, needed in groups if needed)


class GridProduct(GridFunction):
    """Product of a sharded input and a sharded weight; saves only the local shards for backward.

    `inner` is the dim of the weight that is multiplied with the input.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, grid: Grid, inner: int) -> Tensor:
        """Add up the products of the panels."""
        ctx.save_for_backward(x, weight)
        ctx.grid, ctx.inner = grid, inner
        flat, product = x.reshape(-1, x.shape[-1]), None
        for x_panel, weight_panel in grid.list_panels(weight.shape[inner] * grid.down.size):
            panels = (
                x_panel.broadcast_from(flat, 1),
                transpose_to_inner(weight_panel.broadcast_from(weight, inner), inner),
            )
            # out of place: a recomputation may hold the result of a product
            product = torch.mm(*panels) if product is None else torch.addmm(product, *panels)
        assert product is not None
        return product.view(*x.shape[:-1], product.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """Compute both gradients panel by panel; reduce each panel to the rank that holds it."""
        (x, weight), grid, inner = ctx.saved_tensors, ctx.grid, ctx.inner
        flat = x.reshape(-1, x.shape[-1])
        grad = grads[0].reshape(-1, grads[0].shape[-1]).to(weight.dtype)
        needed = needed_gradients(ctx, 2)
        by_x = torch.empty_like(flat) if needed[0] else None
        by_weight = torch.empty_like(weight) if needed[1] else None
        for x_panel, weight_panel in grid.list_panels(weight.shape[inner] * grid.down.size):
            if by_x is not None:
                panel = transpose_to_inner(weight_panel.broadcast_from(weight, inner), inner)
                x_panel.reduce_into(grad @ panel.t(), by_x, 1)
            if by_weight is not None:
                term = x_panel.broadcast_from(flat, 1).t() @ grad
                weight_panel.reduce_into(transpose_to_inner(term, inner), by_weight, inner)
        return by_x.view(x.shape) if by_x is not None else None, by_weight, None, None


def transpose_to_inner(panel: Tensor, inner: int) -> Tensor:
    """Return a weight as (inner, outer), or such a matrix in the weight's order of dims."""
    return panel if inner == 0 else panel.t()


# -- lookups in a table, panel by panel of the hidden dim -----------------------------------------


class GridLookup(GridFunction):
    """Lookup in a table: words are split along a row of the grid, the hidden dim down a column.

    This is the layout of the weight of a tied output layer.  Each column looks up its own words for
    one panel of the hidden dim; the results are reduced to the column that holds the panel.
    """

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, grid: Grid, skip: int | None) -> Tensor:
        """Look up panel by panel; `skip` is the index of padding, whose row has no gradient."""
        local, is_local = local_words(ids, weight, grid.along)
        ctx.save_for_backward(local, is_local & (ids != skip) if skip is not None else is_local)
        ctx.grid, ctx.shape = grid, weight.shape
        hidden = weight.shape[1] * grid.down.size
        output = weight.new_empty(*ids.shape, hidden // grid.along.size)
        for target, source in grid.list_panels(hidden):
            rows = F.embedding(local, source.broadcast_from(weight, 1)) * is_local[..., None]
            target.reduce_into(rows, output, output.ndim - 1)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None, None]:
        """Broadcast each panel's gradient along the row, sum by word, reduce down the column."""
        (local, is_local), grid, (row_count, width) = ctx.saved_tensors, ctx.grid, ctx.shape
        grad = grads[0]
        by_weight = grad.new_empty(row_count, width)
        for target, source in grid.list_panels(width * grid.down.size):
            panel = target.broadcast_from(grad, grad.ndim - 1) * is_local[..., None]
            term = grad.new_zeros(row_count, panel.shape[-1])
            term.index_add_(0, local.reshape(-1), panel.reshape(-1, panel.shape[-1]))
            source.reduce_into(term, by_weight, 1)
        return None, by_weight, None, None


def local_words(ids: Tensor, weight: Tensor, along: Group) -> tuple[Tensor, Tensor]:
    """Return words as indices into this rank's shard of the table, and a mask of local words."""
    row_count = weight.shape[0]
    local = ids - along.rank * row_count
    is_local = (local >= 0) & (local < row_count)
    return local.clamp(0, row_count - 1), is_local


# -- forwards of modules --------------------------------------------------------------------------


def _grid(edges: tuple[Edge, ...]) -> tuple[Grid, Edge | None]:
    """Return the grid of a module, and the edge that activations cross (None: one column)."""
    roles = {edge.variant: edge for edge in edges}
    along, down = roles.get("along"), roles.get("down")
    groups = (edge.group if edge is not None else SINGLE_RANK for edge in (along, down))
    return Grid(*groups), along


def product_forward(
    module: nn.Module, multiply: Multiply, entry: Edge | None, leave: Edge | None
) -> Forward:
    """Return the forward of a Linear or Conv1D: enter, `multiply`, add the bias, exit."""

    def forward(x: Tensor) -> Any:
        x = entry.enter(x) if entry is not None else x
        weight, bias = module._parameters["weight"], module._parameters.get("bias")
        assert weight is not None
        y = multiply(x, weight)
        y = y if bias is None else y + bias
        if leave is None:
            return y
        return shard_logits(y, leave) if leave.is_head else leave.exit(y)

    return forward


def grid_projection(sharded: ShardedLayer, own_forward: Forward) -> Forward:
    """Return the forward of a Linear or Conv1D on a grid."""
    grid, edge = _grid(sharded.edges)
    inner = 1 if sharded.kind == "summa Linear" else 0

    def multiply(x: Tensor, weight: Tensor) -> Tensor:
        return cast(Tensor, GridProduct.apply(x, weight, grid, inner))  # type: ignore[no-untyped-call]

    return product_forward(sharded.module, multiply, edge, edge)


def grid_embedding(sharded: ShardedLayer, own_forward: Forward) -> Forward:
    """Return the forward of an embedding on a grid."""
    module, (grid, edge) = sharded.module, _grid(sharded.edges)
    assert isinstance(module, nn.Embedding)

    def forward(ids: Tensor) -> Tensor:
        check_index(ids, module)
        output: Tensor = GridLookup.apply(ids, module.weight, grid, module.padding_idx)  # type: ignore[no-untyped-call]
        return output if edge is None else edge.exit(output)

    return forward


@dataclass(frozen=True)
class Cube:
    """A rank's groups in a cube: `down` of the first axis, `along` the second, `deep` the third.

    The outer dim consists of concatenated `blocks`, each of which is scattered by itself.
    """

    down: Group
    along: Group
    deep: Group
    blocks: tuple[int, ...] = ()

    def reduce_scatter_blocks(self, x: Tensor) -> Tensor:
        """Reduce-scatter the last dim over the third axis, block by block."""
        if self.deep.size == 1:
            return x
        return reduce_scatter(self._reorder_blocks(x, inward=True), x.ndim - 1, self.deep)

    def all_gather_blocks(self, x: Tensor) -> Tensor:
        """All-gather the last dim over the third axis, and put each block together."""
        if self.deep.size == 1:
            return x
        return self._reorder_blocks(all_gather(x, x.ndim - 1, self.deep), inward=False)

    def _reorder_blocks(self, x: Tensor, inward: bool) -> Tensor:
        """Reorder the last dim from blocks of shards to shards of blocks (`inward`), or back."""
        if len(self.blocks) < 2:
            return x
        parts, total = self.deep.size, sum(self.blocks)
        sizes = [x.shape[-1] * block // total // parts for block in self.blocks]
        lengths = [size for size in sizes for _ in range(parts)] if inward else sizes * parts
        shards = torch.split(x, lengths, -1)
        step = parts if inward else len(sizes)
        return torch.cat([shard for offset in range(step) for shard in shards[offset::step]], -1)


class CubeProduct(GridFunction):
    """Product of an input and a weight on a cube; saves only the local shards for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, grid: Cube, inner: int) -> Tensor:
        """All-gather both factors, multiply, reduce-scatter."""
        ctx.save_for_backward(x, weight)
        ctx.grid, ctx.inner = grid, inner
        gathered = _all_gather(x.reshape(-1, x.shape[-1]), 1, grid.along)
        product = grid.reduce_scatter_blocks(
            gathered @ transpose_to_inner(_all_gather(weight, inner, grid.down), inner)
        )
        return product.view(*x.shape[:-1], product.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """Gather each factor again for the gradient of the other."""
        (x, weight), grid, inner = ctx.saved_tensors, ctx.grid, ctx.inner
        grad = grid.all_gather_blocks(grads[0].reshape(-1, grads[0].shape[-1]).to(weight.dtype))
        by_x = by_weight = None
        needed = needed_gradients(ctx, 2)
        if needed[0]:
            gathered = transpose_to_inner(_all_gather(weight, inner, grid.down), inner)
            by_x = _reduce_scatter(grad @ gathered.t(), 1, grid.along).view(x.shape)
        if needed[1]:
            gathered = _all_gather(x.reshape(-1, x.shape[-1]), 1, grid.along)
            by_weight = _reduce_scatter(
                transpose_to_inner(gathered.t() @ grad, inner), inner, grid.down
            )
        return by_x, by_weight, None, None


class CubeLookup(GridFunction):
    """Lookup in a table on a cube: words split over the second axis, hidden dim over the third."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, grid: Cube, skip: int | None) -> Tensor:
        """Look up local words, reduce-scatter along the second axis."""
        local, is_local = local_words(ids, weight, grid.along)
        ctx.save_for_backward(local, is_local & (ids != skip) if skip is not None else is_local)
        ctx.grid, ctx.words = grid, weight.shape[0]
        rows = F.embedding(local, _all_gather(weight, 1, grid.down)) * is_local[..., None]
        return _reduce_scatter(rows, rows.ndim - 1, grid.along)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None, None]:
        """Gather along the second axis, sum by word, reduce-scatter along the first."""
        (local, is_local), grid = ctx.saved_tensors, ctx.grid
        grad = _all_gather(grads[0], grads[0].ndim - 1, grid.along) * is_local[..., None]
        term = grad.new_zeros(ctx.words, grad.shape[-1])
        term.index_add_(0, local.reshape(-1), grad.reshape(-1, grad.shape[-1]))
        return None, _reduce_scatter(term, 1, grid.down), None, None


def _all_gather(x: Tensor, dim: int, group: Group) -> Tensor:
    return x if group.size == 1 else all_gather(x, dim, group)


def _reduce_scatter(x: Tensor, dim: int, group: Group) -> Tensor:
    return x if group.size == 1 else reduce_scatter(x, dim, group)


# -- forwards of modules --------------------------------------------------------------------------


def _cube(sharded: ShardedLayer) -> tuple[Cube, dict[str, Edge]]:
    """Return the cube of a module, and its edges by role."""
    edges = {edge.variant: edge for edge in sharded.edges}
    groups = {role: edge.group for role, edge in edges.items()}
    computes = edges["out"].output_before if "out" in edges else None
    blocks = computes.blocks if isinstance(computes, S) else ()
    down, along, deep = (groups.get(role, SINGLE_RANK) for role in ("down", "along", "deep"))
    return Cube(down, along, deep, (1,) * blocks if isinstance(blocks, int) else blocks), edges


def cube_projection(sharded: ShardedLayer, own_forward: Forward) -> Forward:
    """Return the forward of a Linear or Conv1D on a cube."""
    cube, edges = _cube(sharded)
    inner = 1 if sharded.kind == "cube Linear" else 0

    def multiply(x: Tensor, weight: Tensor) -> Tensor:
        return cast(Tensor, CubeProduct.apply(x, weight, cube, inner))  # type: ignore[no-untyped-call]

    return product_forward(sharded.module, multiply, edges.get("in"), edges.get("out"))


def cube_embedding(sharded: ShardedLayer, own_forward: Forward) -> Forward:
    """Return the forward of an embedding on a cube."""
    module, (cube, edges) = sharded.module, _cube(sharded)
    leave = edges.get("out")
    assert isinstance(module, nn.Embedding)

    def forward(ids: Tensor) -> Tensor:
        check_index(ids, module)
        pad = module.padding_idx
        output: Tensor = CubeLookup.apply(ids, module.weight, cube, pad)  # type: ignore[no-untyped-call]
        return output if leave is None else leave.exit(output)

    return forward
