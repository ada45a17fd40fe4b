"""A simulated step of each kind of rank on the meta device, and each kind's memory over a step.

`account` and `tune` use it.  Of a pipeline a few microbatches are simulated, and their operations
then stand for all operations of the order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from schedlang.garbage_collection import ProcessState
from schedlang.ir.memory import ADAMW_MOMENTS, CLASSES, STATE, OperationMemory, RankMemory
from schedlang.ir.plan import Plan
from schedlang.passes.analyze.holdings import gathers_by_rows
from schedlang.passes.analyze.prepare import Prepared
from schedlang.passes.analyze.residence import tiers_of
from schedlang.passes.partition.staging import timeline_of, with_eviction
from schedlang.passes.simulate.memory import RankClass, rank_classes
from schedlang.passes.simulate.one_rank_step import (
    SimulatedStep,
    build_one_rank,
    kinds_of_units,
    representative_places,
    with_few_microbatches,
)
from schedlang.pipeline.timeline.table import TRANSFER_KINDS, Kind

if TYPE_CHECKING:
    import torch
    from torch import nn

    from schedlang.passes.partition.staging import Staged
    from schedlang.passes.propagate.sharded_run import Loss
    from schedlang.pipeline.timeline.table import Op
    from schedlang.runtime.program import Program
    from schedlang.runtime.storage.footprint import Footprint, Levels, SegmentWork

# -- results of a simulation -----------------------------------------------------------------------


PARTNER_KINDS = {
    Kind.HOLD: 1,
    Kind.GIVE: -1,
}  # operations of the rank that holds a peer's activations


@dataclass(frozen=True)
class SimulatedRank:
    """Effects of the operations of a few microbatches on one rank, in the order of their runs.

    ops            `operation_key` of an operation -> its runs
    rest           runs after the last operation
    partner_bytes  stage -> bytes of a microbatch that a partner holds for a while
    """

    rank_class: RankClass
    start: Levels
    ops: Mapping[Any, Sequence[OperationRun]]
    rest: Sequence[OperationRun]
    host: int
    uncounted: tuple[str, ...]
    partner_bytes: Mapping[int, int]


class OperationRun(NamedTuple):
    """Bytes by class before an operation, at most during it, and after it; the most besides state;
    and its work."""

    before: Levels
    most: Levels
    end: Levels
    non_state: int
    work: SegmentWork


@dataclass(frozen=True)
class SimulatedRanks:
    """The classes of ranks, and the simulation that stands for each.

    partner_bytes  stage -> bytes that a microbatch's forward moves to a partner
    """

    classes: tuple[RankClass, ...]
    by_class: Mapping[RankClass, SimulatedRank]
    partner_bytes: Mapping[int, int]


def operation_key(stages: Sequence[int], op: Op) -> tuple[Any, ...]:
    """Return a key that is equal for operations of equal stages that differ in their microbatch
    alone; `stages` are those of the operation's place."""
    peer_offset = op.peer - op.stage if op.kind in TRANSFER_KINDS else 0
    return op.kind, stages.index(op.stage), op.slice, peer_offset


# -- along the whole order ---------------------------------------------------------------------


def runs_in_order(
    plan: Plan,
    staged: Staged,
    position: int | None,
    simulated: SimulatedRank,
    parked: Mapping[int, int],
) -> Iterator[tuple[Op, OperationRun]]:
    """Yield each operation of a place in a full step, with the simulated run that stands for it.

    `parked`: stage -> bytes that a partner holds for it.
    """
    rows, stages = _rows(plan, staged, position), staged.stages_at(position or 0)
    counts = Counter(operation_key(stages, op) for op in rows if op.kind not in PARTNER_KINDS)
    turn_counts: Counter[Any] = Counter()
    moves = {
        (stage, kind): _taken_in(size * sign, simulated.start)
        for stage, size in parked.items()
        for kind, sign in PARTNER_KINDS.items()
    }
    for op in rows:
        if op.kind in PARTNER_KINDS:
            yield op, moves[op.stage, op.kind]
            continue
        key = operation_key(stages, op)
        runs = simulated.ops.get(key)
        if runs is not None:
            yield op, runs[_turn(turn_counts[key], counts[key], len(runs))]
        turn_counts[key] += 1


