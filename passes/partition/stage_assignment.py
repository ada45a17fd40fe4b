"""Assignment of units to stages: at named modules, evenly, or balanced by a weight.

The weight of a run of units on a stage is its parameters, its time or its memory (`weight_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

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
from schedlang.runtime.tracing.stage_graph import StageGraph, refusal

RunWeight = Callable[[int, int, int], float]


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
    start_indices = [_index_of(names, start) for start in starts]
    if len(start_indices) != len(set(start_indices)) or 0 in start_indices:
        raise refusal(
            "S613",
            "",
            f"`{names[0]}` is the first module: no stage would be before it"
            if 0 in start_indices
            else "two stages start at one module",
            f"stages may start at {quote_names(names[1:])}",
        )
    return _stage_numbers(len(units), start_indices)


def _index_of(names: Sequence[str], start: str) -> int:
    """Return the index of the first unit that is the module `start` or is inside it."""
    for index, name in enumerate(names):
        if name == start or name.startswith((f"{start}.", f"{start}#")):
            return index
    closest, facts = find_closest(start, names), facts_of_unknown(start, names)
    helps = (f"did you mean `{closest}`?",) if closest else (", ".join(names),)
    title = "is not a module at which a stage can start"
    raise refusal("S613", start, title, *helps, facts=facts)


def even_stages(units: Sequence[ChainUnit], stages: int) -> tuple[int, ...]:
    """Return the stage of each unit, with equal numbers of trunk units per stage.

    Where the numbers cannot be equal, earlier stages have one more unit, since the last stage also
    has the units after the trunk.
    """
    trunk = [unit.name for unit in units if unit.trunk]
    _check_count(len(trunk), stages)
    size, remainder = divmod(len(trunk), stages)
    starts = list(accumulate(size + (k < remainder) for k in range(stages - 1)))
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

    options: dict[float, tuple[StageOption]] = {}  # by weight, as many stages weigh the same

    def menu(first: int, last: int, devices: range, after: int) -> tuple[StageOption]:
        """Return the option of a stage; the order of units is reversed."""
        begin, end = bounds[count - last], bounds[count - first]
        seconds = weight(after, begin, end) if weight else sums[end] - sums[begin]
        if seconds not in options:
            options[seconds] = (StageOption(seconds, 0.0),)
        return options[seconds]

    partition = find_partition(
        PartitionProblem(count, menu, devices=stages, stages=stages, prefer_long_first=True),
        SLOWEST,
    )
    assert partition is not None  # there is no memory limit
    return _stage_numbers(
        len(units), [bounds[start] for start in accumulate(partition.units[:0:-1])]
    )


REGIONS = {Facet.RECOMPUTE: "recomputes", Facet.STRUCTURE: "computes"}


def check_regions(plan: Plan, graph: StageGraph, stage_of: Sequence[int]) -> None:
    """Refuse (S603) a cut inside modules that a row recomputes or computes as one region."""
    rows = [(a, f) for a in plan.actions for f in REGIONS if a.changes(f)]
    for action, facet in rows:
        for region in action.inseparable_groups:
            units_in = [
                k
                for k, name in enumerate(graph.units)
                if any(name.startswith(f"{site}.") for site in region)
                or len(region) > 1
                and name in region
            ]
            cuts = [graph.labels[b] for a, b in pairwise(units_in) if stage_of[a] != stage_of[b]]
            if cuts:
                verb = REGIONS[facet]
                kind = "checkpointed" if facet == Facet.RECOMPUTE else "replaced"
                ends = dict.fromkeys((region[0], region[-1]))
                region_label = Label(
                    action.span, f"{verb} {' to '.join(map(_quoted, ends))} as one"
                )
                raise Refusal.of(
                    "S603",
                    f"a {kind} region cannot span a pipeline cut",
                    Label(text=f"cuts it in two before `{cuts[0]}`"),
                    (region_label,),
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

    names_called = []
    for trunk in cut.trunks:
        site = plan.model.sites[trunk]
        is_unit = trunk in unrolled or not site.is_list
        names = [trunk] if is_unit else [f"{trunk}.{child}" for child in site.children]
        names_called += [name for name in names for _ in range(calls(name))]
    return tuple(names_called)


def _check_count(units: int, stages: int) -> None:
    if stages < 1 or units < stages:
        reason = f"{units} modules of the list cannot be cut into {stages} stages"
        raise refusal("S613", "", reason, f"1 to {units} stages")


def _stage_numbers(count: int, starts: Sequence[int]) -> tuple[int, ...]:
    stage, numbers = 0, []
    for unit in range(count):
        stage += unit in starts
        numbers.append(stage)
    return tuple(numbers)


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
        return lambda stage, first, end: sums[end] - sums[first]
    parameters_read = _parameters_read(plan, graph)
    if balance == "params":
        table = _distinct_sums(
            parameters_read, {n: float(f.numel) for n, f in plan.model.unique_parameters.items()}
        )
        return lambda stage, first, end: table[first][end]
    table = _distinct_sums(
        parameters_read, {name: state_bytes(plan, name) for name in plan.model.unique_parameters}
    )
    in_flight, sums = max_in_flight(timeline), [0, *accumulate(_saved_bytes(plan, graph))]
    return lambda stage, first, end: (
        table[first][end] + in_flight[stage] * (sums[end] - sums[first])
    )


def max_in_flight(timeline: Timeline) -> tuple[float, ...]:
    """Return the largest number of microbatches in flight for each stage.

    A slice of a microbatch counts as a fraction.
    """
    t = timeline
    changes = (t.kind == Kind.F).astype(np.int64) - ((t.kind == Kind.B) | (t.kind == Kind.W))
    slices = max(1, int(t.slice.max(initial=0)) + 1)
    peak_by_stage = []
    for stage in range(t.stages):
        peaks = [
            int(np.cumsum(changes[(t.stage == stage) & (t.replica == replica)]).max(initial=0))
            for replica in range(t.replicas)
        ]
        peak_by_stage.append(max(peaks) / slices)
    return tuple(peak_by_stage)


def state_bytes(plan: Plan, name: str) -> float:
    """Return the bytes of a parameter's shard, its gradient and moments on one rank."""
    param = plan.model.unique_parameters[name]
    local_bytes = float(param.itemsize)
    for dim in plan.effective_layout(name).local_shape(plan.mesh):
        local_bytes *= dim
    kinds = (3, 2, 1)  # the stage of ZeRO from which each is sliced: parameters, gradients, moments
    trained = local_bytes if param.requires_grad else 0.0
    total = 0.0
    for min_stage, size in zip(kinds, (local_bytes, trained, trained * ADAMW_MOMENTS)):
        for row in plan.replicas:
            size /= plan.mesh.size(row.axes) if row.stage >= min_stage else 1.0
        total += size
    return total


