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
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import Facet
from schedlang.passes.analyze.holdings import (
    Reduction,
    gathers_by_rows,
    sliced_names,
    sliced_over,
    slicing,
)
from schedlang.passes.analyze.prepare import Prepared
from schedlang.passes.analyze.residence import (
    NEAR,
    refuse_peer,
    rounds,
    streamed_units,
    tier_of_unit,
    tiers_of,
)
from schedlang.passes.partition.staging import Staged, local_skeleton, meet, on_peers
from schedlang.passes.propagate.casts import gathered_in
from schedlang.passes.propagate.context import exchange, slices_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from schedlang.passes.lower.build import Builder
    from schedlang.runtime.assembly import Weight
    from schedlang.runtime.checkpointing.holding import Holding
    from schedlang.runtime.comm.collectives import Ranks
    from schedlang.runtime.grad_reduction.compressed import Compressor
    from schedlang.runtime.grad_reduction.gradient import Sum
    from schedlang.runtime.grad_reduction.zero import Sliced
    from schedlang.runtime.offload.parameters import StreamedParameter, Window
    from schedlang.runtime.offload.step import Home, Offloaded, Peer, Tiers
    from schedlang.runtime.pipeline.executor import Pipeline
    from schedlang.runtime.pipeline.overlapped_sums import EarlySums
    from schedlang.runtime.pipeline.stage import Stub
    from schedlang.runtime.storage.tiers import Scratch


def slice_state(
    plan: Plan, module: nn.Module, ranks: Ranks, prepared: Prepared
) -> dict[int, Sliced]:
    """Apply fully_shard to the units of each stage of this rank; return the slices by stage."""
    from schedlang.runtime.grad_reduction.zero import Sliced, Unit, join

    staged, holdings = prepared.staged, prepared.holdings
    sliced, _ = slicing(plan)
    if sliced is None:
        return {}
    axes = plan.mesh.fold(sliced.axes)
    every = dict.fromkeys((axes, *(h.sliced for h in holdings.values() if h.sliced)))
    meshes = {over: ranks.device_mesh(over) for over in every}  # created by all ranks, in one order
    ignored = {
        p
        for n, p in module.named_parameters()
        if not holdings[n].sliced or not holdings[n].held(plan.mesh, ranks.rank)
    }
    place = plan.mesh.index(ranks.rank, staged.axis) if staged.axis is not None else 0
    reached = prepared.traced.reached
    # where values choose among modules, a later batch may reach other parameters
    anywhere = bool(prepared.traced.wanders)
    met = {p for n, p in module.named_parameters() if anywhere or n in reached}
    out = {}
    for stage in staged.stages_at(place):
        asked = prepared.traced.asked
        out[stage] = one = Sliced(sliced.stage, meshes[axes], ignored, sliced.reshard, asked)
        for fqn, names in sliced_names(plan, staged, holdings, stage).items():
            over, tier = sliced_over(holdings, names) or axes, tier_of_unit(plan, fqn, names)
            low = gathered_in(plan, names)
            overwrites = fqn in prepared.traced.overwrites
            unit = Unit(not fqn, _has_late_compute(plan, fqn), tier, low, overwrites)
            one.add(module.get_submodule(fqn), meshes[over], unit, met)
        one.prefetch(sliced.prefetch)
    if staged.axis is not None:
        join(list(out.values()))
    return out


def _has_late_compute(plan: Plan, fqn: str) -> bool:
    """Return whether a kernel inside this module computes after the module's forward."""
    late = (action for action, row in plan.rows_with(Injected) if row.waits)
    return any(s == fqn or s.startswith(f"{fqn}.") for action in late for s in action.sites)


def sums_of(
    plan: Plan, planned: Sequence[Reduction], found: Mapping[str, nn.Parameter], ranks: Ranks
) -> tuple[Sum, ...]:
    """Return the gradient reductions of this rank after the last backward.

    All ranks create all process groups, in one order.
    """
    from schedlang.runtime.grad_reduction.gradient import Sum

    sums = []
    if data := plan.data_axes:
        for axes in (data, plan.row_axes, plan.context_axes):
            ranks.group(axes)  # created on all ranks, although only some gather outputs over it
    for one in planned:
        names = tuple(name for name in one.names if name in found)
        if one.stages is not None:  # every rank takes part in creating these groups
            ends = sorted(one.stages)
            groups = [tuple(line[s] for s in ends) for line in plan.mesh.groups(one.axes)]
            group = ranks.subset(one.axes[0], groups)
        else:
            group = ranks.group(one.axes)
            if one.kind == "replicas" and plan.overlapping("gradients"):
                # begins during a backward, which sends on the other group
                group = replace(group, pg=ranks.again(one.axes, "early"))
        if one.kind != "compressed" and group is not None and names:
            sums.append(Sum(group, names, one.kind, one.bucket))
    return tuple(sums)


