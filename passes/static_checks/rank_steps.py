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

    log       what it sends, in order
    sums      its sums of gradients
    messages  its messages: microbatch, source stage, target stage
    weights   the weights of its microbatches in the step's loss
    trained   the parameters that its optimizer received
    held      the parameters that it holds
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
    stage_ranks = mesh.group(0, axis) if axis is not None else (0,)
    kinds = representative_places(plan, prepared)
    pairs = {}
    for position in reversed(range(len(stage_ranks) - 1)):
        pairs[kinds[position], kinds[position + 1]] = (position, position + 1)
    ranks = {stage_ranks[position] for pair in pairs.values() for position in pair}
    for position in set(kinds.values()):
        ranks.add(stage_ranks[position])
        for name, size in mesh.axes:
            if size > 1 and (axis is None or name not in mesh.fold(axis)):
                coordinates = mesh.coordinates(stage_ranks[position])
                ranks.add(mesh.rank(zero | coordinates | {name: size - 1}))
    return tuple(sorted(ranks))


def shorten_step(step: SimulatedStep) -> SimulatedStep:
    """Return the step to simulate: no kernels, no sliced state, the fewest possible microbatches.

    All microbatches send the same; the check of the timeline covers their order.
    """
    plan = step.plan
    plain_plan = _without_kernels(plan)
    unsliced = tuple(replace(replicas, stage=0) for replicas in plan.replicas)
    order, staged = with_few_microbatches(plan, without_eviction(plan, step.prepared.staged), 2)
    short_plan = replace(plain_plan, replicas=unsliced, order=order)
    holdings = holdings_of(short_plan, staged)
    prepared = replace(step.prepared, staged=staged, holdings=holdings, gather_routes={})
    return replace(step, plan=short_plan, prepared=prepared)


def _without_kernels(plan: Plan) -> Plan:
    """Return the plan with original modules, and saved tensors where they are by default."""
    removed = plan.rows_changing(Facet.STRUCTURE, Facet.RESIDENCE)
    kept_actions = tuple(action for action in plan.actions if action not in removed)
    stores = tuple(store for store in plan.stores if store.what != "activations")
    return replace(plan, actions=kept_actions, activation_codings=(), stores=stores)


def simulate_ranks(step: SimulatedStep) -> list[RankStep]:
    """Simulate a step on every rank that differs from others."""
    shorter = shorten_step(step)
    return [
        _simulate_rank(shorter, rank) for rank in ranks_to_simulate(shorter.plan, shorter.prepared)
    ]


def _simulate_rank(step: SimulatedStep, rank: int) -> RankStep:
    from schedlang.runtime.dry_run import dry_run

    trained: list[str] = []

    def optimizer(named_parameters: Any) -> Any:
        import torch

        pairs = list(named_parameters)
        trained.clear()  # `build` first tries it on other parameters
        trained.extend(name for name, _ in pairs)
        return torch.optim.SGD([p for _, p in pairs], lr=0.0)

    plan, staged = step.plan, step.prepared.staged
    with build_one_rank(step, rank, optimizer) as (program, tap):
        simulated = dry_run(program, staged.cut, step.batch, dealings=step.splits)
    if program.optimizer is None:
        trained.clear()  # nothing is trained here; only `build` tried it
    return RankStep(
        rank,
        plan.mesh.index(rank, staged.axis) if staged.axis is not None else 0,
        tuple(tap.log),
        tuple(simulated.messages),
        tuple(_observed_sums(step, program, simulated.invented, tap)),
        tuple(simulated.weights),
        tuple(trained),
        frozenset(program.assembly.parameters),
    )


