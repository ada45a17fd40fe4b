"""What the stages of a plan cost: operations, bytes sent and bytes kept, counted without data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from schedlang.ir.plan import Plan
from schedlang.pipeline.cost import UNIT_COST, Cost

if TYPE_CHECKING:
    from schedlang.passes.partition.staging import Staged
    from schedlang.pipeline.timeline import Timeline
    from schedlang.runtime.tracing.graph import Leaf

MS = 1000.0


@dataclass(frozen=True)
class Machine:
    """Rates of a rank and a link: floating-point operations and bytes a second."""

    speed: float
    bandwidth: float


@dataclass(frozen=True)
class Estimate:
    """A plan's timeline and its costs, times in milliseconds; `notes` say what they are made of."""

    timeline: Timeline
    cost: Cost
    notes: tuple[str, ...]


def estimated(
    plan: Plan, batch: Mapping[str, Any] | None, loss: Callable[..., Any] | None, machine: Machine
) -> Estimate:
    """The costs of a plan's pipeline from the keyword arguments of one whole step.

    Without a batch stages are not known: then all cost one unit. Raises Refusal where the plan
    cannot be cut for this batch.
    """
    from schedlang.passes.partition.staging import stages_of, timeline_of

    if batch is None:
        line = timeline_of(plan)
        note = "nothing: the model file has no batch to count with; every stage costs the same"
        return Estimate(line, UNIT_COST, (note,))
    from schedlang.passes.propagate.propagate import propagate
    from schedlang.runtime.batch import sample_of

    micro = plan.order.micro if plan.order is not None else 1
    sample = sample_of(batch, plan.shares, micro)
    staged = stages_of(plan, propagate(plan, sample, loss), sample, loss)
    cost, notes = _cost(staged, machine)
    return Estimate(staged.timeline.with_edges(staged.cut.edges), cost, notes)


def _cost(staged: Staged, machine: Machine) -> tuple[Cost, tuple[str, ...]]:
    cut, ranks = staged.cut, staged.timeline.ranks
    flops, saved = (
        [sum(of_unit[unit] for unit in cut.units(stage)) for stage in range(cut.stages)]
        for of_unit in (cut.graph.flops, cut.graph.saved)
    )
    if not sum(flops):
        note = "nothing: no operation of this model has a known number of floating-point operations"
        return UNIT_COST, (note,)
    once = sum(flops) / ranks
    time = once / machine.speed * MS
    sent = {
        edge: sum(_bytes(cut.graph.leaves[token]) for token in tokens)
        for edge, tokens in cut.routes.items()
    }
    longest = max(sent.values(), default=0)
    cost = Cost(
        f=time,
        i=time,
        w=time,
        comm=longest / machine.bandwidth * MS,
        shares=tuple(Fraction(n) for n in flops),
        held=tuple(Fraction(n) for n in saved) if sum(saved) else None,
        between={edge: size / machine.bandwidth * MS for edge, size in sent.items()},
    )
    return cost, (
        f"F from {_si(once)}FLOP of a microbatch on one rank's share, at "
        f"{_si(machine.speed)}FLOP/s (--tflops); I and W as F; times in ms",
        f"transfers from their bytes, at most {_si(longest)}B, at {_si(machine.bandwidth)}B/s "
        "(--bandwidth)",
        f"M_B is {_si(sum(saved) / ranks)}B: what the forwards keep, but for parameters",
    )


def _bytes(leaf: Leaf) -> int:
    import math

    import torch

    kind: torch.dtype = getattr(torch, leaf.dtype)
    return math.prod(leaf.shape) * kind.itemsize


def _si(value: float) -> str:
    """A number with a prefix: `1.5 G`."""
    for prefix in ("", "k", "M", "G", "T"):
        if value < 1000:
            return f"{value:.3g} {prefix}"
        value /= 1000
    return f"{value:.3g} P"