def _taken_in(size: int, levels: Levels) -> OperationRun:
    """Return the run of receiving a partner's activations (or, below zero, of giving them back)."""
    from schedlang.runtime.storage.footprint import SegmentWork

    end = levels.copy()
    end[CLASSES.index("activations")] += size
    passing = int(levels[len(STATE) :].sum()) + max(size, 0)
    return OperationRun(levels, end if size > 0 else levels, end, passing, SegmentWork())


def _rows(plan: Plan, staged: Staged, position: int | None) -> list[Op]:
    """Return the operations of a place in a full step, with sends and gathers."""
    from schedlang.pipeline.timeline.proof import with_transfers

    timeline = with_transfers(staged.timeline.with_edges(staged.cut.edges), plan.receive_ahead)
    if (with_rows := gathers_by_rows(plan, staged)) is not None:
        timeline = with_rows(timeline)
    return list(timeline.rows(position or 0))


def _turn(turn: int, run_count: int, simulated_count: int) -> int:
    """Return the index of the simulated run that stands for a turn: first, last, or one between."""
    if turn == 0 or simulated_count == 1:
        return 0
    return simulated_count - 1 if turn == run_count - 1 else min(turn, max(1, simulated_count - 2))


# -- simulating a step on the meta device ----------------------------------------------------------


MIN_MICROBATCHES = 3  # microbatches: the first, one between, the last
ON_DEVICE = "device"
MANY_MODULES = 500  # of a model: a fork costs as much as the step of a smaller one


def simulate_ranks(
    plan: Plan,
    batch: Mapping[str, Any],
    loss: Loss | None,
    prepared: Prepared,
    works: bool = False,
    classes: tuple[RankClass, ...] | None = None,
) -> SimulatedRanks:
    """Simulate a short step of each kind of rank, with AdamW's optimizer state.

    `batch` is that of a full step; with `works` FLOPs and bytes of every operator are counted too.
    `classes` are those of `rank_classes`, if they are known.  Raises what the model raises where
    it cannot be simulated.
    """
    from schedlang.runtime.batch import largest_part
    from schedlang.runtime.launch.forked_calls import call_side_by_side

    sample = largest_part(batch, plan.share_weights, plan.micro)
    short_plan, staged = _short(plan, prepared.staged)
    # one step for all kinds: their programs share the stand-ins for other stages
    step = SimulatedStep(short_plan, replace(prepared, staged=staged), sample, loss)
    kinds = representative_places(plan, prepared)
    classes = classes or rank_classes(plan, prepared.staged, prepared.holdings)
    kind_of = {c: None if c.place is None else kinds[c.place] for c in classes}
    representatives = {
        kind: next(c for c in classes if c.place == kind)
        for kind in dict.fromkeys(kind_of.values())
    }
    unit_kinds = kinds_of_units(plan, prepared)
    plays = [
        partial(_play, step, rank_class, works, unit_kinds)
        for rank_class in representatives.values()
    ]
    if ProcessState.own and len(plan.model.sites) >= MANY_MODULES:
        _prepare_forks(step)
        results = call_side_by_side(plays)
    else:
        results = [play() for play in plays]
    simulated = dict(zip(representatives, results))
    by_class = {rank_class: simulated[kind] for rank_class, kind in kind_of.items()}
    return SimulatedRanks(classes, by_class, _parked(prepared, kinds, simulated))


def _prepare_forks(step: SimulatedStep) -> None:
    """Do once, before forks of this process simulate a step, what each of them would do."""
    for name in ("runtime.dry_run", "runtime.adapters.fully_shard"):  # import nearly all others
        import_module(f"schedlang.{name}")
    _ = step.batch


