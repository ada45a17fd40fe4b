"""Holdings: the ranks that hold each parameter's shards; gathers and gradient reductions of a step.

* Which stages hold a parameter, and over which axes it is split or sliced (by ZeRO).
* How often sliced parameters are gathered.
* Which gradients must be reduced after the last backward, over which axes or stages.
* Which modules ZeRO slices and gathers as units.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from schedlang.ir.annotations import Replicas
from schedlang.ir.plan import Plan
from schedlang.ir.sharing import parents_of
from schedlang.passes.partition.staging import Staged

if TYPE_CHECKING:
    from schedlang.passes.propagate.propagate import Traced
    from schedlang.pipeline.timeline.table import Timeline
    from schedlang.runtime.checkpointing.holdings import Holding


def state_slicing(plan: Plan) -> tuple[Replicas | None, tuple[str, ...]]:
    """Return the row that slices state, and the data axes whose ranks keep full copies."""
    active = [r for r in plan.all_replicas if plan.mesh.size(r.axes) > 1]
    sliced = next((r for r in active if r.stage > 0), None)
    unsliced_axes = tuple(axis for r in active if r.stage == 0 for axis in r.axes)
    return sliced, unsliced_axes


def holdings_of(plan: Plan, staged: Staged) -> dict[str, Holding]:
    """Return the holding of each parameter, by its first name."""
    from schedlang.runtime.checkpointing.holdings import Holding

    sliced = state_slicing(plan)[0] if plan.replicas else None
    axes = plan.mesh.fold(sliced.axes) if sliced is not None else ()
    owners = _owners(staged) if staged.axis is not None else {}
    unsliced = _unsliced(plan, staged) if axes else frozenset()
    holdings = {}
    for name, param in plan.model.unique_parameters.items():
        stages = None
        if staged.axis is not None:
            stages = owners.get(name) or _places_of_unread(staged, param.names)
        unsliced_here = not axes or name in unsliced or not param.shape
        cut = () if unsliced_here else _sliced_axes(plan, name, axes)
        holdings[name] = Holding(name, plan.effective_layout(name), cut, staged.axis, stages)
    for name in _of_other_dtypes(plan, staged, holdings) if axes else ():
        holdings[name] = replace(holdings[name], sliced=())
    return holdings


def _of_other_dtypes(plan: Plan, staged: Staged, holdings: Mapping[str, Holding]) -> frozenset[str]:
    """Return trained parameters whose dtype is not that of most bytes of their unit.

    fully_shard reduces the gradients of a unit as one tensor: these parameters stay replicated.
    """
    facts = plan.model.unique_parameters
    if len({fact.dtype for fact in facts.values() if fact.requires_grad}) < 2:
        return frozenset()
    others: set[str] = set()
    for stage in range(staged.cut.stages):
        for names in sliced_names_by_unit(plan, staged, holdings, stage).values():
            trained = [facts[name] for name in names if facts[name].requires_grad]
            sizes = Counter[str]()
            for fact in trained:
                sizes[fact.dtype] += fact.numel * fact.itemsize
            most = sizes.most_common(1)
            others |= {fact.name for fact in trained if fact.dtype != most[0][0]}
    return frozenset(others)


def _sliced_axes(plan: Plan, name: str, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the slicing axes along which ranks hold the same shard of a parameter.

    Experts that are spread over an axis have full gradients there: the axis does not slice them.
    """
    split = plan.split_axes(name) if name in plan.batch_split_parameters else frozenset()
    equal = tuple(axis for axis in axes if axis not in split)
    return equal if plan.mesh.size(equal) > 1 else ()


def _places_of_unread(staged: Staged, names: tuple[str, ...]) -> frozenset[int]:
    """Return the places of a parameter that no stage reads: those of its unit, else the first."""
    for unit, stage in zip(staged.cut.graph.units, staged.cut.stage_of):
        if any(name.startswith(f"{unit}.") for name in names):
            return staged.places(stage)
    return frozenset([0])


def _owners(staged: Staged) -> dict[str, frozenset[int]]:
    """Return the places along the pipeline axis that hold each parameter."""
    owners: dict[str, set[int]] = {}
    for stage in range(staged.cut.stages):
        for name in staged.cut.parameters(stage):
            owners.setdefault(name, set()).update(staged.places(stage))
    return {name: frozenset(places) for name, places in owners.items()}


