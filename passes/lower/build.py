"""Build the program of this rank from a plan, a model and a batch (the door `build`).

The order of the work is fixed and does not depend on the order of rows: the local copy with this
rank's shards; structure (kernels, fusion); redistributions at edges of modules; casts;
recomputation; residence; stages; slices of data-parallel state.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.annotations import ActivationCoding, OffloadedTensors
from schedlang.ir.features import Copy, Lowered
from schedlang.ir.model import AdapterChange
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import Facet
from schedlang.passes.analyze.compressed_activations import BitTable
from schedlang.passes.analyze.holdings import reductions
from schedlang.passes.analyze.input_checks import add_forward_line
from schedlang.passes.analyze.prepare import Prepared, check_axes, prepare
from schedlang.passes.analyze.staleness import check_stale_options, find_gathered_step
from schedlang.passes.complete.complete import complete_plan
from schedlang.passes.lower import call_record
from schedlang.passes.lower.dropout import NO_DRAW, dropout_of
from schedlang.passes.lower.fingerprint import (
    check_optimizer_settings,
    optimizer_items,
    program_items,
)
from schedlang.passes.lower.step_parts import (
    build_compressor,
    build_early_reductions,
    build_pipeline,
    build_reductions,
    encode_weights,
    offload_state,
    slice_state,
)
from schedlang.passes.partition.recomputed_chains import Chains
from schedlang.passes.partition.staging import Staged, shard_modules, stage_fields
from schedlang.passes.propagate.casts import (
    cast_loss,
    cast_modules,
    has_stable_parameters,
    initial_loss_scale,
)
from schedlang.passes.propagate.loss_sums import is_statistics_relaxed
from schedlang.passes.propagate.original_forward import weight_of
from schedlang.passes.propagate.propagate import Traced
from schedlang.passes.propagate.sequence_trials import install_attention, weight_by_tokens

if TYPE_CHECKING:
    import torch
    from torch import nn

    from schedlang.runtime.assembly import Assembly, WeightFunction
    from schedlang.runtime.checkpointing.holdings import Holding
    from schedlang.runtime.comm.collectives import RankGroups
    from schedlang.runtime.grad_reduction.gradient import LocalParameters
    from schedlang.runtime.mixed_precision import CastRegion
    from schedlang.runtime.program import Program
    from schedlang.runtime.replica_buffers import ReplicaBuffers


# Independent of the order of rows: first the computation of modules; then layouts, whose layers
# wrap the computation; casts around both, so that tensors are cast before they are sent; then what
# is saved for backward.
LOWERING_ORDER = (
    Facet.STRUCTURE,
    Facet.PLACEMENT,
    Facet.DTYPE,
    Facet.RECOMPUTE,
    Facet.RESIDENCE,
    Facet.STAGE,
    Facet.STATE,
    Facet.ORDER,
)


def lower(builder: Builder, crossings: Callable[[], None]) -> None:
    """Execute the annotations of a plan and its `Lowered` rows on `builder`, facet by facet.

    `crossings` installs the traced redistributions at the edges of modules.
    """
    plan = builder.plan
    annotations: dict[Facet, Callable[[], None]] = {Facet.PLACEMENT: crossings}
    if plan.casts:
        annotations[Facet.DTYPE] = partial(_cast, builder)
    if plan.activation_codings or plan.stores:
        annotations[Facet.RESIDENCE] = partial(_save, builder)
    rows = plan.rows_with(Lowered)
    phases = {action.row: _phase(row) for action, row in rows}
    for phase in range(len(LOWERING_ORDER) + 1):
        for action, row in rows:
            if phases[action.row] == phase:
                for target in plan.targets(action):
                    row.lower(target, builder)
        if phase < len(LOWERING_ORDER) and LOWERING_ORDER[phase] in annotations:
            annotations[LOWERING_ORDER[phase]]()


def _phase(row: Lowered) -> int:
    return next(
        (phase for phase, facet in enumerate(LOWERING_ORDER) if row.changes(facet)),
        len(LOWERING_ORDER),
    )


def _cast(builder: Builder) -> None:
    """Install the casts of a plan."""
    plan, staged = builder.plan, builder.staged
    keeps = staged is not None and has_stable_parameters(plan, staged.timeline)
    builder.region = cast_modules(plan, builder.module, keeps)


def _save(builder: Builder) -> None:
    """Install compression and offload of saved tensors, in the order of rows."""
    rows: Iterable[ActivationCoding | OffloadedTensors] = chain(
        builder.plan.activation_codings, builder.plan.stores
    )
    for row in sorted(rows, key=lambda row: row.row):
        if isinstance(row, ActivationCoding):
            compress_activations(row, builder, builder.bits)
        elif row.what == "activations":
            _offload_saved(row, builder)


def compress_activations(row: ActivationCoding, copy: Copy, bits: Mapping[str, Any]) -> None:
    """Compress the tensors that a module saves; `bits` has the table of each module."""
    from schedlang.runtime.activation_memory.quantized import Quantization, quantize_saved

    table = {item.number: item.bits for item in bits.get(row.fqn, ())}
    quantize_saved(copy.at(row.fqn), row.fqn, Quantization(row.bits, row.block), bits=table)


def _offload_saved(row: OffloadedTensors, builder: Builder) -> None:
    """Offload the tensors that a module saves."""
    from schedlang.runtime.offload.offloaded_activations import (
        ActivationStore,
        offload_activations,
        park_activations,
    )
    from schedlang.runtime.storage.tiers import ScratchFiles

    if row.tier == "peer":
        park_activations(builder.at(row.fqn))
        return
    scratch = builder.shared("scratch", ScratchFiles) if row.tier == "disk" else None
    key = ("offload", row.ahead, row.tier)
    store = builder.shared(key, lambda: ActivationStore(row.ahead, scratch=scratch))
    offload_activations(builder.at(row.fqn), store)


Loss = Callable[..., Any]


@dataclass
class Builder:
    """The local copy of the model that lowering changes, module by module.

    region  the region of casts, if there are any
    """

    plan: Plan
    module: nn.Module
    traced: Traced
    ranks: RankGroups
    # sites of a row -> its choice for the memory limit
    chains: Chains = field(default_factory=dict)
    bits: BitTable = field(default_factory=dict)  # of saved tensors, by module
    staged: Staged | None = None
    region: CastRegion | None = None
    _shared: dict[object, Any] = field(default_factory=dict)

    def shared(self, key: object, make: Callable[[], Any]) -> Any:
        """Return the object of a key, shared by all modules; `make` creates it at first."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def at(self, fqn: str) -> nn.Module:
        """Return the module of this name in the copy."""
        return self.module.get_submodule(fqn)

    def with_group(self, edge: Any) -> Any:
        """Return a traced edge (or statistics) with the process group of this rank."""
        axes = edge.group.axes
        group = self.ranks.group(axes[0] if len(axes) == 1 else axes)
        return replace(edge, group=replace(group, label=edge.group.label))


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `build`, beside a plan and a batch.

    loss       loss(output, batch), where the model returns no loss
    optimizer  a function from (name, parameter) pairs to an optimizer
    clip       maximum norm of the gradients
    weight     weight(part): the weight of a part of the batch; default: its counted labels
    seed       seed of dropout masks
    dropout    "native": torch's dropout, from generators that each step seeds; "logical": masks
               that do not depend on the layout; None: logical with a seed, else native on several
               ranks, and torch's default generator in a world of one
    prepared   the result of `prepare` for this plan and a microbatch of this batch, if known
    local      the batch has this rank's rows only
    compare    what ranks compare: `nothing`, builds and the first batch (`build`), all (`batches`)
    wait       seconds within which all ranks must call `build`
    weights    safetensors files or a checkpoint with the values: the model needs no values
    on_meta    build on the meta device: for a step that only shows the collectives
    check      a function called with the prepared plan before anything is built; it may refuse
    """

    loss: Loss | None = None
    optimizer: Callable[..., torch.optim.Optimizer] | None = None
    clip: float | None = None
    weight: WeightFunction | None = None
    seed: int | None = None
    dropout: str | None = None
    prepared: Prepared | None = None
    local: bool = False
    compare: str = "build"
    wait: float = 20.0
    weights: str | os.PathLike[str] | None = None
    on_meta: bool = False
    check: Callable[[Plan, Mapping[str, Any], Prepared], None] | None = None


DEFAULT_OPTIONS = Options()


def build(
    plan: Plan, batch: Mapping[str, Any], options: Options = DEFAULT_OPTIONS, **changes: Any
) -> Program:
    """Build the program of this rank. All ranks of the job call it together.

    `batch` has the keyword arguments of a full step; only its shapes are used. `changes` are
    options by name. Raises Refusal, before any collective, where the plan cannot be built or ranks
    would build different programs.
    """
    from schedlang.runtime.comm.agreement import (
        check_agreement,
        join_world,
        report_failure,
        shared_store,
    )
    from schedlang.runtime.launch.hang_watch import watch_ranks
    from schedlang.runtime.launch.rank_job import RECORD

    options = replace(options, **changes)
    join_world(options.wait)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun detects dead ranks, not a deadlock
        watch_ranks()
    if RECORD in os.environ:
        call_record.begin_record()
    try:
        compares = options.compare != "nothing" and not options.on_meta
        if compares and shared_store() is not None:
            check_agreement(program_items(plan, batch, options), options.wait)
        program = _build(plan, batch, options)
    except Exception as error:
        report_failure(error)
        raise
    if RECORD in os.environ:
        call_record.describe_program(plan, program)
    if options.weights is not None:
        _load_weights(program, options.weights)
    return program


def _load_weights(program: Program, weights: str | os.PathLike[str]) -> None:
    """Load a checkpoint, ours or of others, into a program; `_local_copy` has read other files."""
    from schedlang.runtime.checkpointing.archive import load
    from schedlang.runtime.checkpointing.checkpoint_folders import is_any_checkpoint, is_checkpoint
    from schedlang.runtime.storage.quantized_parameters import open_quantized
    from schedlang.runtime.transfer.transfer import lacks_added_parameters, load_initial_values

    with open_quantized(program.assembly.parameters.values()):
        if is_checkpoint(weights) and not lacks_added_parameters(program, weights):
            load(program, weights, fresh=True)
        elif is_any_checkpoint(weights):
            load_initial_values(program, weights)


def _replica_buffers(plan: Plan, ranks: RankGroups) -> ReplicaBuffers | None:
    from schedlang.runtime.replica_buffers import ReplicaBuffers

    several = plan.shares > 1 and is_statistics_relaxed(plan)
    return ReplicaBuffers(ranks.group(plan.data_axes)) if several else None


def _build(plan: Plan, batch: Mapping[str, Any], options: Options) -> Program:
    import torch

    from schedlang.runtime.assembly import Assembly

    if plan.completions:
        plan = complete_plan(plan, batch, options.loss)
    ranks = join_job(plan, options.on_meta)
    prepared = options.prepared or _prepare(plan, batch, options)
    traced, staged, holdings = prepared.traced, prepared.staged, prepared.holdings
    if plan.order is not None:
        check_stale_options(staged, options.optimizer, options.clip, options.on_meta)
    if options.check is not None:
        options.check(plan, batch, prepared)
    builder = _lowered_copy(plan, prepared, ranks, options)
    sliced = slice_state(plan, builder.module, ranks, prepared) if plan.replicas else {}
    params, module, offloaded = _local_parameters(builder, holdings), builder.module, None
    if plan.stores and not options.on_meta:
        offloaded = offload_state(builder, holdings, params, sliced, options.optimizer)
    needed = reductions(plan, traced, holdings)
    sums = build_reductions(plan, needed, params, ranks) if needed or plan.data_axes else ()
    draws = dropout_of(plan, prepared, ranks, module, batch, options) if prepared.draws else NO_DRAW
    loss = cast_loss(plan, options.loss) if plan.casts else options.loss
    early = build_early_reductions(plan, staged, params, sums) if plan.overlaps else None
    has_double = any(param.dtype == "float64" for param in plan.model.unique_parameters.values())
    coder = build_compressor(plan, needed, holdings, params, ranks) if plan.compression else None
    weigh = weight_of if prepared.tokens is None else weight_by_tokens
    assembly = Assembly(
        module=module,
        pipeline=build_pipeline(plan, module, ranks, prepared, loss, options.weight, sliced),
        ranks=ranks,
        replicas=plan.data_axes,
        replica_buffers=_replica_buffers(plan, ranks) if plan.relaxed else None,
        microbatches=plan.micro,
        parameters=params,
        holdings=holdings,
        ties=(*plan.model.ties, *plan.model.shared_buffers),
        reductions=sums,
        sliced=sliced,
        keys=tuple(plan.model.model.state_dict()),
        built_buffers=frozenset(name for name, _ in module.named_buffers()),
        adapter_changes=tuple(c for c in plan.model.changes if isinstance(c, AdapterChange)),
        loss_dtype=torch.float64 if has_double else torch.float32,  # losses are sums of many terms
        weight=options.weight or weigh(traced, plan.shares * plan.micro),
        compressor=coder,
        region=builder.region,
        early_reductions=early,
        **vars(draws),
        batch_keys=frozenset(batch),
        gather_routes=prepared.gather_routes,
        no_loss=traced.missing_loss,
        takes_gradient=traced.takes_gradient,
        tokens=prepared.tokens,
        boundaries=plan.boundaries,
        context=plan.context_axes if plan.contexts else (),
        row_weights=plan.share_weights if any(r.rows for r in plan.replicas) else None,
        gathers_rows=bool(plan.row_gathers),
        **(stage_fields(plan, staged, staged.axis) if staged.axis is not None else {}),
    )
    return _make_program(plan, staged, assembly, offloaded, options)


def _lowered_copy(plan: Plan, prepared: Prepared, ranks: RankGroups, options: Options) -> Builder:
    """Return the builder after the plan was lowered into the local copy of the model."""
    traced, staged = prepared.traced, prepared.staged
    module = _local_copy(plan, prepared, ranks, options)
    builder = Builder(plan, module, traced, ranks, prepared.chains, prepared.bits, staged)
    if prepared.tokens is not None:
        install_attention(plan, module, prepared.tokens, ranks)
    lower(builder, lambda: shard_modules(module, traced, builder.with_group))
    return builder


def _local_parameters(builder: Builder, holdings: Mapping[str, Holding]) -> LocalParameters:
    """Return this rank's parameters by name, after weights with a quantized storage are encoded."""
    from schedlang.runtime.grad_reduction.gradient import LocalParameters

    held = {n for n, h in holdings.items() if h.is_held(builder.plan.mesh, builder.ranks.rank)}
    parameters = LocalParameters({n: p for n, p in builder.module.named_parameters() if n in held})
    if not all(p.requires_grad for p in parameters.values()):
        unreduced = reductions(builder.plan, builder.traced, holdings, frozen=True)
        parameters.unreduced = frozenset(n for reduction in unreduced for n in reduction.names)
    if builder.plan.model.changes:
        encode_weights(builder, parameters)
    return parameters


