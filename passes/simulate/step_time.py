"""Time of a step, in three ways: from given or measured times, on a cluster, or by FLOPs alone.

`plan --cost` and `expect` use the first, `tune` the second (a simulated step on a cluster),
`simulate` the third.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NoReturn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.memory import STATE
from schedlang.ir.plan import Plan
from schedlang.pipeline.cost import DEFAULT_COST, Cost

if TYPE_CHECKING:
    from schedlang.ir.memory import RankMemory
    from schedlang.passes.analyze.prepare import Prepared
    from schedlang.passes.partition.staging import Staged
    from schedlang.passes.simulate.machine import Cluster
    from schedlang.passes.simulate.memory import RankClass
    from schedlang.passes.simulate.simulated_ranks import SimulatedRank, SimulatedRanks
    from schedlang.pipeline.timeline.table import Op, Timeline
    from schedlang.runtime.storage.footprint import SegmentWork, TrafficMessage

# -- times that are given or measured --------------------------------------------------------------


MEASURE_HELP = "measure again: `schedlang run FILE --timeline t.html --json > measured.json`"
TAIL_OPERATIONS = ("reduce", "step")  # operations that run once, after the last backward


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of one step, and words for how they were obtained."""

    seconds: float
    how: tuple[str, ...] = ()


@dataclass(frozen=True)
class Measurement:
    """Times of a pipeline that a run measured, in seconds.

    means                of each kind of operation at each stage
    rest                 of a step outside of its pipeline: gradient reductions, the update
    mesh, micro, slices  of the measured run
    """

    means: Mapping[tuple[str, int], float]
    transfer: float
    rest: float
    mesh: Mapping[str, int]
    micro: int
    slices: int


def simulate_step(plan: Plan, costs: Cost | Measurement) -> StepSeconds:
    """Simulate a step of the plan by the timeline of its order; sequentially without a pipeline.

    A `Cost` counts milliseconds, with equal stages.  Raises Refusal S608 for sizes that the order
    does not have, S914 where the plan runs operations that were not measured.
    """
    from schedlang.passes.partition.staging import timeline_of

    line = timeline_of(plan).compute()
    return _by_cost(line, costs) if isinstance(costs, Cost) else _by_measure(plan, line, costs)


def _by_cost(line: Timeline, cost: Cost) -> StepSeconds:
    from schedlang.pipeline.timeline.simulation import simulate_timeline
    from schedlang.pipeline.timeline.table import Kind

    tail = [name for name in TAIL_OPERATIONS if not (line.kind == Kind[name.upper()]).any()]
    once = sum(float(getattr(cost, name)) for name in tail)
    makespan = float(simulate_timeline(line, cost).makespan)
    costs = ", ".join(f"{name}={float(getattr(cost, name.lower())):.4g}" for name in "FIW")
    others = ", ".join(
        f"{name}={float(getattr(cost, name)):.4g}" for name in ("comm", *TAIL_OPERATIONS)
    )
    text = (
        f"simulated with {costs}, {others} ms: {makespan:.4g} ms of microbatches,"
        f" {once:.4g} ms after"
    )
    return StepSeconds((makespan + once) / 1e3, (text,))


def _by_measure(plan: Plan, line: Timeline, measured: Measurement) -> StepSeconds:
    import numpy as np

    from schedlang.pipeline.timeline.simulation import simulate_timeline
    from schedlang.pipeline.timeline.table import Kind

    plan_key = (dict(plan.mesh.sizes), line.microbatches, line.slices)
    if plan_key != (dict(measured.mesh), measured.micro, measured.slices):
        _unfit(_ran(*plan_key), _ran(measured.mesh, measured.micro, measured.slices))
    pairs = [(Kind(k).name, s) for k, s in zip(line.kind.tolist(), line.stage.tolist())]
    known_times = {pair: _mean(measured.means, *pair) for pair in set(pairs)}
    if missing := sorted(
        f"{kind} of stage {s}" for (kind, s), t in known_times.items() if t is None
    ):
        _unfit(f"it runs {', '.join(missing[:3])}", "without a measured time")
    costs = np.array([known_times[pair] for pair in pairs], dtype=np.float64)
    makespan = float(simulate_timeline(line, costs, measured.transfer).makespan)
    text = f"simulated with measured times: {makespan * 1e3:.4g} ms of the pipeline"
    return StepSeconds(
        makespan + measured.rest, (f"{text}, {measured.rest * 1e3:.4g} ms beside it",)
    )


