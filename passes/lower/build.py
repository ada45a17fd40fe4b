"""Building of the program that this rank runs, from a plan, a model and a batch.

The order is fixed, whatever the order of rows: the local copy with this rank's parts; structure
(kernels, fusion); crossings; recomputation; residence; stages; slices of data-parallel state.

* What a plan says of modules, put into the copy that is built: by kind, in one order.
* The program of one rank, put together.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.annotations import Kept, Stored
from schedlang.ir.features import Copy, Lowered
from schedlang.ir.model import Adapting
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import Facet
from schedlang.passes.analyze.fewer_bits import Bits
from schedlang.passes.analyze.holdings import reductions
from schedlang.passes.analyze.prepare import Prepared, check_axes, prepare
from schedlang.passes.analyze.staleness import check_build, whole_step
from schedlang.passes.analyze.taking import at_the_forward
from schedlang.passes.complete.complete import completed
from schedlang.passes.lower import recorded
from schedlang.passes.lower.dropout import Dropout, DropoutOptions, dropout_of
from schedlang.passes.lower.executor import (
    compressor_of,
    early_sums,
    encode_weights,
    offload_state,
    pipeline_of,
    slice_state,
    sums_of,
)
from schedlang.passes.lower.fingerprint import built_from, check_places, optimized_by
from schedlang.passes.partition.chains import Chains
from schedlang.passes.partition.staging import Staged, buffer_homes, buffer_stages, shard_modules
from schedlang.passes.propagate.casts import cast_loss, cast_modules, loss_scale, steady
from schedlang.passes.propagate.context import exchange, weight_by_tokens
from schedlang.passes.propagate.original import weight_of
from schedlang.passes.propagate.propagate import Traced

if TYPE_CHECKING:
    import torch
    from torch import nn

    from schedlang.runtime.assembly import Assembly, Weight
    from schedlang.runtime.checkpointing.holding import Holding
    from schedlang.runtime.comm.collectives import Ranks
    from schedlang.runtime.grad_reduction.gradient import LocalParameters
    from schedlang.runtime.mixed_precision import Region
    from schedlang.runtime.program import Program


# Whatever the order of rows: what modules compute; how they lie, which wraps that; casts around it,
# so that what is sent is cast already; then what is kept of all this.
ORDER = (
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
    """Execute the annotations of a plan, and the rows that lower themselves, facet by facet.

    `crossings` puts in place what the traced model says of activations at the edges of modules.
    """
    plan = builder.plan
    annotations: dict[Facet, Callable[[], None]] = {Facet.PLACEMENT: crossings}
    if plan.casts:
        annotations[Facet.DTYPE] = partial(_cast, builder)
    if plan.kept or plan.stores:
        annotations[Facet.RESIDENCE] = partial(_save, builder)
    rows = plan.rows_with(Lowered)
    phases = {action.row: _phase(row) for action, row in rows}
    for phase in range(len(ORDER) + 1):
        for action, row in rows:
            if phases[action.row] == phase:
                for target in plan.targets(action):
                    row.lower(target, builder)
        if phase < len(ORDER) and ORDER[phase] in annotations:
            annotations[ORDER[phase]]()


def _phase(row: Lowered) -> int:
    return next((place for place, facet in enumerate(ORDER) if row.changes(facet)), len(ORDER))


def _cast(builder: Builder) -> None:
    """Let modules compute in other dtypes."""
    plan, staged = builder.plan, builder.staged
    keeps = staged is not None and steady(plan, staged.timeline)
    builder.region = cast_modules(plan, builder.module, keeps)


def _save(builder: Builder) -> None:
    """Let modules keep less of what they save, or keep it elsewhere, in the order of rows."""
    found: Iterable[Kept | Stored] = chain(builder.plan.kept, builder.plan.stores)
    for one in sorted(found, key=lambda one: one.row):
        if isinstance(one, Kept):
            code(one, builder, builder.bits)
        elif one.what == "activations":
            _store(one, builder)


def code(one: Kept, copy: Copy, bits: Mapping[str, Any]) -> None:
    """Let a module keep what it saves in fewer bits; `bits` of single tensors, by modules."""
    from schedlang.runtime.activation_memory.quantized import Coding
    from schedlang.runtime.activation_memory.quantized import code as coded

    table = {each.number: each.bits for each in bits.get(one.fqn, ())}
    coded(copy.at(one.fqn), one.fqn, Coding(one.bits, one.block), bits=table)


def _store(one: Stored, builder: Builder) -> None:
    """Keep what a module saves off the device."""
    from schedlang.runtime.offload.saved_tensors import Store, offload, park
    from schedlang.runtime.storage.tiers import Scratch

    if one.tier == "peer":
        park(builder.at(one.fqn))
        return
    scratch = builder.shared("scratch", Scratch) if one.tier == "disk" else None
    key = ("offload", one.ahead, one.tier)
    store = builder.shared(key, lambda: Store(one.ahead, scratch=scratch))
    offload(builder.at(one.fqn), store)


Loss = Callable[..., Any]


@dataclass
class Builder:
    """The local copy of the model that lowering changes, module by module.

    region  where casts are made, if there are any
    """

    plan: Plan
    module: nn.Module
    traced: Traced
    ranks: Ranks
    chains: Chains = field(default_factory=dict)  # the sites of a row -> what fits into memory
    bits: Bits = field(default_factory=dict)  # of saved tensors, by modules
    staged: Staged | None = None
    region: Region | None = None
    _shared: dict[object, Any] = field(default_factory=dict)

    def shared(self, key: object, make: Callable[[], Any]) -> Any:
        """One object for all modules that ask with this key."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def at(self, fqn: str) -> nn.Module:
        """The module of this name in the copy that is being built."""
        return self.module.get_submodule(fqn)

    def with_group(self, edge: Any) -> Any:
        """Give an edge (or statistics) that was traced the process group of this rank."""
        axes = edge.group.axes
        group = self.ranks.group(axes[0] if len(axes) == 1 else axes)
        return replace(edge, group=replace(group, label=edge.group.label))


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `build`, beside a plan and a batch.

    loss       loss(output, batch), where the model returns none
    optimizer  a function from (name, parameter) pairs to an optimizer; `clip` bounds the norm
    weight     weight(part) of a part of the batch in the mean; default: the labels that count
    seed       of dropout's masks
    dropout    "native": as torch draws it, from generators that each step seeds; "logical": masks
               that do not depend on the layout; None: logical if there is a seed, else native on
               several ranks, and as the process draws in a world of one
    prepared   what `prepare` found for this plan and a microbatch of this batch, if it ran before
    local      the batch is this rank's rows
    compare    what ranks compare: `nothing`, builds and the first batch (`build`), all (`batches`)
    wait       seconds in which all ranks come to `build`
    weights    files of safetensors or a checkpoint that the values come from: the model needs none
    on_meta    everything lies on the meta device: for a step that only shows what would be sent
    check      asked last of what is prepared, before anything is built; it may refuse
    """

    loss: Loss | None = None
    optimizer: Callable[..., torch.optim.Optimizer] | None = None
    clip: float | None = None
    weight: Weight | None = None
    seed: int | None = None
    dropout: str | None = None
    prepared: Prepared | None = None
    local: bool = False
    compare: str = "build"
    wait: float = 20.0
    weights: str | os.PathLike[str] | None = None
    on_meta: bool = False
    check: Callable[[Plan, Mapping[str, Any], Prepared], None] | None = None


PLAIN = Options()


def build(plan: Plan, batch: Mapping[str, Any], options: Options = PLAIN, **more: Any) -> Program:
    """This rank's program.

    `batch` is the keyword arguments of a whole step, for shapes only; `more` are options by name.
    Raises Refusal before any collective where the plan cannot be built, and where ranks of the job
    would build different things.
    """
    from schedlang.runtime.comm.agreement import agree, join_world, shared_store, tell
    from schedlang.runtime.launch.heart import watch
    from schedlang.runtime.launch.job import RECORD

    given = replace(options, **more)
    join_world(given.wait)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun knows when a rank dies, not when all wait
        watch()
    if RECORD in os.environ:
        recorded.begin()
    try:
        compares = given.compare != "nothing" and not given.on_meta
        if compares and shared_store() is not None:
            agree(built_from(plan, batch, given), given.wait)
        program = _built(plan, batch, given)
    except Exception as error:
        tell(error)
        raise
    if RECORD in os.environ:
        recorded.known(plan, program)
    if given.weights is not None:
        _taken(program, given.weights)
    return program


def _taken(program: Program, weights: str | os.PathLike[str]) -> None:
    """Read a checkpoint, ours or torch's, into the parts of a program; files are there already."""
    from schedlang.runtime.checkpointing.archive import load
    from schedlang.runtime.checkpointing.steps import is_checkpoint, is_dcps
    from schedlang.runtime.storage.coded import all_opened
    from schedlang.runtime.transfer.transfer import begin, is_of_before

    with all_opened(program.assembly.parameters.values()):
        if is_checkpoint(weights) and not is_of_before(program, weights):
            load(program, weights, fresh=True)
        elif is_checkpoint(weights) or is_dcps(weights):
            begin(program, weights)


