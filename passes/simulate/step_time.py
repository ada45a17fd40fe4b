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


def simulate_step(plan: Plan, given: Cost | Measurement) -> StepSeconds:
    """Simulate a step of the plan by the timeline of its order; sequentially without a pipeline.

    A `Cost` counts milliseconds, with equal stages.  Raises Refusal S608 for sizes that the order
    does not have, S914 where the plan runs operations that were not measured.
    """
    from schedlang.passes.partition.staging import timeline_of

    line = timeline_of(plan).compute()
    return _by_cost(line, given) if isinstance(given, Cost) else _by_measure(plan, line, given)


def _by_cost(line: Timeline, cost: Cost) -> StepSeconds:
    from schedlang.pipeline.timeline.simulation import simulate_timeline
    from schedlang.pipeline.timeline.table import Kind

    tail = [name for name in TAIL_OPERATIONS if not (line.kind == Kind[name.upper()]).any()]
    once = sum(float(getattr(cost, name)) for name in tail)
    span = float(simulate_timeline(line, cost).makespan)
    said = ", ".join(f"{name}={float(getattr(cost, name.lower())):.4g}" for name in "FIW")
    rest = ", ".join(
        f"{name}={float(getattr(cost, name)):.4g}" for name in ("comm", *TAIL_OPERATIONS)
    )
    how = f"simulated with {said}, {rest} ms: {span:.4g} ms of microbatches, {once:.4g} ms after"
    return StepSeconds((span + once) / 1e3, (how,))


def _by_measure(plan: Plan, line: Timeline, given: Measurement) -> StepSeconds:
    import numpy as np

    from schedlang.pipeline.timeline.simulation import simulate_timeline
    from schedlang.pipeline.timeline.table import Kind

    mine = (dict(plan.mesh.sizes), line.microbatches, line.slices)
    if mine != (dict(given.mesh), given.micro, given.slices):
        _unfit(_ran(*mine), _ran(given.mesh, given.micro, given.slices))
    pairs = [(Kind(k).name, s) for k, s in zip(line.kind.tolist(), line.stage.tolist())]
    known = {pair: _mean(given.means, *pair) for pair in set(pairs)}
    if missing := sorted(f"{kind} of stage {s}" for (kind, s), t in known.items() if t is None):
        _unfit(f"it runs {', '.join(missing[:3])}", "without a measured time")
    costs = np.array([known[pair] for pair in pairs], dtype=np.float64)
    span = float(simulate_timeline(line, costs, given.transfer).makespan)
    how = f"simulated with measured times: {span * 1e3:.4g} ms of the pipeline"
    return StepSeconds(span + given.rest, (f"{how}, {given.rest * 1e3:.4g} ms beside it",))


def _mean(means: Mapping[tuple[str, int], float], kind: str, stage: int) -> float | None:
    """Return the time of an operation; a backward without a time is the sum of its two halves."""
    if kind == "B" and ("B", stage) not in means:
        halves = [means.get((half, stage)) for half in "IW"]
        return None if None in halves else sum(filter(None, halves))
    return means.get((kind, stage))


def _ran(mesh: Mapping[str, int], micro: int, slices: int) -> str:
    axes = ", ".join(f"{name}={size}" for name, size in mesh.items()) or "one rank"
    return f"mesh {axes}, {micro} microbatches" + (f", {slices} slices" if slices > 1 else "")


def _unfit(plan: str, run: str) -> NoReturn:
    title = "the measured times are not those of this plan"
    notes = (f"the plan: {plan}", f"measured: {run}")
    raise Refusal.of("S914", title, notes=notes, helps=(MEASURE_HELP,))


