"""From a plan, a model and a batch to the program that this rank runs.

The order is fixed, whatever the order of rows: the local copy with this rank's parts; structure
(kernels, fusion); crossings; recomputation; residence; stages; slices of data-parallel state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from schedlang.diagnostic import Diagnostic, Refusal
from schedlang.passes.propagate import Traced, propagate
from schedlang.passes.stages import Unit, at_units, balanced, even, placement
from schedlang.plan import Plan, Replicas

if TYPE_CHECKING:
    import torch
    from torch import nn

    from schedlang.model import Site
    from schedlang.runtime.gradient import Sum
    from schedlang.runtime.graph import Cut
    from schedlang.runtime.holding import Holding
    from schedlang.runtime.program import Program, Weight
    from schedlang.runtime.ranks import Ranks
    from schedlang.runtime.replicas import Sliced
    from schedlang.timeline import Timeline

Loss = Callable[..., Any]
FACETS = ("structure", "dtype", "placement", "recompute", "residence", "stage", "state", "order")


@dataclass(frozen=True)
class Staged:
    """The stages of a plan: the recorded cut, the order, and the pipeline rank of every stage."""

    cut: Cut
    timeline: Timeline
    ranks: tuple[int, ...]  # place along the pipeline's axis of every stage
    axis: str | None
    trunk: frozenset[str]


@dataclass
class Builder:
    """What a primitive's `apply` changes: the local copy of the model, module by module."""

    plan: Plan
    module: nn.Module
    traced: Traced
    ranks: Ranks
    _shared: dict[object, Any] = field(default_factory=dict)

    def shared(self, key: object, make: Callable[[], Any]) -> Any:
        """One object for all modules that ask with this key."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def at(self, fqn: str) -> nn.Module:
        """The module of this name in the copy that is being built."""
        return self.module.get_submodule(fqn)


def build(
    plan: Plan,
    batch: Mapping[str, Any],
    *,
    loss: Loss | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    clip: float | None = None,
    weight: Weight | None = None,
    seed: int | None = None,
    local: bool = False,
) -> Program:
    """This rank's program.

    batch      the keyword arguments of one whole step (with `local` of this rank's rows), for
               shapes; values do not matter
    loss       loss(output, batch), where the model returns none
    optimizer  a function from (name, parameter) pairs to an optimizer
    clip       bound for the global norm of the gradients
    weight     weight(part) of a part of the batch in the mean; default: the labels that count
    seed       draw dropout logically from this seed; on several ranks it always is (0)
    Raises Refusal before any collective where the plan cannot be built.
    """
    from schedlang.runtime import parts
    from schedlang.runtime.program import Assembly, Program

    ranks = check_job(plan)
    micro = plan.order.micro if plan.order is not None else 1
    replicas = plan.data_axes
    count = plan.mesh.size(replicas)
    sample = parts.split(batch, 1 if local else count, micro)[0][0].inputs
    traced = propagate(plan, sample, loss)
    staged = stages_of(plan, traced, sample, loss)
    holdings = holdings_of(plan, staged)
    module = _local_copy(plan, holdings, ranks)
    builder = Builder(plan, module, traced, ranks)
    _apply(builder)
    sliced = _slice(builder, staged, holdings)
    found = {
        name: parameter
        for name, parameter in module.named_parameters()
        if holdings[name].held(plan.mesh, ranks.rank)
    }
    sums = _sums(plan, traced, holdings, found, ranks)
    dropout = _dropout(plan, traced, ranks, seed, module)
    pipeline = _pipeline(builder, staged, loss)
    axis = staged.axis
    last = {axis: staged.ranks[-1]} if axis is not None else {}
    zero = dict.fromkeys(plan.mesh.sizes, 0)
    assembly = Assembly(
        module=module, pipeline=pipeline, ranks=ranks, replicas=replicas, micro=micro,
        parameters=found, holdings=holdings, buffers=dict(module.named_buffers()),
        buffer_stages=_buffer_stages(staged, module), ties=plan.model.ties,
        keys=tuple(plan.model.model.state_dict()), sums=tuple(sums), sliced=sliced,
        weight=weight or _weight(plan, traced, count * micro),
        last_rank=plan.mesh.rank(zero | last), stage_axis=axis, dropout=dropout,
        outputs_missing=staged.cut.missing if axis is not None else (), inputs=frozenset(batch),
    )  # fmt: skip
    made = None
    trained = [(n, p) for n, p in found.items() if p.requires_grad]
    if optimizer is not None and trained:
        _check_optimizer(plan, holdings, optimizer)
        made = optimizer(trained)
    return Program(assembly, made, clip)


def check_job(plan: Plan) -> Ranks:
    """Join the running job; refuse idle axes (S205) and a mesh of another size (S607)."""
    from schedlang.runtime.ranks import Ranks, join_world

    join_world()
    _check_axes(plan)
    return Ranks(plan.mesh)


def _check_axes(plan: Plan) -> None:
    """Every axis must have work to do: ranks along an idle one would all do the same."""
    used = plan.used_axes
    for axis, size in plan.mesh.axes:
        if size > 1 and axis not in used:
            raise Refusal(
                Diagnostic(
                    "S205", f"no row uses the axis `{axis}`",
                    notes=(f"its {size} ranks would all do the same work",),
                    helps=(f"to split the batch over it: `zero(stage=0, over={axis})`",
                           f"or set it to 1: `--mesh {axis}=1`"),
                )
            )  # fmt: skip


# -- stages ------------------------------------------------------------------------------------------


def local_skeleton(plan: Plan, traced: Traced) -> nn.Module:
    """The local model on the meta device: right shapes, crossings that send nothing."""
    from schedlang.runtime.meta import hollow_model

    shapes = {name: plan.held(name).local_shape(plan.mesh) for name in plan.layouts}
    model = hollow_model(plan.model.model, shapes)
    _shape_up(model, traced, lambda edge: edge)
    return model


def _shape_up(model: nn.Module, traced: Traced, at_home: Callable[[Any], Any]) -> None:
    """Divide the numbers that modules count by, and put crossings around sharded modules."""
    from schedlang.runtime.shard import Sharded

    for fqn, attribute, value in traced.numbers:
        setattr(model.get_submodule(fqn), attribute, value)
    for fqn, edges in traced.edges.items():
        module = model.get_submodule(fqn)
        home = tuple(at_home(edge) for edge in edges)
        module.forward = Sharded(module, traced.kinds[fqn], home)  # type: ignore[method-assign]


def stages_of(
    plan: Plan, traced: Traced, batch: Mapping[str, Any], loss: Loss | None
) -> Staged:
    """Cut the model as the plan asks; without cuts everything is one stage."""
    from schedlang.orders import OrderError, order
    from schedlang.runtime.graph import cut
    from schedlang.runtime.record import record
    from schedlang.runtime.units import units_of

    micro = plan.order.micro if plan.order is not None else 1
    axis = plan.cuts[0].axis if plan.cuts else None
    count = plan.mesh.size(axis) if axis is not None else 1
    chunks = plan.order.chunks if plan.order is not None else 1
    name = plan.order.name if plan.order is not None else "GPipe"
    if axis is None or count * chunks == 1:
        from schedlang.runtime.graph import Cut, Reads, StageGraph

        whole = StageGraph(("",), (Reads(),), Reads(), {}, (Reads(), Reads()), {})
        return Staged(Cut(whole, (0,)), order("GPipe", 1, micro), (0,), None, _trunk(plan))
    skeleton = local_skeleton(plan, traced)
    skeleton.train()
    try:
        at = [fqn for c in plan.cuts for fqn in c.before]
        names = units_of(skeleton, batch, at)
        made = cut(record(skeleton, names, batch, loss=loss), _stage_numbers(plan, names, count * chunks))
        timeline = order(name, count, micro, chunks)
    except Refusal as refusal:
        raise _placed(refusal, plan, "stage") from refusal
    except OrderError as error:
        told = Diagnostic("S608", error.reason, helps=(error.legal,))
        raise _placed(Refusal(told), plan, "order") from error
    return Staged(made, timeline, placement(count * chunks, count), axis, _trunk(plan))


def _stage_numbers(plan: Plan, names: Sequence[str], stages: int) -> tuple[int, ...]:
    """The stage of every unit, from the cuts of the plan."""
    trunk = next((c.trunk for c in plan.cuts if c.trunk is not None), None)
    units = [
        Unit(name, plan.model.numel(name), trunk is None or name.startswith(f"{trunk}."))
        for name in names
    ]
    starts = [fqn for c in plan.cuts for fqn in c.before]
    if starts:
        return at_units(units, starts)
    balance = plan.cuts[0].balance
    return balanced(units, stages) if balance == "params" else even(units, stages)


def _trunk(plan: Plan) -> frozenset[str]:
    """The elements of the outermost module lists: what is gathered one by one."""
    lists = [
        fqn
        for fqn, site in plan.model.sites.items()
        if site.is_a("torch.nn.modules.container.ModuleList")
    ]
    outer = [f for f in lists if not any(f.startswith(f"{other}.") for other in lists if other != f)]
    return frozenset(f"{fqn}.{child}" for fqn in outer for child in plan.model.sites[fqn].children)


def _placed(refusal: Refusal, plan: Plan, facet: str) -> Refusal:
    """The refusal at the first row that writes a facet."""
    row = next((a for a in plan.actions if facet in a.primitive.writes), None)
    return refusal.at(row.span) if row is not None and row.span is not None else refusal


# -- what lies where ---------------------------------------------------------------------------------


def slicing(plan: Plan) -> tuple[Replicas | None, tuple[str, ...]]:
    """The row that slices state, and the data axes that keep whole copies."""
    real = [r for r in plan.replicas if plan.mesh.size(r.axes) > 1]
    sliced = next((r for r in real if r.stage > 0), None)
    whole = tuple(axis for r in real if r.stage == 0 for axis in r.axes)
    return sliced, whole


def holdings_of(plan: Plan, staged: Staged) -> dict[str, Holding]:
    """Where the parts of every parameter lie."""
    from schedlang.runtime.holding import Holding

    sliced, _ = slicing(plan)
    axes = plan.mesh.fold(sliced.axes) if sliced is not None else ()
    owners = _owners(staged)
    unsliced = _unsliced(plan, staged)
    holdings = {}
    for name, fact in plan.model.unique.items():
        stages = owners.get(name, frozenset([0])) if staged.axis is not None else None
        cut = () if name in unsliced or not fact.shape else axes
        holdings[name] = Holding(name, plan.held(name), cut, staged.axis, stages)
    return holdings


def _owners(staged: Staged) -> dict[str, frozenset[int]]:
    """The places along the pipeline axis that hold each parameter."""
    owners: dict[str, set[int]] = {}
    if staged.axis is not None:
        for stage, place in enumerate(staged.ranks):
            for name in staged.cut.parameters(stage):
                owners.setdefault(name, set()).add(place)
    return {name: frozenset(places) for name, places in owners.items()}


def _unsliced(plan: Plan, staged: Staged) -> frozenset[str]:
    """Parameters that stay whole on data-parallel ranks although the rest is sliced.

    In a pipeline: those that several units use, or none holds; each unit gathers and frees its own.
    """
    if staged.axis is None:
        return frozenset()
    units = [f"{name}." for name in staged.cut.graph.units]
    held = {
        name: sum(any(n.startswith(unit) for n in fact.names) for unit in units)
        for name, fact in plan.model.unique.items()
    }
    return frozenset(staged.cut.shared) | {name for name, count in held.items() if count != 1}


def _local_copy(plan: Plan, holdings: Mapping[str, Holding], ranks: Ranks) -> nn.Module:
    """The model with this rank's part of every parameter before slicing; others have no values."""
    from torch import nn

    from schedlang.runtime.holding import take
    from schedlang.runtime.meta import copy_with, hollow_parameter

    if any(p.is_meta for p in plan.model.model.parameters()):
        raise Refusal(
            Diagnostic(
                "S609", "the model has no values: it lies on the meta device",
                helps=("build it on a real device; `plan` and `diff` need no values",),
            )
        )  # fmt: skip

    def local(name: str, parameter: nn.Parameter) -> nn.Parameter:
        holding = replace(holdings[name], sliced=())
        if not holding.held(plan.mesh, ranks.rank):
            return hollow_parameter(parameter)
        part = take(parameter.detach(), holding, plan.mesh, ranks.rank)
        return nn.Parameter(part, requires_grad=parameter.requires_grad)

    return copy_with(plan.model.model, local, lambda tensor: tensor.detach().clone())


def _apply(builder: Builder) -> None:
    """Run every action's `apply`, facet by facet; sharding comes in before recomputation."""
    from schedlang.runtime.shard import Edge

    plan, ranks = builder.plan, builder.ranks

    def at_home(edge: Edge) -> Edge:
        return replace(edge, group=ranks.group(edge.group.axes[0]))

    shaped = False
    for action in sorted(plan.actions, key=lambda a: _phase(a.primitive.writes)):
        if not shaped and _phase(action.primitive.writes) > FACETS.index("placement"):
            _shape_up(builder.module, builder.traced, at_home)
            shaped = True
        for group in action.each:
            sites = tuple(plan.model.sites[fqn] for fqn in group)
            target: Site | tuple[Site, ...] = sites if action.primitive.takes == "selection" else sites[0]
            action.primitive.apply(target, builder)
    if not shaped:
        _shape_up(builder.module, builder.traced, at_home)


def _phase(writes: frozenset[str]) -> int:
    return min((FACETS.index(f) for f in writes if f in FACETS), default=len(FACETS))


# -- data-parallel state -----------------------------------------------------------------------------


def _slice(builder: Builder, staged: Staged, holdings: Mapping[str, Holding]) -> dict[int, Sliced]:
    """Put fully_shard around the units of each stage of this rank."""
    from schedlang.runtime.replicas import Sliced

    plan, ranks, module = builder.plan, builder.ranks, builder.module
    sliced, whole = slicing(plan)
    if sliced is None:
        return {}
    mesh = ranks.device_mesh(plan.mesh.fold(sliced.axes), plan.mesh.fold(whole) if whole else ())
    ignored = {
        p for n, p in module.named_parameters()
        if not holdings[n].sliced or not holdings[n].held(plan.mesh, ranks.rank)
    }  # fmt: skip
    out = {}
    if staged.axis is None:
        one = Sliced(sliced.stage, mesh, ignored)
        for fqn in sorted(staged.trunk):
            one.add(builder.at(fqn))
        one.add(module)
        return {0: one}
    place = plan.mesh.index(ranks.rank, staged.axis)
    for stage, owner in enumerate(staged.ranks):
        if owner != place:
            continue
        one = Sliced(sliced.stage, mesh, ignored)
        names = [staged.cut.graph.units[u] for u in staged.cut.units(stage)]
        for unit in map(builder.at, names):
            if any(p not in ignored for p in unit.parameters()):
                one.add(unit)
        out[stage] = one
    return out


def _sums(
    plan: Plan, traced: Traced, holdings: Mapping[str, Holding],
    found: Mapping[str, nn.Parameter], ranks: Ranks,
) -> list[Sum]:  # fmt: skip
    """The reductions after the last backward: over ties, over parts, over whole replicas."""
    from schedlang.runtime.gradient import Sum

    sums = []
    trained = [name for name in plan.model.unique if plan.model.unique[name].requires_grad]
    by_axes: dict[tuple[str, ...], list[str]] = {}
    for name in trained:
        axes = tuple(a for a in plan.mesh.names if a in traced.partial.get(name, ()))
        if axes and name in found:
            by_axes.setdefault(axes, []).append(name)
    for axes, names in sorted(by_axes.items()):
        sums.append(Sum(ranks.group(axes), tuple(names), "partial"))
    sums += _ties(plan, holdings, trained, ranks)
    sliced, _ = slicing(plan)
    if plan.data_axes and plan.mesh.size(plan.data_axes) > 1:
        whole = [n for n in trained if n in found and not holdings[n].sliced]
        if whole:
            sums.append(Sum(ranks.group(plan.data_axes), tuple(whole), "replicas"))
    return sums


def _ties(
    plan: Plan, holdings: Mapping[str, Holding], trained: Sequence[str], ranks: Ranks
) -> list[Sum]:
    """Sums over the stages that share a parameter; every rank takes part in making the groups."""
    from schedlang.runtime.gradient import Sum

    by_stages: dict[frozenset[int], list[str]] = {}
    for name in trained:
        stages = holdings[name].stages
        if stages is not None and len(stages) > 1:
            by_stages.setdefault(stages, []).append(name)
    sums = []
    for stages, names in sorted(by_stages.items(), key=lambda item: sorted(item[0])):
        axis = holdings[names[0]].axis
        assert axis is not None
        groups = [tuple(ranks_[s] for s in sorted(stages)) for ranks_ in plan.mesh.groups(axis)]
        group = ranks.subset(axis, groups)
        if group is not None:
            sums.append(Sum(group, tuple(names), "tied"))
    return sums


def _buffer_stages(staged: Staged, module: nn.Module) -> dict[str, frozenset[int] | None]:
    if staged.axis is None:
        return {}
    found: dict[str, set[int]] = {}
    for stage, place in enumerate(staged.ranks):
        for name in staged.cut.buffers(stage):
            found.setdefault(name, set()).add(place)
    return {name: frozenset(places) for name, places in found.items()}


# -- random numbers, weights, the executor -----------------------------------------------------------


def _dropout(
    plan: Plan, traced: Traced, ranks: Ranks, seed: int | None, module: nn.Module
) -> Any:
    """Logical dropout, where a seed asks for it or several ranks must agree on masks."""
    from schedlang.runtime.random import LogicalDropout, Window
    from schedlang.runtime.scope import named_sites

    if not traced.random or (seed is None and plan.mesh.world == 1):
        return None
    named_sites(module)

    def slices(site: str, call: int, shape: tuple[int, ...]) -> Window | None:
        whole, tags = traced.masks.get((site, call), ((), {}))
        if not tags:
            return None
        logical = list(shape)
        index: list[Any] = [None] * len(shape)
        for axis, tag in tags.items():
            dim, parts = tag.dim - 1, plan.mesh.size(axis)  # dim 0 holds the samples
            logical[dim] = shape[dim] * parts
            place = plan.mesh.index(ranks.rank, axis)
            index[dim] = _positions(tag.blocks, logical[dim], parts, place)
        return Window(tuple(logical), tuple(index))

    return LogicalDropout(seed or 0, slices)


def _positions(blocks: Sequence[int], size: int, parts: int, place: int) -> list[int]:
    """The logical positions that a rank holds along a dim of blocks split one by one."""
    scale = size / sum(blocks)
    found, start = [], 0
    for block in blocks:
        length = int(block * scale) // parts
        found += range(start + place * length, start + (place + 1) * length)
        start += int(block * scale)
    return found


def part_weight(
    plan: Plan, sample: Mapping[str, Any], loss: Loss | None, weight: Weight | None, parts: int
) -> Weight:
    """What a part of a batch weighs, as `build` decides it from a sample part."""
    if weight is not None:
        return weight
    return _weight(plan, propagate(Plan.empty(plan.model), sample, loss), parts)


def _weight(plan: Plan, traced: Traced, parts: int) -> Weight:
    """What a part of a batch weighs: its labels that count, else its rows."""
    from schedlang.runtime.parts import rows_of

    if len(traced.labels) == 1:
        rule = traced.labels[0]
        # a batch without labels can be evaluated, not trained on: only its rows count
        return lambda batch: float(
            rows_of(batch) if batch.get(rule.source) is None else rule.count(batch)
        )
    if len(traced.labels) > 1 and parts > 1:
        raise Refusal(
            Diagnostic(
                "S621", f"the model has {len(traced.labels)} losses with labels of their own",
                notes=("a part of the batch would weigh differently in each",),
                helps=("say what a part weighs: `weight(batch)` in the model file",),
            )
        )  # fmt: skip
    return lambda batch: float(rows_of(batch))


def _pipeline(builder: Builder, staged: Staged, loss: Loss | None) -> Any:
    from schedlang.runtime.pipeline import Pipeline
    from schedlang.runtime.stage import Stage, Stub
    from schedlang.runtime.units import Switch

    plan, ranks = builder.plan, builder.ranks
    if staged.axis is None:
        stage = Stage(builder.module, staged.cut, 0, loss=loss)
        return Pipeline({0: stage}, staged.timeline, {0: ranks.rank})
    group = ranks.group(staged.axis)
    down = ranks.again(staged.axis)
    place = plan.mesh.index(ranks.rank, staged.axis)
    switch = Switch(builder.module, staged.cut.graph.units)
    stub = Stub(local_skeleton(plan, builder.traced), staged.cut)
    stages = {
        s: Stage(builder.module, staged.cut, s, switch=switch, stub=stub, loss=loss)
        for s, owner in enumerate(staged.ranks)
        if owner == place
    }
    homes = {s: group.ranks[owner] for s, owner in enumerate(staged.ranks)}
    return Pipeline(stages, staged.timeline, homes, group=group.pg, down=down)


def _check_optimizer(
    plan: Plan, holdings: Mapping[str, Holding], optimizer: Callable[..., Any]
) -> None:
    """Refuse an optimizer that needs whole matrices where parameters are split by `shard`."""
    from schedlang.runtime.elementwise import is_elementwise

    split = next((h for h in holdings.values() if h.layout.splits or h.sliced), None)
    if split is None or is_elementwise(optimizer):
        return
    raise Refusal(
        Diagnostic(
            "S622", "this optimizer does not treat each element by itself",
            notes=(f"`{split.name}` lies in parts on several ranks, and parts would be updated"
                   " otherwise than the whole",),
            helps=("use an elementwise optimizer (SGD, Adam, AdamW, Adagrad, RMSprop, ...)",),
        )
    )  # fmt: skip