def _built(plan: Plan, batch: Mapping[str, Any], given: Options) -> Program:
    from schedlang.runtime.assembly import Assembly

    if plan.completing:
        plan = completed(plan, batch, given.loss)
    ranks = check_job(plan, given.on_meta)
    prepared = given.prepared or _prepared(plan, batch, given)
    traced, staged, holdings = prepared.traced, prepared.staged, prepared.holdings
    if plan.order is not None:
        check_build(staged, given.optimizer, given.clip, given.on_meta)
    if given.check is not None:
        given.check(plan, batch, prepared)
    module = _local_copy(plan, prepared, ranks, given)
    builder = Builder(plan, module, traced, ranks, prepared.chains, prepared.bits, staged)
    if prepared.tokens is not None:
        exchange(plan, module, prepared.tokens, ranks)
    lower(builder, lambda: shard_modules(module, traced, builder.with_group))
    sliced = slice_state(plan, module, ranks, prepared) if plan.replicas else {}
    found = _held(builder, holdings)
    stores = plan.stores and not given.on_meta
    lying = offload_state(builder, holdings, found, sliced, given.optimizer) if stores else None
    planned = reductions(plan, traced, holdings)
    sums = sums_of(plan, planned, found, ranks) if planned or plan.data_axes else ()
    asked = _dropout_options(plan, batch, given) if traced.random else None
    dropout = Dropout() if asked is None else dropout_of(plan, prepared, ranks, module, asked)
    loss = cast_loss(plan, given.loss) if plan.casts else given.loss
    compressor = compressor_of(plan, planned, holdings, found, ranks) if plan.compression else None
    # by labels that count; without any by rows, and by tokens where sequences are split
    weigh = weight_of if prepared.tokens is None else weight_by_tokens
    assembly = Assembly(
        module=module,
        pipeline=pipeline_of(plan, module, ranks, prepared, loss, given.weight, sliced),
        ranks=ranks,
        replicas=plan.data_axes,
        micro=plan.micro,
        parameters=found,
        holdings=holdings,
        ties=(*plan.model.ties, *plan.model.shared_buffers),
        sums=sums,
        sliced=sliced,
        keys=tuple(plan.model.model.state_dict()),
        merges=tuple(change for change in plan.model.changes if isinstance(change, Adapting)),
        loss_dtype=_loss_dtype(plan),
        weight=given.weight or weigh(traced, plan.shares * plan.micro),
        compressor=compressor,
        region=builder.region,
        early=early_sums(plan, staged, found, sums) if plan.overlaps else None,
        dropout=dropout.used,
        native=dropout.native,
        drawn_because=dropout.why,
        inputs=frozenset(batch),
        ways=prepared.ways,
        lossless=traced.lossless,
        tokens=prepared.tokens,
        boundaries=plan.boundaries,
        context=plan.context_axes if plan.contexts else (),
        dealt=plan.dealt if any(one.rows for one in plan.replicas) else None,
        **(_of_stages(plan, staged, staged.axis) if staged.axis is not None else {}),
    )
    return _trained(plan, staged, assembly, lying, given)