def _mean(means: Mapping[tuple[str, int], float], kind: str, stage: int) -> float | None:
    """Return the time of an operation; a backward without a time is the sum of its two halves."""
    if kind == "B" and ("B", stage) not in means:
        halves = [means.get((half, stage)) for half in "IW"]
        return None if None in halves else sum(filter(None, halves))
    return means.get((kind, stage))


def _ran(mesh: Mapping[str, int], micro: int, slices: int) -> str:
    axes = ", ".join(f"{name}={size}" for name, size in mesh.items()) or "one rank"
    return f"mesh {axes}, {micro} microbatches" + (f", {slices} slices" if slices > 1 else "")


def _unfit(plan: str, measured: str) -> NoReturn:
    title = "the measured times are not those of this plan"
    notes = (f"the plan: {plan}", f"measured: {measured}")
    raise Refusal.of("S914", title, notes=notes, helps=(MEASURE_HELP,))


def read_measurement(record: Any) -> Measurement:
    """Read the output of `run --timeline --json`; raises KeyError, TypeError, ValueError or
    IndexError for anything else."""
    run = record["pipeline"]
    means = {(str(m["kind"]), int(m["stage"])): float(m["seconds"]) for m in run["means"]}
    rest = float(record["step_seconds"]) - float(run["measured"]["makespan"])
    mesh = {str(name): int(size) for name, size in record["mesh"].items()}
    return Measurement(
        means, float(run["transfer"]), max(0.0, rest), mesh, int(run["micro"]), int(run["slices"])
    )


# -- times on a cluster ----------------------------------------------------------------------------


