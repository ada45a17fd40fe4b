"""The rule of `relax(routing)` by which experts drop tokens, for the original too.

The rule counts tokens of the whole batch in the order of its rows, on however many ranks they are;
so the original under the same rule, in one process, is what the program has to equal, and without
a limit both are the model as it is.
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


def routings(plan: Plan) -> Iterator[tuple[str, Routing]]:
    """The modules whose experts take a limited number of tokens."""
    for fqn, told in plan.told.items():
        if getattr(told, "capacity", None) is not None:
            yield fqn, told


def limited(plan: Plan, model: nn.Module) -> nn.Module:
    """The model of one process, in place, under the rules of a plan."""
    from schedlang.runtime.moe.experts import limit_experts

    limit_experts(
        model, {fqn: (told.experts.count, told.capacity or 0.0) for fqn, told in routings(plan)}
    )
    return model


def unlimited(plan: Plan) -> Plan:
    """The plan in which experts take all tokens."""
    free = {fqn: replace(told, capacity=None) for fqn, told in routings(plan)}
    return replace(plan, told={**plan.told, **free})


def check_routing(plan: Plan) -> None:
    """Refuse a limit that would be counted over a part of the batch only (S422)."""
    for fqn, _ in routings(plan):
        over = {b.axis for b in plan.boundaries[fqn]}
        apart = [a for a in plan.data_axes if plan.mesh.size(a) > 1 and a not in over]
        axes = ", ".join(a for a in plan.mesh.sizes if a in over or a in apart)
        title = f"the capacity of `{fqn}` would be counted over only a part of the batch"
        if apart:
            notes = (f"the batch is split over `{apart[0]}`, but its experts are not",)
            helps = (f"shard the experts over all of these axes: `view ep of ({axes})`",)
            raise Refusal.of("S422", title, notes=notes, helps=helps)
        if plan.micro > 1:
            notes = (f"the batch is split into {plan.micro} microbatches",)
            helps = ("use `micro=1`, or leave out `capacity=`",)
            raise Refusal.of("S422", title, notes=notes, helps=helps)
