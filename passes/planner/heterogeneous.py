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
    optimizer_seconds,
    parameters_by_place,
    replica_seconds,
    run_seconds,
    sending_axes,
    stage_send_seconds,
    state_bytes,
    tied_grad_seconds,
    units_by_stage,
    weight_grad_seconds,
)
from schedlang.passes.planner.search_space import AXIS_ORDERS, Floats, Ints, Job
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
    every = range(len(nodes))
    quick = sorted(every, key=lambda at: -nodes[at].device.speed * nodes[at].device.product)
    half = -(-len(quick) // 2)
    turns = sorted(every, key=lambda at: (quick.index(at) % half, quick.index(at)))
    some = (
        permutations(every)
        if len(nodes) <= MAX_PERMUTED_NODES
        else (every, quick, quick[::-1], turns)
    )
    found: dict[tuple[Node, ...], tuple[int, ...]] = {}
    for order in map(tuple, some):
        found.setdefault(tuple(nodes[at] for at in order), order)
    return tuple(found.values())


def replica_machines(setting: Setting, nodes: Nodes) -> tuple[Machines, ...]:
    """List the machines of each replica, one for each pipeline place."""
    one = setting.placement
    width = one.tp * one.cp
    first = setting.axes.index("dp") < setting.axes.index("pp")
    far, near = (setting.pp, 1) if first else (1, setting.dp)
    return tuple(
        tuple(
            _at(nodes, width * (replica * far + place * near), width, one.ep > 1)
            for place in range(setting.pp)
        )
        for replica in range(setting.dp)
    )


@lru_cache(4096)
def _at(nodes: Nodes, first: int, width: int, spread: bool) -> Nodes:
    """Return the machine of consecutive ranks; ranks of experts also talk to ranks outside of
    it."""
    found = nodes.for_ranks(range(first, first + width))
    return replace(found, only=()) if spread else found


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

    def ends(most: float) -> tuple[Ints, list[Floats]]:
        """Return the last unit that each stage reaches from each unit, and where stages before it
        may end."""
        each = [[np.searchsorted(at, at + most, "right") - 1 for at in one] for one in table]
        far = np.array(each).min(0)
        found = [np.arange(count + 1) == 0]
        for stage in range(stages):
            start = np.flatnonzero(found[-1] & (far[stage] > np.arange(count + 1)))
            opens = np.zeros(count + 2, dtype=np.int64)
            np.add.at(opens, start + 1, 1)
            np.add.at(opens, far[stage, start] + 1, -1)
            found.append(opens.cumsum()[:-1] > 0)
        return far, found

    low, high = 0.0, float(table[:, :, -1].max()) * (1 + 1e-9)
    if not ends(high)[1][-1][count]:
        return None
    while high - low > 1e-7 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if ends(middle)[1][-1][count] else (middle, high)
    far, begins = ends(high * (1 + 1e-9))
    speeds = 1 / table[:, :, -1].max(0)
    work, found = table[0, 0] / table[0, 0, -1], [count]
    for stage in reversed(range(1, stages)):
        some = np.flatnonzero(begins[stage][: found[0]] & (far[stage, : found[0]] >= found[0]))
        part = speeds[:stage].sum() / speeds.sum()
        found.insert(0, int(some[np.abs(work[some] - part).argmin()]))
    return tuple(b - a for a, b in zip([0, *found], found))


def split_rows(rows: int, took: Sequence[Callable[[int], float]]) -> tuple[int, ...]:
    """Split rows over replicas, at least one each, so that the last replica ends as early as
    possible.

    took  seconds of a replica as a function of its rows; never falls with more rows; infinite for
          more rows than the replica can hold
    Starts from rows in proportion to speed.  Then moves a row from the replica that ends last to
    the replica that would end earliest with it, as long as that helps; then no other move helps.
    """
    mean = max(1, rows // len(took))
    speeds = [1 / one(mean) for one in took]
    found = [max(1, int(rows * speed / (sum(speeds) or 1))) for speed in speeds]
    every = range(len(took))
    while True:
        gains = min(every, key=lambda at: took[at](found[at] + 1))
        several = (at for at in every if found[at] > 1)
        last = max(several, key=lambda at: took[at](found[at]), default=gains)
        over = sum(found) - rows
        if over < 0:
            found[gains] += 1
        elif over > 0:
            found[last] -= 1
        elif took[gains](found[gains] + 1) < took[last](found[last]) and gains != last:
            found[gains], found[last] = found[gains] + 1, found[last] - 1
        else:
            return tuple(found)


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
    wide = max(best.network, best.link)
    free = {"network": wide, "routed": 1.0, "linked": 1.0, "library": "", "overlap": 1.0}
    none = dict.fromkeys(("hop", "far", "start", "ramp"), 0.0)
    quick = replace(best, **free, **none)  # type: ignore[arg-type]
    worth = sum(max(one / two for one, two in zip(_figures(d), _figures(quick))) for d in devices)
    return replace(
        job, cluster=quick, relative_speed=worth / job.ranks, can_offload="offload" in limits.pinned
    )


def _figures(one: Cluster) -> tuple[float, ...]:
    """Return the rates of a device."""
    reached = (1.0, one.product, one.attention)
    return (*(one.speed * share for share in reached), one.stream * one.streaming, one.link)


def price_on_nodes(profiles: Profiles, job: Job, setting: Setting) -> EvaluatedSetting:
    """Price a setting that has its stages, at its place on unequal nodes."""
    filler = HeterogeneousEvaluator(job, Limits(), profiles)
    return filler._priced(setting, setting.cuts, filler._rows(setting))


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
        way: Setting,
        worst: float = np.inf,
        beside: float = 0.0,
        after: float = 0.0,
    ) -> EvaluatedSetting:
        """Place a candidate on the nodes, split it into stages, split its rows, and price it."""
        if way.cuts:
            return self._priced(way, way.cuts, self._rows(way))
        nodes = self._nodes
        axes_ = [one for one in NODE_AXIS_ORDERS if self.limits.admits("axes", "-".join(one))]
        every = [
            replace(way, axes=axes, nodes=order)
            for axes in axes_[: None if way.dp > 1 and way.pp > 1 else 1]
            for order in node_orders(nodes.nodes)
        ]
        found = [self._priced(each, *one) for each in every for one in self._shaped(each)]
        found += [
            again
            for one in found
            if one.least < CLOSE_TO_BEST * worst
            for again in self._with_programme_stages(one)
        ]
        best = min(found, key=evaluation_key, default=EvaluatedSetting(way, np.inf, 0.0))
        return self._moved(best) if best.least < CLOSE_TO_BEST * worst else best

    def split_by_programme(self, clock: ChainTimes, filled: EvaluatedSetting) -> EvaluatedSetting:
        """Return the setting unchanged: stages were already split for its nodes."""
        return filled

    def _with_programme_stages(self, one: EvaluatedSetting) -> Iterator[EvaluatedSetting]:
        """Price the setting with stages of the dynamic programme, which includes the memory of each
        device, and the warm-up and drain of a pipeline."""
        for keeps in (True,) if one.priced is not None else (True, False):
            cuts = self._programme(one.setting, keeps)
            if cuts is not None and cuts != one.setting.cuts:
                yield self._priced(one.setting, cuts, self._rows(one.setting))

    def _moved(self, one: EvaluatedSetting) -> EvaluatedSetting:
        """Move units to an adjacent stage, one at a time, as long as the step gets quicker, or
        closer to what memory holds."""
        if one.setting.pp * sum(one.setting.cuts) > MAX_PROGRAMME:
            return one
        while True:
            rows, pp = self._rows(one.setting), len(one.setting.cuts)
            moves = islice(neighbour_splits(one.setting.cuts), 2 * (pp - 1))
            near = (self._priced(one.setting, cuts, rows) for cuts in moves)
            found = min(near, key=evaluation_key, default=one)
            if evaluation_key(found) >= evaluation_key(one):
                return one
            one = found

    @property
    def _nodes(self) -> Nodes:
        assert isinstance(self.job.cluster, Nodes)
        return self.job.cluster

    def _shaped(self, way: Setting) -> list[Shape]:
        """Splits into stages and rows of a candidate in one order; the same for every stage of
        ZeRO."""
        key = replace(way, zero=0)
        if key not in self._shapes:
            self._shapes[key] = list(self._shapes_of(key))
        return self._shapes[key]

    def _shapes_of(self, way: Setting) -> Iterator[Shape]:
        """Yield stages for equal rows, then stages and rows for replicas of unequal speed."""
        rows, machines = self._rows(way), replica_machines(way, order_nodes(self._nodes, way.nodes))
        cuts = self._cut(way, rows)
        if cuts is None:
            return
        yield cuts, rows
        if way.placement.ep > 1 or len(set(machines)) == 1 or way.placement.rows == 1:
            return
        for _ in range(ROW_ROUNDS):  # alternate: rows for these stages, stages for these rows
            before = cuts, rows
            clocks = {one: self._clock(way, one, cuts) for one in set(machines)}
            rows = split_rows(sum(rows), [clocks[one] for one in machines])
            cuts = self._cut(way, rows)
            if cuts is None or (cuts, rows) == before:
                return
            yield cuts, rows

    def _rows(self, way: Setting) -> tuple[int, ...]:
        return way.rows or (way.placement.rows,) * way.dp

    # -- seconds of a replica ----------------------------------------------------------------------

    def _chain(self, way: Setting, rows: int) -> Chain | None:
        at = replace(way.placement, rows=rows)
        if at not in self._chains:
            found = self.profiles(at)
            self._chains[at] = found if isinstance(found, Chain) else None
        return self._chains[at]

    def _table(self, way: Setting, rows: int, machine: Nodes) -> tuple[Floats, ...]:
        """Seconds of one unit of each run, summed over the causes of `run_seconds`."""
        axes = sending_axes(way)
        key = replace(way.placement, rows=rows), axes, machine
        if key not in self._tables:
            chain = self._chain(way, rows)
            assert chain is not None
            self._tables[key] = tuple(one.sum(1) for one in run_seconds(chain, axes, machine)[1])
        return self._tables[key]

    def _cut(self, way: Setting, rows: Sequence[int]) -> tuple[int, ...] | None:
        """Split for the slowest replica at each stage; None where the model cannot have these
        rows."""
        home = stage_ranks(way.order, way.pp, way.chunks)
        totals = []
        for kind in set(zip(rows, replica_machines(way, order_nodes(self._nodes, way.nodes)))):
            flat = self._flat(way, kind)
            if flat is None:
                return None
            totals.append([np.concatenate([[0.0], np.cumsum(flat[at])]) for at in home])
        return split_for_slowest(totals)

    def _programme(self, way: Setting, keeps: bool) -> tuple[int, ...] | None:
        """Split into stages by the dynamic programme for 1F1B, on devices with their own speed and
        memory.

        All units are recomputed unless `keeps`: then stages save activations.  Returns None for
        several stages on a rank, and for chains that would take too long.
        """
        kinds = dict.fromkeys(
            zip(self._rows(way), replica_machines(way, order_nodes(self._nodes, way.nodes)))
        )
        chains = [self._chain(way, rows) for rows, _ in kinds]
        large = way.pp * sum(way.cuts) > MAX_PROGRAMME
        if way.chunks > 1 or way.pp == 1 or large or any(chain is None for chain in chains):
            return None
        tables = [self._costs(way, kind, keeps) for kind in kinds]
        flying = count_in_flight(way.order, way.pp, way.micro, 1)[0].tolist()

        def menu(first: int, last: int, devices: range, after: int) -> Iterator[StageOption]:
            at = devices.start
            found = [one[at, :4, last] - one[at, :4, first] for one in tables]
            ahead, back = max(((one[0], one[1]) for one in found), key=sum)
            once = max(float(one[at, 4, first:last].max()) for one in tables)
            held, kept = max(one[2] for one in found) + once, max(one[3] for one in found)
            yield StageOption(ahead, back, held=held, kept=kept)

        problem = PartitionProblem(
            sum(way.cuts),
            menu,
            way.micro,
            devices=way.pp,
            stages=way.pp,
            memory=1.0,
            flight=lambda after: flying[way.pp - 1 - after],
        )
        found = find_partition(problem, ROUNDS)
        return None if found is None else found.units

    def _costs(self, way: Setting, kind: ReplicaKind, keeps: bool) -> Floats:
        """Costs of the units before each unit, at each place [places, 5, units + 1].

        The rows: seconds forward and backward, shares of the place's memory that state and
        activations fill, and the share that the unit itself needs once.
        """
        chain = self._chain(way, kind[0])
        assert chain is not None
        units = [run.unit for run in chain.runs]
        each = replace(way, pp=len(units), chunks=1, order="1F1B")  # each run as a stage
        state = state_bytes(chain, each, self.job.recipe, np.eye(len(units)), np.arange(len(units)))
        kept = np.array([u.kept if keeps else min(u.kept, u.input) for u in units])
        counts, found = [run.count for run in chain.runs], []
        for one in kind[1]:
            ahead, back, _, fore, hind = self._table(way, kind[0], one)
            if not keeps:
                ahead, back = ahead + fore, back + hind
            sums = [ahead, back, state / one.memory, kept / one.memory]
            rates = np.pad(np.repeat(sums, counts, axis=1).cumsum(1), ((0, 0), (1, 0)))
            once = np.repeat([unit.peak / one.memory for unit in units], counts)
            found.append(np.vstack([rates, np.append(once, 0.0)]))
        return np.array(found)

    def _flat(self, way: Setting, kind: ReplicaKind) -> list[Floats] | None:
        """Seconds of each unit at each place."""
        rows, machines = kind
        chain = self._chain(way, rows)
        if chain is None:
            return None
        counts = [run.count for run in chain.runs]
        tables = (self._table(way, rows, one) for one in machines)
        return [np.repeat(ahead + back, counts) for ahead, back, *_ in tables]

    def _passes(self, way: Setting, kind: ReplicaKind) -> tuple[Floats, Floats, Floats]:
        """Seconds of a microbatch at each stage: forward, and both halves of its backward."""
        rows, machines = kind
        chain = self._chain(way, rows)
        assert chain is not None
        made, more = units_by_stage(chain, way.cuts, way.again)
        home = stage_ranks(way.order, way.pp, way.chunks)
        each = np.array([self._table(way, rows, machines[at]) for at in home])
        ahead, back, half, fore, hind = each.transpose(1, 0, 2)
        forward, backward = (made * ahead + more * fore).sum(1), made * back + more * hind
        whole, halved = (one.sum(1, keepdims=True) for one in (backward, made * half))
        weights = weight_grad_seconds(way, whole, halved)
        return forward, (whole - weights)[:, 0], weights[:, 0]

    def _span(self, way: Setting, kind: ReplicaKind) -> tuple[float, float]:
        """Seconds of a replica's pipeline, and of the messages on its critical path."""
        key = replace(way, zero=min(way.zero, 1), rows=()), kind
        if key not in self._spans:
            self._spans[key] = self._longest(way, kind)
        return self._spans[key]

    def _longest(self, way: Setting, kind: ReplicaKind) -> tuple[float, float]:
        chain, passes = self._chain(way, kind[0]), self._passes(way, kind)
        assert chain is not None
        send = sum(
            took for _, took in stage_send_seconds(chain, way, order_nodes(self._nodes, way.nodes))
        )
        found = find_critical_path(way.order, way.pp, way.chunks, way.micro, *passes, send)
        return found.seconds(*passes, send), found.sends * send

    def _clock(
        self, way: Setting, machines: Machines, cuts: tuple[int, ...]
    ) -> Callable[[int], float]:
        """Return a function from rows to seconds of a replica."""
        known: dict[int, float] = {}
        split = replace(way, cuts=cuts)

        def took(rows: int) -> float:
            if rows not in known:
                possible = self._chain(way, rows) is not None
                known[rows] = self._span(split, (rows, machines))[0] if possible else np.inf
            return known[rows]

        return took

    # -- a price -----------------------------------------------------------------------------------

    def _priced(
        self, way: Setting, cuts: tuple[int, ...], rows: tuple[int, ...]
    ) -> EvaluatedSetting:
        """Price a candidate with its stages and rows, or say which rank has too little memory."""
        machines = replica_machines(way, order_nodes(self._nodes, way.nodes))
        kinds = list(dict.fromkeys(zip(rows, machines)))
        uneven = rows if len(set(rows)) > 1 else ()
        setting = replace(way, cuts=cuts, rows=uneven, again=())
        if any(self._chain(way, k) is None for k, _ in kinds):
            return EvaluatedSetting(setting, np.inf, 0.0)
        again: Ints = np.zeros(len(cuts), dtype=np.int64)
        for k, some in kinds:
            held = self._held(setting, k)
            fewest = held.fewest_recomputed(_memory(some), *self._bounds(setting))
            if fewest is None:
                return self._full(setting, held.bytes(np.zeros_like(again)), some)
            again = np.maximum(again, fewest)
        most = np.zeros(way.pp)
        for k, some in kinds:
            needs = self._held(setting, k).bytes(again)
            if (needs > _memory(some)).any():
                return self._full(setting, needs, some)
            most = np.maximum(most, needs)
        setting = replace(setting, again=tuple(again.tolist()) if again.any() else ())
        seconds, parts = self._seconds(setting, kinds)
        priced = Price(seconds, tuple(most.tolist()), parts)
        return EvaluatedSetting(setting, seconds, priced.peak, priced)

    def _held(self, setting: Setting, rows: int) -> RecomputeBytes:
        chain = self._chain(setting, rows)
        assert chain is not None
        return RecomputeBytes(chain, self.job, setting)

    def _full(self, setting: Setting, needs: Floats, machines: Machines) -> EvaluatedSetting:
        """Return a candidate that is too large for the memory of one of its ranks."""
        worst = int((needs / _memory(machines)).argmax())
        return EvaluatedSetting(
            setting, 0.0, float(needs[worst]), room=float(machines[worst].memory)
        )

    def _seconds(
        self, setting: Setting, kinds: Sequence[ReplicaKind]
    ) -> tuple[float, dict[str, float]]:
        """Seconds of a step, and its parts: of the replica that ends last, then of all replicas."""
        nodes, recipe, none = order_nodes(self._nodes, setting.nodes), self.job.recipe, NO_WEIGHTS
        last = max(kinds, key=lambda kind: self._span(setting, kind))
        (span, sends), passes = self._span(setting, last), self._passes(setting, last)
        chain, home = (
            self._chain(setting, last[0]),
            stage_ranks(setting.order, setting.pp, setting.chunks),
        )
        assert chain is not None
        made, _ = units_by_stage(chain, setting.cuts)
        held = parameters_by_place(chain, made, home, setting.pp)
        busy = np.bincount(home, sum(passes), setting.pp) * setting.micro
        units = np.bincount(home, made.sum(1), setting.pp)
        worst = int(busy.argmax())
        busiest = {COMPUTING: float(busy[worst])}
        most, often = held.max(0), round(float(units[worst]))
        sent = replica_seconds(setting, most, often, nodes, recipe, busiest, none)
        shared = tied_grad_seconds(chain, setting, nodes, recipe, made, home)
        every = [(at, one) for _, some in kinds for at, one in enumerate(some)]
        parts = dict(busiest)
        if setting.pp > 1:
            sends = min(sends, span - busiest[COMPUTING])
            parts |= {"pp": sends, "idle": span - busiest[COMPUTING] - sends}
        parts["gradients"] = sum(sent.values()) + sum(took for _, took in shared)
        parts["optimizer"] = max(
            optimizer_seconds(setting, held[at], one, recipe) for at, one in every
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
        for moved in neighbour_splits(setting.rows):
            yield self._priced(setting, setting.cuts, moved)


ROW_ROUNDS = 3
CLOSE_TO_BEST = 1.25  # a candidate within this factor of the best is improved
MAX_PROGRAMME = 300  # maximum of units * stages: beyond, the programme takes too long


def _memory(machines: Machines) -> Floats:
    """Bytes of the ranks of each place."""
    return np.array([float(one.memory) for one in machines])
