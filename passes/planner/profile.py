"""Chains of a model under any placement, by simulated steps on the meta device.

The planner asks a `Profiles` for the chain of each placement.  A step runs with the rows that split
tensors, on a model with few layers; its units then stand for all layers of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.garbage_collection import ProcessState
from schedlang.ir.limits import Limits
from schedlang.ir.mesh import Mesh
from schedlang.ir.model import ModelFacts, is_inside
from schedlang.ir.module_attributes import module_kind
from schedlang.ir.plan import Plan
from schedlang.passes.analyze.prepare import Prepared, prepare
from schedlang.passes.autoshard.propose import ProposalRequest, rows_of_role
from schedlang.passes.complete.proposed_rows import (
    ProposedRow,
    RowTrial,
    make_call,
    plan_of_proposal,
    precision_rows,
)
from schedlang.passes.complete.sequence_rows import sequence_rows
from schedlang.passes.planner.extrapolation import extrapolate_rows, extrapolate_slices
from schedlang.passes.planner.search_space import Job, iter_placements, microbatch_rows
from schedlang.passes.planner.values import (
    Chain,
    CollectiveCost,
    Kind,
    OperatorCost,
    Placement,
    Recipe,
    Shapes,
    Unit,
    UnitRun,
    Work,
)
from schedlang.passes.propagate.batch_refusals import batch_refusal
from schedlang.passes.propagate.loss_sums import find_shared_sums
from schedlang.passes.propagate.propagate import propagate
from schedlang.passes.propagate.sequence_trials import is_on_meta, slicing_of
from schedlang.passes.reduce_model.blocks import Blocks, blocks_of, fewest_layers
from schedlang.passes.simulate.one_rank_step import SimulatedStep, repeat_sample
from schedlang.passes.simulate.unit_profile import HEAD, MICRO, TAIL, UnitProfile, profile_units
from schedlang.passes.verify.probe import find_batch_norm
from schedlang.runtime.launch.forked_calls import CallsAhead

if TYPE_CHECKING:
    from schedlang.passes.propagate.original_forward import Weight
    from schedlang.passes.propagate.sharded_run import Loss
    from schedlang.runtime.storage.footprint import SegmentWork, TrafficMessage

# -- a source of chains ----------------------------------------------------------------------------


AXES = ("ep", "cp", "tp")  # of a placement, slowest first
# rows that are simulated, besides one row, which operators often treat specially; other rows are
# extrapolated.  A unit's peak is a maximum of lines, for few rows the line of its weights: between
# these rows the result is too large, beyond them exact
SIMULATED_ROWS = (2, 16)


@dataclass
class Profiles:
    """Chains of one model by placement, each simulated once; many rows are extrapolated from few.

    batch  of any number of rows, with the sequence length of training
    dtype  in which all is computed, as `cast(bf16, params=true)` has it; "" for the stored dtype
    """

    facts: ModelFacts
    batch: Mapping[str, Any]
    loss: Loss | None = None
    weight: Weight | None = None
    dtype: str = "bf16"
    _rows: dict[object, list[ProposedRow] | Refusal] = field(default_factory=dict)
    _known: dict[Placement, Chain | Refusal] = field(default_factory=dict)
    names: tuple[str, ...] = ()  # of all units (where stages may start), after the first simulation
    _ahead: Mapping[Placement, int] = field(default_factory=dict)  # simulated in a fork too
    _calls: CallsAhead[Chain | Refusal] | None = None
    _prepared: dict[object, tuple[Plan, Prepared]] = field(default_factory=dict)  # the last one

    def __call__(self, placement: Placement) -> Chain | Refusal:
        """Return the chain of a placement, or the refusal why there is none."""
        if placement.offload != "none":  # the simulation is the same with offloading
            base = self(replace(placement, offload="none"))
            return base if isinstance(base, Refusal) else replace(base, placement=placement)
        chain = self._known.get(placement)
        if chain is None:
            try:
                chain = self._of_few(placement) or self._simulated(placement)
            except Refusal as refusal:
                chain = refusal
            self._known[placement] = chain
        return chain

    @contextmanager
    def simulating_ahead(self, placements: Iterable[Placement]) -> Iterator[None]:
        """Simulate these placements in a fork of this process too, the last first, for a search
        that asks for them in their order; only in a process that runs a command alone."""
        if ProcessState.own:
            self._ahead = {placement: index for index, placement in enumerate(placements)}
        try:
            yield
        finally:
            if self._calls is not None:
                self._calls.end()
            self._ahead, self._calls = {}, None

    def _simulated(self, placement: Placement) -> Chain | Refusal:
        """Simulate a placement, here or in the fork; the first one here, which finds what others
        need too."""
        if placement not in self._ahead or not self.names:
            return self._simulate_or_refuse(placement)
        if self._calls is None:
            calls = [partial(self._simulate_or_refuse, ahead) for ahead in self._ahead]
            self._calls = CallsAhead(calls)
        return self._calls(self._ahead[placement])

    def _simulate_or_refuse(self, placement: Placement) -> Chain | Refusal:
        try:
            return self.simulate(placement)
        except Refusal as refusal:
            return refusal

    def _of_few(self, placement: Placement) -> Chain | None:
        """Extrapolate to many rows, or to slices; None for rows that are simulated, and where the
        chains of few rows differ.

        Raises Refusal where the chain of few rows is refused, because many rows would take long
        until the same refusal; and where sequences cannot be sliced.
        """
        sliced = placement.slices > 1
        if placement.rows in (1, *SIMULATED_ROWS) and not sliced:
            return None
        if sliced and self.slicing_refusal is not None:
            raise self.slicing_refusal
        first, second = (self(replace(placement, rows=rows, slices=1)) for rows in SIMULATED_ROWS)
        for chain in (first, second):
            if isinstance(chain, Refusal):
                raise chain
        assert isinstance(first, Chain) and isinstance(second, Chain)
        if not sliced:
            return extrapolate_rows(first, second, placement.rows)
        extrapolated = extrapolate_slices(first, second, placement.rows, placement.slices)
        if extrapolated is None:
            raise no_slice_price("its units run other operators in many rows than in few")
        return extrapolated

    @cached_property
    def slicing_refusal(self) -> Refusal | None:
        """The refusal of slices of sequences; None where the model runs on slices, by shapes
        alone."""
        plan, sample = Plan(self.facts), self.trial.sample
        try:
            traced = propagate(plan, sample, self.loss)
            slicing_of(plan, traced, 2, sample, self.loss, self.weight)
        except Refusal as refusal:
            return refusal
        except Exception as error:  # raised by the model itself, on less than it is made for
            return batch_refusal(error)
        return None

    @property
    def has_values(self) -> bool:
        """Whether the model has values, so that running it on slices can be tested."""
        return not is_on_meta(self.facts.model)

    @property
    def recipe(self) -> Recipe:
        """Bytes of numbers: 16 bits with masters in 32, or all as they are stored."""
        return CAST_RECIPE if self.dtype else recipe_of(self.facts)

    def rows(self, placement: Placement) -> Mapping[str, list[ProposedRow]]:
        """Return the rows that split tensors, by role; raises Refusal where nothing can be split.

        The rows of each role are found once for each size of its axis.
        """
        mesh = {axis: size for axis in AXES if (size := getattr(placement, axis)) > 1}
        request = ProposalRequest(self.trial, self.trial.full_blocks, mesh, self.batch)

        def of(role: str, axis: str) -> dict[str, list[ProposedRow]]:
            key = role, mesh.get(axis), role == "parts" and "ep" in mesh
            found = self._find_rows(key, partial(rows_of_role, request, role, []))
            return {role: found}

        rows = of("parts", "tp") if "tp" in mesh else {}
        rows |= of("experts", "ep") if "ep" in mesh else {}
        if placement.sequence and "tp" in mesh:
            find = partial(sequence_rows, self.trial, rows["parts"], "tp", placement.tp)
            rows["parts"] = self._find_rows(("sequence", placement.tp, "ep" in mesh), find)
        return rows | (of("tokens", "cp") if "cp" in mesh else {})

    def _find_rows(self, key: object, find: Callable[[], list[ProposedRow]]) -> list[ProposedRow]:
        """Return the rows of `key`, found once; raises their refusal each time."""
        if key not in self._rows:
            try:
                self._rows[key] = find()
            except Refusal as refusal:
                self._rows[key] = refusal
        found_rows = self._rows[key]
        if isinstance(found_rows, Refusal):
            raise found_rows
        return found_rows

    @cached_property
    def trial(self) -> RowTrial:
        """The model on which rows are tried."""
        blocks = blocks_of(self.facts)
        return RowTrial(self.facts, blocks, self.batch, self.loss, self.weight)

    def relax(self, replicas: int, passes: int = 1) -> str:
        """Return the word of `relax` for a batch that replicas and passes split.

        "batch_stats" where parts of the batch have statistics of their own: those of a norm over
        the batch, or, in several passes, sums over the batch in the loss.
        """
        norms_differ = (replicas > 1 or passes > 1) and self._normalizes_batch
        return "batch_stats" if norms_differ or passes > 1 and self.sums_batch else ""

    @cached_property
    def _normalizes_batch(self) -> bool:
        model = self.reduced.blocks.facts
        traced = propagate(Plan(model), self.trial.sample, self.loss)
        return find_batch_norm(model.model, traced) is not None

    @cached_property
    def sums_batch(self) -> bool:
        """Whether the loss has sums over all rows that microbatches cannot share."""
        plan, weighed = Plan(self.reduced.blocks.facts), self.weight is not None
        return bool(find_shared_sums(plan, self.trial.sample, self.loss, weighed))

    # -- one simulation ----------------------------------------------------------------------------

    @cached_property
    def reduced(self) -> ReducedModel:
        """The model with few layers, or the full model where it does not run with fewer."""
        return reduce_layers(self.trial.full_blocks) if self.trial.is_shortened else self.full

    @property
    def full(self) -> ReducedModel:
        """The full model."""
        return ReducedModel(self.trial.full_blocks, {})

    def simulate(self, placement: Placement) -> Chain:
        """Simulate a step of a placement now; raises Refusal where that is impossible."""
        try:
            plan, profiles = self._seen(placement, self.reduced, self.reduced.units)
        except LookupError:
            plan, profiles = self._seen(placement, self.full, ())
        except Refusal:
            raise
        except Exception as error:  # a model may read values, which meta tensors do not have
            raise batch_refusal(error) from error
        return self._whole(placement, plan, profiles)

    def _seen(
        self, placement: Placement, reduced: ReducedModel, units: Sequence[str]
    ) -> tuple[Plan, Sequence[UnitProfile]]:
        plan, prepared = self._prepare(placement, reduced)
        sample = self.sample_rows(placement.rows)
        return plan, profile_units(
            SimulatedStep(plan, prepared, sample, self.loss, self.weight), units
        )

    def _prepare(self, placement: Placement, reduced: ReducedModel) -> tuple[Plan, Prepared]:
        """Prepare the plan of a placement: with one row, or with two, as for any more rows."""
        rows = min(placement.rows, SIMULATED_ROWS[0])
        key = replace(placement, rows=rows), reduced is self.reduced
        if key not in self._prepared:
            plan = self._plan(placement, reduced.blocks)
            prepared = prepare(plan, self.sample_rows(rows), self.loss, self.weight)
            self._prepared.clear()  # the next one is for other rows of the same placement, or none
            self._prepared[key] = plan, prepared
        return self._prepared[key]

    def _plan(self, placement: Placement, blocks: Blocks) -> Plan:
        """The plan of a placement for a model with few layers, with one stage."""
        split = [row for rows in self.rows(placement).values() for row in rows]
        first = precision_rows(self.dtype, blocks) if self.dtype else []
        last = [ProposedRow((), make_call("zero", stage=0, over="ep"))] if placement.ep > 1 else []
        last.append(ProposedRow((), make_call("pipeline", order="1F1B", micro=MICRO)))
        mesh = {axis: size for axis in AXES if (size := getattr(placement, axis)) > 1}
        relaxed = ("dtype",) * bool(self.dtype) + ("batch_stats",) * self.sums_batch
        return plan_of_proposal([*first, *split, *last], blocks, mesh, "profile", *relaxed)

    def sample_rows(self, rows: int) -> Mapping[str, Any]:
        """Return a microbatch: the first row of the batch, repeated."""
        return repeat_sample(self._first_row, rows)

    @cached_property
    def _first_row(self) -> Mapping[str, Any]:
        from schedlang.runtime.batch import row_count, split_batch

        return split_batch(self.batch, row_count(self.batch), 1)[0][0].inputs

    # -- from few layers to all --------------------------------------------------------------------

    def _whole(self, placement: Placement, plan: Plan, profiles: Sequence[UnitProfile]) -> Chain:
        dims = _held(plan, profiles)
        units_by_name = {
            profile.name: _unit(profile, after, plan, dims[profile.name], self.trial.full_blocks)
            for profile, after in zip(profiles, [*profiles[1:], None])
        }
        matched = self.reduced.match_units(tuple(units_by_name), self.trial.full_blocks)
        self.names = _starts(profiles, tuple(matched))
        units = [units_by_name[name] for name in matched.values()]
        runs = tuple(UnitRun(unit, len(list(group))) for unit, group in groupby(units))
        return Chain(placement, runs, _tied(plan, profiles, runs, units, list(matched.values())))


def placements_to_simulate(job: Job, limits: Limits) -> list[Placement]:
    """List the placements that a search simulates at most, in its order."""
    few, found = {1, *SIMULATED_ROWS}, dict[Placement, None]()
    for placement in iter_placements(job, limits):
        rows = {*microbatch_rows(job, placement, limits)}
        counts = rows & few
        if placement.slices > 1 or rows - few:  # extrapolated
            counts |= {*SIMULATED_ROWS}
        whole = replace(placement, offload="none", slices=1)
        found |= dict.fromkeys(replace(whole, rows=count) for count in sorted(counts))
    return list(found)


CAST_RECIPE = Recipe(gradient=4)  # of `cast(bf16, params=true)`: gradients have the masters' dtype


def no_slice_price(reason: str) -> Refusal:
    """Return the refusal of a model whose slices have no price."""
    help_ = 'use an order without slices: `pipeline(order="1F1B", micro=...)`'
    return Refusal.of("S655", "slices of this model have no price", notes=(reason,), helps=(help_,))


def recipe_of(facts: ModelFacts) -> Recipe:
    """Return the bytes of numbers that are all as they are stored."""
    width = max((fact.itemsize for fact in facts.unique_parameters.values()), default=4)
    return Recipe(width, width, 2 * width, 0)


def _unit(
    unit: UnitProfile, after: UnitProfile | None, plan: Plan, shapes: Shapes, blocks: Blocks
) -> Unit:
    name = {HEAD: "first", TAIL: "last"}.get(unit.name) or blocks.common_name(unit.name)
    return Unit(
        name,
        sum(numel for _, numel, _ in shapes),
        _work(unit.forward, plan.mesh),
        _work(unit.backward, plan.mesh),
        float(unit.saved),
        float(
            unit.new_inputs if unit.name not in (HEAD, TAIL) else unit.saved
        ),  # no module to recompute
        float(unit.peak),
        float(after.inputs if after is not None else 0),
        sum(expert_numel for _, _, expert_numel in shapes),
        float(unit.freed_inputs),
        float(unit.outputs),
        shapes,
    )


def _work(recorded: SegmentWork, mesh: Mesh) -> Work:
    """Convert recorded work to the planner's values, without messages that this rank receives."""
    operators = tuple(
        OperatorCost(cast(Kind, kind), flops, float(moved), float(count))
        for (kind, flops, moved), count in recorded.operators.items()
    )
    sent: dict[CollectiveCost, float] = {}
    for message, count in recorded.messages.items():
        axis = _axis_of(message, mesh)
        if axis is not None and message.op != "recv":
            cost = CollectiveCost(message.op, axis, float(message.bytes))
            sent[cost] = sent.get(cost, 0.0) + count
    return Work(operators, tuple(replace(cost, count=count) for cost, count in sent.items()))


