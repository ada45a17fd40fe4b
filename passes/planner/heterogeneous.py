"""Evaluation of candidates on heterogeneous nodes: order of nodes, stages by speed, rows of
replicas.

The search uses `HeterogeneousEvaluator` instead of `Evaluator` where the cluster has unequal nodes.
Ranks are placed on nodes in any order (AMP, Li et al., NeurIPS 2022).  Replicas on nodes of their
own get rows by their speed (Whale, Jia et al., USENIX ATC 2022).  With stages on nodes of their
own, a replica is a pipeline of unequal devices (a virtual worker of HetPipe, Park et al., USENIX
ATC 2020).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice, permutations

import numpy as np

from schedlang.ir.limits import Limits
from schedlang.passes.partition.stage_partition import (
    ROUNDS,
    PartitionProblem,
    StageOption,
    find_partition,
)
from schedlang.passes.planner.bounds import ChainTimes
from schedlang.passes.planner.critical_path import count_in_flight, find_critical_path, stage_ranks
from schedlang.passes.planner.evaluation import (
    EvaluatedSetting,
    Evaluator,
    RecomputeBytes,
    evaluation_key,
    neighbour_splits,
)
from schedlang.passes.planner.price import (
    COMPUTING,
    NO_WEIGHTS,
    crosswise_seconds,
    optimizer_seconds,
    replica_seconds,
    run_seconds,
    sending_axes,
    stage_send_seconds,
    state_bytes,
    tied_grad_seconds,
    weight_grad_seconds,
)
from schedlang.passes.planner.search_space import AXIS_ORDERS, Floats, Ints, Job
from schedlang.passes.planner.stage_contents import parameters_by_place, units_by_stage, zero_shards
from schedlang.passes.planner.values import Chain, Placement, Price, Setting
from schedlang.passes.simulate.machine import Cluster
from schedlang.passes.simulate.node_cluster import Node, Nodes

Machines = tuple[Nodes, ...]  # of a replica: its ranks at each pipeline place, as one machine
ReplicaKind = tuple[int, Machines]  # kind of a replica: rows of a microbatch, and its machines
Shape = tuple[tuple[int, ...], tuple[int, ...]]  # units of each stage, rows of each replica

# -- placement of ranks ----------------------------------------------------------------------------


NODE_AXIS_ORDERS = tuple(order for order in AXIS_ORDERS if order[2:] == ("cp", "tp"))
MAX_PERMUTED_NODES = 6  # all orders of up to so many nodes are tried


@lru_cache
def node_orders(nodes: tuple[Node, ...]) -> tuple[tuple[int, ...], ...]:
    """List orders of nodes that differ.

    Of many nodes these four: as given, quickest first, slowest first, and alternating from the
    quicker half and the slower half.
    """
    positions = range(len(nodes))
    by_speed = sorted(positions, key=lambda k: -nodes[k].device.speed * nodes[k].device.product)
    half = -(-len(by_speed) // 2)
    alternating = sorted(positions, key=lambda k: (by_speed.index(k) % half, by_speed.index(k)))
    orders = (
        permutations(positions)
        if len(nodes) <= MAX_PERMUTED_NODES
        else (positions, by_speed, by_speed[::-1], alternating)
    )
    distinct: dict[tuple[Node, ...], tuple[int, ...]] = {}
    for order in map(tuple, orders):
        distinct.setdefault(tuple(nodes[k] for k in order), order)
    return tuple(distinct.values())


def replica_machines(setting: Setting, nodes: Nodes) -> tuple[Machines, ...]:
    """List the machines of each replica, one for each pipeline place."""
    placement = setting.placement
    width = placement.tp * placement.cp
    dp_outside = setting.axes.index("dp") < setting.axes.index("pp")
    outer, inner = (setting.pp, 1) if dp_outside else (1, setting.dp)
    return tuple(
        tuple(
            _at(nodes, width * (replica * outer + place * inner), width, placement.ep > 1)
            for place in range(setting.pp)
        )
        for replica in range(setting.dp)
    )


@lru_cache(4096)
def _at(nodes: Nodes, first: int, width: int, spread: bool) -> Nodes:
    """Return the machine of consecutive ranks; ranks of experts also talk to ranks outside of
    it."""
    machine = nodes.for_ranks(range(first, first + width))
    return replace(machine, only=()) if spread else machine


order_nodes = lru_cache(1024)(Nodes.in_order)

# -- stages and rows -------------------------------------------------------------------------------


def split_for_slowest(totals: Sequence[Sequence[Floats]]) -> tuple[int, ...] | None:
    """Split units into stages so that the slowest stage of all replicas is as quick as possible.

    totals  seconds of the units before each unit [replicas, stages, units + 1]
    The allowed time of a stage is found by bisection.  Of the splits within that time, stages end
    closest to where all of them would take equally long.  Returns None for fewer units than stages.
    """
    table = np.array(totals)
    stages, count = table.shape[1], table.shape[2] - 1

    def ends(limit: float) -> tuple[Ints, list[Floats]]:
        """Return the last unit that each stage reaches from each unit, and where stages before it
        may end."""
        last = [[np.searchsorted(sums, sums + limit, "right") - 1 for sums in row] for row in table]
        reach = np.array(last).min(0)
        may_begin = [np.arange(count + 1) == 0]
        for stage in range(stages):
            start = np.flatnonzero(may_begin[-1] & (reach[stage] > np.arange(count + 1)))
            opens = np.zeros(count + 2, dtype=np.int64)
            np.add.at(opens, start + 1, 1)
            np.add.at(opens, reach[stage, start] + 1, -1)
            may_begin.append(opens.cumsum()[:-1] > 0)
        return reach, may_begin

    lower, upper = 0.0, float(table[:, :, -1].max()) * (1 + 1e-9)
    if not ends(upper)[1][-1][count]:
        return None
    while upper - lower > 1e-7 * upper:
        middle = (lower + upper) / 2
        lower, upper = (lower, middle) if ends(middle)[1][-1][count] else (middle, upper)
    reach, begins = ends(upper * (1 + 1e-9))
    speeds = 1 / table[:, :, -1].max(0)
    shares, edges = table[0, 0] / table[0, 0, -1], [count]
    for stage in reversed(range(1, stages)):
        options = np.flatnonzero(begins[stage][: edges[0]] & (reach[stage, : edges[0]] >= edges[0]))
        part = speeds[:stage].sum() / speeds.sum()
        edges.insert(0, int(options[np.abs(shares[options] - part).argmin()]))
    return tuple(b - a for a, b in zip([0, *edges], edges))


def split_rows(rows: int, seconds_of: Sequence[Callable[[int], float]]) -> tuple[int, ...]:
    """Split rows over replicas, at least one each, so that the last replica ends as early as
    possible.

    took  seconds of a replica as a function of its rows; never falls with more rows; infinite for
          more rows than the replica can hold
    Starts from rows in proportion to speed.  Then moves a row from the replica that ends last to
    the replica that would end earliest with it, as long as that helps; then no other move helps.
    """
    mean = max(1, rows // len(seconds_of))
    speeds = [1 / seconds(mean) for seconds in seconds_of]
    split = [max(1, int(rows * speed / (sum(speeds) or 1))) for speed in speeds]
    replicas = range(len(seconds_of))
    while True:
        target = min(replicas, key=lambda replica: seconds_of[replica](split[replica] + 1))
        movable = (replica for replica in replicas if split[replica] > 1)
        last = max(movable, key=lambda replica: seconds_of[replica](split[replica]), default=target)
        excess = sum(split) - rows
        if excess < 0:
            split[target] += 1
        elif excess > 0:
            split[last] -= 1
        elif (
            seconds_of[target](split[target] + 1) < seconds_of[last](split[last]) and target != last
        ):
            split[target], split[last] = split[target] + 1, split[last] - 1
        else:
            return tuple(split)


# -- evaluation ------------------------------------------------------------------------------------


Profiles = Callable[[Placement], object]


def bounding_job(job: Job, limits: Limits) -> Job:
    """Return the job on equal ranks that are no slower than any of the unequal nodes, for lower
    bounds.

    On unequal nodes offloading is tried only where it is pinned.
    """
    if not isinstance(job.cluster, Nodes):
        return job
    best, devices = job.cluster.best, [job.cluster.device_of(rank) for rank in range(job.ranks)]
    bandwidth = max(best.network, best.link)
    free = {"network": bandwidth, "routed": 1.0, "linked": 1.0, "library": "", "overlap": 1.0}
    none = dict.fromkeys(("hop", "far", "start", "ramp"), 0.0)
    bound = replace(best, **free, **none)  # type: ignore[arg-type]
    speed = sum(max(a / b for a, b in zip(_figures(d), _figures(bound))) for d in devices)
    return replace(
        job, cluster=bound, relative_speed=speed / job.ranks, can_offload="offload" in limits.pinned
    )


def _figures(chip: Cluster) -> tuple[float, ...]:
    """Return the rates of a device."""
    shares = (1.0, chip.product, chip.attention)
    return (*(chip.speed * share for share in shares), chip.stream * chip.streaming, chip.link)


def price_on_nodes(profiles: Profiles, job: Job, setting: Setting) -> EvaluatedSetting:
    """Price a setting that has its stages, at its place on unequal nodes."""
    evaluator = HeterogeneousEvaluator(job, Limits(), profiles)
    return evaluator._priced(setting, setting.cuts, evaluator._rows(setting))


def evaluator_of(profiles: Profiles, job: Job, limits: Limits) -> Evaluator:
    """Return the evaluator for the job's cluster."""
    if isinstance(job.cluster, Nodes):
        return HeterogeneousEvaluator(job, limits, profiles)
    return Evaluator(job, limits)