DATA_PARALLEL_OPS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
)  # collectives of data parallelism


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, and how its busiest rank spends them.

    computing  of that rank
    sending    waiting for collectives, and for copies to and from its host; without transfers
               between stages
    """

    seconds: float
    computing: float
    sending: float

    @property
    def idle(self) -> float:
        """Seconds in which that rank waits for other stages."""
        return max(0.0, self.seconds - self.computing - self.sending)


@dataclass(frozen=True)
class _Took:
    """Seconds of an operation: computing, and waiting for communication; and of a reduction that it
    begins at its end (`tail`)."""

    computing: float
    sending: float
    tail: float = 0.0

    @property
    def seconds(self) -> float:
        return self.computing + self.sending

    def __add__(self, other: _Took) -> _Took:
        return _Took(self.computing + other.computing, self.sending + other.sending)


def time_step(
    plan: Plan, prepared: Prepared, simulated: SimulatedRanks, cluster: Cluster
) -> StepTime:
    """Time a step of a plan from the simulated steps of its ranks.

    Collectives between ranks that share their data block: the rank waits.  Gathers of parameters,
    gradient reductions over replicas, and ring sends overlap with computing; they count where they
    take longer, and with the share that the cluster does not hide.  In a pipeline, gathers at the
    beginning of a step and the last reduction of a backward run beside other operations: no other
    stage waits for them.  Operations after the last backward count in full.  Transfers between
    stages all take as long as the largest.  On unequal nodes each pipeline is timed on its own
    ranks with its own rows; the slowest pipeline sets the pace of all.
    """
    from schedlang.pipeline.timeline.simulation import simulate_timeline
    from schedlang.pipeline.timeline.table import Kind

    line = _line(plan, prepared.staged)
    computes = line.kind != Kind.UNSHARD
    places = [item.place or 0 for item in simulated.classes]
    by_pos = dict(zip(places, map(simulated.by_class.__getitem__, simulated.classes)))
    busy = [_NOTHING] * line.ranks
    ends, rests = [0.0] * line.ranks, [0.0] * line.ranks
    for worker in _pipelines(plan, prepared.staged, cluster):
        clocks = [
            _Clock(plan, prepared.staged, by_pos[pos].rank_class, *worker[pos]) for pos in worker
        ]
        by_op = [
            _times(item, pos, by_pos[pos], simulated.partner_bytes)
            for pos, item in enumerate(clocks)
        ]
        times = [by_op[rank].get(op, _NOTHING) for rank, op in _ops(line)]
        timeline, seconds = _with_tails(line, times)
        transfer = max((item.transfer(by_pos[pos]) for pos, item in enumerate(clocks)), default=0.0)
        timed = simulate_timeline(timeline, seconds, transfer)
        for pos, clock in enumerate(clocks):
            rest_time = clock.rest(by_pos[pos])
            own_times = [item for item, own in zip(times, computes & (line.rank == pos)) if own]
            busy[pos] = max(busy[pos], sum(own_times, rest_time), key=lambda item: item.seconds)
            ends[pos] = max(ends[pos], float(timed.end[timeline.rank == pos].max(initial=0.0)))
            rests[pos] = max(rests[pos], rest_time.seconds)
    busiest = max(busy, key=lambda item: item.seconds)
    return StepTime(max(map(sum, zip(ends, rests))), busiest.computing, busiest.sending)


RankPipeline = dict[int, "tuple[Cluster, int | None, float]"]  # place -> machine, first rank, rows


def _pipelines(plan: Plan, staged: Staged, cluster: Cluster) -> Iterator[RankPipeline]:
    """Yield the pipelines with rows of their own.

    For each place: the machine of the ranks that wait for each other there, the first of these
    ranks, and the pipeline's rows as a share of the largest pipeline's.  On equal ranks the
    pipeline with most rows stands for all.
    """
    from schedlang.passes.simulate.node_cluster import Nodes

    mesh, axis, share_weights = plan.mesh, staged.axis, plan.share_weights
    if not isinstance(cluster, Nodes):
        yield dict.fromkeys(range(mesh.size(axis) if axis is not None else 1), (cluster, None, 1.0))
        return
    ranks_by_part: dict[int, dict[int, list[int]]] = {}
    for rank in range(mesh.world):
        part = mesh.index(rank, plan.row_axes) if plan.row_axes else 0
        pos = mesh.coordinates(rank)[axis] if axis is not None else 0
        ranks_by_part.setdefault(part, {}).setdefault(pos, []).append(rank)
    for part, ranks in ranks_by_part.items():
        share = 1.0 if isinstance(share_weights, int) else share_weights[part] / max(share_weights)
        yield {
            pos: (cluster.for_ranks(members), members[0], share)
            for pos, members in sorted(ranks.items())
        }


def missing_memory(
    plan: Plan, staged: Staged, memories: Sequence[RankMemory], cluster: Cluster
) -> int:
    """Return the most bytes that a rank needs beyond its device's memory; below 0 where all fit."""
    lacking = []
    for worker in _pipelines(plan, staged, cluster):
        for memory in memories:
            machine, _, share = worker[memory.place or 0]
            count = len(STATE)
            sums = (sum(m.most[:count]) + share * sum(m.most[count:]) for m in memory.moments)
            lacking.append(int(max(sums)) - machine.memory)
    return max(lacking)


_NOTHING = _Took(0.0, 0.0)


def _line(plan: Plan, staged: Staged) -> Timeline:
    """Return the timeline that ranks run, with gathers where its rows include them."""
    from schedlang.passes.analyze.holdings import gathers_by_rows

    line, with_rows = staged.timeline.with_edges(staged.cut.edges), gathers_by_rows(plan, staged)
    return line if with_rows is None else with_rows(line)


