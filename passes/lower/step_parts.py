"""Build the runtime parts of a step on this rank; called by `build` in a fixed order.

* Sliced state (fully_shard), gradient reductions, compressed reductions.
* The pipeline: stages, their process groups, stand-ins for units of other stages.
* Offloaded parameters, gradients and optimizer state, and the modules that fetch them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import ref

from schedlang.ir.features import Injected
from schedlang.ir.model import are_nested
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import Facet
from schedlang.passes.analyze.holdings import (
    Reduction,
    gathers_by_rows,
    sliced_names_by_unit,
    slicing_axes_of,
    state_slicing,
)
from schedlang.passes.analyze.prepare import Prepared
from schedlang.passes.analyze.residence import (
    HELP_STATE_ON_HOST,
    group_into_rounds,
    refuse_peer,
    streamed_units,
    tier_of_unit,
    tiers_of,
)
from schedlang.passes.partition.staging import Staged, local_skeleton, peer_stores
from schedlang.passes.propagate.casts import gather_dtype
from schedlang.passes.propagate.sequence_trials import install_attention, slices_of
from schedlang.pipeline.timeline.table import Kind

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from schedlang.passes.lower.build import Builder
    from schedlang.runtime.assembly import WeightFunction
    from schedlang.runtime.checkpointing.holdings import Holding
    from schedlang.runtime.comm.collectives import RankGroups
    from schedlang.runtime.grad_reduction.compressed import Compressor
    from schedlang.runtime.grad_reduction.gradient import GradientReduction
    from schedlang.runtime.grad_reduction.zero import ShardedStage
    from schedlang.runtime.offload.offloaded_step import (
        OffloadedState,
        OffloadedStorage,
        ParameterTiers,
        PeerState,
    )
    from schedlang.runtime.offload.streamed_parameters import StreamedParameter, Window
    from schedlang.runtime.pipeline.executor import Pipeline
    from schedlang.runtime.pipeline.overlapped_reduction import OverlappedReduction
    from schedlang.runtime.pipeline.stage import Stub
    from schedlang.runtime.storage.tiers import ScratchFiles


def slice_state(
    plan: Plan, module: nn.Module, ranks: RankGroups, prepared: Prepared
) -> dict[int, ShardedStage]:
    """Apply fully_shard to the units of each stage of this rank; return the slices by stage."""
    from schedlang.runtime.grad_reduction.zero import ShardedStage, ShardedUnit, join_stages

    staged, holdings = prepared.staged, prepared.holdings
    sliced, _ = state_slicing(plan)
    if sliced is None:
        return {}
    axes = plan.mesh.fold(sliced.axes)
    axis_sets = dict.fromkeys((axes, *(h.sliced for h in holdings.values() if h.sliced)))
    # created by all ranks, in one order
    meshes = {unit_axes: ranks.device_mesh(unit_axes) for unit_axes in axis_sets}
    ignored = {
        p
        for n, p in module.named_parameters()
        if not holdings[n].sliced or not holdings[n].is_held(plan.mesh, ranks.rank)
    }
    position = plan.mesh.index(ranks.rank, staged.axis) if staged.axis is not None else 0
    reached = prepared.traced.reached_parameters
    # where values choose among modules, a later batch may reach other parameters
    anywhere = bool(prepared.traced.varying_modules)
    reached_now = {p for n, p in module.named_parameters() if anywhere or n in reached}
    stages = {}
    for stage in staged.stages_at(position):
        reads_values = prepared.traced.reads_values
        stages[stage] = sharded = ShardedStage(
            sliced.stage, meshes[axes], ignored, sliced.reshard, reads_values
        )
        for fqn, names in sliced_names_by_unit(plan, staged, holdings, stage).items():
            unit_axes = slicing_axes_of(holdings, names) or axes
            tier = tier_of_unit(plan, fqn, names)
            dtype = gather_dtype(plan, names)
            overwrites = fqn in prepared.traced.overwriting_modules
            unit = ShardedUnit(not fqn, _has_late_compute(plan, fqn), tier, dtype, overwrites)
            sharded.add_unit(module.get_submodule(fqn), meshes[unit_axes], unit, reached_now)
        sharded.prefetch(sliced.prefetch)
    if staged.axis is not None:
        join_stages(list(stages.values()))
    return stages


def _has_late_compute(plan: Plan, fqn: str) -> bool:
    """Return whether a kernel inside this module computes after the module's forward."""
    late = (action for action, row in plan.rows_with(Injected) if row.waits)
    return any(s == fqn or s.startswith(f"{fqn}.") for action in late for s in action.sites)