@dataclass(frozen=True)
class HeterogeneousEvaluator(Evaluator):
    """Evaluates candidates on unequal nodes: the best over all orders of nodes and of axes."""

    profiles: Profiles = lambda placement: None
    _tables: dict[object, tuple[Floats, ...]] = field(default_factory=dict)
    _chains: dict[Placement, Chain | None] = field(default_factory=dict)
    _shapes: dict[Setting, list[Shape]] = field(default_factory=dict)
    _spans: dict[object, tuple[float, float]] = field(default_factory=dict)

    def evaluate(
        self,
        clock: ChainTimes,
        setting: Setting,
        worst: float = np.inf,
        during: float = 0.0,
        after: float = 0.0,
    ) -> EvaluatedSetting:
        """Place a candidate on the nodes, split it into stages, split its rows, and price it."""
        if setting.cuts:
            return self._priced(setting, setting.cuts, self._rows(setting))
        nodes = self._nodes
        axes_ = [entry for entry in NODE_AXIS_ORDERS if self.limits.admits("axes", "-".join(entry))]
        placed = [
            replace(setting, axes=axes, nodes=order)
            for axes in axes_[: None if setting.dp > 1 and setting.pp > 1 else 1]
            for order in node_orders(nodes.nodes)
        ]
        evaluated = [self._priced(each, *entry) for each in placed for entry in self._shaped(each)]
        evaluated += [
            improved
            for entry in evaluated
            if entry.least < CLOSE_TO_BEST * worst
            for improved in self._with_programme_stages(entry)
        ]
        best = min(evaluated, key=evaluation_key, default=EvaluatedSetting(setting, np.inf, 0.0))
        return self._moved(best) if best.least < CLOSE_TO_BEST * worst else best

    def split_by_programme(self, clock: ChainTimes, result: EvaluatedSetting) -> EvaluatedSetting:
        """Return the setting unchanged: stages were already split for its nodes."""
        return result

    def _with_programme_stages(self, evaluated: EvaluatedSetting) -> Iterator[EvaluatedSetting]:
        """Price the setting with stages of the dynamic programme, which includes the memory of each
        device, and the warm-up and drain of a pipeline."""
        for keeps in (True,) if evaluated.priced is not None else (True, False):
            cuts = self._programme(evaluated.setting, keeps)
            if cuts is not None and cuts != evaluated.setting.cuts:
                yield self._priced(evaluated.setting, cuts, self._rows(evaluated.setting))

    def _moved(self, evaluated: EvaluatedSetting) -> EvaluatedSetting:
        """Move units to an adjacent stage, one at a time, as long as the step gets quicker, or
        closer to what memory holds."""
        if evaluated.setting.pp * sum(evaluated.setting.cuts) > MAX_PROGRAMME:
            return evaluated
        while True:
            rows, pp = self._rows(evaluated.setting), len(evaluated.setting.cuts)
            moves = islice(neighbour_splits(evaluated.setting.cuts), 2 * (pp - 1))
            neighbours = (self._priced(evaluated.setting, cuts, rows) for cuts in moves)
            best = min(neighbours, key=evaluation_key, default=evaluated)
            if evaluation_key(best) >= evaluation_key(evaluated):
                return evaluated
            evaluated = best

    @property
    def _nodes(self) -> Nodes:
        assert isinstance(self.job.cluster, Nodes)
        return self.job.cluster

    def _shaped(self, setting: Setting) -> list[Shape]:
        """Splits into stages and rows of a candidate in one order; the same for every stage of
        ZeRO."""
        key = replace(setting, zero=0)
        if key not in self._shapes:
            self._shapes[key] = list(self._shapes_of(key))
        return self._shapes[key]

    def _shapes_of(self, setting: Setting) -> Iterator[Shape]:
        """Yield stages for equal rows, then stages and rows for replicas of unequal speed."""
        rows, machines = (
            self._rows(setting),
            replica_machines(setting, order_nodes(self._nodes, setting.nodes)),
        )
        cuts = self._cut(setting, rows)
        if cuts is None:
            return
        yield cuts, rows
        if setting.placement.ep > 1 or len(set(machines)) == 1 or setting.placement.rows == 1:
            return
        for _ in range(ROW_ROUNDS):  # alternate: rows for these stages, stages for these rows
            previous = cuts, rows
            clocks = {machine: self._clock(setting, machine, cuts) for machine in set(machines)}
            rows = split_rows(sum(rows), [clocks[machine] for machine in machines])
            cuts = self._cut(setting, rows)
            if cuts is None or (cuts, rows) == previous:
                return
            yield cuts, rows

    def _rows(self, setting: Setting) -> tuple[int, ...]:
        return setting.rows or (setting.placement.rows,) * setting.dp

    # -- seconds of a replica ----------------------------------------------------------------------

    def _chain(self, setting: Setting, rows: int) -> Chain | None:
        placement = replace(setting.placement, rows=rows)
        if placement not in self._chains:
            profile = self.profiles(placement)
            self._chains[placement] = profile if isinstance(profile, Chain) else None
        return self._chains[placement]

    def _table(self, setting: Setting, rows: int, machine: Nodes) -> tuple[Floats, ...]:
        """Seconds of one unit of each run, summed over the causes of `run_seconds`."""
        axes = sending_axes(setting)
        key = replace(setting.placement, rows=rows), axes, machine
        if key not in self._tables:
            chain = self._chain(setting, rows)
            assert chain is not None
            self._tables[key] = tuple(part.sum(1) for part in run_seconds(chain, axes, machine)[1])
        return self._tables[key]

    def _cut(self, setting: Setting, rows: Sequence[int]) -> tuple[int, ...] | None:
        """Split for the slowest replica at each stage; None where the model cannot have these
        rows."""
        ranks = stage_ranks(setting.order, setting.pp, setting.chunks)
        totals = []
        for kind in set(
            zip(rows, replica_machines(setting, order_nodes(self._nodes, setting.nodes)))
        ):
            flat = self._flat(setting, kind)
            if flat is None:
                return None
            totals.append([np.concatenate([[0.0], np.cumsum(flat[rank])]) for rank in ranks])
        return split_for_slowest(totals)

    def _programme(self, setting: Setting, keeps: bool) -> tuple[int, ...] | None:
        """Split into stages by the dynamic programme for 1F1B, on devices with their own speed and
        memory.

        All units are recomputed unless `keeps`: then stages save activations.  Returns None for
        several stages on a rank, and for chains that would take too long.
        """
        kinds = dict.fromkeys(
            zip(
                self._rows(setting),
                replica_machines(setting, order_nodes(self._nodes, setting.nodes)),
            )
        )
        chains = [self._chain(setting, rows) for rows, _ in kinds]
        large = setting.pp * sum(setting.cuts) > MAX_PROGRAMME
        if setting.chunks > 1 or setting.pp == 1 or large or any(chain is None for chain in chains):
            return None
        tables = [self._costs(setting, kind, keeps) for kind in kinds]
        in_flight = count_in_flight(setting.order, setting.pp, setting.micro, 1)[0].tolist()

        def menu(begin: int, end: int, devices: range, after: int) -> Iterator[StageOption]:
            place = devices.start
            costs = [cost[place, :4, end] - cost[place, :4, begin] for cost in tables]
            forward, backward = max(((cost[0], cost[1]) for cost in costs), key=sum)
            once = max(float(cost[place, 4, begin:end].max()) for cost in tables)
            held, kept = max(cost[2] for cost in costs) + once, max(cost[3] for cost in costs)
            yield StageOption(forward, backward, held=held, kept=kept)

        problem = PartitionProblem(
            sum(setting.cuts),
            menu,
            setting.micro,
            devices=setting.pp,
            stages=setting.pp,
            memory=1.0,
            flight=lambda after: in_flight[setting.pp - 1 - after],
        )
        partition = find_partition(problem, ROUNDS)
        return None if partition is None else partition.units

    def _costs(self, setting: Setting, kind: ReplicaKind, keeps: bool) -> Floats:
        """Costs of the units before each unit, at each place [places, 5, units + 1].

        The rows: seconds forward and backward, shares of the place's memory that state and
        activations fill, and the share that the unit itself needs once.
        """
        chain = self._chain(setting, kind[0])
        assert chain is not None
        units = [run.unit for run in chain.runs]
        runs = replace(setting, pp=len(units), chunks=1, order="1F1B")  # each run as a stage
        state = state_bytes(chain, runs, self.job.recipe, np.eye(len(units)), np.arange(len(units)))
        kept = np.array([u.kept if keeps else min(u.kept, u.input) for u in units])
        counts, tables = [run.count for run in chain.runs], []
        for machine in kind[1]:
            forward, backward, _, re_fwd, re_bwd = self._table(setting, kind[0], machine)
            if not keeps:
                forward, backward = forward + re_fwd, backward + re_bwd
            sums = [forward, backward, state / machine.memory, kept / machine.memory]
            rates = np.pad(np.repeat(sums, counts, axis=1).cumsum(1), ((0, 0), (1, 0)))
            once = np.repeat([unit.peak / machine.memory for unit in units], counts)
            tables.append(np.vstack([rates, np.append(once, 0.0)]))
        return np.array(tables)

    def _flat(self, setting: Setting, kind: ReplicaKind) -> list[Floats] | None:
        """Seconds of each unit at each place."""
        rows, machines = kind
        chain = self._chain(setting, rows)
        if chain is None:
            return None
        counts = [run.count for run in chain.runs]
        tables = (self._table(setting, rows, machine) for machine in machines)
        return [np.repeat(forward + backward, counts) for forward, backward, *_ in tables]

    def _passes(self, setting: Setting, kind: ReplicaKind) -> tuple[Floats, Floats, Floats]:
        """Seconds of a microbatch at each stage: forward, and both halves of its backward."""
        rows, machines = kind
        chain = self._chain(setting, rows)
        assert chain is not None
        counts, redone = units_by_stage(chain, setting.cuts, setting.again)
        ranks = stage_ranks(setting.order, setting.pp, setting.chunks)
        tables = np.array([self._table(setting, rows, machines[rank]) for rank in ranks])
        fwd, bwd, half, re_fwd, re_bwd = tables.transpose(1, 0, 2)
        forward, backward = (counts * fwd + redone * re_fwd).sum(1), counts * bwd + redone * re_bwd
        full, halved = (table.sum(1, keepdims=True) for table in (backward, counts * half))
        weights = weight_grad_seconds(setting, full, halved)
        return forward, (full - weights)[:, 0], weights[:, 0]

    def _span(self, setting: Setting, kind: ReplicaKind) -> tuple[float, float]:
        """Seconds of a replica's pipeline, and of the messages on its critical path."""
        key = replace(setting, zero=min(setting.zero, 1), rows=()), kind
        if key not in self._spans:
            self._spans[key] = self._longest(setting, kind)
        return self._spans[key]

    def _longest(self, setting: Setting, kind: ReplicaKind) -> tuple[float, float]:
        chain, passes = self._chain(setting, kind[0]), self._passes(setting, kind)
        assert chain is not None
        send = sum(
            seconds
            for _, seconds in stage_send_seconds(
                chain, setting, order_nodes(self._nodes, setting.nodes)
            )
        )
        path = find_critical_path(
            setting.order, setting.pp, setting.chunks, setting.micro, *passes, send
        )
        return path.seconds(*passes, send), path.sends * send

    def _clock(
        self, setting: Setting, machines: Machines, cuts: tuple[int, ...]
    ) -> Callable[[int], float]:
        """Return a function from rows to seconds of a replica."""
        cache: dict[int, float] = {}
        split = replace(setting, cuts=cuts)

        def took(rows: int) -> float:
            if rows not in cache:
                possible = self._chain(setting, rows) is not None
                cache[rows] = self._span(split, (rows, machines))[0] if possible else np.inf
            return cache[rows]

        return took

    # -- a price -----------------------------------------------------------------------------------

    def _priced(
        self, candidate: Setting, cuts: tuple[int, ...], rows: tuple[int, ...]
    ) -> EvaluatedSetting:
        """Price a candidate with its stages and rows, or say which rank has too little memory."""
        machines = replica_machines(candidate, order_nodes(self._nodes, candidate.nodes))
        kinds = list(dict.fromkeys(zip(rows, machines)))
        uneven = rows if len(set(rows)) > 1 else ()
        setting = replace(candidate, cuts=cuts, rows=uneven, again=())
        if any(self._chain(candidate, kind) is None for kind, _ in kinds):
            return EvaluatedSetting(setting, np.inf, 0.0)
        again: Ints = np.zeros(len(cuts), dtype=np.int64)
        for kind, rank_machines in kinds:
            usage = self._held(setting, kind)
            fewest = usage.fewest_recomputed(_memory(rank_machines), *self._bounds(setting))
            if fewest is None:
                return self._full(setting, usage.bytes(np.zeros_like(again)), rank_machines)
            again = np.maximum(again, fewest)
        fullest = np.zeros(candidate.pp)
        for kind, rank_machines in kinds:
            rank_bytes = self._held(setting, kind).bytes(again)
            if (rank_bytes > _memory(rank_machines)).any():
                return self._full(setting, rank_bytes, rank_machines)
            fullest = np.maximum(fullest, rank_bytes)
        setting = replace(setting, again=tuple(again.tolist()) if again.any() else ())
        seconds, parts = self._seconds(setting, kinds)
        priced = Price(seconds, tuple(fullest.tolist()), parts)
        return EvaluatedSetting(setting, seconds, priced.peak, priced)

    def _held(self, setting: Setting, rows: int) -> RecomputeBytes:
        chain = self._chain(setting, rows)
        assert chain is not None
        return RecomputeBytes(chain, self.job, setting)

    def _full(self, setting: Setting, rank_bytes: Floats, machines: Machines) -> EvaluatedSetting:
        """Return a candidate that is too large for the memory of one of its ranks."""
        worst = int((rank_bytes / _memory(machines)).argmax())
        return EvaluatedSetting(
            setting, 0.0, float(rank_bytes[worst]), room=float(machines[worst].memory)
        )

    def _seconds(
        self, setting: Setting, kinds: Sequence[ReplicaKind]
    ) -> tuple[float, dict[str, float]]:
        """Seconds of a step, and its parts: of the replica that ends last, then of all replicas."""
        nodes, recipe, none = order_nodes(self._nodes, setting.nodes), self.job.recipe, NO_WEIGHTS
        last = max(kinds, key=lambda kind: self._span(setting, kind))
        (span, sends), passes = self._span(setting, last), self._passes(setting, last)
        chain, ranks = (
            self._chain(setting, last[0]),
            stage_ranks(setting.order, setting.pp, setting.chunks),
        )
        assert chain is not None
        counts, _ = units_by_stage(chain, setting.cuts)
        shards = zero_shards(setting) if setting.zero else (1, 1)
        numel = parameters_by_place(chain, counts, ranks, setting.pp, shards)
        busy = np.bincount(ranks, sum(passes), setting.pp) * setting.micro
        units = np.bincount(ranks, counts.sum(1), setting.pp)
        worst = int(busy.argmax())
        busiest = {COMPUTING: float(busy[worst])}
        largest, unit_count = numel.max(0), round(float(units[worst]))
        sent = replica_seconds(setting, largest, unit_count, nodes, recipe, busiest, none)
        places = chain, setting, nodes, recipe, counts, ranks
        others = (*tied_grad_seconds(*places), *crosswise_seconds(*places))
        machines = [(place, machine) for _, group in kinds for place, machine in enumerate(group)]
        parts = dict(busiest)
        if setting.pp > 1:
            sends = min(sends, span - busiest[COMPUTING])
            parts |= {"pp": sends, "idle": span - busiest[COMPUTING] - sends}
        parts["gradients"] = sum(sent.values()) + sum(seconds for _, seconds in others)
        parts["optimizer"] = max(
            optimizer_seconds(setting, numel[place], machine, recipe) for place, machine in machines
        )
        return sum(parts.values()), parts

    # -- near the best -----------------------------------------------------------------------------

    def _near(self, clock: ChainTimes, best: EvaluatedSetting) -> Iterator[EvaluatedSetting]:
        """Evaluate neighbours: stages of the dynamic programme, one unit more or less on some
        stages, one row more or less on some replicas."""
        setting = best.setting
        rows = self._rows(setting)
        yield from self._with_programme_stages(best)
        for cuts in neighbour_splits(setting.cuts):
            yield self._priced(setting, cuts, rows)
        for shifted_rows in neighbour_splits(setting.rows):
            yield self._priced(setting, setting.cuts, shifted_rows)


ROW_ROUNDS = 3
CLOSE_TO_BEST = 1.25  # a candidate within this factor of the best is improved
MAX_PROGRAMME = 300  # maximum of units * stages: beyond, the programme takes too long


def _memory(machines: Machines) -> Floats:
    """Bytes of the ranks of each place."""
    return np.array([float(machine.memory) for machine in machines])
