"""Injected bugs of 2D and 3D tensor parallelism: panels, column sums, partial statistics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from schedlang.ir import plan
from schedlang.runtime.comm import collectives
from schedlang.runtime.sharding import grid, norms
from tests.zoo.bug import ADJOINT, REDUCTION, SLICE, Patch, Site, bug


@bug("T40", "grid", REDUCTION, "grid", credit="SUMMA, the second product")
def weight_gradients_of_own_rows(patch: Patch, site: Site) -> None:
    """A rank keeps the weight gradient of its own rows: it is not summed down the column."""
    original = grid.Panel.reduce_into

    def summed(panel: grid.Panel, term: Tensor, part: Tensor, dim: int) -> None:
        if panel.group.axes != ("r",):
            original(panel, term, part, dim)
        elif panel.group.rank == panel.owner:
            panel.slice_of(part, dim).copy_(term)

    patch.setattr(grid.Panel, "reduce_into", summed)


@bug("T41", "grid", SLICE, "grid", credit="SUMMA, panels out of step")
def panels_out_of_step(patch: Patch, site: Site) -> None:
    """A panel of the input is multiplied by the weight panel of the next one."""
    original = grid.Grid.list_panels

    def cuts(self: grid.Grid, inner: int) -> Iterator[tuple[grid.Panel, grid.Panel]]:
        pairs = list(original(self, inner))
        rotated = pairs[1:] + pairs[:1]
        yield from (
            (input_panel, weight_panel)
            for (input_panel, _), (_, weight_panel) in zip(pairs, rotated)
        )

    patch.setattr(grid.Grid, "list_panels", cuts)


@bug("T42", "grid", REDUCTION, "grid", "cube", credit="split LayerNorm")
def statistics_of_own_part(patch: Patch, site: Site) -> None:
    """A norm takes mean and variance over this rank's part of the hidden dim."""
    patch.setattr(
        norms.SplitDimMode, "total", lambda self, x: x.sum(-1, keepdim=True) * self.group.size
    )


@bug("T43", "grid", ADJOINT, "grid", credit="as T02, of statistics")
def statistics_without_their_gradient(patch: Patch, site: Site) -> None:
    """Gradients of the mean and the variance from other ranks are not summed."""

    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].expand(*grads[0].shape[:-1], ctx.width), None

    patch.setattr(norms.SumLast, "backward", staticmethod(backward))


@bug("T44", "grid", REDUCTION, "grid", credit="expert gradients over dp, twice")
def complete_gradients_summed_again(patch: Patch, site: Site) -> None:
    """Gradients that are summed over columns are summed over replicas once more."""
    patch.setattr(plan.Plan, "replica_axes", lambda self, name: self.data_axes)


@bug("T45", "grid", SLICE, "cube", credit="as T08, of groups")
def parts_in_mesh_order(patch: Patch, site: Site) -> None:
    """Parts over two axes are numbered in mesh order, not in the order of the row."""
    patch.setattr(collectives.RankGroups, "_ordered", lambda self, group, axes: group)