def _axis_of(message: TrafficMessage, mesh: Mesh) -> str | None:
    """The mesh axis along which the ranks of a message differ; of several the slowest."""
    first, *other_ranks = map(mesh.coordinates, message.ends or message.ranks)
    axes = {axis for point in other_ranks for axis in point if point[axis] != first[axis]}
    return next((axis for axis in mesh.sizes if axis in axes), None)


def _starts(profiles: Sequence[UnitProfile], names: Sequence[str]) -> tuple[str, ...]:
    """The module at which each unit starts; "" for the first, and where no module starts."""
    last = next(iter(profiles[-1].modules), "") if len(profiles) > 1 else ""
    return tuple(last if name == TAIL else name for name in names)


# -- parameters ------------------------------------------------------------------------------------


def _names(plan: Plan, profiles: Sequence[UnitProfile]) -> dict[str, set[str]]:
    """The parameters of each unit, by their first names; uncalled modules belong to the first
    unit."""
    owner = {name: profile.name for profile in profiles for name in profile.modules}
    units = [profile.name for profile in profiles if profile.name not in (HEAD, TAIL)]
    names: dict[str, set[str]] = {profile.name: set() for profile in profiles}
    for name, fact in plan.model.parameters.items():
        module = name.rpartition(".")[0]
        unit = next((unit for unit in units if is_inside(module, unit)), owner.get(module, HEAD))
        names[unit].add(fact.name)
    return names