def build_reductions(
    plan: Plan, planned: Sequence[Reduction], params: Mapping[str, nn.Parameter], ranks: RankGroups
) -> tuple[GradientReduction, ...]:
    """Return the gradient reductions of this rank after the last backward.

    All ranks create all process groups, in one order.
    """
    from schedlang.runtime.grad_reduction.gradient import GradientReduction

    sums = []
    if data := plan.data_axes:
        for axes in (data, plan.row_axes, plan.context_axes):
            ranks.group(axes)  # created on all ranks, although only some gather outputs over it
    for reduction in planned:
        names = tuple(name for name in reduction.names if name in params)
        if reduction.stages is not None:  # every rank takes part in creating these groups
            stages = sorted(reduction.stages)
            groups = [tuple(line[s] for s in stages) for line in plan.mesh.groups(reduction.axes)]
            group = ranks.subset(reduction.axes[0], groups)
        else:
            group = ranks.group(reduction.axes)
            if reduction.kind == "replicas" and plan.find_overlap("gradients"):
                # begins during a backward, which sends on the other group
                group = replace(group, pg=ranks.another_group(reduction.axes, "early"))
        if reduction.kind != "compressed" and group is not None and names:
            sums.append(GradientReduction(group, names, reduction.kind, reduction.bucket))
    return tuple(sums)


def build_compressor(
    plan: Plan,
    planned: Sequence[Reduction],
    holdings: Mapping[str, Holding],
    parameters: Mapping[str, nn.Parameter],
    ranks: RankGroups,
) -> Compressor | None:
    """Return the compressor of this rank's gradients; None without a compressed reduction."""
    from schedlang.runtime.checkpointing.holdings import zero_padding
    from schedlang.runtime.grad_reduction.compressed import Compressor

    coding = plan.compression
    reduction = next((reduction for reduction in planned if reduction.kind == "compressed"), None)
    if coding is None or reduction is None:
        return None
    names = tuple(name for name in reduction.names if name in parameters)

    def clean(name: str, part: Tensor) -> Tensor:
        return zero_padding(part, holdings[name], plan.mesh, ranks.rank)

    return Compressor(coding.codec, ranks.group(reduction.axes), names, clean)


Loss = Callable[..., Any]