def _parked(
    prepared: Prepared, kinds: Mapping[int, int], simulated: Mapping[int | None, SimulatedRank]
) -> dict[int, int]:
    staged = prepared.staged
    t, bytes_by_stage = staged.timeline, {}
    for stage in sorted(set(t.stage[t.kind == Kind.EVICT].tolist())):
        position = staged.ranks[stage]
        stage_index, kind = staged.stages_at(position).index(stage), kinds[position]
        bytes_by_stage[stage] = simulated[kind].partner_bytes[staged.stages_at(kind)[stage_index]]
    return bytes_by_stage


# -- one rank ----------------------------------------------------------------------------------


def _play(
    step: SimulatedStep, rank_class: RankClass, works: bool, unit_kinds: Sequence[object]
) -> SimulatedRank:
    """Simulate a short step of the first rank of a class, with its footprint."""
    from schedlang.runtime.adapters.fully_shard import on_meta_device
    from schedlang.runtime.declined_calls import declined_in
    from schedlang.runtime.dry_run import dry_run
    from schedlang.runtime.storage.footprint import Footprint

    short_plan, staged = step.plan, step.prepared.staged
    footprint = Footprint("meta", works)
    with build_one_rank(step, rank_class.first, footprint=footprint) as (program, _):
        # not by `build`, which would try whether AdamW updates elements independently
        program.optimizer = _adamw(program.assembly.parameters.values())
        away = {
            name for name, item in tiers_of(short_plan).items() if item.as_tuple[2] != ON_DEVICE
        }
        record_state(program, footprint, away)
        units = [unit for item in program.assembly.sliced.values() for unit in item.units]
        with on_meta_device(units):
            dry_run(program, staged.cut, step.batch, footprint, step.splits, unit_kinds)
    declined = tuple(map(str, declined_in(program.assembly.module)))
    parking = program.assembly.pipeline.parking
    sent = {} if parking is None else dict(parking.sent)
    return _table(footprint, rank_class, staged, declined, sent)


def _short(plan: Plan, staged: Staged) -> tuple[Plan, Staged]:
    """Return the plan with few microbatches: as many as include each stage that moves
    activations."""

    def parking(staged_plan: Staged) -> set[int]:
        return set(staged_plan.timeline.stage[staged_plan.timeline.kind == Kind.EVICT].tolist())

    # includes one between whose receive is posted by another one between
    min_micro = max(MIN_MICROBATCHES, plan.receive_ahead + 2)
    while True:
        order, few_staged = with_few_microbatches(plan, staged, min_micro)
        short_plan = replace(plan, order=order)
        few_staged = with_eviction(
            short_plan, replace(few_staged, timeline=timeline_of(short_plan))
        )
        if order == plan.order or parking(few_staged) >= parking(staged):
            return short_plan, few_staged
        min_micro *= 2


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer | None:
    from torch.optim import AdamW

    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return AdamW(trained) if trained else None


def record_state(program: Program, footprint: Footprint, off_device: Collection[str]) -> None:
    """Record the bytes between steps (after the first): parameters, buffers, optimizer moments.

    `off_device` are parameters whose moments are offloaded.
    """
    import torch

    from schedlang.runtime.storage.quantized_parameters import stored_tensors

    assembly, optimizer = program.assembly, program.optimizer
    footprint.set_class("parameters", stored_tensors(assembly.parameters.values()))
    footprint.set_class("parameters", assembly.buffers.values())
    for name, parameter in assembly.parameters.items() if optimizer is not None else ():
        if parameter.requires_grad:
            assert optimizer is not None
            moments = [torch.empty_like(parameter) for _ in range(ADAMW_MOMENTS)]
            optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": moments[0],
                "exp_avg_sq": moments[1],
            }
            if name in off_device:
                footprint.exclude(moments)
            footprint.set_class("optimizer", () if name in off_device else moments)