def _with_tails(line: Timeline, times: Sequence[_Took]) -> tuple[Timeline, Any]:
    """Add a REDUCE after each operation with a tail; return the timeline, and seconds of its
    rows."""
    import numpy as np

    from schedlang.pipeline.timeline.table import Kind

    seconds, tails = (np.array([getattr(t, name) for t in times]) for name in ("seconds", "tail"))
    rows = np.flatnonzero(tails)
    copies = rows, 2 * rows + 1, {"kind": Kind.REDUCE, "peer": -1}
    timeline = line.with_copies(2 * np.arange(len(line)), copies)
    return timeline, np.insert(seconds, rows + 1, tails[rows])


def _ops(line: Timeline) -> Iterable[tuple[int, Op]]:
    """Yield every row with its rank."""
    for rank in range(line.ranks):
        for op in line.rows(rank):
            yield rank, op


def _times(
    clock: _Clock, position: int, simulated: SimulatedRank, parked: Mapping[int, int]
) -> Mapping[Op, _Took]:
    """Time each operation of a place."""
    from schedlang.passes.simulate.simulated_ranks import runs_in_order

    pos = position if clock.staged.axis is not None else None
    known_times: dict[int, _Took] = {}
    times = {}
    for op, run in runs_in_order(clock.plan, clock.staged, pos, simulated, parked):
        key = id(run)
        if key not in known_times:
            known_times[key] = clock.took(run.work)
        times[op] = known_times[key]
    return times