def build_pipeline(
    plan: Plan,
    module: nn.Module,
    ranks: RankGroups,
    prepared: Prepared,
    loss: Loss | None,
    weight: WeightFunction | None,
    sliced: Mapping[int, Any],
) -> Pipeline:
    """Return the pipeline of this rank: its stages and the timeline of the plan.

    `sliced`: the slices of `zero`, by stage.
    """
    from schedlang.runtime.adapters.torch_compile import keep_buffers
    from schedlang.runtime.grad_reduction.batch_statistics import watch_losses
    from schedlang.runtime.grad_reduction.zero import gather_handlers
    from schedlang.runtime.pipeline.executor import Pipeline
    from schedlang.runtime.pipeline.stage import Stage
    from schedlang.runtime.tracing.units import CallSwitch

    staged, device = prepared.staged, ranks.device
    if prepared.traced.label_means is not None:
        watch_losses(module, prepared.traced.label_means)
    slices = None
    if prepared.slicing is not None:
        slices = slices_of(prepared.slicing, module, prepared.traced, weight)
    halves: Mapping[int, Mapping[str, Any]] = {}
    if (staged.timeline.kind == Kind.W).any():
        late = _late_parameters(plan)
        halves = {
            s: {"split": _can_split_backward(plan, staged, s, sliced), "late": late}
            for s in range(staged.cut.stages)
        }
        keep_buffers()
    if staged.axis is None:
        stage = Stage(module, staged.cut, 0, loss=loss, **halves.get(0, {}))
        return Pipeline({0: stage}, staged.timeline, (ranks.rank,), device=device, slices=slices)
    group = ranks.group(staged.axis)
    up = ranks.message_group(staged.axis)
    down = ranks.message_group(staged.axis, "down") if ranks.messages_may_deadlock else None
    position = plan.mesh.index(ranks.rank, staged.axis)
    switch = CallSwitch(module, staged.cut.graph.units)
    stub = _stub_of(plan, prepared, ranks)
    stages = {
        s: Stage(
            module,
            staged.cut,
            s,
            switch=switch,
            stub=stub,
            loss=loss,
            **halves.get(s, {}),
            through=sliced[s].run_forward if s in sliced else None,
        )
        for s in staged.stages_at(position)
    }
    return Pipeline(
        stages,
        staged.timeline,
        group.ranks,
        position,
        group=up,
        down=down,
        device=device,
        lookahead=plan.receive_ahead,
        slices=slices,
        parks=_eviction_groups(staged, ranks),
        picked=bool(peer_stores(plan, "activations")),
        handlers=gather_handlers(sliced),
        gathers=gathers_by_rows(plan, staged),
        varying=bool(plan.row_gathers),
    )


class _LastStub(threading.local):
    """The last stand-ins made in a thread, with plan and preparation: ranks may be threads."""

    made: tuple[ref[Plan], ref[Prepared], Stub] | None = None


_last = _LastStub()


def _stub_of(plan: Plan, prepared: Prepared, ranks: RankGroups) -> Stub:
    """Return stand-ins for units of other stages; programs of one preparation share them."""
    from schedlang.runtime.pipeline.stage import Stub

    if _last.made is not None:
        plan_ref, prepared_ref, last_stub = _last.made
        if plan_ref() is plan and prepared_ref() is prepared:
            return last_stub
    plan_ref, prepared_ref, cut = ref(plan), ref(prepared), prepared.staged.cut

    def copied() -> nn.Module:
        plan, prepared = plan_ref(), prepared_ref()
        assert plan is not None and prepared is not None, "a proof holds what it proves"
        skeleton = local_skeleton(plan, prepared.traced)
        install_attention(plan, skeleton, prepared.tokens, ranks)
        return skeleton

    model, recorded = plan.model.model, prepared.staged.recorded
    known_outputs = {} if recorded is None else recorded.outputs_for(model)
    if prepared.outputs:  # known from a proof: the copy is hardly ever needed
        stub = Stub(model, cut, {**known_outputs, **prepared.outputs}, copied)
    else:
        stub = Stub(copied(), cut, known_outputs)
    if prepared.tokens is None:  # else the copy has process groups of this rank
        _last.made = plan_ref, prepared_ref, stub
    return stub


def build_early_reductions(
    plan: Plan,
    staged: Staged,
    params: Mapping[str, nn.Parameter],
    sums: Sequence[GradientReduction],
) -> OverlappedReduction | None:
    """Return the reductions that begin before the step ends, if a row allows this; else None."""
    from schedlang.runtime.pipeline.overlapped_reduction import OverlappedReduction

    if plan.find_overlap("gradients") is None:
        return None
    if staged.axis is None:
        return OverlappedReduction(params, sums, dict.fromkeys(params, frozenset([0])))
    by_stage = [(stage, staged.cut.parameters(stage)) for stage in range(staged.cut.stages)]
    stages = {name: frozenset(s for s, names in by_stage if name in names) for name in params}
    return OverlappedReduction(params, sums, stages)


