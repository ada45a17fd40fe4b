"""Stages of a plan (the door `stages_of`): units assigned to stages, the timeline, homes of stages.

The model is split into units by a recorded forward, which each stage replays. This file also
installs redistributions around sharded modules, and adds EVICT and LOAD operations to the timeline
of stages that offload activations to the next rank of the pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal
from schedlang.ir.annotations import OffloadedTensors
from schedlang.ir.features import Recomputing
from schedlang.ir.model import are_nested
from schedlang.ir.plan import Plan, place_at_row
from schedlang.ir.primitive import Facet
from schedlang.passes.elaborate.legality import check_cuts
from schedlang.passes.partition.recomputed_chains import CostSubject, time_weight_of
from schedlang.passes.partition.stage_assignment import (
    ChainUnit,
    RunWeight,
    balanced_stages,
    check_regions,
    even_stages,
    stages_starting_at,
    weight_of,
)
from schedlang.passes.propagate.casts import cast_modules
from schedlang.passes.propagate.equal_units import equally_sharded_units
from schedlang.passes.propagate.propagate import Traced
from schedlang.pipeline.timeline.table import SINGLE_STAGE, Kind, split_backwards
from schedlang.runtime.tracing.stage_graph import UNSPLIT, split_graph

if TYPE_CHECKING:
    from torch import nn

    from schedlang.pipeline.timeline.table import Timeline
    from schedlang.runtime.pipeline.stage import RecordedOutputs
    from schedlang.runtime.sharding.edges import RedistributionCache
    from schedlang.runtime.tracing.stage_graph import StageGraph, StageSplit


Loss = Callable[..., Any]
CONTAINERS = tuple(f"torch.nn.modules.container.{kind}" for kind in ("ModuleList", "ModuleDict"))


@dataclass(frozen=True)
class Staged:
    """The stages of a plan: the recorded cut, the timeline, and the place of each stage.

    homes                   homes[replica][stage] is a place along the pipeline's axis
    trunk                   modules that are gathered one by one, where rows slice or move
                            parameters
    outside_calls           (module, enclosing module): called while the enclosing module does not
                            run (in DiT other code calls the embedding of the first block)
    unsliceable_parameters  parameters that are read or replaced while their unit of the cut does
                            not run, or that the forward writes into
    recorded                outputs of units when the model was recorded
    """

    cut: StageSplit
    timeline: Timeline
    homes: tuple[tuple[int, ...], ...]
    axis: str | None
    trunk: frozenset[str]
    outside_calls: frozenset[tuple[str, str]] = frozenset()
    unsliceable_parameters: frozenset[str] = frozenset()
    recorded: RecordedOutputs | None = field(default=None, repr=False, compare=False)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the place of each stage of replica 0."""
        return self.homes[0]

    def stages_at(self, position: int) -> tuple[int, ...]:
        """Return the stages of any replica that a place runs; all stages without a pipeline."""
        if self.axis is None:
            return tuple(range(self.cut.stages))
        return tuple(s for s in range(self.cut.stages) if position in self.places(s))

    def count_microbatches(self, stage: int, position: int, replica: int | None = None) -> int:
        """Return the number of microbatches per step of a stage at a place, or of one replica."""
        t = self.timeline
        stage_ops = (t.kind == Kind.F) & (t.stage == stage) & (t.rank == position) & (t.slice == 0)
        return int((stage_ops if replica is None else stage_ops & (t.replica == replica)).sum())

    def places(self, *stages: int) -> frozenset[int]:
        """Return the places that hold any of these stages, over all replicas."""
        return frozenset(row[stage] for row in self.homes for stage in stages)


def local_skeleton(plan: Plan, traced: Traced) -> nn.Module:
    """Return the local model on the meta device, with local shapes and without process groups."""
    from schedlang.runtime.tracing.meta_runs import meta_model

    shapes = {name: plan.effective_layout(name).local_shape(plan.mesh) for name in plan.layouts}
    model = meta_model(plan.model.model, shapes)
    shard_modules(model, traced, lambda edge: edge)
    cast_modules(plan, model)
    return model