@dataclass(frozen=True)
class _Clock:
    """Times of ranks under one plan; a rank of class `of` was simulated for them.

    first  of these ranks, where ranks are not equal; `share` of the simulated rows
    """

    plan: Plan
    staged: Staged
    of: RankClass
    cluster: Cluster
    first: int | None = None
    share: float = 1.0

    def took(self, work: SegmentWork) -> _Took:
        """Time an operation: computing, and waiting for communication.

        Of a backward in a pipeline the largest reduction is its tail: that of the last unit, which
        begins when this backward has computed all (as in torch's fully_shard).
        """
        last = self._last_reduction(work) if self.staged.axis is not None else None
        tail = 0.0
        computing, waiting = self.cluster.computing_seconds(work, self.share), 0.0
        overlapped = self.cluster.copy_seconds(work.copied * self.share)
        can_hide = overlapped * self.cluster.overlap
        for message, count in work.messages.items():
            if self._between_stages(message) or message.op == "recv":
                continue
            overlaps = self._overlaps(message)
            mapped = self._here(
                message, self.share if message.op not in DATA_PARALLEL_OPS or not overlaps else 1
            )
            message_seconds = self.cluster.message_seconds(mapped)
            if message is last:
                tail, count = message_seconds, count - 1
            seconds = count * message_seconds
            if overlaps:
                overlapped += seconds
                can_hide += seconds * self.cluster.hidden_share(
                    mapped.op, mapped.bytes, mapped.ranks
                )
            else:
                waiting += seconds
        hidden = can_hide * min(1.0, computing / overlapped) if overlapped else 0.0
        return _Took(computing, waiting + overlapped - hidden, tail)

    def _last_reduction(self, work: SegmentWork) -> TrafficMessage | None:
        sums = [m for m in work.messages if m.op != "all_gather" and m.ends is None]
        return max(filter(self._overlaps, sums), key=lambda m: m.bytes, default=None)

    def _here(self, message: TrafficMessage, share: float = 1.0) -> TrafficMessage:
        """Translate a message of the simulated rank to the message of the first of these ranks."""
        if self.first is None:
            return message
        mesh = self.plan.mesh
        own_point, base_point = mesh.coordinates(self.first), mesh.coordinates(self.of.first)

        def moved(rank: int) -> int:
            point = mesh.coordinates(rank)
            return mesh.rank(
                {x: (point[x] + own_point[x] - base_point[x]) % mesh.sizes[x] for x in point}
            )

        ends = message.ends and (moved(message.ends[0]), moved(message.ends[1]))
        size = round(message.bytes * share)
        return replace(message, ranks=tuple(map(moved, message.ranks)), ends=ends, bytes=size)

    def rest(self, simulated: SimulatedRank) -> _Took:
        """Time the operations after the last backward.

        An optimizer updates many parameters in one kernel: starts of operators are left out.
        """
        total, no_start = _NOTHING, replace(self.cluster, start=0.0)
        for run in simulated.rest:
            sent = sum(
                count * self.cluster.message_seconds(self._here(message))
                for message, count in run.work.messages.items()
                if message.op != "recv"
            )
            total += _Took(no_start.computing_seconds(run.work), sent)
        return _Took(total.computing + self._hosted(), total.sending)

    def _hosted(self) -> float:
        """Seconds of an optimizer whose state is on the host.

        The host's processor reads and writes the state, gradients come, parameters come and go, all
        at the pace of the link, as in the planner's price.
        """
        from schedlang.passes.analyze.residence import tiers_of
        from schedlang.runtime.storage.tiers import CPU

        rank_class = self.of
        if not rank_class.cpu or not any(
            tier_set.as_tuple[2] == CPU for tier_set in tiers_of(self.plan).values()
        ):
            return 0.0
        share = rank_class.cpu / (rank_class.cpu + rank_class.optimizer)
        return self.cluster.copy_seconds(
            2 * rank_class.cpu + share * (2 * rank_class.gradients + 3 * rank_class.parameters)
        )

    def transfer(self, simulated: SimulatedRank) -> float:
        """Return the longest time that one operation sends to another stage."""
        works = [run.work for runs in simulated.ops.values() for run in runs]
        return max((self._transfer(work) for work in works), default=0.0)

    def _transfer(self, work: SegmentWork) -> float:
        return sum(
            count * self.cluster.message_seconds(self._here(message, self.share))
            for message, count in work.messages.items()
            if message.op != "recv" and self._between_stages(message)
        )

    def _between_stages(self, message: TrafficMessage) -> bool:
        axis = self.staged.axis
        if axis is None or message.ends is None:
            return False
        source, target = (self.plan.mesh.coordinates(rank)[axis] for rank in message.ends)
        return source != target

    def _overlaps(self, message: TrafficMessage) -> bool:
        """Return whether a message overlaps with computing: ring sends, gathers of parameters,
        gradient reductions."""
        if message.ends is not None:
            return True
        replicas = {axis for row in self.plan.replicas for axis in self.plan.mesh.fold(row.axes)}
        return message.op in DATA_PARALLEL_OPS and self._axes_of(message) <= replicas

    def _axes_of(self, message: TrafficMessage) -> set[str]:
        """Return the axes along which the ranks of a message differ."""
        first_point, *points = map(self.plan.mesh.coordinates, message.ranks)
        return {axis for point in points for axis in point if point[axis] != first_point[axis]}


# -- costs of stages from FLOPs and bytes alone ----------------------------------------------------


MS_PER_SECOND = 1000.0


@dataclass(frozen=True)
class RankRates:
    """Rates of a rank and a link: FLOPs and bytes a second.

    slowdowns  for each pipeline place: how much slower its ranks are; () where all are equally fast
    """

    speed: float
    bandwidth: float
    slowdowns: tuple[float, ...] = ()


def place_slowdowns(plan: Plan, cluster: Cluster | None) -> tuple[float, ...]:
    """Return how much slower the slowest rank of each place is than the fastest of all; () for
    equal ranks, or too few for the mesh."""
    from schedlang.passes.simulate.node_cluster import Nodes

    if not isinstance(cluster, Nodes) or not plan.cuts or cluster.ranks < plan.mesh.world:
        return ()
    speeds: dict[int, float] = {}
    for rank in range(plan.mesh.world):
        device, pos = cluster.device_of(rank), plan.mesh.coordinates(rank)[plan.cuts[0].axis]
        speeds[pos] = min(speeds.get(pos, math.inf), device.speed * device.product)
    return tuple(max(speeds.values()) / speeds[pos] for pos in sorted(speeds))