def _held(plan: Plan, profiles: Sequence[UnitProfile]) -> dict[str, Shapes]:
    """Count the parameters that a rank holds of each unit, and those among them that `ep` splits,
    by their shapes."""
    held = {}
    for unit, names in _names(plan, profiles).items():
        numels: dict[tuple[int, ...], tuple[int, int]] = {}
        for name in names:
            layout = plan.effective_layout(name)
            shape = layout.local_shape(plan.mesh) or (1,)
            numel = math.prod(shape)
            total, experts = numels.get(shape, (0, 0))
            is_spread = any(split.axis == "ep" for split in layout.splits)
            numels[shape] = total + numel, experts + numel * is_spread
        held[unit] = tuple((shape, *both) for shape, both in sorted(numels.items()))
    return held


def _tied(
    plan: Plan,
    profiles: Sequence[UnitProfile],
    runs: Sequence[UnitRun],
    units: Sequence[Unit],
    simulated: Sequence[str],
) -> tuple[tuple[int, int], ...]:
    """List pairs of runs that share parameters."""
    names = _names(plan, profiles)
    run_of, begin = {}, 0
    for k, run in enumerate(runs):
        for unit_name in simulated[begin : begin + run.count]:
            run_of[unit_name] = k
        begin += run.count
    pairs = set()
    for first, first_names in names.items():
        for second, second_names in names.items():
            if first in run_of and second in run_of and first_names & second_names:
                pairs.add((run_of[first], run_of[second]))
    return tuple(sorted(pair for pair in pairs if pair[0] < pair[1]))