def _held(builder: Builder, holdings: Mapping[str, Holding]) -> LocalParameters:
    """This rank's parameters by name; those that are to lie in codes lie there now."""
    from schedlang.runtime.grad_reduction.gradient import LocalParameters

    mesh, rank = builder.plan.mesh, builder.ranks.rank
    held = {name for name, holding in holdings.items() if holding.held(mesh, rank)}
    named = builder.module.named_parameters()
    found = LocalParameters({name: p for name, p in named if name in held})
    if builder.plan.model.changes:
        encode_weights(builder, found)
    return found


def _trained(plan: Plan, staged: Staged, a: Assembly, lying: Any, given: Options) -> Program:
    """The program with its optimizer; refuses optimizers that ranks have set otherwise."""
    from schedlang.runtime.comm.agreement import agree, shared_store
    from schedlang.runtime.program import Program
    from schedlang.runtime.step_batch import Comparing

    whole = optimizer = comparing = None
    if given.optimizer is not None:
        if a.stage_axis is not None or any(h.layout.splits for h in a.holdings.values()):
            check_places(plan, a.stage_axis, a.holdings, given.optimizer)
        whole = whole_step(a, staged, given.optimizer)
        every = {n for n, p in plan.model.model.named_parameters() if p.requires_grad}
        optimizer = _optimizer(a, given.optimizer, every)
    if given.compare != "nothing" and not given.on_meta and shared_store() is not None:
        names = {id(parameter): name for name, parameter in a.parameters.items()}
        if given.optimizer is not None:  # alike on all ranks, those too that train nothing
            agree(optimized_by(optimizer, names), given.wait)
        settings = partial(optimized_by, optimizer, names)
        comparing = Comparing(settings, given.compare == "batches")
    return Program(
        a,
        optimizer,
        given.clip,
        whole=whole,
        offloaded=lying,
        loss_scale=loss_scale(plan) if plan.casts else None,
        comparing=comparing,
    )