def _observed_sums(step: SimulatedStep, program: Any, answers: Any, tap: OperationLog) -> Any:
    """Yield the sums of gradients: all-reduces of their storage, or of buffers that contain them.

    A gradient that is multiplied outside of a sum is yielded as a sum over no axis, with a divisor.
    """
    from schedlang.runtime.dry_run import storage_place
    from schedlang.runtime.tracing.meta_runs import storage

    gradients = [(n, p.grad) for n, p in program.assembly.parameters.items() if p.grad is not None]
    names = {storage_place(grad): name for name, grad in gradients}
    stale = step.prepared.staged.timeline.stale
    for lane, tensor in tap.summed:
        _, places_added = answers.together.get(id(tensor), (None, {}))
        # gradients that share a buffer from the start are summed in place
        inside = [name for (key, _), name in names.items() if key == storage(tensor)]
        # with several updates in a step, each with its sums, count those of the last update
        last = [n for n, place in places_added.items() if not stale or names.get(place) == n]
        summed_names = frozenset([*last, *inside])
        if summed_names:
            yield sum_over_ranks(step.plan, step.prepared, lane.ranks, summed_names)
    for name, grad in gradients:
        factor = answers.scaled.get(storage_place(grad), 1.0)
        if factor != 1.0:
            yield GradientSum((), frozenset([name]), divisor=1 / factor)


def sum_over_ranks(
    plan: Plan, prepared: Prepared, ranks: tuple[int, ...], names: frozenset[str]
) -> GradientSum:
    """Describe a sum over ranks as one over axes (or runs of neighbours) and stages."""
    mesh, axis = plan.mesh, prepared.staged.axis
    stages = mesh.fold(axis) if axis is not None else ()
    points = [mesh.coordinates(rank) for rank in ranks]
    values_of = {name: sorted({point[name] for point in points}) for name in mesh.sizes}
    axes = tuple(
        name if len(values) == mesh.size(name) or name in stages else run_axis(name, len(values))
        for name, values in values_of.items()
        if len(values) > 1
    )
    if axis is None:
        return GradientSum(axes, names)
    return GradientSum(axes, names, frozenset(mesh.index(rank, axis) for rank in ranks))


def planned_sums(plan: Plan, prepared: Prepared) -> dict[int, list[GradientSum]]:
    """Return the planned sums: buckets after the last backward, and those of sliced units."""
    mesh, staged = plan.mesh, prepared.staged
    count = mesh.size(staged.axis) if staged.axis is not None else 1
    sums_at: dict[int, list[GradientSum]] = {position: [] for position in range(count)}
    for reduction in reductions(plan, prepared.traced, prepared.holdings):
        for position in reduction.stages if reduction.stages is not None else sums_at:
            positions = frozenset([position]) if reduction.stages is None else reduction.stages
            sums_at[position].append(
                GradientSum(mesh.fold(reduction.axes), frozenset(reduction.names), positions)
            )
    row, _ = state_slicing(plan)
    for position in sums_at if row is not None else ():
        for stage in staged.stages_at(position):
            units = sliced_names_by_unit(plan, staged, prepared.holdings, stage)
            for names in units.values():
                axes = slicing_axes_of(prepared.holdings, names)
                sums_at[position].append(GradientSum(axes, frozenset(names), frozenset([position])))
    return sums_at


