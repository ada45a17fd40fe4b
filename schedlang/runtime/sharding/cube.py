"""Products on a cube of ranks: 3-D tensor parallelism (Agarwal et al. 1995; Bian et al. 2021).

Along the first axis ranks see different rows of the batch, and hold slices of each weight.  The
inner dim of a weight (that of the input) lies along the third axis, its outer dim along the second;
an activation comes with its hidden dim over (third, second), and leaves with it over (second,
third), so that the next layer names the two in the other order.  Inputs are gathered along the
second axis and weights along the first, results summed and scattered along the third.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.placement import S
from schedlang.runtime.collectives.collective import Group, all_gather, reduce_scatter
from schedlang.runtime.sharding.grid import ALONE, InParts, own_words, product, turned
from schedlang.runtime.sharding.shard import Edge, Forward

if TYPE_CHECKING:
    from schedlang.runtime.sharding.leaf import Sharded


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
        """From block by block to part by part, or back."""
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
        if ctx.needs_input_grad[0]:
            whole = turned(_gathered(weight, inner, grid.down), inner)
            by_x = _summed(grad @ whole.t(), 1, grid.along).view(x.shape)
        if ctx.needs_input_grad[1]:
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


def projection(sharded: Sharded) -> Forward:
    """A Linear or Conv1D on a cube."""
    cube, edges = _lines(sharded)
    inner = 1 if sharded.kind == "cube Linear" else 0

    def multiply(x: Tensor, weight: Tensor) -> Tensor:
        return cast(Tensor, CubeProduct.apply(x, weight, cube, inner))  # type: ignore[no-untyped-call]

    return product(sharded.module, multiply, edges.get("in"), edges.get("out"))


def embedding(sharded: Sharded) -> Forward:
    """An embedding on a cube."""
    module, (cube, edges) = sharded.module, _lines(sharded)
    leave = edges.get("out")
    assert isinstance(module, nn.Embedding)

    def forward(ids: Tensor) -> Tensor:
        pad = module.padding_idx
        out: Tensor = CubeLookup.apply(ids, module.weight, cube, pad)  # type: ignore[no-untyped-call]
        return out if leave is None else leave.exit()(out)

    return forward
