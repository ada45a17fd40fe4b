"""Capacity of experts under `relax(routing)`: which tokens are dropped, also by the original.

The capacity counts the tokens of the full batch, in the order of its rows, on any number of ranks.
A proof compares the program with the original under the same capacity, in one process. Without a
capacity both compute the unmodified model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.plan import Plan

if TYPE_CHECKING:
    from torch import nn

    from schedlang.runtime.moe.experts import Routing


def find_capacities(plan: Plan) -> Iterator[tuple[str, Routing]]:
    """Yield the modules whose experts have a capacity, with their routing."""
    for fqn, routing in plan.kind_options.items():
        if getattr(routing, "capacity", None) is not None:
            yield fqn, routing


def limit_capacity(plan: Plan, model: nn.Module) -> nn.Module:
    """Limit the experts of a full model to the capacities of a plan, in place; return the model."""
    from schedlang.runtime.moe.experts import limit_experts

    limit_experts(
        model,
        {fqn: (route.experts.count, route.capacity or 0.0) for fqn, route in find_capacities(plan)},
    )
    return model


def without_capacity(plan: Plan) -> Plan:
    """Return the plan without capacities: experts take all tokens."""
    unlimited = {fqn: replace(routing, capacity=None) for fqn, routing in find_capacities(plan)}
    return replace(plan, kind_options={**plan.kind_options, **unlimited})


def check_routing(plan: Plan) -> None:
    """Refuse (S422) a capacity that would count only a part of the batch's tokens."""
    for fqn, _ in find_capacities(plan):
        expert_axes = {b.axis for b in plan.boundaries[fqn]}
        unshared = [a for a in plan.data_axes if plan.mesh.size(a) > 1 and a not in expert_axes]
        axes = ", ".join(a for a in plan.mesh.sizes if a in expert_axes or a in unshared)
        title = f"the capacity of `{fqn}` would be counted over only a part of the batch"
        if unshared:
            notes = (f"the batch is split over `{unshared[0]}`, but its experts are not",)
            helps = (f"shard the experts over all of these axes: `view ep of ({axes})`",)
            raise Refusal.of("S422", title, notes=notes, helps=helps)
        if plan.micro > 1:
            notes = (f"the batch is split into {plan.micro} microbatches",)
            helps = ("use `micro=1`, or leave out `capacity=`",)
            raise Refusal.of("S422", title, notes=notes, helps=helps)
