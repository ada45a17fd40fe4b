"""Bugs of expert parallelism: what goes to the experts, what comes back, and its gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from schedlang.runtime.comm import collectives
from schedlang.runtime.moe import dispatch, experts
from schedlang.runtime.sharding import edges
from tests.zoo.bug import ADJOINT, DETACH, GROUP, REDUCTION, SLICE, Patch, Site, bug
from tests.zoo.place import sharded_module

EP = "expert_parallel"


class _Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] / 2


@bug("E02", EP, GROUP, "routed", credit="DeepSpeed#5259")
def experts_divided(patch: Patch, site: Site) -> None:
    """Gradients of experts are divided by the data-parallel ranks."""
    here, plain = sharded_module(patch), experts.ShardedExperts._run_experts

    def called(self: Any, rows: Any, chosen: Any, dtype: Any, own: Any, held: Any) -> Any:
        if site.covers(here()):
            own = {name: _Halved.apply(part) for name, part in own.items()}
        return plain(self, rows, chosen, dtype, own, held)

    patch.setattr(experts.ShardedExperts, "_run_experts", called)


@bug("E04", EP, DETACH, "routed", credit="transformers#48687")
def router_left_out(patch: Patch, site: Site) -> None:
    """The router gets no gradient, or a wrong one."""
    here, plain = sharded_module(patch), experts.ShardedExperts.__call__

    def call(self: Any, hidden: Any, index: Any, weights: Any) -> Any:
        return plain(self, hidden, index, weights.detach() if site.covers(here()) else weights)

    patch.setattr(experts.ShardedExperts, "__call__", call)


@bug("E04b", EP, ADJOINT, "routed alike")
def router_gets_a_part(patch: Patch, site: Site) -> None:
    """Where ranks see the same tokens, the router gets the gradient of its own experts only."""
    here, plain = sharded_module(patch), edges.Edge.enter

    def entered(edge: Any, x: Any) -> Any:
        few = x.shape[-1] == 2  # the weights of two experts
        return x if few and site.covers(here()) else plain(edge, x)

    patch.setattr(edges.Edge, "enter", entered)


@bug("E07", EP, SLICE, "routed, dropped", row="none")  # the rule changes with its row
def capacity_of_a_rank(patch: Patch, site: Site) -> None:
    """Capacity is counted by each rank for itself."""
    here, plain = sharded_module(patch), experts.capacity_mask

    def kept(index: Any, count: int, capacity: float, groups: Any = ()) -> Any:
        if not site.covers(here()):
            return plain(index, count, capacity, groups)
        parts = index.chunk(1 if groups else 2)  # without groups: tokens of both ranks
        return torch.cat([plain(part, count, capacity) for part in parts])

    patch.setattr(experts, "capacity_mask", kept)


@bug("E08", EP, SLICE, "routed")
def tokens_come_back_disordered(patch: Patch, site: Site) -> None:
    """Tokens come back in another order than they went."""
    here, plain = sharded_module(patch), dispatch.RoutedRows.return_results

    def home(self: Any, y: Tensor) -> Tensor:
        back = plain(self, y)
        return back.flip(0) if site.covers(here()) else back

    patch.setattr(dispatch.RoutedRows, "return_results", home)


@bug("E14", EP, REDUCTION, "routed, cut")
def parts_of_experts_stay_apart(patch: Patch, site: Site) -> None:
    """Each rank adds all of a bias that stands behind the sum over parts of an expert."""
    here, plain = sharded_module(patch), experts.ShardedExperts._divide_biases

    def shared_out(self: Any, parameters: Any) -> Any:
        return parameters if site.covers(here()) else plain(self, parameters)

    patch.setattr(experts.ShardedExperts, "_divide_biases", shared_out)


@bug("E15", "zero", ADJOINT, "balanced", row="none")
def statistics_keep_their_gradients(patch: Patch, site: Site) -> None:
    """A statistic of the batch passes back what this rank's loss gives, not what all give."""
    patch.setattr(collectives.TotalSum, "backward", staticmethod(lambda ctx, grad: (grad, None)))


@bug("E16", "zero", REDUCTION, "balanced", row="none")
def statistics_of_a_rank(patch: Patch, site: Site) -> None:
    """A router loss is made of the statistics of this rank's rows."""
    patch.setattr(collectives, "all_reduce", lambda x, group: x * group.size)