def _parameters_read(plan: Plan, graph: StageGraph) -> list[set[str]]:
    """Return the parameters (first names) that each unit reads."""
    names_by_unit: list[set[str]] = [set() for _ in graph.units]
    for name, owners in graph.owners.items():
        for unit in owners:
            names_by_unit[unit].add(plan.model.parameters[name].name)
    return names_by_unit


def _distinct_sums(name_sets: Sequence[set[str]], sizes: Mapping[str, float]) -> list[list[float]]:
    """Return a table [low][high] of sums over the names of units low to high - 1, each once."""
    table = []
    for first_unit in range(len(name_sets)):
        counted_names: set[str] = set()
        row, total = [0.0] * (first_unit + 1), 0.0
        for names in name_sets[first_unit:]:
            total += sum(sizes[name] for name in names - counted_names)
            counted_names |= names
            row.append(total)
        table.append(row)
    return table


def _saved_bytes(plan: Plan, graph: StageGraph) -> list[int]:
    """Return the bytes that each unit saves for the backward of one microbatch."""
    rows = plan.rows_changing(Facet.RECOMPUTE)
    first_of = {  # module -> the first module of its recomputed region, whose input is saved
        site: region[0]
        for action in rows
        for region in action.inseparable_groups
        for site in region
    }
    sizes = []
    for name, saved, given in zip(graph.units, graph.saved_bytes, graph.argument_bytes):
        ancestor = name
        while ancestor and ancestor not in first_of:
            ancestor = ancestor.rpartition(".")[0]
        inside = ancestor in first_of
        sizes.append((given if first_of[ancestor] == ancestor else 0) if inside else saved)
    return sizes