def _make_program(
    plan: Plan, staged: Staged, a: Assembly, offloaded: Any, options: Options
) -> Program:
    """Return the program with its optimizer; refuse an optimizer whose settings differ by rank."""
    import torch

    from schedlang.runtime.comm.agreement import check_agreement, shared_store
    from schedlang.runtime.optim.full_tensor_step import complete_hooks
    from schedlang.runtime.program import Program
    from schedlang.runtime.shard_state import OptimizerShards
    from schedlang.runtime.step_batch import BatchComparison
    from schedlang.runtime.user_loops import check_broadcasts

    if any(site.is_a("TransformerEncoderLayer") for site in plan.model.sites.values()):
        from schedlang.runtime.inference_paths import evaluate_by_calls

        evaluate_by_calls(a.module, a.stage_axis is not None)
    full_step = optimizer = comparing = None
    if options.optimizer is not None:
        if a.stage_axis is not None or any(h.layout.splits for h in a.holdings.values()):
            check_optimizer_settings(plan, a.stage_axis, a.holdings, options.optimizer)
        full_step = find_gathered_step(a, staged, options.optimizer)
        trained_names = {n for n, p in plan.model.model.named_parameters() if p.requires_grad}
        optimizer = _make_optimizer(a, options.optimizer, trained_names)
        if isinstance(optimizer, torch.optim.Optimizer) and a.ranks.mesh.world > 1:
            complete_hooks(optimizer)
            check_broadcasts(a, optimizer)
            shards = OptimizerShards(a)
            optimizer.register_state_dict_post_hook(shards.mark)
            optimizer.register_load_state_dict_pre_hook(shards.check)
    if options.compare != "nothing" and not options.on_meta and shared_store() is not None:
        names = {id(parameter): name for name, parameter in a.parameters.items()}
        if options.optimizer is not None:  # on all ranks, also those that train no parameter
            check_agreement(optimizer_items(optimizer, names), options.wait)
        settings = partial(optimizer_items, optimizer, names)
        comparing = BatchComparison(settings, options.compare == "batches")
    return Program(
        a,
        optimizer,
        options.clip,
        whole=full_step.of(optimizer) if full_step is not None else None,
        offloaded=offloaded,
        loss_scale=initial_loss_scale(plan) if plan.casts else None,
        comparing=comparing,
    )


