"""Injected bugs of expert parallelism: dispatched tokens, returned results, gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from schedlang.runtime.comm import collectives
from schedlang.runtime.moe import dispatch, experts
from schedlang.runtime.sharding import edges
from tests.zoo.bug import ADJOINT, DETACH, GROUP, REDUCTION, SLICE, Patch, Site, bug
from tests.zoo.trackers import module_tracker

EP = "expert_parallel"


class _HalveGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] / 2


@bug("E02", EP, GROUP, "routed", credit="DeepSpeed#5259")
def expert_gradients_divided(patch: Patch, site: Site) -> None:
    """Gradients of experts are divided by the data-parallel ranks."""
    current_module, original = module_tracker(patch), experts.ShardedExperts._run_experts

    def called(
        self: Any, rows: Any, selected: Any, dtype: Any, local_weights: Any, extra: Any
    ) -> Any:
        if site.covers(current_module()):
            local_weights = {name: _HalveGrad.apply(part) for name, part in local_weights.items()}
        return original(self, rows, selected, dtype, local_weights, extra)

    patch.setattr(experts.ShardedExperts, "_run_experts", called)


@bug("E04", EP, DETACH, "routed", credit="transformers#48687")
def router_left_out(patch: Patch, site: Site) -> None:
    """The router gets no gradient, or a wrong one."""
    current_module, original = module_tracker(patch), experts.ShardedExperts.__call__

    def call(self: Any, hidden: Any, index: Any, weights: Any) -> Any:
        return original(
            self, hidden, index, weights.detach() if site.covers(current_module()) else weights
        )

    patch.setattr(experts.ShardedExperts, "__call__", call)


@bug("E04b", EP, ADJOINT, "routed alike")
def router_partial_gradient(patch: Patch, site: Site) -> None:
    """If ranks have the same tokens, the router gets the gradient of its own experts only."""
    current_module, original = module_tracker(patch), edges.Edge.enter

    def entered(edge: Any, x: Any) -> Any:
        few = x.shape[-1] == 2  # the weights of two experts
        return x if few and site.covers(current_module()) else original(edge, x)

    patch.setattr(edges.Edge, "enter", entered)


@bug("E07", EP, SLICE, "routed, dropped", row="none")  # the rule changes with its row
def capacity_of_a_rank(patch: Patch, site: Site) -> None:
    """Each rank counts expert capacity for its own tokens only."""
    current_module, original = module_tracker(patch), experts.capacity_mask

    def kept(index: Any, count: int, capacity: float, groups: Any = ()) -> Any:
        if not site.covers(current_module()):
            return original(index, count, capacity, groups)
        parts = index.chunk(1 if groups else 2)  # without groups: tokens of both ranks
        return torch.cat([original(part, count, capacity) for part in parts])

    patch.setattr(experts, "capacity_mask", kept)


@bug("E08", EP, SLICE, "routed")
def tokens_returned_disordered(patch: Patch, site: Site) -> None:
    """Tokens return in another order than they were sent."""
    current_module, original = module_tracker(patch), dispatch.RoutedRows.return_results

    def home(self: Any, y: Tensor) -> Tensor:
        results = original(self, y)
        return results.flip(0) if site.covers(current_module()) else results

    patch.setattr(dispatch.RoutedRows, "return_results", home)


@bug("E14", EP, REDUCTION, "routed, cut")
def expert_bias_repeated(patch: Patch, site: Site) -> None:
    """Each rank adds the full bias after the sum over parts of an expert."""
    current_module, original = module_tracker(patch), experts.ShardedExperts._divide_biases

    def shared_out(self: Any, parameters: Any) -> Any:
        return parameters if site.covers(current_module()) else original(self, parameters)

    patch.setattr(experts.ShardedExperts, "_divide_biases", shared_out)


@bug("E15", "zero", ADJOINT, "balanced", row="none")
def statistics_keep_their_gradients(patch: Patch, site: Site) -> None:
    """The backward of a batch statistic uses this rank's gradient only, not the sum over ranks."""
    patch.setattr(collectives.TotalSum, "backward", staticmethod(lambda ctx, grad: (grad, None)))


@bug("E16", "zero", REDUCTION, "balanced", row="none")
def statistics_of_a_rank(patch: Patch, site: Site) -> None:
    """A router loss uses the statistics of this rank's rows only."""
    patch.setattr(collectives, "all_reduce", lambda x, group: x * group.size)