def shard_modules(model: nn.Module, traced: Traced, with_group: Callable[[Any], Any]) -> None:
    """Divide numbers in attributes of modules, and wrap redistributions around sharded modules.

    `with_group` returns an edge with the process group of this rank, or the edge itself.
    """
    from schedlang.runtime.forward import wrap
    from schedlang.runtime.grad_reduction.batch_statistics import gather_statistics, sum_over
    from schedlang.runtime.grad_reduction.row_gathering import RowGathering, gather_over
    from schedlang.runtime.propagation.argument_shards import ArgumentLayer
    from schedlang.runtime.sharding.module_sizes import SizesLayer, set_number
    from schedlang.runtime.sharding.sharded_layer import UNCALLED, UNCHOSEN, ShardedLayer

    for fqn, attribute, value in traced.local_numbers:
        set_number(model.get_submodule(fqn), attribute, value)
    for fqn, counted in traced.counted_sizes.items():
        module = model.get_submodule(fqn)
        wrap(module, "sizes", SizesLayer(module, counted))
    for fqn, parts in traced.narrowed_arguments.items():
        grouped_parts = tuple(replace(part, edge=with_group(part.edge)) for part in parts)
        module = model.get_submodule(fqn)
        wrap(module, "parts", ArgumentLayer(module, grouped_parts))
    arrivals = _shared_arrivals(model, traced) if traced.sharing_modules else {}
    for fqn, edges in traced.edges.items():
        module, cache = model.get_submodule(fqn), arrivals.get(fqn)
        grouped = tuple(replace(with_group(edge), cache=cache) for edge in edges)
        wrap(module, "sharded", ShardedLayer(module, traced.kinds[fqn], grouped))
    for fqn in traced.uncalled:
        module = model.get_submodule(fqn)
        uncalled = UNCHOSEN if traced.reads_values else UNCALLED
        wrap(module, "sharded", ShardedLayer(module, uncalled, (), name=fqn))
    if traced.statistics is not None:
        statistics = with_group(traced.statistics)
        for fqn in statistics.gathered:
            gather = gather_over(replace(statistics.group, label=fqn))
            wrap(model.get_submodule(fqn), "gathered", RowGathering(fqn, gather))
        if statistics.sums:
            gather_statistics(model, statistics.sums, sum_over(statistics.group))


def _shared_arrivals(model: nn.Module, traced: Traced) -> dict[str, RedistributionCache]:
    """Return a cache of redistributed inputs for each sharded module that shares its input.

    Modules in the same outermost block of a list share one cache, and so do modules in no list.
    """
    from torch.nn import Module

    from schedlang.runtime.forward import wrap
    from schedlang.runtime.sharding.edges import RedistributionCache

    blocks: dict[str, list[str]] = {}
    for fqn in (fqn for fqn in traced.edges if fqn in traced.sharing_modules):
        block = ""
        for end, letter in enumerate(fqn):
            ancestor = fqn[:end]
            # a list in a list is never called
            if letter == "." and not block and ancestor.rpartition(".")[2].isdigit():
                has_forward = type(model.get_submodule(ancestor)).forward is not Module.forward
                block = ancestor if has_forward else ""
        blocks.setdefault(block, []).append(fqn)
    caches: dict[str, RedistributionCache] = {}
    for block, fqns_inside in blocks.items():
        if len(fqns_inside) > 1:
            cache = RedistributionCache(traced.is_shared_input_written)
            wrap(model.get_submodule(block), "arrivals", cache)
            caches |= dict.fromkeys(fqns_inside, cache)
    return caches


def stages_of(plan: Plan, traced: Traced, batch: Mapping[str, Any], loss: Loss | None) -> Staged:
    """Return the stages of a plan; without cuts the model is one stage.

    Raises Refusal at the row of the cut where the model cannot be split so.
    """
    from schedlang.runtime.global_state import restore_global_state
    from schedlang.runtime.training_mode import TrainingMode

    axis = plan.cuts[0].axis if plan.cuts else None
    timeline = timeline_of(plan)
    if axis is None or timeline.stages == 1:
        if plan.unrolled and traced.call_counts:
            _check_call_counts(plan, traced)
        trunk = _trunk(plan) if plan.replicas or plan.stores else frozenset()
        # the root module gathers instead
        trunk -= {caller for _, caller in traced.outside_parameters}
        outside = traced.outside_calls
        if traced.varying_modules:  # ranks would gather and reduce different modules together
            trunk -= {
                caller for fqn, caller in outside if fqn in traced.varying_modules
            } | traced.varying_modules
            outside = frozenset(pair for pair in outside if traced.varying_modules.isdisjoint(pair))
        return Staged(UNSPLIT, timeline, ((0,),), None, trunk, outside, traced.rewritten_parameters)
    check_cuts(plan)
    skeleton = local_skeleton(plan, traced)
    TrainingMode(skeleton).train()
    try:
        with restore_global_state(plan.model.model, loss):
            graph, recorded = _record_graph(plan, traced, skeleton, batch, loss)
            counting = CostSubject(plan, traced, None, batch, loss)
            numbers = _stage_numbers(counting, graph, timeline)
        check_regions(plan, graph, numbers)
        split = split_graph(graph, numbers)
        _check_derived(traced, graph)
        _check_reentered(traced, graph, numbers)
    except Refusal as refusal:
        raise place_at_facet(refusal, plan, Facet.STAGE) from refusal
    homes = tuple(tuple(row) for row in timeline.replica_ranks.tolist())
    unsliced = frozenset(
        name for name, caller in traced.outside_parameters if caller in graph.units
    )
    unsliced |= traced.rewritten_parameters
    # with casts, slices or split tokens the outputs of units differ from the recorded outputs
    is_exact = not plan.casts and not plan.contexts and timeline.slices == 1
    outputs = recorded if is_exact else None
    staged = Staged(
        split, timeline, homes, axis, _trunk(plan), traced.outside_calls, unsliced, outputs
    )
    return with_eviction(plan, staged)