@dataclass(frozen=True)
class PipelineEstimate:
    """A plan's timeline and its costs, times in milliseconds; `notes` say how they were
    obtained."""

    timeline: Timeline
    cost: Cost
    notes: tuple[str, ...]


def estimate_pipeline(
    plan: Plan, batch: Mapping[str, Any] | None, loss: Callable[..., Any] | None, machine: RankRates
) -> PipelineEstimate:
    """Estimate the costs of a plan's pipeline, given the keyword arguments of one full step.

    Without a batch stages are unknown, and all cost one unit.  Raises Refusal where the plan cannot
    be split into stages for this batch.
    """
    from schedlang.passes.partition.staging import stages_of, timeline_of

    if batch is None:
        line = timeline_of(plan)
        note = "nothing: the model file has no batch to count with; every stage costs the same"
        return PipelineEstimate(line, DEFAULT_COST, (note,))
    from schedlang.passes.propagate.propagate import propagate
    from schedlang.runtime.batch import largest_part

    micro = plan.order.micro if plan.order is not None else 1
    sample = largest_part(batch, plan.share_weights, micro)
    staged = stages_of(plan, propagate(plan, sample, loss), sample, loss)
    cost, notes = _cost(staged, machine)
    return PipelineEstimate(staged.timeline.with_edges(staged.cut.edges), cost, notes)


def _cost(staged: Staged, machine: RankRates) -> tuple[Cost, tuple[str, ...]]:
    from schedlang.passes.simulate.traffic import tensor_bytes

    cut, ranks, leaves = staged.cut, staged.timeline.ranks, staged.cut.graph.leaves
    flops, saved = (
        [sum(of_unit[unit] for unit in cut.units(stage)) for stage in range(cut.stages)]
        for of_unit in (cut.graph.flops, cut.graph.saved_bytes)
    )
    slowdowns = machine.slowdowns or (1.0,) * ranks
    flops = [round(size * slowdowns[position]) for size, position in zip(flops, staged.ranks)]
    if not sum(flops):
        note = "nothing: no operation of this model has a known number of floating-point operations"
        return DEFAULT_COST, (note,)
    mean_flops = sum(flops) / ranks
    time = mean_flops / machine.speed * MS_PER_SECOND
    sent = {
        edge: sum(tensor_bytes(leaf.shape, leaf.dtype) for leaf in map(leaves.__getitem__, tokens))
        for edge, tokens in cut.routes.items()
    }
    longest = max(sent.values(), default=0)
    cost = Cost(
        f=time,
        i=time,
        w=time,
        comm=longest / machine.bandwidth * MS_PER_SECOND,
        shares=tuple(Fraction(n) for n in flops),
        held=tuple(Fraction(n) for n in saved) if sum(saved) else None,
        between={edge: size / machine.bandwidth * MS_PER_SECOND for edge, size in sent.items()},
    )
    return cost, (
        f"F from {_si(mean_flops)}FLOP of a microbatch on one rank's share, at "
        f"{_si(machine.speed)}FLOP/s (--tflops); I and W as F; times in ms",
        *_slow(machine),
        f"transfers from their bytes, at most {_si(longest)}B, at {_si(machine.bandwidth)}B/s "
        "(--bandwidth)",
        f"M_B is {_si(sum(saved) / ranks)}B: what the forwards keep, but for parameters",
    )


def _slow(machine: RankRates) -> tuple[str, ...]:
    slowest = max(machine.slowdowns, default=1.0)
    if slowest == 1:
        return ()
    places = ", ".join(str(pos) for pos, value in enumerate(machine.slowdowns) if value == slowest)
    return (f"ranks of place {places} are {slowest:.3g} times slower than the quickest",)


def _si(value: float) -> str:
    """Format a number with a prefix: `1.5 G`."""
    for prefix in ("", "k", "M", "G", "T"):
        if value < 1000:
            return f"{value:.3g} {prefix}"
        value /= 1000
    return f"{value:.3g} P"