def read_measurement(made: Any) -> Measurement:
    """Read the output of `run --timeline --json`; raises KeyError, TypeError, ValueError or
    IndexError for anything else."""
    ran = made["pipeline"]
    means = {(str(m["kind"]), int(m["stage"])): float(m["seconds"]) for m in ran["means"]}
    rest = float(made["step_seconds"]) - float(ran["measured"]["makespan"])
    mesh = {str(name): int(size) for name, size in made["mesh"].items()}
    return Measurement(
        means, float(ran["transfer"]), max(0.0, rest), mesh, int(ran["micro"]), int(ran["slices"])
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
    """Seconds of an operation: computing, and waiting for communication."""

    computing: float
    sending: float

    @property
    def seconds(self) -> float:
        return self.computing + self.sending

    def __add__(self, other: _Took) -> _Took:
        return _Took(self.computing + other.computing, self.sending + other.sending)


def time_step(plan: Plan, prepared: Prepared, played: SimulatedRanks, cluster: Cluster) -> StepTime:
    """Time a step of a plan from the simulated steps of its ranks.

    Collectives between ranks that share their data block: the rank waits.  Gathers of parameters,
    gradient reductions over replicas, and ring sends overlap with computing; they count where they
    take longer, and with the share that the cluster does not hide.  Operations after the last
    backward count in full.  Transfers between stages all take as long as the largest.  On unequal
    nodes each pipeline is timed on its own ranks with its own rows; the slowest pipeline sets the
    pace of all.
    """
    import numpy as np

    from schedlang.pipeline.timeline.simulation import simulate_timeline

    line = _line(plan, prepared.staged)
    places = [one.place or 0 for one in played.classes]
    found = dict(zip(places, map(played.by_class.__getitem__, played.classes)))
    busy = [_NOTHING] * line.ranks
    ends, rests = [0.0] * line.ranks, [0.0] * line.ranks
    for worker in _pipelines(plan, prepared.staged, cluster):
        clocks = [_Clock(plan, prepared.staged, found[at].rank_class, *worker[at]) for at in worker]
        by_op = [_times(one, at, found[at], played.partner_bytes) for at, one in enumerate(clocks)]
        took = [by_op[rank].get(op, _NOTHING) for rank, op in _ops(line)]
        transfer = max((one.transfer(found[at]) for at, one in enumerate(clocks)), default=0.0)
        timed = simulate_timeline(line, np.array([one.seconds for one in took]), transfer)
        for at, clock in enumerate(clocks):
            rest = clock.rest(found[at])
            own = [one for rank, one in zip(line.rank.tolist(), took) if rank == at]
            busy[at] = max(busy[at], sum(own, rest), key=lambda one: one.seconds)
            ends[at] = max(ends[at], float(timed.end[line.rank == at].max(initial=0.0)))
            rests[at] = max(rests[at], rest.seconds)
    busiest = max(busy, key=lambda one: one.seconds)
    return StepTime(max(map(sum, zip(ends, rests))), busiest.computing, busiest.sending)


RankPipeline = dict[int, "tuple[Cluster, int | None, float]"]  # place -> machine, first rank, rows


def _pipelines(plan: Plan, staged: Staged, cluster: Cluster) -> Iterator[RankPipeline]:
    """Yield the pipelines with rows of their own.

    For each place: the machine of the ranks that wait for each other there, the first of these
    ranks, and the pipeline's rows as a share of the largest pipeline's.  On equal ranks the
    pipeline with most rows stands for all.
    """
    from schedlang.passes.simulate.node_cluster import Nodes

    mesh, axis, dealt = plan.mesh, staged.axis, plan.share_weights
    if not isinstance(cluster, Nodes):
        yield dict.fromkeys(range(mesh.size(axis) if axis is not None else 1), (cluster, None, 1.0))
        return
    found: dict[int, dict[int, list[int]]] = {}
    for rank in range(mesh.world):
        part = mesh.index(rank, plan.row_axes) if plan.row_axes else 0
        at = mesh.coordinates(rank)[axis] if axis is not None else 0
        found.setdefault(part, {}).setdefault(at, []).append(rank)
    for part, ranks in found.items():
        share = 1.0 if isinstance(dealt, int) else dealt[part] / max(dealt)
        yield {at: (cluster.for_ranks(some), some[0], share) for at, some in sorted(ranks.items())}


def missing_memory(
    plan: Plan, staged: Staged, found: Sequence[RankMemory], cluster: Cluster
) -> int:
    """Return the most bytes that a rank needs beyond its device's memory; below 0 where all fit."""
    most = []
    for worker in _pipelines(plan, staged, cluster):
        for one in found:
            machine, _, share = worker[one.place or 0]
            own = len(STATE)
            needs = (sum(m.most[:own]) + share * sum(m.most[own:]) for m in one.moments)
            most.append(int(max(needs)) - machine.memory)
    return max(most)


_NOTHING = _Took(0.0, 0.0)


def _line(plan: Plan, staged: Staged) -> Timeline:
    """Return the timeline that ranks run, with gathers where its rows include them."""
    from schedlang.passes.analyze.holdings import gathers_by_rows
    from schedlang.pipeline.timeline.sharded_weights import with_gathers

    line = staged.timeline.with_edges(staged.cut.edges)
    return with_gathers(line) if gathers_by_rows(plan, staged) else line


def _ops(line: Timeline) -> Iterable[tuple[int, Op]]:
    """Yield every row with its rank."""
    for rank in range(line.ranks):
        for op in line.rows(rank):
            yield rank, op


def _times(
    clock: _Clock, place: int, played: SimulatedRank, parked: Mapping[int, int]
) -> Mapping[Op, _Took]:
    """Time each operation of a place."""
    from schedlang.passes.simulate.simulated_ranks import runs_in_order

    at = place if clock.staged.axis is not None else None
    known: dict[int, _Took] = {}
    found = {}
    for op, run in runs_in_order(clock.plan, clock.staged, at, played, parked):
        key = id(run)
        if key not in known:
            known[key] = clock.took(run.work)
        found[op] = known[key]
    return found


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
        """Time an operation: computing, and waiting for communication."""
        computing, waits = self.cluster.computing_seconds(work, self.share), 0.0
        overlapped = self.cluster.copy_seconds(work.copied * self.share)
        can_hide = overlapped * self.cluster.overlap
        for message, often in work.messages.items():
            if self._between_stages(message) or message.op == "recv":
                continue
            overlaps = self._overlaps(message)
            here = self._here(
                message, self.share if message.op not in DATA_PARALLEL_OPS or not overlaps else 1
            )
            seconds = often * self.cluster.message_seconds(here)
            if overlaps:
                overlapped += seconds
                can_hide += seconds * self.cluster.hidden_share(here.op, here.bytes, here.ranks)
            else:
                waits += seconds
        hidden = can_hide * min(1.0, computing / overlapped) if overlapped else 0.0
        return _Took(computing, waits + overlapped - hidden)

    def _here(self, message: TrafficMessage, share: float = 1.0) -> TrafficMessage:
        """Translate a message of the simulated rank to the message of the first of these ranks."""
        if self.first is None:
            return message
        mesh = self.plan.mesh
        mine, other = mesh.coordinates(self.first), mesh.coordinates(self.of.first)

        def moved(rank: int) -> int:
            at = mesh.coordinates(rank)
            return mesh.rank({x: (at[x] + mine[x] - other[x]) % mesh.sizes[x] for x in at})

        ends = message.ends and (moved(message.ends[0]), moved(message.ends[1]))
        size = round(message.bytes * share)
        return replace(message, ranks=tuple(map(moved, message.ranks)), ends=ends, bytes=size)

    def rest(self, played: SimulatedRank) -> _Took:
        """Time the operations after the last backward.

        An optimizer updates many parameters in one kernel: starts of operators are left out.
        """
        found, ready = _NOTHING, replace(self.cluster, start=0.0)
        for run in played.rest:
            sent = sum(
                often * self.cluster.message_seconds(self._here(message))
                for message, often in run.work.messages.items()
                if message.op != "recv"
            )
            found += _Took(ready.computing_seconds(run.work), sent)
        return _Took(found.computing + self._hosted(), found.sending)

    def _hosted(self) -> float:
        """Seconds of an optimizer whose state is on the host.

        The host's processor reads and writes the state, gradients come, parameters come and go, all
        at the pace of the link, as in the planner's price.
        """
        from schedlang.passes.analyze.residence import tiers_of
        from schedlang.runtime.storage.tiers import CPU

        of = self.of
        if not of.cpu or not any(one.as_tuple[2] == CPU for one in tiers_of(self.plan).values()):
            return 0.0
        share = of.cpu / (of.cpu + of.optimizer)
        return self.cluster.copy_seconds(
            2 * of.cpu + share * (2 * of.gradients + 3 * of.parameters)
        )

    def transfer(self, played: SimulatedRank) -> float:
        """Return the longest time that one operation sends to another stage."""
        works = [run.work for runs in played.ops.values() for run in runs]
        return max((self._transfer(work) for work in works), default=0.0)

    def _transfer(self, work: SegmentWork) -> float:
        return sum(
            often * self.cluster.message_seconds(self._here(message, self.share))
            for message, often in work.messages.items()
            if message.op != "recv" and self._between_stages(message)
        )

    def _between_stages(self, message: TrafficMessage) -> bool:
        axis = self.staged.axis
        if axis is None or message.ends is None:
            return False
        first, second = (self.plan.mesh.coordinates(rank)[axis] for rank in message.ends)
        return first != second

    def _overlaps(self, message: TrafficMessage) -> bool:
        """Return whether a message overlaps with computing: ring sends, gathers of parameters,
        gradient reductions."""
        if message.ends is not None:
            return True
        replicas = {axis for row in self.plan.replicas for axis in self.plan.mesh.fold(row.axes)}
        return message.op in DATA_PARALLEL_OPS and self._axes_of(message) <= replicas

    def _axes_of(self, message: TrafficMessage) -> set[str]:
        """Return the axes along which the ranks of a message differ."""
        first, *others = map(self.plan.mesh.coordinates, message.ranks)
        return {axis for other in others for axis in other if other[axis] != first[axis]}


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
        one, at = cluster.device_of(rank), plan.mesh.coordinates(rank)[plan.cuts[0].axis]
        speeds[at] = min(speeds.get(at, math.inf), one.speed * one.product)
    return tuple(max(speeds.values()) / speeds[at] for at in sorted(speeds))


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
    slow = machine.slowdowns or (1.0,) * ranks
    flops = [round(size * slow[place]) for size, place in zip(flops, staged.ranks)]
    if not sum(flops):
        note = "nothing: no operation of this model has a known number of floating-point operations"
        return DEFAULT_COST, (note,)
    once = sum(flops) / ranks
    time = once / machine.speed * MS_PER_SECOND
    sent = {
        edge: sum(tensor_bytes(one.shape, one.dtype) for one in map(leaves.__getitem__, tokens))
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
        f"F from {_si(once)}FLOP of a microbatch on one rank's share, at "
        f"{_si(machine.speed)}FLOP/s (--tflops); I and W as F; times in ms",
        *_slow(machine),
        f"transfers from their bytes, at most {_si(longest)}B, at {_si(machine.bandwidth)}B/s "
        "(--bandwidth)",
        f"M_B is {_si(sum(saved) / ranks)}B: what the forwards keep, but for parameters",
    )


def _slow(machine: RankRates) -> tuple[str, ...]:
    slow = max(machine.slowdowns, default=1.0)
    if slow == 1:
        return ()
    places = ", ".join(str(at) for at, one in enumerate(machine.slowdowns) if one == slow)
    return (f"ranks of place {places} are {slow:.3g} times slower than the quickest",)


def _si(value: float) -> str:
    """Format a number with a prefix: `1.5 G`."""
    for prefix in ("", "k", "M", "G", "T"):
        if value < 1000:
            return f"{value:.3g} {prefix}"
        value /= 1000
    return f"{value:.3g} P"