def _record_graph(
    plan: Plan, traced: Traced, skeleton: nn.Module, batch: Mapping[str, Any], loss: Loss | None
) -> tuple[StageGraph, RecordedOutputs]:
    """Record which outputs units read of each other, and the outputs.

    Runs another forward to count calls where the trace does not have each unit called once.
    """
    from schedlang.runtime.tracing.module_calls import calls_from_counts
    from schedlang.runtime.tracing.units import units_of

    starts = [fqn for c in plan.cuts for fqn in c.before]
    trunks, unrolled = [fqn for c in plan.cuts for fqn in c.trunks], dict(plan.unrolled)
    calls = calls_from_counts(plan.model.model, traced.call_counts)
    if calls is not None:
        try:
            names = units_of(skeleton, batch, starts, trunks=trunks, unrolled=unrolled, calls=calls)
            return _record_units(skeleton, names, batch, loss, equally_sharded_units(traced))
        except Refusal:
            pass  # a forward called by name is no unit; the next lines refuse where necessary
    names = units_of(skeleton, batch, starts, trunks=trunks, unrolled=unrolled)
    return _record_units(skeleton, names, batch, loss, {})


def _record_units(
    skeleton: nn.Module,
    names: Sequence[str],
    batch: Mapping[str, Any],
    loss: Loss | None,
    equal: Mapping[str, object],
) -> tuple[StageGraph, RecordedOutputs]:
    """Record a forward; of `equal` units (unit -> its kind) two run, or all if they differ here."""
    from schedlang.runtime.pipeline.stage import RecordedOutputs
    from schedlang.runtime.tracing.equal_units import DifferentUnits
    from schedlang.runtime.tracing.recording import record_forward

    if equal:
        recorded = RecordedOutputs(skeleton, names)
        with suppress(DifferentUnits):
            graph = record_forward(skeleton, names, batch, loss=loss, met=recorded, equal=equal)
            return graph, recorded
    recorded = RecordedOutputs(skeleton, names)
    return record_forward(skeleton, names, batch, loss=loss, met=recorded), recorded


def _check_call_counts(plan: Plan, traced: Traced) -> None:
    """Refuse (S601) an `unroll` row with another number of calls than the model makes."""
    from schedlang.runtime.tracing.units import check_calls

    try:
        check_calls(dict(plan.unrolled), traced.call_counts)
    except Refusal as refusal:
        raise place_at_facet(refusal, plan, Facet.STAGE) from refusal


def timeline_of(plan: Plan) -> Timeline:
    """Return the timeline of the plan's order, with split backwards where rows request them."""
    timeline = _timeline_of_order(plan) if plan.cuts or plan.order is not None else SINGLE_STAGE
    return timeline if plan.deferred_weight_grads is None else split_backwards(timeline)


def _timeline_of_order(plan: Plan) -> Timeline:
    """Return the timeline of the order alone; without stages microbatches run one by one.

    Raises Refusal S608 for sizes that the order does not support.
    """
    from schedlang.pipeline.schedules import OrderError, find_order, make_order

    axis = plan.cuts[0].axis if plan.cuts else None
    order = plan.order
    try:
        if order is None:
            return make_order("GPipe", plan.mesh.size(plan.cuts[0].axis), 1)
        if axis is not None:
            return order.timeline(plan.mesh.size(axis))
        known_order = None if order.table else find_order(order.name)
        if known_order is not None and (order.slices > 1 or known_order.relaxed):
            return order.timeline(1)
        # one stage: each forward, then its backward. With 1F1B, parameters on the host would be
        # gathered also for the microbatch before, and the optimizer would not wait for this
        offloads = any(store.what == "parameters" for store in plan.stores)
        return make_order("GPipe" if offloads else "1F1B", 1, order.micro)
    except OrderError as error:
        diagnostic = Diagnostic("S608", error.reason, helps=(error.legal,))
        raise place_at_facet(Refusal(diagnostic), plan, Facet.ORDER) from error