def compressor_of(
    plan: Plan,
    planned: Sequence[Reduction],
    holdings: Mapping[str, Holding],
    found: Mapping[str, nn.Parameter],
    ranks: Ranks,
) -> Compressor | None:
    """Return the compressor of this rank's gradients; None without a compressed reduction."""
    from schedlang.runtime.checkpointing.holding import cleaned
    from schedlang.runtime.grad_reduction.compressed import Compressor

    how, one = plan.compression, next((one for one in planned if one.kind == "compressed"), None)
    if how is None or one is None:
        return None
    names = tuple(name for name in one.names if name in found)

    def clean(name: str, part: Tensor) -> Tensor:
        return cleaned(part, holdings[name], plan.mesh, ranks.rank)

    return Compressor(how.codec, ranks.group(one.axes), names, clean)


Loss = Callable[..., Any]


def pipeline_of(
    plan: Plan,
    module: nn.Module,
    ranks: Ranks,
    prepared: Prepared,
    loss: Loss | None,
    weight: Weight | None,
    sliced: Mapping[int, Any],
) -> Pipeline:
    """Return the pipeline of this rank: its stages and the timeline of the plan.

    `sliced`: the slices of `zero`, by stage.
    """
    from schedlang.pipeline.timeline.table import Kind
    from schedlang.runtime.adapters.torch_compile import keep_buffers
    from schedlang.runtime.grad_reduction.zero import gathering
    from schedlang.runtime.pipeline.executor import Pipeline
    from schedlang.runtime.pipeline.stage import Stage
    from schedlang.runtime.tracing.units import Switch

    staged, device = prepared.staged, ranks.device
    slices = None
    if prepared.slicing is not None:
        slices = slices_of(prepared.slicing, module, prepared.traced, weight)
    halves: Mapping[int, Mapping[str, Any]] = {}
    if (staged.timeline.kind == Kind.W).any():
        late = _late_parameters(plan)
        each = range(staged.cut.stages)
        halves = {
            s: {"split": _can_split_backward(plan, staged, s, sliced), "late": late} for s in each
        }
        keep_buffers()
    if staged.axis is None:
        stage = Stage(module, staged.cut, 0, loss=loss, **halves.get(0, {}))
        alone = (ranks.rank,)
        return Pipeline({0: stage}, staged.timeline, alone, device=device, slices=slices)
    group = ranks.group(staged.axis)
    up = ranks.between(staged.axis)
    down = ranks.between(staged.axis, "down") if ranks.one_way else None
    place = plan.mesh.index(ranks.rank, staged.axis)
    switch = Switch(module, staged.cut.graph.units)
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
            through=sliced[s].through if s in sliced else None,
        )
        for s in staged.stages_at(place)
    }
    return Pipeline(
        stages,
        staged.timeline,
        group.ranks,
        place,
        group=up,
        down=down,
        device=device,
        lookahead=plan.ahead,
        slices=slices,
        parks=_eviction_groups(staged, ranks),
        picked=bool(on_peers(plan, "activations")),
        handlers=gathering(sliced) if gathers_by_rows(plan, staged) else None,
    )


class _LastStub(threading.local):
    """The last stand-ins made in a thread, with plan and preparation: ranks may be threads."""

    made: tuple[ref[Plan], ref[Prepared], Stub] | None = None


_last = _LastStub()


def _stub_of(plan: Plan, prepared: Prepared, ranks: Ranks) -> Stub:
    """Return stand-ins for units of other stages; programs of one preparation share them."""
    from schedlang.runtime.pipeline.stage import Stub

    if _last.made is not None:
        of, ready, known = _last.made
        if of() is plan and ready() is prepared:
            return known
    of, ready, cut = ref(plan), ref(prepared), prepared.staged.cut

    def copied() -> nn.Module:
        plan, prepared = of(), ready()
        assert plan is not None and prepared is not None, "a proof holds what it proves"
        skeleton = local_skeleton(plan, prepared.traced)
        exchange(plan, skeleton, prepared.tokens, ranks)
        return skeleton

    model, recorded = plan.model.model, prepared.staged.recorded
    known_outputs = {} if recorded is None else recorded.known_of(model)
    if prepared.outputs:  # known from a proof: the copy is hardly ever needed
        made = Stub(model, cut, {**known_outputs, **prepared.outputs}, copied)
    else:
        made = Stub(copied(), cut, known_outputs)
    if prepared.tokens is None:  # else the copy has process groups of this rank
        _last.made = of, ready, made
    return made