def _unsliced(plan: Plan, staged: Staged) -> frozenset[str]:
    """Return the parameters that stay replicated on data-parallel ranks where state is sliced.

    * Parameters that several units use: each unit gathers and frees its own.
    * In a pipeline: parameters that no unit holds. Without a pipeline the root module gathers them.
    * Parameters that are read while their unit does not run, or that the forward writes into: a
      write into a gathered copy would be lost.
    * Quantized frozen weights, which no unit gathers.
    """
    outside = {
        param.name
        for n in staged.unsliceable_parameters
        if (param := plan.model.parameters.get(n)) is not None
    }
    outside |= {
        name for name in plan.model.unique_parameters if plan.model.coding_of(name) is not None
    }
    if staged.axis is None:
        return frozenset(_shared_with_trunk(plan, staged)) | outside
    calls = Counter(unit for unit in staged.cut.graph.units if unit)
    unit_counts = {
        name: sum(calls[unit] for unit in {unit for n in fact.names for unit in parents_of(n)})
        for name, fact in plan.model.unique_parameters.items()
    }
    not_one_unit = {name for name, count in unit_counts.items() if count != 1}
    return frozenset(staged.cut.shared) | not_one_unit | outside


def _shared_with_trunk(plan: Plan, staged: Staged) -> Iterator[str]:
    """Yield parameters of an element of the trunk that also have a name outside the element."""
    for name, param in plan.model.unique_parameters.items():
        units = {next((u for u in staged.trunk if n.startswith(f"{u}.")), "") for n in param.names}
        if len(units) > 1:
            yield name


Places = frozenset[int] | None


def gathers_by_rows(plan: Plan, staged: Staged) -> Callable[[Timeline], Timeline] | None:
    """Return what adds the rows of a timeline that gather parameters; None without such rows.

    A pipeline with ZeRO has them: stages 1 and 2 gather at the beginning of a step, stage 3 once a
    run of operations of a stage.
    """
    from schedlang.pipeline.timeline.sharded_weights import with_early_gathers, with_gathers

    sliced, _ = state_slicing(plan)
    if staged.axis is None or sliced is None:
        return None
    return with_gathers if sliced.stage == 3 else with_early_gathers


def gathers_of(plan: Plan, staged: Staged, stage: int, position: int) -> tuple[int, int] | None:
    """Return the numbers of runs of forwards and backwards during which a stage stays gathered.

    Returns None where a stage is not gathered by runs at this place.
    """
    from schedlang.pipeline.timeline.sharded_weights import find_runs, with_gathers

    if gathers_by_rows(plan, staged) is not with_gathers:
        return None
    timeline = staged.timeline
    runs = find_runs(timeline)
    own_runs = (timeline.stage[runs.first] == stage) & (timeline.rank[runs.first] == position)
    backwards = int(runs.backward[own_runs].sum())
    return (int(own_runs.sum()) - backwards, backwards) if own_runs.any() else None


def gathers_by_place(
    plan: Plan, staged: Staged, stage: int, places: Places, microbatches: int
) -> Iterator[tuple[Places, int, int]]:
    """Yield places of a stage, each with the numbers of gathers in forwards and in backwards.

    The gathers are those of ZeRO stage 3.
    """
    default = (microbatches * staged.timeline.slices,) * 2
    if places is None:
        yield None, *default
        return
    by_times: dict[tuple[int, int], set[int]] = {}
    for index in places:
        by_times.setdefault(gathers_of(plan, staged, stage, index) or default, set()).add(index)
    for times, places_alike in by_times.items():
        yield frozenset(places_alike), *times


@dataclass(frozen=True)
class Reduction:
    """A reduction of gradients of `names` over `axes`, or over the places `stages` of one axis.

    kind    "partial": each rank computed with a shard of the activations; "tied": several stages
            use the parameter; "replicas": ranks had different rows of the batch; "compressed": as
            "replicas", in fewer bytes
    bucket  bytes that are reduced at once; None: the runtime's default
    """

    kind: str
    axes: tuple[str, ...]
    names: tuple[str, ...]
    stages: frozenset[int] | None = None
    bucket: int | None = None


def reductions(
    plan: Plan, traced: Traced, holdings: Mapping[str, Holding], *, frozen: bool = False
) -> list[Reduction]:
    """Return the gradient reductions of a step, in the order of all ranks, for trained parameters.

    With `frozen` those that the frozen parameters would need. A rank leaves out the names that it
    does not hold.
    """
    parameters = plan.model.unique_parameters.items()
    trained = [name for name, param in parameters if param.requires_grad is not frozen]
    return [
        *(_partial(plan, traced, trained) if traced.partial else ()),
        *(_tied(holdings, trained) if plan.cuts else ()),
        *(_replicas(plan, holdings, trained) if plan.data_axes else ()),
    ]


def _partial(plan: Plan, traced: Traced, trained: list[str]) -> Iterator[Reduction]:
    by_axes: dict[tuple[str, ...], list[str]] = {}
    for name in trained:
        axes = plan.mesh.in_mesh_order(traced.partial.get(name, ()))
        if axes:
            by_axes.setdefault(axes, []).append(name)
    for axes, names in sorted(by_axes.items()):
        yield Reduction("partial", axes, tuple(names))


