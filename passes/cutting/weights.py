"""What a run of units weighs on its stage, for cuts in balance: parameters, time or memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from schedlang.memory import MOMENTS
from schedlang.passes.cutting.stages import Weight
from schedlang.plan import Plan
from schedlang.timeline import Kind, Timeline

if TYPE_CHECKING:
    from schedlang.runtime.recording.graph import StageGraph


def weight_of(balance: str, plan: Plan, graph: StageGraph, timeline: Timeline) -> Weight:
    """The weight of a run of units.

    params  elements of the parameters that the run holds; one that several units share counts once
    time    floating-point operations of the forward, counted on the meta device; the backward of
            each is twice that, so it changes no cut
    memory  bytes at the peak: parameters, gradients and AdamW's state as they lie on a rank, and
            what the forward saves for the backward, for as many microbatches as the order keeps
            alive on that stage; a unit that is recomputed whole keeps its arguments only
    """
    if balance == "time":
        sums = [0, *accumulate(graph.flops)]
        return lambda stage, low, high: sums[high] - sums[low]
    held = _held(plan, graph)
    if balance == "params":
        table = _distinct(held, {n: float(f.numel) for n, f in plan.model.unique.items()})
        return lambda stage, low, high: table[low][high]
    table = _distinct(held, {name: state_bytes(plan, name) for name in plan.model.unique})
    alive, sums = in_flight(timeline), [0, *accumulate(_kept(plan, graph))]
    return lambda stage, low, high: table[low][high] + alive[stage] * (sums[high] - sums[low])


def in_flight(timeline: Timeline) -> tuple[float, ...]:
    """The most microbatches of each stage that are between forward and backward at one time.

    A slice of a microbatch counts as its share.
    """
    t = timeline
    made = (t.kind == Kind.F).astype(np.int64) - ((t.kind == Kind.B) | (t.kind == Kind.W))
    slices = max(1, int(t.slice.max(initial=0)) + 1)
    found = []
    for stage in range(t.stages):
        peaks = [
            int(np.cumsum(made[(t.stage == stage) & (t.replica == replica)]).max(initial=0))
            for replica in range(t.replicas)
        ]
        found.append(max(peaks) / slices)
    return tuple(found)


def state_bytes(plan: Plan, name: str) -> float:
    """Bytes of a parameter, its gradient and moments on one rank, between the cut's other rows."""
    fact = plan.model.unique[name]
    part = float(fact.itemsize)
    for dim in plan.held(name).local_shape(plan.mesh):
        part *= dim
    kinds = (3, 2, 1)  # the stage of ZeRO from which each is sliced: parameters, gradients, moments
    trained = part if fact.requires_grad else 0.0
    total = 0.0
    for least, size in zip(kinds, (part, trained, trained * MOMENTS)):
        for row in plan.replicas:
            size /= plan.mesh.size(row.axes) if row.stage >= least else 1.0
        total += size
    return total


def _held(plan: Plan, graph: StageGraph) -> list[set[str]]:
    """The parameters (first names) that each unit reads itself."""
    held: list[set[str]] = [set() for _ in graph.units]
    for name, owners in graph.owners.items():
        for unit in owners:
            held[unit].add(plan.model.parameters[name].name)
    return held


def _distinct(held: Sequence[set[str]], sizes: Mapping[str, float]) -> list[list[float]]:
    """Entry [low][high]: the sum over what units low to high - 1 hold, each name once."""
    table = []
    for low in range(len(held)):
        seen: set[str] = set()
        row, total = [0.0] * (low + 1), 0.0
        for names in held[low:]:
            total += sum(sizes[name] for name in names - seen)
            seen |= names
            row.append(total)
        table.append(row)
    return table


def _kept(plan: Plan, graph: StageGraph) -> list[int]:
    """Bytes that each unit keeps for the backward of one microbatch."""
    rows = [action for action in plan.actions if "recompute" in action.primitive.writes]
    first = {  # module -> the first of those that are recomputed with it, whose input is kept
        site: region[0]
        for action in rows
        for region in action.primitive.together(action.sites)
        for site in region
    }
    found = []
    for name, saved, given in zip(graph.units, graph.saved, graph.given):
        above = name
        while above and above not in first:
            above = above.rpartition(".")[0]
        inside = above in first
        found.append((given if first[above] == above else 0) if inside else saved)
    return found