def early_sums(
    plan: Plan, staged: Staged, found: Mapping[str, nn.Parameter], sums: Sequence[Sum]
) -> EarlySums | None:
    """Return the reductions that begin before the step ends, if a row allows this; else None."""
    from schedlang.runtime.pipeline.overlapped_sums import EarlySums

    if plan.overlapping("gradients") is None:
        return None
    if staged.axis is None:
        return EarlySums(found, sums, dict.fromkeys(found, frozenset([0])))
    held = [(stage, staged.cut.parameters(stage)) for stage in range(staged.cut.stages)]
    stages = {name: frozenset(s for s, names in held if name in names) for name in found}
    return EarlySums(found, sums, stages)


def _can_split_backward(plan: Plan, staged: Staged, stage: int, sliced: Mapping[int, Any]) -> bool:
    """Return whether a stage's backward can run in two halves (input and weight gradients).

    It cannot where weights are gathered, since they are freed before the second half, nor where
    activations are recomputed, since each half would recompute all of them.
    """
    if stage in sliced:
        return False
    units = [staged.cut.graph.units[k] for k in staged.cut.units(stage)]
    again = {site for a in plan.rows_changing(Facet.RECOMPUTE) for site in a.sites}
    return not any(meet(unit, site) for unit in units for site in again)


def _eviction_groups(staged: Staged, ranks: Ranks) -> tuple[Any, ...]:
    """Return the process groups for activations that are evicted to a partner rank."""
    from schedlang.pipeline.timeline.table import Kind

    if staged.axis is None or not (staged.timeline.kind == Kind.EVICT).any():
        return ()
    groups = [ranks.between(staged.axis, f"parked {way}") for way in range(4)]
    return (*groups, ranks.on_host(staged.axis, "parked sizes"))


def _late_parameters(plan: Plan) -> frozenset[str] | None:
    """Return the parameters whose gradients may be computed late, by all names; None: all."""
    if plan.late is None:
        return None
    inside = tuple(f"{fqn}." if fqn else "" for fqn in plan.late)
    return frozenset(
        name
        for fact in plan.model.unique.values()
        for name in fact.names
        if any(other.startswith(inside) for other in fact.names)
    )


def encode_weights(builder: Builder, found: Mapping[str, nn.Parameter]) -> None:
    """Encode this rank's shards of quantized weights, and install decoding in their modules."""
    from schedlang.runtime.offload.decoded import decode
    from schedlang.runtime.storage.coded import Coded

    facts = builder.plan.model
    for name, parameter in found.items():
        coding = facts.coded(name)
        if coding is not None:
            held = Coded(parameter, coding)
            for each in facts.parameters[name].names:
                decode(builder.at(each.rpartition(".")[0]), held)


# -- offload ---------------------------------------------------------------------------------------


def offload_state(
    builder: Builder,
    holdings: Mapping[str, Holding],
    found: Mapping[str, nn.Parameter],
    sliced: Mapping[int, Sliced],
    optimizer: Callable[..., torch.optim.Optimizer] | None,
) -> Offloaded | None:
    """Move this rank's parameters to their tiers; return None if everything stays on the device."""
    from schedlang.runtime.adapters.fully_shard import Shard
    from schedlang.runtime.offload.parameters import Window
    from schedlang.runtime.offload.step import Offloaded
    from schedlang.runtime.optim.whole_step import dims_of, is_tensorwise
    from schedlang.runtime.storage.offloaded_gradients import offload_gradients
    from schedlang.runtime.storage.tiers import CPU, DISK, Scratch

    plan, staged = builder.plan, builder.staged
    assert staged is not None, "a program that is built has stages"
    disk = any(row.tier == DISK for row in plan.stores)
    if not disk and all(row.what == "activations" for row in plan.stores):
        return None
    scratch, window = builder.shared("scratch", Scratch), Window()
    tiers = {name: one for name, one in tiers_of(plan).items() if name in found}
    homes = {**_offload_slices(found, sliced, scratch, tiers)}
    homes |= _stream_parameters(builder, staged, found, window, scratch, tiers, frozenset(homes))
    for tier, to in ((CPU, None), (DISK, scratch)):
        leave = {name: found[name] for name, one in tiers.items() if one.gradient == tier}
        # fully_shard copies gradients to the tier of slices, and waits for this if there are hooks
        shards = [p for n, p in leave.items() if n in homes and isinstance(homes[n], Shard)]
        offload_gradients(leave.values(), to, shards if to is None else ())
    dims = dims_of(holdings)
    tensorwise = optimizer is None or is_tensorwise(optimizer, dims)
    files = any(r.tier == DISK and r.what in ("parameters", "optimizer") for r in plan.stores)
    ring = peer_of(builder, found, tiers, optimizer, dims)
    made = Offloaded(found, tiers, homes, window, scratch, disk, files, tensorwise, ring)
    made.check("the program was not built")
    return made