def _prepared(plan: Plan, batch: Mapping[str, Any], given: Options) -> Prepared:
    """Prepare a plan on each rank alike; the first rank's table of bits holds for all."""
    from schedlang.runtime.batch import sample_of
    from schedlang.runtime.comm import world

    with at_the_forward(plan.model.model):
        sample = sample_of(batch, 1 if given.local else plan.dealt, plan.micro)
    found = prepare(plan, sample, given.loss, given.weight, trains=False)
    # each rank has measured its own table of bits, on a machine of its own: the first one's counts
    return replace(found, bits=world.broadcast_object(0, found.bits)) if found.bits else found


def _dropout_options(plan: Plan, batch: Mapping[str, Any], given: Options) -> DropoutOptions:
    """Return the kind of dropout that the options ask for, its seed, and the rows of a
    microbatch."""
    from schedlang.runtime.batch import rows_of, sample_of

    kind = given.dropout or ("logical" if given.seed is not None else None)
    sample = sample_of(batch, 1 if given.local else plan.dealt, plan.micro)
    return DropoutOptions(kind, given.seed, rows_of(sample), given.on_meta)


def _of_stages(plan: Plan, staged: Staged, axis: str) -> dict[str, Any]:
    """List the fields of an assembly that only a model of several stages has."""
    frozen = any(not fact.requires_grad for fact in plan.model.parameters.values())
    last = dict.fromkeys(plan.mesh.sizes, 0) | {axis: staged.ranks[-1]}
    return {
        "stage_axis": axis,
        "buffer_stages": buffer_stages(staged),
        "buffer_homes": next(iter(buffer_homes(staged)), {}),
        "last_rank": plan.mesh.rank(last),
        "outputs_missing": staged.cut.missing,
        # stages send on what is frozen: no gradient comes back to what it was made of
        "ends_early": frozen and staged.cut.constant,
    }


def _optimizer(
    a: Assembly, make: Callable[..., torch.optim.Optimizer], every: Container[str]
) -> torch.optim.Optimizer | None:
    """Make the optimizer of what this rank trains; None where there is nothing.

    `every` names what any rank trains.
    """
    from schedlang.runtime.optim.whole_step import check_closure, dims_of, fill_groups, groups_of

    trained = [(name, p) for name, p in a.parameters.items() if p.requires_grad]
    if not trained:
        return None
    names = {id(p): name for name, p in trained}
    dims = {name: count for name, count in dims_of(a.holdings).items() if name in every}
    staged = a.stage_axis is not None
    whole = groups_of(make, dims, set(names.values())) if staged else ()
    made = make(trained)  # the last that is made: the function may keep it
    check_closure(made)
    groups = getattr(made, "param_groups", ())
    held, ours = {id(p) for g in groups for p in g["params"]}, {id(p) for _, p in trained}
    if held and not held & ours and a.stage_axis is None:
        raise Refusal.of(
            "S618",
            "the optimizer has none of the program's parameters",
            notes=("a program trains copies of the model's parameters, and parts of them",),
            helps=("take those that are given: `lambda named: torch.optim.AdamW(named, lr=1e-3)`",),
        )
    fill_groups(made, whole, names)
    return made