def _prepare(plan: Plan, batch: Mapping[str, Any], options: Options) -> Prepared:
    """Prepare a plan on each rank; the table of bits is broadcast from the first rank."""
    from schedlang.runtime.batch import largest_part
    from schedlang.runtime.comm import world

    with add_forward_line(plan.model.model):
        sample = largest_part(batch, 1 if options.local else plan.share_weights, plan.micro)
    ready = prepare(plan, sample, options.loss, options.weight, trains=False)
    # tables of bits were measured on each rank's machine, and may differ
    return replace(ready, bits=world.broadcast_object(0, ready.bits)) if ready.bits else ready


def _make_optimizer(
    a: Assembly, make: Callable[..., torch.optim.Optimizer], trained_anywhere: Container[str]
) -> torch.optim.Optimizer | None:
    """Return the optimizer of this rank's trained parameters; None if it has no such parameter.

    `trained_anywhere` names the parameters that any rank trains.
    """
    from schedlang.runtime.optim.full_tensor_step import (
        check_closure,
        dims_of,
        fill_groups,
        groups_of,
    )

    trained = [(name, p) for name, p in a.parameters.items() if p.requires_grad]
    if not trained:
        return None
    names = {id(p): name for name, p in trained}
    dims = {name: count for name, count in dims_of(a.holdings).items() if name in trained_anywhere}
    has_stages = a.stage_axis is not None
    full_groups = groups_of(make, dims, set(names.values())) if has_stages else ()
    optimizer = make(trained)  # the last that is made: the function may keep it
    check_closure(optimizer)
    groups = getattr(optimizer, "param_groups", ())
    given_ids, own_ids = {id(p) for g in groups for p in g["params"]}, {id(p) for _, p in trained}
    if given_ids and not given_ids & own_ids and a.stage_axis is None:
        raise Refusal.of(
            "S618",
            "the optimizer has none of the program's parameters",
            notes=("a program trains copies of the model's parameters, and parts of them",),
            helps=("take those that are given: `lambda named: torch.optim.AdamW(named, lr=1e-3)`",),
        )
    fill_groups(optimizer, full_groups, names)
    return optimizer


