"""Simulate steps of some ranks without values, and prove that their communication matches.

All ranks must agree on process groups, collectives and messages. The logs of simulated ranks run
against each other. A collective waits until all simulated members of its group have reached the
same one, so two groups in opposite orders are found as well as two operations that differ. Messages
are paired in order on each channel, as torch pairs them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.diagnostic import Diagnostic
from schedlang.ir.mesh import run_axis
from schedlang.ir.plan import Action, Plan
from schedlang.ir.primitive import Facet
from schedlang.passes.analyze.axis_rows import axis_row, last_row_changing
from schedlang.passes.analyze.holdings import (
    holdings_of,
    reductions,
    sliced_names_by_unit,
    slicing_axes_of,
    state_slicing,
)
from schedlang.passes.analyze.prepare import Prepared
from schedlang.passes.partition.staging import without_eviction
from schedlang.passes.simulate.one_rank_step import (
    SimulatedStep,
    build_one_rank,
    representative_places,
    with_few_microbatches,
)
from schedlang.passes.static_checks.claims import Claim, join_problems, row_label

if TYPE_CHECKING:
    from schedlang.runtime.comm.fake_rank import Lane, LoggedOperation, OperationLog
    from schedlang.runtime.dry_run import SimulatedMessage

SIMULATE_ALL = 8  # up to so many ranks, all are simulated


@dataclass(frozen=True)
class GradientSum:
    """One sum of gradients: plain axes, parameters, stages that take part, and the divisor."""

    axes: tuple[str, ...]
    names: frozenset[str]
    places: frozenset[int] = frozenset([0])
    divisor: float = 1.0


SumsByStage = Mapping[int, Sequence[GradientSum]]


@dataclass(frozen=True)
class RankStep:
    """The simulated step of one rank.

    log        what it sends, in order
    sums       its sums of gradients
    `messages`  its messages: microbatch, source stage, target stage
    weights    the weights of its microbatches in the step's loss
    trained    the parameters that its optimizer received
    held       the parameters that it holds
    """

    rank: int
    place: int
    log: tuple[LoggedOperation, ...]
    messages: tuple[SimulatedMessage, ...]
    sums: tuple[GradientSum, ...]
    weights: tuple[float, ...]
    trained: tuple[str, ...]
    held: frozenset[str]


def ranks_to_simulate(plan: Plan, prepared: Prepared) -> tuple[int, ...]:
    """Return all ranks of a small world; of a large one each kind of stage with some neighbours.

    Neighbours along the pipeline are adjacent stages, once for each pair of kinds; along another
    axis the last rank, because ranks that differ along one axis may differ in what the axis
    decides.
    """
    mesh, axis = plan.mesh, prepared.staged.axis
    if mesh.world <= SIMULATE_ALL:
        return tuple(range(mesh.world))
    zero = dict.fromkeys(mesh.sizes, 0)
    line = mesh.group(0, axis) if axis is not None else (0,)
    kinds = representative_places(plan, prepared)
    pairs = {}
    for place in reversed(range(len(line) - 1)):
        pairs[kinds[place], kinds[place + 1]] = (place, place + 1)
    found = {line[place] for both in pairs.values() for place in both}
    for place in set(kinds.values()):
        found.add(line[place])
        for name, size in mesh.axes:
            if size > 1 and (axis is None or name not in mesh.fold(axis)):
                at = mesh.coordinates(line[place])
                found.add(mesh.rank(zero | at | {name: size - 1}))
    return tuple(sorted(found))


def shorten_step(step: SimulatedStep) -> SimulatedStep:
    """Return the step to simulate: no kernels, no sliced state, the fewest possible microbatches.

    All microbatches send the same; the check of the timeline covers their order.
    """
    plan = step.plan
    plain = _without_kernels(plan)
    whole = tuple(replace(one, stage=0) for one in plan.replicas)
    least, staged = with_few_microbatches(plan, without_eviction(plan, step.prepared.staged), 2)
    short = replace(plain, replicas=whole, order=least)
    held = holdings_of(short, staged)
    prepared = replace(step.prepared, staged=staged, holdings=held, gather_routes={})
    return replace(step, plan=short, prepared=prepared)


def _without_kernels(plan: Plan) -> Plan:
    """Return the plan with original modules, and saved tensors where they are by default."""
    away = plan.rows_changing(Facet.STRUCTURE, Facet.RESIDENCE)
    kept = tuple(action for action in plan.actions if action not in away)
    stores = tuple(one for one in plan.stores if one.what != "activations")
    return replace(plan, actions=kept, activation_codings=(), stores=stores)


def simulate_ranks(step: SimulatedStep) -> list[RankStep]:
    """Simulate a step on every rank that differs from others."""
    short = shorten_step(step)
    return [_simulate_rank(short, rank) for rank in ranks_to_simulate(short.plan, short.prepared)]


def _simulate_rank(step: SimulatedStep, rank: int) -> RankStep:
    from schedlang.runtime.dry_run import dry_run

    trained: list[str] = []

    def optimizer(named: Any) -> Any:
        import torch

        pairs = list(named)
        trained.clear()  # `build` first tries it on other parameters
        trained.extend(name for name, _ in pairs)
        return torch.optim.SGD([p for _, p in pairs], lr=0.0)

    plan, staged = step.plan, step.prepared.staged
    with build_one_rank(step, rank, optimizer) as (program, tap):
        played = dry_run(program, staged.cut, step.batch, dealings=step.splits)
    if program.optimizer is None:
        trained.clear()  # nothing is trained here; only `build` tried it
    return RankStep(
        rank,
        plan.mesh.index(rank, staged.axis) if staged.axis is not None else 0,
        tuple(tap.log),
        tuple(played.messages),
        tuple(_observed_sums(step, program, played.invented, tap)),
        tuple(played.weights),
        tuple(trained),
        frozenset(program.assembly.parameters),
    )


def _observed_sums(step: SimulatedStep, program: Any, answers: Any, tap: OperationLog) -> Any:
    """Yield the sums of gradients: all-reduces of their storage, or of buffers that contain them.

    A gradient that is multiplied outside of a sum is yielded as a sum over no axis, with a divisor.
    """
    from schedlang.runtime.dry_run import storage_place
    from schedlang.runtime.tracing.meta_runs import storage

    there = [(n, p.grad) for n, p in program.assembly.parameters.items() if p.grad is not None]
    names = {storage_place(grad): name for name, grad in there}
    stale = step.prepared.staged.timeline.stale
    for lane, tensor in tap.summed:
        _, put = answers.together.get(id(tensor), (None, {}))
        # gradients that share a buffer from the start are summed in place
        lying = [name for (at, _), name in names.items() if at == storage(tensor)]
        # with several updates in a step, each with its sums, count those of the last update
        last = [n for n, place in put.items() if not stale or names.get(place) == n]
        of = frozenset([*last, *lying])
        if of:
            yield sum_over_ranks(step.plan, step.prepared, lane.ranks, of)
    for name, grad in there:
        factor = answers.scaled.get(storage_place(grad), 1.0)
        if factor != 1.0:
            yield GradientSum((), frozenset([name]), divisor=1 / factor)


def sum_over_ranks(
    plan: Plan, prepared: Prepared, ranks: tuple[int, ...], names: frozenset[str]
) -> GradientSum:
    """Describe a sum over ranks as one over axes (or runs of neighbours) and stages."""
    mesh, axis = plan.mesh, prepared.staged.axis
    stages = mesh.fold(axis) if axis is not None else ()
    at = [mesh.coordinates(one) for one in ranks]
    along = {name: sorted({place[name] for place in at}) for name in mesh.sizes}
    axes = tuple(
        name if len(some) == mesh.size(name) or name in stages else run_axis(name, len(some))
        for name, some in along.items()
        if len(some) > 1
    )
    if axis is None:
        return GradientSum(axes, names)
    return GradientSum(axes, names, frozenset(mesh.index(one, axis) for one in ranks))


def planned_sums(plan: Plan, prepared: Prepared) -> dict[int, list[GradientSum]]:
    """Return the planned sums: buckets after the last backward, and those of sliced units."""
    mesh, staged = plan.mesh, prepared.staged
    count = mesh.size(staged.axis) if staged.axis is not None else 1
    book: dict[int, list[GradientSum]] = {place: [] for place in range(count)}
    for one in reductions(plan, prepared.traced, prepared.holdings):
        for place in one.stages if one.stages is not None else book:
            at = frozenset([place]) if one.stages is None else one.stages
            book[place].append(GradientSum(mesh.fold(one.axes), frozenset(one.names), at))
    row, _ = state_slicing(plan)
    for place in book if row is not None else ():
        for stage in staged.stages_at(place):
            units = sliced_names_by_unit(plan, staged, prepared.holdings, stage)
            for names in units.values():
                axes = slicing_axes_of(prepared.holdings, names)
                book[place].append(GradientSum(axes, frozenset(names), frozenset([place])))
    return book


def executed_sums(
    plan: Plan,
    prepared: Prepared,
    played: Sequence[RankStep],
    slices: Mapping[int, Sequence[GradientSum]],
) -> dict[int, list[GradientSum]]:
    """Return the sums that simulated ranks did; the planned ones for other stages.

    Ranks with sliced state are simulated with full copies, so their sums in `slices` replace
    those.
    """
    plans = planned_sums(plan, prepared)
    book = dict(plans)
    sliced = frozenset(n for n, holding in prepared.holdings.items() if holding.sliced)
    data = set(plan.data_axes)
    for role in sorted(played, key=lambda role: -role.rank):
        seen = []
        for one in role.sums:
            left = one.names - sliced if data & set(one.axes) else one.names
            if left:
                seen.append(GradientSum(one.axes, left, one.places, one.divisor))
        rest = slices.get(role.place)
        if rest is None:
            rest = [one for one in plans[role.place] if one.names <= sliced]
        book[role.place] = [*seen, *rest]
    return book


def sliced_sums(step: SimulatedStep, rank: int) -> tuple[GradientSum, ...]:
    """Return the sums of sliced gradients on a rank, with divisors; the rank is built, not run.

    They are fully_shard's sums, unit by unit, and sums over full copies of slices.
    """
    from schedlang.runtime.grad_reduction.zero import reduction_factors

    row, _ = state_slicing(step.plan)
    if row is None:
        return ()
    plan, prepared = _without_kernels(step.plan), step.prepared
    cut = {name for name, holding in prepared.holdings.items() if holding.sliced}
    found = []
    with build_one_rank(replace(step, plan=plan), rank) as (program, _):
        for one in program.assembly.sliced.values():
            for names, divisor in reduction_factors(one, program.assembly.parameters):
                axes = slicing_axes_of(prepared.holdings, tuple(names))
                made = sum_over_ranks(plan, prepared, plan.mesh.group(rank, axes), names)
                found.append(replace(made, divisor=divisor))
        for copies in program.assembly.reductions:
            names = frozenset(copies.names) & cut
            if copies.kind == "replicas" and names:
                found.append(sum_over_ranks(plan, prepared, copies.group.ranks, names))
    return tuple(found)


Logs = Mapping[int, Sequence["LoggedOperation"]]


def check_matching(plan: Plan, prepared: Prepared, played: Sequence[RankStep]) -> Claim:
    """Compare the logs of simulated ranks (S714), and pair the messages of all microbatches."""
    logs = {role.rank: role.log for role in played}
    problems = [
        ("all ranks", d) for d in (*_check_groups(plan, logs), *_check_collectives(plan, logs))
    ]
    problems += [
        ("messages", d)
        for d in (
            *_check_messages(plan, logs),
            *_check_message_names(plan, played),
            *_check_timeline(plan, prepared),
        )
    ]
    sent = [one for log in logs.values() for one in log if one.lane is not None]
    groups = {one.lane for one in sent if one.ends is None}
    channels = {(one.lane, one.ends) for one in sent if one.ends is not None}
    ranks = f"{len(logs)} of {plan.mesh.world}" if len(logs) < plan.mesh.world else f"{len(logs)}"
    said = (
        f"{ranks} ranks simulated, {sum(one.ends is None for one in sent)} collectives in"
        f" {len(groups)} groups, {sum(one.ends is not None for one in sent)} messages in"
        f" {len(channels)} channels"
    )
    return Claim("matching", said, join_problems(problems), unseen=_unseen(plan, prepared, logs))


def _unseen(plan: Plan, prepared: Prepared, logs: Logs) -> tuple[str, ...]:
    found = []
    if any(holding.sliced for holding in prepared.holdings.values()):
        found.append(
            "what torch's fully_shard sends for shards: simulated with full copies instead"
        )
    if len(logs) < plan.mesh.world:
        found.append("ranks that were not simulated: assumed to do the same as those that were")
    if prepared.staged.axis is not None:
        found.append("the headers of first messages, which hold sizes")
    return tuple(found)


def _check_groups(plan: Plan, logs: Logs) -> Iterator[Diagnostic]:
    """Yield a problem unless all ranks make the same groups in the same order, members or not."""
    made = {rank: [one for one in log if one.lane is None] for rank, log in logs.items()}
    first, *others = made
    for rank in others:
        for count, (one, other) in enumerate(zip(made[first], made[rank])):
            if one != other:
                said = f"as group {count + 1} ranks {first} and {rank} make different ones"
                notes = (f"{list(one.shape)} and {list(other.shape)}",)
                yield Diagnostic("S714", said, notes=notes)
                return
        if len(made[first]) != len(made[rank]):
            said = f"ranks {first} and {rank} make {len(made[first])} and {len(made[rank])} groups"
            yield Diagnostic("S714", said)
            return


def _check_collectives(plan: Plan, logs: Logs) -> Iterator[Diagnostic]:
    """Run collectives against each other until all are done, two differ, or all ranks wait."""
    left = {
        rank: [one for one in reversed(log) if one.lane is not None and one.ends is None]
        for rank, log in logs.items()
    }
    ready = list(left)[::-1]
    while ready:
        rank = ready.pop()
        while left[rank]:
            mine = left[rank][-1]
            assert mine.lane is not None
            members = [r for r in mine.lane.ranks if r in left]
            heads = {r: left[r][-1] if left[r] else None for r in members}
            if any(head is None or head.lane != mine.lane for head in heads.values()):
                break
            other = next((r for r, head in heads.items() if head != mine), None)
            if other is not None:
                yield _describe_difference(plan, mine.lane, rank, mine, other, heads[other])
                return
            for member in members:
                left[member].pop()
            ready += members
    stuck = {rank: rest[-1] for rank, rest in left.items() if rest}
    if stuck:
        yield _describe_deadlock(plan, stuck, left)


def _row_of_group(plan: Plan, lane: Lane, one: LoggedOperation) -> Action | None:
    """Return the row that introduces the axis of a group."""
    at = [plan.mesh.coordinates(rank) for rank in lane.ranks]
    axes = [name for name in plan.mesh.sizes if len({place[name] for place in at}) > 1]
    return axis_row(plan, one.fqn, axes[0]) if len(axes) == 1 else None


def _describe_difference(
    plan: Plan,
    lane: Lane,
    rank: int,
    mine: LoggedOperation,
    other: int,
    theirs: LoggedOperation | None,
) -> Diagnostic:
    said = f"ranks {rank} and {other} do not agree on a collective of {lane}"
    at = f" at `{mine.fqn}`" if mine.fqn else ""
    notes = (f"rank {rank} sends {mine}{at}", f"rank {other} sends {theirs}")
    return Diagnostic("S714", said, row_label(_row_of_group(plan, lane, mine)), notes=notes)


def _describe_deadlock(
    plan: Plan, stuck: Mapping[int, LoggedOperation], left: Mapping[int, list[LoggedOperation]]
) -> Diagnostic:
    """Describe ranks that wait forever, for each other or for a rank that is done."""
    rank, mine = next(iter(stuck.items()))
    assert mine.lane is not None
    other = next(
        r for r in mine.lane.ranks if r in left and (r not in stuck or stuck[r].lane != mine.lane)
    )
    theirs = f"waits in {stuck[other]} of {stuck[other].lane}" if other in stuck else "is done"
    notes = (f"rank {rank} waits in {mine} of {mine.lane}", f"rank {other} {theirs}")
    said = f"ranks {rank} and {other} wait for each other, or for ever"
    return Diagnostic("S714", said, row_label(_row_of_group(plan, mine.lane, mine)), notes=notes)


def _check_messages(plan: Plan, logs: Logs) -> Iterator[Diagnostic]:
    """Check that sent and expected messages agree, in order, on every simulated channel."""
    channels: dict[tuple[Lane, tuple[int, int]], dict[str, list[LoggedOperation]]] = {}
    for log in logs.values():
        for one in log:
            if one.lane is not None and one.ends is not None and set(one.ends) <= logs.keys():
                both = channels.setdefault((one.lane, one.ends), {"send": [], "recv": []})
                both[one.op].append(one)
    label = row_label(last_row_changing(plan, Facet.STAGE))
    for (_, (source, target)), both in channels.items():
        sent, got = both["send"], both["recv"]
        for count, (one, other) in enumerate(zip(sent, got)):
            if (one.shape, one.dtype) != (other.shape, other.dtype):
                said = f"message {count + 1} from rank {source} is not what rank {target} expects"
                yield Diagnostic("S714", said, label, notes=(f"{one}, {other}",))
                return
        if len(sent) != len(got):
            counts = f"{len(sent)} messages to rank {target}, which expects {len(got)}"
            said = f"rank {source} sends {counts}"
            yield Diagnostic("S714", said, label)
            return


def _check_message_names(plan: Plan, played: Sequence[RankStep]) -> Iterator[Diagnostic]:
    """Check that each message has the value and microbatch that the receiver expects (S714)."""
    ranks = {role.rank for role in played}
    channels: dict[tuple[int, int], dict[bool, list[SimulatedMessage]]] = {}
    for role in played:
        for one in role.messages:
            if set(one.ranks) <= ranks:
                channels.setdefault(one.ranks, {True: [], False: []})[one.sends].append(one)
    for (source, target), both in channels.items():
        for sent, due in zip_longest(both[True], both[False]):
            if sent is None or due is None or (sent.key, sent.tensors) != (due.key, due.tensors):
                said = f"rank {target} takes a message of rank {source} for another one"
                notes = (
                    f"{_describe_message(sent)} is sent, {_describe_message(due)} is expected",
                )
                yield Diagnostic(
                    "S714", said, row_label(last_row_changing(plan, Facet.STAGE)), notes=notes
                )
                return


def _describe_message(letter: SimulatedMessage | None) -> str:
    if letter is None:
        return "nothing"
    name = letter.key
    what = "the gradient" if name.back else "the output"
    return f"{what} of microbatch {name.microbatch} from stage {name.source} to stage {name.target}"


def _check_timeline(plan: Plan, prepared: Prepared) -> Iterator[Diagnostic]:
    """Check that the timeline ends for all microbatches, and that its transfers are paired."""
    from schedlang.pipeline.timeline.proof import check_queues, check_timeline, with_transfers
    from schedlang.pipeline.timeline.table import TimelineError

    staged = prepared.staged
    if staged.axis is None:
        return
    try:
        order = with_transfers(staged.timeline.with_edges(staged.cut.edges), plan.receive_ahead)
        check_timeline(order)
        check_queues(order)  # with NCCL's rules; an order that ends with NCCL also ends with gloo
    except TimelineError as error:
        yield Diagnostic("S714", str(error), row_label(last_row_changing(plan, Facet.ORDER)))