def _offload_slices(
    found: Mapping[str, nn.Parameter],
    sliced: Mapping[int, Sliced],
    scratch: Scratch,
    tiers: Mapping[str, Tiers],
) -> dict[str, Home]:
    """Mark or write the slices that fully_shard gathers from the host or from disk."""
    from schedlang.runtime.adapters.fully_shard import shards_of
    from schedlang.runtime.storage.tiers import DEVICE, DISK, mark

    held: dict[str, Home] = {}
    shards = shards_of(unit for one in sliced.values() for unit in one.units)
    for name, one in tiers.items():
        shard = shards.get(found[name])
        if shard is not None and one.parameter != DEVICE:
            held[name] = shard
            if one.parameter == DISK:
                shard.settle(scratch.put(shard.home))
            else:
                mark(shard.home, one.parameter)
    return held


def _stream_parameters(
    builder: Builder,
    staged: Staged,
    found: Mapping[str, nn.Parameter],
    window: Window,
    scratch: Scratch,
    tiers: Mapping[str, Tiers],
    sliced: frozenset[str],
) -> dict[str, Home]:
    """Move unsliced parameters to their tiers, and install fetching in their modules."""
    from schedlang.runtime.offload.parameters import StreamedParameter, stream
    from schedlang.runtime.storage.tiers import DISK, plain_copy

    held: dict[str, StreamedParameter] = {}
    for fqn, (row, names) in streamed_units(builder.plan, staged.trunk).items():
        mine = [name for name in names if name in found and name not in sliced]
        for name in mine:
            if name not in held:
                put = scratch.put if tiers[name].parameter == DISK else plain_copy
                held[name] = StreamedParameter(found[name], put(found[name].detach()))
        if mine:
            stream(builder.at(fqn), [held[name] for name in mine], window, row.ahead)
    return {**held}


def peer_of(
    builder: Builder,
    found: Mapping[str, nn.Parameter],
    tiers: Mapping[str, Tiers],
    optimizer: Callable[..., torch.optim.Optimizer] | None,
    dims: Mapping[str, int],
) -> Peer | None:
    """Return this rank's end of the ring of peers; None without state on peers or an optimizer.

    Refuses (S851) an optimizer that is not elementwise.
    """
    from schedlang.runtime.comm import world
    from schedlang.runtime.offload.step import Peer
    from schedlang.runtime.optim.whole_step import is_elementwise, is_tensorwise
    from schedlang.runtime.storage.offloaded_gradients import local

    rows = on_peers(builder.plan, "optimizer")
    if not rows or optimizer is None:
        return None
    if not (is_elementwise(optimizer, dims) and is_tensorwise(optimizer, dims)):
        refuse_peer(
            builder.plan,
            rows[0],
            "this optimizer is not elementwise",
            "the state is moved back for only a few parameters at a time",
            ("use an elementwise optimizer (SGD, Adam, AdamW, ...)", NEAR),
        )
    names = [n for n, t in tiers.items() if t.state == "peer" and found[n].requires_grad]
    sizes = [local(found[n]).nbytes for n in names]
    turns = [[names[k] for k in turn] for turn in rounds(sizes)]
    axis = rows[0].over
    assert axis is not None
    everyone = world.all_gather_object(len(turns))
    group = replace(builder.ranks.group(axis), pg=builder.ranks.again(axis, "peer"))
    most = max(everyone[rank] for rank in group.ranks)
    return Peer(group, found, turns, most, builder.ranks.on_host(axis, "peer sizes"))