def executed_sums(
    plan: Plan,
    prepared: Prepared,
    rank_steps: Sequence[RankStep],
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
    for role in sorted(rank_steps, key=lambda role: -role.rank):
        executed = []
        for grad_sum in role.sums:
            names = grad_sum.names - sliced if data & set(grad_sum.axes) else grad_sum.names
            if names:
                executed.append(
                    GradientSum(grad_sum.axes, names, grad_sum.places, grad_sum.divisor)
                )
        sliced_part = slices.get(role.place)
        if sliced_part is None:
            sliced_part = [grad_sum for grad_sum in plans[role.place] if grad_sum.names <= sliced]
        book[role.place] = [*executed, *sliced_part]
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
    sliced_names = {name for name, holding in prepared.holdings.items() if holding.sliced}
    sums = []
    with build_one_rank(replace(step, plan=plan), rank) as (program, _):
        for sharded_stage in program.assembly.sliced.values():
            for names, divisor in reduction_factors(sharded_stage, program.assembly.parameters):
                axes = slicing_axes_of(prepared.holdings, tuple(names))
                gradient_sum = sum_over_ranks(plan, prepared, plan.mesh.group(rank, axes), names)
                sums.append(replace(gradient_sum, divisor=divisor))
        for copies in program.assembly.reductions:
            names = frozenset(copies.names) & sliced_names
            if copies.kind == "replicas" and names:
                sums.append(sum_over_ranks(plan, prepared, copies.group.ranks, names))
    return tuple(sums)


Logs = Mapping[int, Sequence["LoggedOperation"]]


def check_matching(plan: Plan, prepared: Prepared, rank_steps: Sequence[RankStep]) -> Claim:
    """Compare the logs of simulated ranks (S714), and pair the messages of all microbatches."""
    logs = {role.rank: role.log for role in rank_steps}
    problems = [("all ranks", d) for d in (*_check_groups(logs), *_check_collectives(plan, logs))]
    problems += [
        ("messages", d)
        for d in (
            *_check_messages(plan, logs),
            *_check_message_names(plan, rank_steps),
            *_check_timeline(plan, prepared),
        )
    ]
    sent = [op for log in logs.values() for op in log if op.lane is not None]
    groups = {op.lane for op in sent if op.ends is None}
    channels = {(op.lane, op.ends) for op in sent if op.ends is not None}
    ranks = f"{len(logs)} of {plan.mesh.world}" if len(logs) < plan.mesh.world else f"{len(logs)}"
    summary = (
        f"{ranks} ranks simulated, {sum(op.ends is None for op in sent)} collectives in"
        f" {len(groups)} groups, {sum(op.ends is not None for op in sent)} messages in"
        f" {len(channels)} channels"
    )
    return Claim("matching", summary, join_problems(problems), unseen=_unseen(plan, prepared, logs))


def _unseen(plan: Plan, prepared: Prepared, logs: Logs) -> tuple[str, ...]:
    gaps = []
    if any(holding.sliced for holding in prepared.holdings.values()):
        gaps.append("what torch's fully_shard sends for shards: simulated with full copies instead")
    if len(logs) < plan.mesh.world:
        gaps.append("ranks that were not simulated: assumed to do the same as those that were")
    if prepared.staged.axis is not None:
        gaps.append("the headers of first messages, which hold sizes")
    return tuple(gaps)


def _check_groups(logs: Logs) -> Iterator[Diagnostic]:
    """Yield a problem unless all ranks make the same groups in the same order, members or not."""
    groups = {rank: [group for group in log if group.lane is None] for rank, log in logs.items()}
    first, *other_ranks = groups
    for rank in other_ranks:
        for count, (group, other_group) in enumerate(zip(groups[first], groups[rank])):
            if group != other_group:
                message = f"as group {count + 1} ranks {first} and {rank} make different ones"
                notes = (f"{list(group.shape)} and {list(other_group.shape)}",)
                yield Diagnostic("S714", message, notes=notes)
                return
        if len(groups[first]) != len(groups[rank]):
            message = (
                f"ranks {first} and {rank} make {len(groups[first])} and {len(groups[rank])} groups"
            )
            yield Diagnostic("S714", message)
            return


def _check_collectives(plan: Plan, logs: Logs) -> Iterator[Diagnostic]:
    """Run collectives against each other until all are done, two differ, or all ranks wait."""
    remaining = {
        rank: [op for op in reversed(log) if op.lane is not None and op.ends is None]
        for rank, log in logs.items()
    }
    ready = list(remaining)[::-1]
    while ready:
        rank = ready.pop()
        while remaining[rank]:
            operation = remaining[rank][-1]
            assert operation.lane is not None
            members = [r for r in operation.lane.ranks if r in remaining]
            heads = {r: remaining[r][-1] if remaining[r] else None for r in members}
            if any(head is None or head.lane != operation.lane for head in heads.values()):
                break
            differing = next((r for r, head in heads.items() if head != operation), None)
            if differing is not None:
                yield _describe_difference(
                    plan, operation.lane, rank, operation, differing, heads[differing]
                )
                return
            for member in members:
                remaining[member].pop()
            ready += members
    stuck = {rank: operations[-1] for rank, operations in remaining.items() if operations}
    if stuck:
        yield _describe_deadlock(plan, stuck, remaining)


def _row_of_group(plan: Plan, lane: Lane, operation: LoggedOperation) -> Action | None:
    """Return the row that introduces the axis of a group."""
    points = [plan.mesh.coordinates(rank) for rank in lane.ranks]
    axes = [name for name in plan.mesh.sizes if len({point[name] for point in points}) > 1]
    return axis_row(plan, operation.fqn, axes[0]) if len(axes) == 1 else None


def _describe_difference(
    plan: Plan,
    lane: Lane,
    rank: int,
    own_op: LoggedOperation,
    peer: int,
    peer_op: LoggedOperation | None,
) -> Diagnostic:
    message = f"ranks {rank} and {peer} do not agree on a collective of {lane}"
    where_text = f" at `{own_op.fqn}`" if own_op.fqn else ""
    notes = (f"rank {rank} sends {own_op}{where_text}", f"rank {peer} sends {peer_op}")
    return Diagnostic("S714", message, row_label(_row_of_group(plan, lane, own_op)), notes=notes)


def _describe_deadlock(
    plan: Plan, stuck: Mapping[int, LoggedOperation], remaining: Mapping[int, list[LoggedOperation]]
) -> Diagnostic:
    """Describe ranks that wait forever, for each other or for a rank that is done."""
    rank, own_op = next(iter(stuck.items()))
    assert own_op.lane is not None
    peer = next(
        r
        for r in own_op.lane.ranks
        if r in remaining and (r not in stuck or stuck[r].lane != own_op.lane)
    )
    peer_text = f"waits in {stuck[peer]} of {stuck[peer].lane}" if peer in stuck else "is done"
    notes = (f"rank {rank} waits in {own_op} of {own_op.lane}", f"rank {peer} {peer_text}")
    message = f"ranks {rank} and {peer} wait for each other, or for ever"
    return Diagnostic(
        "S714", message, row_label(_row_of_group(plan, own_op.lane, own_op)), notes=notes
    )


def _check_messages(plan: Plan, logs: Logs) -> Iterator[Diagnostic]:
    """Check that sent and expected messages agree, in order, on every simulated channel."""
    channels: dict[tuple[Lane, tuple[int, int]], dict[str, list[LoggedOperation]]] = {}
    for log in logs.values():
        for op in log:
            if op.lane is not None and op.ends is not None and set(op.ends) <= logs.keys():
                pair = channels.setdefault((op.lane, op.ends), {"send": [], "recv": []})
                pair[op.op].append(op)
    label = row_label(last_row_changing(plan, Facet.STAGE))
    for (_, (source, target)), pair in channels.items():
        sent, received = pair["send"], pair["recv"]
        for count, (op, received_op) in enumerate(zip(sent, received)):
            if (op.shape, op.dtype) != (received_op.shape, received_op.dtype):
                message = (
                    f"message {count + 1} from rank {source} is not what rank {target} expects"
                )
                yield Diagnostic("S714", message, label, notes=(f"{op}, {received_op}",))
                return
        if len(sent) != len(received):
            counts = f"{len(sent)} messages to rank {target}, which expects {len(received)}"
            message = f"rank {source} sends {counts}"
            yield Diagnostic("S714", message, label)
            return


def _check_message_names(plan: Plan, rank_steps: Sequence[RankStep]) -> Iterator[Diagnostic]:
    """Check that each message has the value and microbatch that the receiver expects (S714)."""
    ranks = {role.rank for role in rank_steps}
    channels: dict[tuple[int, int], dict[bool, list[SimulatedMessage]]] = {}
    for role in rank_steps:
        for message in role.messages:
            if set(message.ranks) <= ranks:
                channels.setdefault(message.ranks, {True: [], False: []})[message.sends].append(
                    message
                )
    for (source, target), pair in channels.items():
        for sent, expected in zip_longest(pair[True], pair[False]):
            if (
                sent is None
                or expected is None
                or (sent.key, sent.tensors) != (expected.key, expected.tensors)
            ):
                text = f"rank {target} takes a message of rank {source} for another one"
                notes = (
                    f"{_describe_message(sent)} is sent, {_describe_message(expected)} is expected",
                )
                yield Diagnostic(
                    "S714", text, row_label(last_row_changing(plan, Facet.STAGE)), notes=notes
                )
                return


def _describe_message(letter: SimulatedMessage | None) -> str:
    if letter is None:
        return "nothing"
    name = letter.key
    content = "the gradient" if name.back else "the output"
    return (
        f"{content} of microbatch {name.microbatch} from stage {name.source} to stage {name.target}"
    )


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
