"""A simulated step of one rank on the meta device: its sends, in order, and its bytes.

No other ranks and no values exist.  Memory, time, sends of activations to a peer, and the static
proofs are derived from it: `simulate_ranks` simulates each kind of rank, with every storage and
operator; `static_checks.roles` simulates several ranks, with the sends of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from schedlang.ir.annotations import Order
from schedlang.ir.plan import Plan
from schedlang.ir.sharing import parents_of
from schedlang.passes.analyze.holdings import state_slicing
from schedlang.passes.analyze.prepare import Prepared

if TYPE_CHECKING:
    from torch import Tensor

    from schedlang.passes.partition.staging import Staged
    from schedlang.passes.propagate.sharded_run import Loss
    from schedlang.runtime.comm.fake_rank import Lane, OperationLog
    from schedlang.runtime.program import Program
    from schedlang.runtime.storage.footprint import Footprint

# -- the step --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SimulatedStep:
    """A plan to simulate, with its prepared facts; `sample` is one microbatch."""

    plan: Plan
    prepared: Prepared
    sample: Mapping[str, Any]
    loss: Loss | None = None
    weight: Any = None
    # cache of how the batch is split, which is the same for all ranks
    splits: dict[object, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def equal_rows_plan(self) -> Plan:
        """The plan with equal rows for all ranks: all simulate the sample, which is the largest
        part."""
        if not any(replicas.rows for replicas in self.plan.replicas):
            return self.plan
        return replace(self.plan, replicas=tuple(replace(r, rows=()) for r in self.plan.replicas))

    @cached_property
    def batch(self) -> dict[str, Any]:
        """The batch of a full step; every part of it is the sample."""
        return repeat_sample(self.sample, self.plan.shares * self.plan.micro)


def repeat_sample(sample: Mapping[str, Any], times: int) -> dict[str, Any]:
    """Return a batch with every part equal to the sample, also inside dicts and lists."""
    import torch

    from schedlang.ir import pytree
    from schedlang.runtime.batch import row_count
    from schedlang.runtime.row_lists import is_row_list, take_rows

    rows = row_count(sample)

    def repeat(value: Any) -> Any:
        if is_row_list(value, rows):
            return take_rows(value, torch.arange(rows * times) % rows)
        is_batched = isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape[0] == rows
        return torch.cat([value] * times) if is_batched else value

    def is_leaf(value: Any) -> bool:
        return pytree.is_sample_batch(value) or is_row_list(value, rows)

    repeated: dict[str, Any] = pytree.tree_map(repeat, dict(sample), is_leaf=is_leaf)
    return repeated


def expand_rows(batch: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Return a batch of `rows` rows: views of the first row, which need no memory; the batch itself
    where it has as many rows.

    Raises Refusal (S109) for objects of many samples, such as a `Batch` of torch_geometric.
    """
    import torch
    from torch import Tensor

    from schedlang.diagnostics.diagnostic import Refusal
    from schedlang.ir import pytree
    from schedlang.runtime.batch import row_count
    from schedlang.runtime.row_lists import is_row_list, take_rows

    count = row_count(batch)
    if rows == count:
        return dict(batch)

    def part(value: Any) -> Any:
        if pytree.is_sample_batch(value):
            title = f"`--rows {rows}` cannot repeat a row of a `{type(value).__name__}`"
            help_ = "leave it out, and let the model file's `batch` have as many rows"
            raise Refusal.of("S109", title, helps=(help_,))
        if is_row_list(value, count):
            return take_rows(value, torch.zeros(rows, dtype=torch.int64))
        is_batched = isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == count
        return value[:1].expand(rows, *value.shape[1:]) if is_batched else value

    def is_leaf(value: Any) -> bool:
        return pytree.is_sample_batch(value) or is_row_list(value, count)

    expanded: dict[str, Any] = pytree.tree_map(part, dict(batch), is_leaf=is_leaf)
    return expanded


def with_few_microbatches(
    plan: Plan, staged: Staged, min_micro: int
) -> tuple[Order | None, Staged]:
    """Return the order with at least `min_micro` microbatches but few, and its stages; else both
    unchanged."""
    from schedlang.pipeline.schedules import OrderError

    order = plan.order
    if order is None or order.micro <= min_micro or order.table:
        return order, staged
    count = plan.mesh.size(staged.axis) if staged.axis is not None else 1
    for micro in sorted({min_micro, *(n for n in (count, count * order.chunks) if n > min_micro)}):
        try:
            shorter = replace(order, micro=micro)
            return shorter, replace(staged, timeline=shorter.timeline(count))
        except OrderError:
            continue
    return order, staged