def check_job(plan: Plan, on_meta: bool = False) -> Ranks:
    """Join the running job; refuse idle axes (S205) and a mesh of another size (S607)."""
    from schedlang.runtime.comm import world
    from schedlang.runtime.comm.agreement import join_world
    from schedlang.runtime.comm.collectives import Ranks

    join_world()
    check_axes(plan)
    if on_meta:
        return Ranks(plan.mesh)
    lies = next((one.device for one in plan.model.model.parameters()), None)
    return Ranks(plan.mesh, world.here().device_for(lies))


# -- what lies where ---------------------------------------------------------------------------


def _local_copy(plan: Plan, prepared: Prepared, ranks: Ranks, given: Options) -> nn.Module:
    """The model with this rank's part of every parameter before slicing; others have no values."""
    import torch
    from torch import nn

    from schedlang.runtime.checkpointing.holding import take
    from schedlang.runtime.initial.sources import source_of
    from schedlang.runtime.initial.weights import Room
    from schedlang.runtime.redistribution.sharding import whole
    from schedlang.runtime.tracing.meta import copy_with, meta_parameter

    _check_state(plan)
    mesh, rank, on_meta, model = plan.mesh, ranks.rank, given.on_meta, plan.model.model
    if not on_meta and (prepared.tokens is not None or prepared.slicing is not None):
        _check_tried(model)
    bare = given.weights is not None or any(p.is_meta for p in model.parameters())
    # the record, and other names in files, are of the model that was given
    source = source_of(plan.model.base.model, given.weights) if bare and not on_meta else None
    rooms: list[Room] = []

    def local(name: str, parameter: nn.Parameter) -> nn.Parameter:
        holding = replace(prepared.holdings[name], sliced=())
        if not holding.held(mesh, rank):
            return meta_parameter(parameter)
        if on_meta:
            return meta_parameter(parameter, holding.local_shape(mesh, rank))
        here = source is None or (given.weights is None and not parameter.is_meta)
        make = None if here else plan.model.drawn(name)
        if here or make is not None:
            value = parameter.detach() if make is None else make(parameter)
            part = take(value, holding, mesh, rank).to(ranks.device)
        else:
            part = parameter.new_zeros(holding.local_shape(mesh, rank), device=ranks.device)
            names = plan.model.unique[name].names
            rooms.append(Room(names, parameter, part.detach(), holding.part(mesh, rank)))
        return nn.Parameter(part, requires_grad=parameter.requires_grad)

    saved = {id(b): n for n, b in model.named_buffers() if n in model.state_dict(keep_vars=True)}

    def other(tensor: torch.Tensor) -> torch.Tensor:
        if on_meta:
            return tensor.to("meta")
        if source is None or not tensor.is_meta:
            return tensor.detach().clone().to(ranks.device)
        if id(tensor) not in saved:
            raise _no_values(model, tensor)
        made = torch.zeros_like(tensor, device=ranks.device)
        rooms.append(Room((saved[id(tensor)],), tensor, made, whole(tuple(tensor.shape))))
        return made

    module = copy_with(model, local, other)
    if source is not None:
        source.fill(rooms)
    return module


def _no_values(model: nn.Module, tensor: torch.Tensor) -> Refusal:
    """Refuse a tensor on the meta device that no file of weights has."""
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


def _check_tried(model: nn.Module) -> None:
    """Refuse a model without values where its forward on parts of sequences has to be tried."""
    if any(p.is_meta for p in model.parameters()):
        raise Refusal.of(
            "S623",
            "the model has no values: how it runs on parts of sequences cannot be tried",
            notes=("rows that split sequences try a forward and a backward of the model",),
            helps=("build the model with its values on every rank, or leave these rows out",),
        )


def _check_state(plan: Plan) -> None:
    """Refuse state that is neither parameter nor buffer: no layout could keep it."""
    model = plan.model.model
    known = {n for n, _ in model.named_buffers(remove_duplicate=False)} | set(plan.model.parameters)
    extra = [key for key in model.state_dict() if key not in known]
    if extra:
        raise Refusal.of(
            "S624",
            f"`{extra[0]}` of the state dict is not a parameter or a buffer",
            notes=("a module returns it as extra state, which cannot be sharded or saved",),
            helps=("leave it out: override `get_extra_state` in a subclass",),
        )


def _loss_dtype(plan: Plan) -> torch.dtype:
    """float64 for a float64 model, else float32: losses are sums of many terms."""
    import torch

    wide = any(fact.dtype == "float64" for fact in plan.model.unique.values())
    return torch.float64 if wide else torch.float32
