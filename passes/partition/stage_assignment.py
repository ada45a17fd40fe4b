"""Assignment of units to stages: at named modules, evenly, or balanced by a weight.

The weight of a run of units on a stage is its parameters, its time or its memory (`weight_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np

from schedlang.diagnostics.diagnostic import (
    Label,
    Refusal,
    facts_of_unknown,
    find_closest,
    quote_names,
)
from schedlang.ir.annotations import StageCut
from schedlang.ir.memory import ADAMW_MOMENTS
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import Facet
from schedlang.passes.partition.stage_partition import (
    SLOWEST,
    PartitionProblem,
    StageOption,
    find_partition,
)
from schedlang.pipeline.timeline.table import Kind, Timeline
from schedlang.runtime.tracing.stage_graph import refusal

if TYPE_CHECKING:
    from schedlang.runtime.tracing.stage_graph import StageGraph


RunWeight = Callable[[int, int, int], float]
MODULE_LISTS = ("ModuleList", "ModuleDict", "Sequential")


@dataclass(frozen=True)
class ChainUnit:
    """A unit in call order: its name, number of parameters, and whether it belongs to the trunk.

    Only trunk units are counted for even stages; units before and after the trunk belong to the
    first and the last stage.
    """

    name: str
    params: int
    trunk: bool = True


def stages_starting_at(units: Sequence[ChainUnit], starts: Sequence[str]) -> tuple[int, ...]:
    """Return the stage of each unit, where a new stage starts at each module in `starts` (S613)."""
    names = [unit.name for unit in units]
    places = [_index_of(names, start) for start in starts]
    if len(places) != len(set(places)) or 0 in places:
        raise refusal(
            "S613",
            "",
            f"`{names[0]}` is the first module: no stage would be before it"
            if 0 in places
            else "two stages start at one module",
            f"stages may start at {quote_names(names[1:])}",
        )
    return _stage_numbers(len(units), places)


def _index_of(names: Sequence[str], start: str) -> int:
    """Return the index of the first unit that is the module `start` or is inside it."""
    for place, name in enumerate(names):
        if name == start or name.startswith((f"{start}.", f"{start}#")):
            return place
    near, facts = find_closest(start, names), facts_of_unknown(start, names)
    helps = (f"did you mean `{near}`?",) if near else (", ".join(names),)
    title = "is not a module at which a stage can start"
    raise refusal("S613", start, title, *helps, facts=facts)


def even_stages(units: Sequence[ChainUnit], stages: int) -> tuple[int, ...]:
    """Return the stage of each unit, with equal numbers of trunk units per stage.

    Where the numbers cannot be equal, earlier stages have one more unit, since the last stage also
    has the units after the trunk.
    """
    trunk = [unit.name for unit in units if unit.trunk]
    _check_count(len(trunk), stages)
    size, more = divmod(len(trunk), stages)
    starts = list(accumulate(size + (k < more) for k in range(stages - 1)))
    return stages_starting_at(units, [trunk[start] for start in starts])


def balanced_stages(
    units: Sequence[ChainUnit], stages: int, weight: RunWeight | None = None
) -> tuple[int, ...]:
    """Return the stage of each unit such that the largest weight of a stage is smallest.

    Every stage has a trunk unit. `weight(stage, first, after)` is the weight of units first to
    after - 1 on a stage, not necessarily a sum over units; by default the number of parameters. The
    result is exact. Of equal results it is the one with the earliest starts.
    """
    trunk = [k for k, unit in enumerate(units) if unit.trunk]
    _check_count(len(trunk), stages)
    bounds = [
        0,
        *trunk[1:],
        len(units),
    ]  # units before the trunk belong to its first unit, units after it to its last
    count, sums = len(trunk), [0, *accumulate(unit.params for unit in units)]

    def menu(first: int, last: int, devices: range, after: int) -> Iterator[StageOption]:
        """Yield the option of a stage; the order of units is reversed."""
        low, high = bounds[count - last], bounds[count - first]
        yield StageOption(weight(after, low, high) if weight else sums[high] - sums[low], 0.0)

    found = find_partition(
        PartitionProblem(count, menu, devices=stages, stages=stages, prefer_long_first=True),
        SLOWEST,
    )
    assert found is not None  # there is no memory limit
    return _stage_numbers(len(units), [bounds[at] for at in accumulate(found.units[:0:-1])])


REGIONS = {Facet.RECOMPUTE: "recomputes", Facet.STRUCTURE: "computes"}


def check_regions(plan: Plan, graph: StageGraph, stage_of: Sequence[int]) -> None:
    """Refuse (S603) a cut inside modules that a row recomputes or computes as one region."""
    rows = [(a, f) for a in plan.actions for f in REGIONS if a.changes(f)]
    for action, facet in rows:
        for region in action.inseparable_groups:
            inside = [
                k
                for k, name in enumerate(graph.units)
                if any(name.startswith(f"{site}.") for site in region)
                or len(region) > 1
                and name in region
            ]
            cuts = [graph.labels[b] for a, b in pairwise(inside) if stage_of[a] != stage_of[b]]
            if cuts:
                does = REGIONS[facet]
                what = "checkpointed" if facet == Facet.RECOMPUTE else "replaced"
                ends = dict.fromkeys((region[0], region[-1]))
                one = Label(action.span, f"{does} {' to '.join(map(_quoted, ends))} as one")
                raise Refusal.of(
                    "S603",
                    f"a {what} region cannot span a pipeline cut",
                    Label(text=f"cuts it in two before `{cuts[0]}`"),
                    (one,),
                    helps=(
                        f"cut before `{region[0]}` or after `{region[-1]}`",
                        f"or let `{action.name}` select the modules one by one",
                    ),
                )


def _quoted(name: str) -> str:
    return f"`{name}`"


def trunk_modules(plan: Plan, cut: StageCut) -> tuple[str, ...]:
    """Return the modules in the lists of a cut, repeated for unrolled calls, without a forward."""
    unrolled = dict(plan.unrolled)

    def calls(fqn: str) -> int:
        inside = [n for name, n in unrolled.items() if name == fqn or name.startswith(f"{fqn}.")]
        return max(1, sum(inside))

    found = []
    for trunk in cut.trunks:
        site = plan.model.sites[trunk]
        whole = trunk in unrolled or not any(site.is_a(kind) for kind in MODULE_LISTS)
        names = [trunk] if whole else [f"{trunk}.{child}" for child in site.children]
        found += [name for name in names for _ in range(calls(name))]
    return tuple(found)


def _check_count(units: int, stages: int) -> None:
    if stages < 1 or units < stages:
        reason = f"{units} modules of the list cannot be cut into {stages} stages"
        raise refusal("S613", "", reason, f"1 to {units} stages")


def _stage_numbers(count: int, starts: Sequence[int]) -> tuple[int, ...]:
    stage, found = 0, []
    for unit in range(count):
        stage += unit in starts
        found.append(stage)
    return tuple(found)


def weight_of(balance: str, plan: Plan, graph: StageGraph, timeline: Timeline) -> RunWeight:
    """Return the weight function of a kind of balance.

    params  elements of the parameters of the run; a parameter of several units counts once
    time    floating-point operations of the forward, counted on the meta device; backwards have
            twice as many, and change no cut
    memory  bytes at the peak: parameters, gradients and AdamW's state on a rank, and saved
            activations of the stage's microbatches in flight; a recomputed unit saves only its
            inputs
    """
    if balance == "time":
        sums = [0, *accumulate(graph.flops)]
        return lambda stage, low, high: sums[high] - sums[low]
    held = _parameters_read(plan, graph)
    if balance == "params":
        table = _distinct_sums(
            held, {n: float(f.numel) for n, f in plan.model.unique_parameters.items()}
        )
        return lambda stage, low, high: table[low][high]
    table = _distinct_sums(
        held, {name: state_bytes(plan, name) for name in plan.model.unique_parameters}
    )
    alive, sums = max_in_flight(timeline), [0, *accumulate(_saved_bytes(plan, graph))]
    return lambda stage, low, high: table[low][high] + alive[stage] * (sums[high] - sums[low])


def max_in_flight(timeline: Timeline) -> tuple[float, ...]:
    """Return the largest number of microbatches in flight for each stage.

    A slice of a microbatch counts as a fraction.
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
    """Return the bytes of a parameter's shard, its gradient and moments on one rank."""
    fact = plan.model.unique_parameters[name]
    part = float(fact.itemsize)
    for dim in plan.effective_layout(name).local_shape(plan.mesh):
        part *= dim
    kinds = (3, 2, 1)  # the stage of ZeRO from which each is sliced: parameters, gradients, moments
    trained = part if fact.requires_grad else 0.0
    total = 0.0
    for least, size in zip(kinds, (part, trained, trained * ADAMW_MOMENTS)):
        for row in plan.replicas:
            size /= plan.mesh.size(row.axes) if row.stage >= least else 1.0
        total += size
    return total


def _parameters_read(plan: Plan, graph: StageGraph) -> list[set[str]]:
    """Return the parameters (first names) that each unit reads."""
    held: list[set[str]] = [set() for _ in graph.units]
    for name, owners in graph.owners.items():
        for unit in owners:
            held[unit].add(plan.model.parameters[name].name)
    return held


def _distinct_sums(held: Sequence[set[str]], sizes: Mapping[str, float]) -> list[list[float]]:
    """Return a table [low][high] of sums over the names of units low to high - 1, each once."""
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


def _saved_bytes(plan: Plan, graph: StageGraph) -> list[int]:
    """Return the bytes that each unit saves for the backward of one microbatch."""
    rows = plan.rows_changing(Facet.RECOMPUTE)
    first = {  # module -> the first module of its recomputed region, whose input is saved
        site: region[0]
        for action in rows
        for region in action.inseparable_groups
        for site in region
    }
    found = []
    for name, saved, given in zip(graph.units, graph.saved_bytes, graph.argument_bytes):
        above = name
        while above and above not in first:
            above = above.rpartition(".")[0]
        inside = above in first
        found.append((given if first[above] == above else 0) if inside else saved)
    return found