def _can_split_backward(plan: Plan, staged: Staged, stage: int, sliced: Mapping[int, Any]) -> bool:
    """Return whether a stage's backward can run in two halves (input and weight gradients).

    It cannot where weights are gathered, since they are freed before the second half, nor where
    activations are recomputed, since each half would recompute all of them.
    """
    if stage in sliced:
        return False
    units = [staged.cut.graph.units[k] for k in staged.cut.units(stage)]
    recomputed = {site for a in plan.rows_changing(Facet.RECOMPUTE) for site in a.sites}
    return not any(are_nested(unit, site) for unit in units for site in recomputed)


def _eviction_groups(staged: Staged, ranks: RankGroups) -> tuple[Any, ...]:
    """Return the process groups for activations that are evicted to a partner rank."""
    if staged.axis is None or not (staged.timeline.kind == Kind.EVICT).any():
        return ()
    groups = [ranks.message_group(staged.axis, f"parked {direction}") for direction in range(4)]
    return (*groups, ranks.host_group(staged.axis, "parked sizes"))


def _late_parameters(plan: Plan) -> frozenset[str] | None:
    """Return the parameters whose gradients may be computed late, by all names; None: all."""
    if plan.deferred_weight_grads is None:
        return None
    inside = tuple(f"{fqn}." if fqn else "" for fqn in plan.deferred_weight_grads)
    return frozenset(
        name
        for param in plan.model.unique_parameters.values()
        for name in param.names
        if any(alias.startswith(inside) for alias in param.names)
    )


def encode_weights(builder: Builder, params: Mapping[str, nn.Parameter]) -> None:
    """Encode this rank's shards of quantized weights, and install decoding in their modules."""
    from schedlang.runtime.offload.decoded_weights import decode_weight
    from schedlang.runtime.storage.quantized_parameters import QuantizedParameter

    model = builder.plan.model
    for name, parameter in params.items():
        coding = model.coding_of(name)
        if coding is not None:
            quantized = QuantizedParameter(parameter, coding)
            for alias in model.parameters[name].names:
                decode_weight(builder.at(alias.rpartition(".")[0]), quantized)


# -- offload ---------------------------------------------------------------------------------------


def offload_state(
    builder: Builder,
    holdings: Mapping[str, Holding],
    params: Mapping[str, nn.Parameter],
    sliced: Mapping[int, ShardedStage],
    optimizer: Callable[..., torch.optim.Optimizer] | None,
) -> OffloadedState | None:
    """Move this rank's parameters to their tiers; return None if everything stays on the device."""
    from schedlang.runtime.adapters.fully_shard import ZeroSlice
    from schedlang.runtime.offload.offloaded_step import OffloadedState
    from schedlang.runtime.offload.streamed_parameters import Window
    from schedlang.runtime.optim.full_tensor_step import dims_of, is_tensorwise
    from schedlang.runtime.storage.offloaded_gradients import offload_gradients
    from schedlang.runtime.storage.tiers import CPU, DISK, ScratchFiles

    plan, staged = builder.plan, builder.staged
    assert staged is not None, "a program that is built has stages"
    disk = any(row.tier == DISK for row in plan.stores)
    if not disk and all(row.what == "activations" for row in plan.stores):
        return None
    scratch, window = builder.shared("scratch", ScratchFiles), Window()
    tiers = {name: tier_set for name, tier_set in tiers_of(plan).items() if name in params}
    homes = {**_offload_slices(params, sliced, scratch, tiers)}
    homes |= _stream_parameters(builder, staged, params, window, scratch, tiers, frozenset(homes))
    for tier, target_files in ((CPU, None), (DISK, scratch)):
        selected = {
            name: params[name] for name, tier_set in tiers.items() if tier_set.gradient == tier
        }
        # fully_shard copies gradients to the tier of slices, and waits for this if there are hooks
        shards = [p for n, p in selected.items() if n in homes and isinstance(homes[n], ZeroSlice)]
        offload_gradients(selected.values(), target_files, shards if target_files is None else ())
    dims = dims_of(holdings)
    tensorwise = optimizer is None or is_tensorwise(optimizer, dims)
    on_disk = any(r.tier == DISK and r.what in ("parameters", "optimizer") for r in plan.stores)
    ring = build_peer(builder, params, tiers, optimizer, dims)
    state = OffloadedState(params, tiers, homes, window, scratch, disk, on_disk, tensorwise, ring)
    state.check("the program was not built")
    return state