def _table(
    footprint: Footprint,
    rank_class: RankClass,
    staged: Staged,
    declined: tuple[str, ...],
    parked: Mapping[int, int],
) -> SimulatedRank:
    marks = [item.operation for item in footprint.stretches]
    segments = footprint.summarize([op for op in marks if op is not None and op.kind is Kind.F])
    runs = [
        OperationRun(a.end, b.peak, b.end, b.peak_transient, b.work)
        for a, b in zip(segments, segments[1:])
    ]
    ops: dict[Any, list[OperationRun]] = {}
    other_runs: list[OperationRun] = []
    stages = staged.stages_at(rank_class.place or 0)
    for item, run in zip(segments[1:], runs):
        if item.operation is None:
            other_runs.append(run)
        elif item.operation.kind not in PARTNER_KINDS:  # a partner's bytes are not known here
            ops.setdefault(operation_key(stages, item.operation), []).append(run)
    return SimulatedRank(
        rank_class, segments[0].end, ops, other_runs, footprint.host, declined, parked
    )


# -- memory over a step ----------------------------------------------------------------------------
# The real program runs a step on the meta device, and every storage in it is watched.  What the
# operations of a few microbatches hold, free and need for a while is repeated along the order.


BEFORE, AFTER = "before", "sums and update"


def estimate_memory(
    plan: Plan, batch: Mapping[str, Any], loss: Loss | None, prepared: Prepared
) -> tuple[RankMemory, ...]:
    """Estimate the memory of each kind of rank, in the order of their first rank, with AdamW.

    `batch` is that of a full step.  All microbatches count as large as the first.  Raises what the
    model raises where it cannot be simulated.
    """
    return memory_of_ranks(plan, prepared, simulate_ranks(plan, batch, loss, prepared))


def memory_of_ranks(
    plan: Plan, prepared: Prepared, simulated: SimulatedRanks
) -> tuple[RankMemory, ...]:
    """Estimate memory as `estimate_memory` does, from steps that are simulated already."""
    return tuple(_memory(plan, prepared, rank_class, simulated) for rank_class in simulated.classes)


# -- along the whole order ---------------------------------------------------------------------


def _memory(
    plan: Plan, prepared: Prepared, rank_class: RankClass, all_ranks: SimulatedRanks
) -> RankMemory:
    """Lay the simulated operations along the order of this rank's place, with what it holds for
    others."""
    staged, simulated = prepared.staged, all_ranks.by_class[rank_class]
    level = simulated.start + _parked_by_others(rank_class)
    moments = [OperationMemory(BEFORE, _plain(level), _plain(level))]

    def then(text: str, run: OperationRun) -> None:
        nonlocal level
        shift = level - run.before
        passing = run.non_state + int(shift[len(STATE) :].sum())
        moments.append(
            OperationMemory(text, _plain(run.most + shift), _plain(run.end + shift), passing)
        )
        level = run.end + shift

    for op, run in runs_in_order(
        plan, staged, rank_class.place, simulated, all_ranks.partner_bytes
    ):
        then(str(op), run)
    for run in simulated.rest:
        then(AFTER, run)
    scale = [
        _ratio(getattr(rank_class, name), getattr(simulated.rank_class, name)) for name in STATE
    ]
    return RankMemory(
        rank_class.ranks,
        rank_class.first,
        rank_class.place,
        tuple(_scaled(m, scale) for m in moments),
        simulated.host,
        simulated.uncounted,
    )


def _parked_by_others(rank_class: RankClass) -> Levels:
    """Return the bytes of other ranks' state that a rank always holds."""
    import numpy as np

    levels: Levels = np.zeros(len(CLASSES), dtype=np.int64)
    levels[CLASSES.index("optimizer")] = rank_class.peer
    return levels


def _ratio(value: int, base: int) -> float:
    return value / base if base else 1.0


def _scaled(moment: OperationMemory, scale: Sequence[float]) -> OperationMemory:
    """Scale a moment to a rank with larger or smaller shards of the state."""

    def of(levels: tuple[int, ...]) -> tuple[int, ...]:
        state = (round(size * factor) for size, factor in zip(levels, scale))
        return (*state, *levels[len(scale) :])

    return (
        moment
        if all(factor == 1 for factor in scale)
        else OperationMemory(moment.what, of(moment.most), of(moment.end), moment.passing)
    )


def _plain(levels: Levels) -> tuple[int, ...]:
    return tuple(int(size) for size in levels)