# -- fewer layers ----------------------------------------------------------------------------------


MIN_LAYERS = 3  # minimal layers of a list: one of them has equal neighbours on both sides


@dataclass(frozen=True)
class ReducedModel:
    """A model with fewer blocks: for each shortened list, the indices of blocks that remain."""

    blocks: Blocks
    indices: Mapping[str, Sequence[int]]
    _places: dict[str, list[int]] = field(default_factory=dict, compare=False)

    @cached_property
    def units(self) -> tuple[str, ...]:
        """The blocks of all outermost lists."""
        return tuple(
            f"{fqn}.{child}"
            for fqn in self.blocks.facts.sites
            if fqn in self.blocks.lists and "*" not in fqn.split(".")
            for child in self.blocks.facts.children(fqn)
        )

    def match_units(self, simulated: Sequence[str], full: Blocks) -> dict[str, str]:
        """Map every unit of the full model, in call order, to the simulated unit that stands for
        it."""
        matches: dict[str, str] = {}
        for trunk, group in groupby(simulated, lambda name: name.rpartition(".")[0]):
            names = list(group)
            if trunk not in self.indices:
                matches |= dict(zip(names, names))
                continue
            if trunk not in self._places:
                self._places[trunk] = _representatives(full, trunk, self.indices[trunk])
            for child, index in zip(full.facts.children(trunk), self._places[trunk]):
                matches[f"{trunk}.{child}"] = names[index]
        return matches