def _offload_slices(
    params: Mapping[str, nn.Parameter],
    sliced: Mapping[int, ShardedStage],
    scratch: ScratchFiles,
    tiers: Mapping[str, ParameterTiers],
) -> dict[str, OffloadedStorage]:
    """Mark or write the slices that fully_shard gathers from the host or from disk."""
    from schedlang.runtime.adapters.fully_shard import shards_of
    from schedlang.runtime.storage.tiers import DEVICE, DISK, set_tier

    storages: dict[str, OffloadedStorage] = {}
    shards = shards_of(unit for one in sliced.values() for unit in one.units)
    for name, one in tiers.items():
        shard = shards.get(params[name])
        if shard is not None and one.parameter != DEVICE:
            storages[name] = shard
            if one.parameter == DISK:
                shard.set_home(scratch.store(shard.home))
            else:
                set_tier(shard.home, one.parameter)
    return storages


def _stream_parameters(
    builder: Builder,
    staged: Staged,
    params: Mapping[str, nn.Parameter],
    window: Window,
    scratch: ScratchFiles,
    tiers: Mapping[str, ParameterTiers],
    sliced: frozenset[str],
) -> dict[str, OffloadedStorage]:
    """Move unsliced parameters to their tiers, and install fetching in their modules."""
    from schedlang.runtime.offload.streamed_parameters import StreamedParameter, stream_parameters
    from schedlang.runtime.storage.tiers import DISK, host_copy

    streams: dict[str, StreamedParameter] = {}
    for fqn, (row, names) in streamed_units(builder.plan, staged.trunk).items():
        local_names = [name for name in names if name in params and name not in sliced]
        for name in local_names:
            if name not in streams:
                store_copy = scratch.store if tiers[name].parameter == DISK else host_copy
                streams[name] = StreamedParameter(params[name], store_copy(params[name].detach()))
        if local_names:
            stream_parameters(
                builder.at(fqn), [streams[name] for name in local_names], window, row.ahead
            )
    return {**streams}


def build_peer(
    builder: Builder,
    params: Mapping[str, nn.Parameter],
    tiers: Mapping[str, ParameterTiers],
    optimizer: Callable[..., torch.optim.Optimizer] | None,
    dims: Mapping[str, int],
) -> PeerState | None:
    """Return this rank's end of the ring of peers; None without state on peers or an optimizer.

    Refuses (S851) an optimizer that is not elementwise.
    """
    from schedlang.runtime.comm import world
    from schedlang.runtime.offload.offloaded_step import PeerState
    from schedlang.runtime.optim.full_tensor_step import is_elementwise, is_tensorwise
    from schedlang.runtime.storage.offloaded_gradients import local_tensor

    rows = peer_stores(builder.plan, "optimizer")
    if not rows or optimizer is None:
        return None
    if not (is_elementwise(optimizer, dims) and is_tensorwise(optimizer, dims)):
        refuse_peer(
            builder.plan,
            rows[0],
            "this optimizer is not elementwise",
            "the state is moved back for only a few parameters at a time",
            ("use an elementwise optimizer (SGD, Adam, AdamW, ...)", HELP_STATE_ON_HOST),
        )
    names = [n for n, t in tiers.items() if t.state == "peer" and params[n].requires_grad]
    sizes = [local_tensor(params[n]).nbytes for n in names]
    rounds = [[names[k] for k in round_indices] for round_indices in group_into_rounds(sizes)]
    axis = rows[0].over
    assert axis is not None
    round_counts = world.all_gather_object(len(rounds))
    group = replace(builder.ranks.group(axis), pg=builder.ranks.another_group(axis, "peer"))
    max_rounds = max(round_counts[rank] for rank in group.ranks)
    return PeerState(
        group, params, rounds, max_rounds, builder.ranks.host_group(axis, "peer sizes")
    )