def _tied(holdings: Mapping[str, Holding], trained: list[str]) -> Iterator[Reduction]:
    by_stages: dict[frozenset[int], list[str]] = {}
    for name in trained:
        stages = holdings[name].stages
        if stages is not None and len(stages) > 1:
            by_stages.setdefault(stages, []).append(name)
    for stages, names in sorted(by_stages.items(), key=lambda item: sorted(item[0])):
        axis = holdings[names[0]].axis
        assert axis is not None
        yield Reduction("tied", (axis,), tuple(names), stages)


def _replicas(
    plan: Plan, holdings: Mapping[str, Holding], trained: list[str]
) -> Iterator[Reduction]:
    by_axes: dict[tuple[str, ...], list[str]] = {}
    compressed_axes = compression_axes(plan)
    compressed: dict[tuple[str, ...], list[str]] = {}
    for name in trained:
        cut = plan.mesh.fold(holdings[name].sliced)  # reduced unit by unit, by fully_shard
        axes = tuple(axis for axis in plan.replica_axes(name) if axis not in cut)
        if set(compressed_axes) <= set(axes) and compressed_axes:
            compressed.setdefault(compressed_axes, []).append(name)
            axes = tuple(axis for axis in axes if axis not in compressed_axes)
        if axes and plan.mesh.size(axes) > 1:
            by_axes.setdefault(axes, []).append(name)
    for axes, names in sorted(by_axes.items(), key=lambda item: -len(item[0])):
        yield Reduction("replicas", axes, tuple(names), bucket=_bucket(plan, axes))
    for axes, names in compressed.items():
        yield Reduction("compressed", axes, tuple(names))


def _bucket(plan: Plan, axes: tuple[str, ...]) -> int | None:
    """Return the smallest bucket size of the rows over any of these axes, or None."""
    rows = (row for row in plan.replicas if set(plan.mesh.fold(row.axes)) & set(axes))
    return min((row.bucket for row in rows if row.bucket is not None), default=None)


def is_lossy(plan: Plan) -> bool:
    """Return whether gradients are sent, or activations saved, in fewer bits."""
    return bool(plan.activation_codings or compression_axes(plan))


def compression_axes(plan: Plan) -> tuple[str, ...]:
    """Return the axes over which reductions are compressed, in mesh order; none for one rank."""
    axes = plan.mesh.fold(plan.compression.axes) if plan.compression is not None else ()
    return tuple(a for a in plan.mesh.sizes if a in axes) if plan.mesh.size(axes) > 1 else ()


def units_of_stage(plan: Plan, staged: Staged, stage: int) -> tuple[str, ...]:
    """Return the units of a stage, which are gathered one by one, in the order of slicing.

    A unit has the parameters that no unit before it has; without a pipeline the root module ("")
    has the rest.
    """
    if staged.axis is None:
        return (*(fqn for fqn in plan.model.sites if fqn in staged.trunk), "")
    return tuple(staged.cut.graph.units[unit] for unit in staged.cut.units(stage))


def sliced_names_by_unit(
    plan: Plan, staged: Staged, holdings: Mapping[str, Holding], stage: int
) -> dict[str, tuple[str, ...]]:
    """Return the sliced parameters (first names) of each unit of a stage, and of the root module.

    Some modules inside a unit are units themselves, and come before it: experts that are sliced
    over other axes than the unit, and modules that are called while the unit does not run, when
    their parameters would not be gathered.
    """
    remaining = {name for name, holding in holdings.items() if holding.sliced}
    names_by_unit = {}
    for fqn in _with_inner_units(plan, staged, holdings, stage):
        unit_names = tuple(
            dict.fromkeys(f.name for f in plan.model.parameters_below(fqn) if f.name in remaining)
        )
        remaining -= set(unit_names)
        if unit_names or not fqn:
            names_by_unit[fqn] = unit_names
    return names_by_unit


def _with_inner_units(
    plan: Plan, staged: Staged, holdings: Mapping[str, Holding], stage: int
) -> Iterator[str]:
    """Yield the units of a stage, each after the modules inside it that are units themselves."""
    row = next((replicas.axes for replicas in plan.all_replicas if replicas.stage > 0), ())
    axes, visited = plan.mesh.fold(row), set()
    experts = [
        fqn
        for fqn in plan.computes
        if any(
            holdings[name.name].sliced not in ((), axes)
            for name in plan.model.parameters_below(fqn)
        )
    ]
    for unit in units_of_stage(plan, staged, stage):
        inside = [
            name
            for name in experts
            if name not in visited and (not unit or name.startswith(f"{unit}."))
        ]
        called_outside = sorted(
            fqn for fqn, caller in staged.outside_calls if caller == unit and fqn not in inside
        )
        visited.update(inside)
        yield from (*inside, *called_outside, unit)


def slicing_axes_of(holdings: Mapping[str, Holding], names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the axes over which parameters of one unit are sliced."""
    return holdings[names[0]].sliced if names else ()