def _representatives(full: Blocks, trunk: str, kept: Sequence[int]) -> list[int]:
    """Pick for each block of a list the index of an equal block among those kept, if possible one
    with equal neighbours."""
    facts = full.facts
    kinds = [module_kind(facts, f"{trunk}.{child}") for child in facts.children(trunk)]
    ends = ["first", *kinds, "last"]
    contexts = list(zip(ends, kinds, ends[2:]))
    position_of: dict[object, int] = {}
    for n, index in enumerate(kept):
        position_of.setdefault(contexts[index], n)
        position_of[kinds[index]] = position_of.get(kinds[index], n) if n == len(kept) - 1 else n
    return [position_of.get(contexts[k], position_of[kind]) for k, kind in enumerate(kinds)]


def reduce_layers(full: Blocks) -> ReducedModel:
    """Build the model with the fewest blocks that show all kinds and neighbours, at least LEAST of
    each list."""
    from schedlang.runtime.tracing.meta_runs import meta_model

    kept: dict[str, Sequence[int]] = {}
    for trunk in full.lists:
        children = full.facts.children(trunk) if "*" not in trunk.split(".") else ()
        indices = fewest_layers([module_kind(full.facts, f"{trunk}.{child}") for child in children])
        additional = (index for index in range(len(children)) if index not in indices)
        indices = sorted(
            [*indices, *(index for index, _ in zip(additional, range(MIN_LAYERS - len(indices))))]
        )
        if len(indices) < len(children):
            kept[trunk] = indices
    names = {
        trunk: [full.facts.children(trunk)[index] for index in indices]
        for trunk, indices in kept.items()
    }
    return ReducedModel(full.in_model(ModelFacts(meta_model(full.facts.model, {}, names))), kept)