def representative_places(plan: Plan, prepared: Prepared) -> dict[int, int]:
    """Map each pipeline place to the first place with equal stages."""
    staged = prepared.staged
    if staged.axis is None:
        return {0: 0}
    first_alike: dict[object, int] = {}
    representatives = {}
    looks = _module_looks(plan, staged)
    for position in range(plan.mesh.size(staged.axis)):
        look = tuple(_look(looks, staged, stage) for stage in staged.stages_at(position))
        representatives[position] = first_alike.setdefault(look, position)
    return representatives


def kinds_of_units(plan: Plan, prepared: Prepared) -> list[object]:
    """Return for each unit of a pipeline a number that is equal for units with equal modules and
    rows, which ran the same operators on results of the same sizes."""
    graph, numbers = prepared.staged.cut.graph, dict[object, int]()
    if not graph.operator_classes or len(set(graph.units)) < len(graph.units):
        return []
    looks = _module_looks(plan, prepared.staged)
    keys = (
        (tuple(looks[name]), graph.run_key(range(unit, unit + 1)))
        for unit, name in enumerate(graph.units)
    )
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def _module_looks(plan: Plan, staged: Staged) -> dict[str, list[object]]:
    """Return, for each unit, keys of the modules in it that are equal for equal modules."""
    rows = plan.rows_by_module()
    looks: dict[str, list[object]] = {unit: [] for unit in staged.cut.graph.units}
    for fqn, site in plan.model.sites.items():
        trained = tuple(param.requires_grad for param in site.parameters.values())
        look = site.kind, trained, plan.boundaries.get(fqn, ()), tuple(rows.get(fqn, ()))
        for unit in (fqn, *filter(None, parents_of(fqn))):
            if unit in looks:
                looks[unit].append((fqn[len(unit) :], *look))
    return looks


def _look(looks: Mapping[str, Sequence[object]], staged: Staged, stage: int) -> object:
    """Return a key that is equal for stages that run the same modules and send the same values.

    `looks`: those of `_module_looks`.
    """
    cut = staged.cut
    modules = tuple(look for unit in cut.units(stage) for look in looks[cut.graph.units[unit]])
    routes = tuple(
        (source - stage, target - stage, tuple(cut.graph.leaves[t] for t in tokens))
        for (source, target), tokens in cut.routes.items()
        if stage in (source, target)
    )
    return modules, routes, cut.graph.run_key(cut.units(stage)), stage == cut.stages - 1


# -- one rank --------------------------------------------------------------------------------------


@contextmanager
def build_one_rank(
    step: SimulatedStep, rank: int, optimizer: Any = None, footprint: Footprint | None = None
) -> Iterator[tuple[Program, OperationLog]]:
    """Build the program of one rank without any other rank; the tap logs its sends.

    A footprint watches its storages, and records its sends.  This process must not be a rank of a
    job.  Raises what the model raises where it cannot be built without values.
    """
    from schedlang.passes.lower.build import build
    from schedlang.runtime.comm.fake_rank import fake_rank
    from schedlang.runtime.offload.offloaded_activations import listen_to_stores
    from schedlang.runtime.storage.footprint import TrafficMessage

    plan = step.equal_rows_plan
    row, _ = state_slicing(plan)
    state = () if row is None else tuple(plan.mesh.group(rank, plan.mesh.fold(row.axes)))

    def hear(op: str, lane: Lane, sent: Iterable[Tensor], ends: tuple[int, int] | None) -> None:
        assert footprint is not None
        for tensor in sent:  # these ranks exchange shards of parameters and gradients
            footprint.note_collective(tensor, lane.ranks == state)
        size = max((tensor.numel() * tensor.element_size() for tensor in sent), default=0)
        footprint.add_message(TrafficMessage(op, lane.ranks, size, ends))

    with ExitStack() as stack:
        watches = footprint is not None
        tap = stack.enter_context(fake_rank(rank, plan.mesh.world, hear if watches else None))
        if footprint is not None:
            stack.enter_context(listen_to_stores(footprint))
        program = build(
            plan,
            step.batch,
            loss=step.loss,
            optimizer=optimizer,
            weight=step.weight,
            prepared=step.prepared,
            on_meta=True,
        )
        yield program, tap