def join_job(plan: Plan, on_meta: bool = False, wait: float | None = None) -> RankGroups:
    """Join the running job; refuse idle axes (S205), a mesh of another size (S607), and ranks that
    have not come after `wait` seconds (S651; None: wait as long as torch does)."""
    from schedlang.runtime.comm import world
    from schedlang.runtime.comm.agreement import join_world
    from schedlang.runtime.comm.collectives import RankGroups

    join_world(wait)
    check_axes(plan)
    if on_meta:
        return RankGroups(plan.mesh)
    device = next((parameter.device for parameter in plan.model.model.parameters()), None)
    return RankGroups(plan.mesh, world.current_world().device_for(device))


# -- the local copy ----------------------------------------------------------------------------


def _local_copy(plan: Plan, prepared: Prepared, ranks: RankGroups, options: Options) -> nn.Module:
    """Return a copy of the model with this rank's shard of each parameter, before slicing.

    Parameters that this rank does not hold are on the meta device.
    """
    import torch
    from torch import nn

    from schedlang.runtime.checkpointing.holdings import shard_of
    from schedlang.runtime.initial.sources import source_of
    from schedlang.runtime.initial.weight_files import TargetPart
    from schedlang.runtime.redistribution.sharding import full_slice
    from schedlang.runtime.tracing.meta_runs import copy_with, meta_parameter

    _check_state(plan)
    mesh, rank, on_meta, model = plan.mesh, ranks.rank, options.on_meta, plan.model.model
    if not on_meta and (prepared.tokens is not None or prepared.slicing is not None):
        _check_has_values(model)
    needs_values = options.weights is not None or any(p.is_meta for p in model.parameters())
    # recorded initial values, and names in files, are those of the user's model
    source = (
        source_of(plan.model.base.model, options.weights) if needs_values and not on_meta else None
    )
    targets: list[TargetPart] = []

    def local(name: str, parameter: nn.Parameter) -> nn.Parameter:
        holding = replace(prepared.holdings[name], sliced=())
        if not holding.is_held(mesh, rank):
            return meta_parameter(parameter)
        if on_meta:
            return meta_parameter(parameter, holding.local_shape(mesh, rank))
        has_value = source is None or (options.weights is None and not parameter.is_meta)
        make = None if has_value else plan.model.initializer_of(name)
        if has_value or make is not None:
            value = parameter.detach() if make is None else make(parameter)
            part = shard_of(value, holding, mesh, rank).to(ranks.device)
        else:
            part = parameter.new_zeros(holding.local_shape(mesh, rank), device=ranks.device)
            names = plan.model.unique_parameters[name].names
            targets.append(TargetPart(names, parameter, part.detach(), holding.part(mesh, rank)))
        return nn.Parameter(part, requires_grad=parameter.requires_grad)

    keys = model.state_dict(keep_vars=True).keys() if source is not None else ()
    saved = {id(buffer): name for name, buffer in model.named_buffers() if name in keys}

    def other(tensor: torch.Tensor) -> torch.Tensor:
        if on_meta:
            return tensor.to("meta")
        if source is None or not tensor.is_meta:
            return tensor.detach().clone().to(ranks.device)
        if id(tensor) not in saved:
            raise _no_values(model, tensor)
        zeros = torch.zeros_like(tensor, device=ranks.device)
        targets.append(
            TargetPart((saved[id(tensor)],), tensor, zeros, full_slice(tuple(tensor.shape)))
        )
        return zeros

    module = copy_with(model, local, other)
    if source is not None:
        source.fill(targets)
    return module