def _stage_numbers(counting: CostSubject, graph: StageGraph, timeline: Timeline) -> tuple[int, ...]:
    """Return the stage of each unit, from the cuts of the plan."""
    from schedlang.runtime.tracing.units import is_in_trunk

    plan = counting.plan
    trunks = [fqn for c in plan.cuts for fqn in c.trunks]
    in_trunk = is_in_trunk(plan.model.model, graph.units, trunks, dict(plan.unrolled))
    units = [
        ChainUnit(label, plan.model.numel(name), trunk)
        for name, label, trunk in zip(graph.units, graph.labels, in_trunk)
    ]
    starts = [fqn for c in plan.cuts for fqn in c.before]
    if starts:
        return stages_starting_at(units, starts)
    weight = _weight(counting, graph, timeline)
    if weight is None:
        return even_stages(units, timeline.stages)
    return balanced_stages(units, timeline.stages, weight)


def _weight(counting: CostSubject, graph: StageGraph, timeline: Timeline) -> RunWeight | None:
    """Return the weight function that balances the stages; None: equal numbers of units."""
    plan = counting.plan
    planned = plan.rows_with(Recomputing)
    rows = [(action, row.budget) for action, row in planned if row.budget and row.budget.cuts]
    if rows:
        return time_weight_of(counting, rows, graph, timeline)
    balance = plan.cuts[0].balance
    return None if balance == "even" else weight_of(balance, plan, graph, timeline)


def _check_derived(traced: Traced, graph: StageGraph) -> None:
    """Refuse (S610) a forward that takes a gradient through several units.

    No stage has the full autograd graph.
    """
    for fqn, line in traced.differentiating_modules.items():
        if not any(f"{fqn}.".startswith(f"{unit}.") for unit in graph.units):
            raise Refusal.of(
                "S610",
                "the forward takes a gradient through modules of several stages",
                notes=(f"at {line}: each stage has the graph of its own modules",),
                helps=(
                    "leave the axis out: `pp=1`",
                    "or take the gradient inside of one module, and cut beside it",
                ),
            )


def _check_reentered(traced: Traced, graph: StageGraph, numbers: Sequence[int]) -> None:
    """Refuse (S610) a unit inside a reentrant checkpoint around several units.

    Only in the last stage is the unit allowed: later stages replay the same code, and their
    backward would run the checkpoint again. Refuse also a unit inside an `autograd.Function` of
    the model with its own backward (reversible layers).
    """
    for unit, stage in zip(graph.units, numbers):
        function = traced.no_grad_modules.get(unit, "")
        if stage < max(numbers) and function and function != "CheckpointFunction":
            raise Refusal.of(
                "S610",
                f"`{unit}` runs in `{function}`, whose backward is its own and of all it calls",
                notes=("no stage has all of what that backward runs",),
                helps=("leave out the pipeline: `zero` and `shard` do not cut it",),
            )
        if (
            traced.has_reentrant_checkpoints
            and unit in traced.no_grad_modules
            and stage < max(numbers)
        ):
            raise Refusal.of(
                "S610",
                f"`{unit}` runs in a reentrant checkpoint, which no later stage can run again",
                helps=(
                    "let the model say `use_reentrant=False` in `torch.utils.checkpoint`",
                    "or take that checkpoint out of the model, and add a row `checkpoint()`",
                ),
            )


def _trunk(plan: Plan) -> frozenset[str]:
    """Return the elements of the outermost module lists, which are gathered one by one."""
    lists = [
        fqn
        for fqn, site in plan.model.sites.items()
        if site.is_a("torch.nn.modules.container.ModuleList")
    ]
    outer = [
        f
        for f in lists
        if not any(f.startswith(f"{outer_list}.") for outer_list in lists if outer_list != f)
    ]
    return frozenset(element for fqn in outer for element in _elements(plan, fqn))


def _elements(plan: Plan, fqn: str) -> Iterator[str]:
    """Yield the modules in a list, with those of nested lists and dicts."""
    for child in plan.model.sites[fqn].children:
        name = f"{fqn}.{child}"
        if any(plan.model.sites[name].is_a(kind) for kind in CONTAINERS):
            yield from _elements(plan, name)
        else:
            yield name