def _no_values(model: nn.Module, tensor: torch.Tensor) -> Refusal:
    """Return S623: a tensor on the meta device is in no file of weights."""
    names = (
        f"{prefix}.{name}".strip(".")
        for prefix, module in model.named_modules()
        for name, value in (*module._buffers.items(), *vars(module).items())
        if value is tensor
    )
    return Refusal.of(
        "S623",
        f"`{next(names, 'a tensor')}` has no values, and files of weights do not have it",
        notes=("it is on the meta device, and no part of the state dict",),
        helps=("make the model by `schedlang.deferred_init(make)`: it computes buffers",),
    )


def _check_has_values(model: nn.Module) -> None:
    """Refuse (S623) a model without values where a forward on parts of sequences must be probed."""
    if any(p.is_meta for p in model.parameters()):
        raise Refusal.of(
            "S623",
            "the model has no values: how it runs on parts of sequences cannot be tried",
            notes=("rows that split sequences try a forward and a backward of the model",),
            helps=("build the model with its values on every rank, or leave these rows out",),
        )


def _check_state(plan: Plan) -> None:
    """Refuse (S624) state that is neither parameter nor buffer: it cannot be sharded or saved."""
    model = plan.model.model
    names = {n for n, _ in model.named_buffers(remove_duplicate=False)} | set(plan.model.parameters)
    extra = [key for key in model.state_dict() if key not in names]
    if extra:
        raise Refusal.of(
            "S624",
            f"`{extra[0]}` of the state dict is not a parameter or a buffer",
            notes=("a module returns it as extra state, which cannot be sharded or saved",),
            helps=("leave it out: override `get_extra_state` in a subclass",),
        )