def place_at_facet(refusal: Refusal, plan: Plan, facet: Facet) -> Refusal:
    """Return the refusal placed at the first row that changes a facet."""
    row = next(iter(plan.rows_changing(facet)), None)
    return place_at_row(refusal, row)


def buffer_stages(staged: Staged) -> dict[str, frozenset[int] | None]:
    """Return, by buffer, the places along the pipeline's axis that hold it; {} without stages."""
    if staged.axis is None:
        return {}
    positions: dict[str, set[int]] = {}
    for stage in range(staged.cut.stages):
        for name in staged.cut.buffers(stage):
            positions.setdefault(name, set()).update(staged.places(stage))
    return {name: frozenset(places) for name, places in positions.items()}


def buffer_homes(staged: Staged) -> tuple[dict[str, int], ...]:
    """Return, for each replica of the stages, the place whose value of each buffer is saved.

    Returns () without stages. Replicas of a stage at the same place share buffers; otherwise each
    replica has its own buffers.
    """
    if staged.axis is None:
        return ()
    homes_by_replica: list[dict[str, int]] = [{} for _ in staged.homes]
    for stage in range(staged.cut.stages):
        for name in staged.cut.buffers(stage):
            for homes, row in zip(homes_by_replica, staged.homes):
                homes[name] = min(homes.get(name, row[stage]), row[stage])
    return tuple(homes_by_replica)


def stage_fields(plan: Plan, staged: Staged, axis: str) -> dict[str, Any]:
    """Return the fields of an Assembly that only a model of several stages has."""
    frozen = any(not fact.requires_grad for fact in plan.model.parameters.values())
    last = dict.fromkeys(plan.mesh.sizes, 0) | {axis: staged.ranks[-1]}
    return {
        "stage_axis": axis,
        "buffer_stages": buffer_stages(staged),
        "buffer_homes": next(iter(buffer_homes(staged)), {}),
        "last_rank": plan.mesh.rank(last),
        "outputs_missing": staged.cut.missing_outputs,
        # stages forward tensors of frozen modules: their origins get no gradient
        "backward_ends_early": frozen and staged.cut.sends_constants,
    }


def peer_stores(plan: Plan, *what: str) -> list[OffloadedTensors]:
    """Return the offloads of a plan to a peer, of the given kinds or of all kinds."""
    return [s for s in plan.stores if s.tier == "peer" and (not what or s.what in what)]


def with_eviction(plan: Plan, staged: Staged) -> Staged:
    """Return the stages with EVICT and LOAD operations for activations offloaded to a peer.

    The largest `ahead` of a stage's rows decides how early its activations are loaded. Raises
    Refusal S851 where the order has such operations itself.
    """
    ahead = _load_ahead(plan, staged)
    if not ahead:
        return staged
    from schedlang.pipeline.timeline.memory import with_evictions

    _check_order(plan, staged.timeline)
    return replace(staged, timeline=with_evictions(staged.timeline, ahead))


def without_eviction(plan: Plan, staged: Staged) -> Staged:
    """Return the stages without EVICT and LOAD operations that `with_eviction` added."""
    t = staged.timeline
    if not _load_ahead(plan, staged):
        return staged
    return replace(staged, timeline=t.pick((t.kind != Kind.EVICT) & (t.kind != Kind.LOAD)))


def _load_ahead(plan: Plan, staged: Staged) -> dict[int, int]:
    """Return, by stage, how many operations ahead its activations are loaded."""
    ahead_by_stage: dict[int, int] = {}
    for store in peer_stores(plan, "activations"):
        if store.over != staged.axis:
            continue  # refused elsewhere
        for stage in range(staged.cut.stages):
            units = [staged.cut.graph.units[k] for k in staged.cut.units(stage)]
            if any(are_nested(unit, store.fqn) for unit in units):
                ahead_by_stage[stage] = max(ahead_by_stage.get(stage, 0), store.ahead)
    return ahead_by_stage


def _check_order(plan: Plan, timeline: Timeline) -> None:
    kinds = [kind for kind in (Kind.EVICT, Kind.OFFLOAD, Kind.RECOMPUTE) if kind in timeline.kind]
    if not kinds:
        return
    order = plan.order.name if plan.order is not None else ""
    row = plan.origin(peer_stores(plan, "activations")[0])
    refusal = Refusal.of(
        "S851",
        f"the order `{order}` already decides what happens to saved activations",
        notes=(f"its timeline has {kinds[0].name} operations",),
        helps=("drop this row", 'or use an order without them: `pipeline(order="1F1B", micro=4)`'),
    )
    raise place_at_row(refusal, row)
