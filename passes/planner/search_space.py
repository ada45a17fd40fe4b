"""Search space: every candidate layout of a job on its ranks, as columns of numbers.

A candidate has the fields of a `Setting`, except its stages and what is recomputed: these
follow from the others (`fill`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.limits import AXES, CHOICES, Limits, Value
from schedlang.passes.planner.critical_path import order_timeline
from schedlang.passes.planner.values import Chain, Placement, Recipe, Setting
from schedlang.passes.simulate.machine import Cluster
from schedlang.passes.simulate.node_cluster import Nodes
from schedlang.pipeline.schedules import OrderError, checked_size, find_order

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# pipeline orders that a search tries by default, each with its numbers of stages on a rank.  Other
# orders must be pinned
ORDERS: dict[str, tuple[int, ...]] = {
    "1F1B": (1,),
    "Interleaved1F1B": (2, 3, 4, 6, 8),
    "ZB-H1": (1,),
    "ZB-V": (2,),
    "V-Half": (2,),
    "V-Min": (2,),
    "GPipe": (1,),
}
SPLIT_BACKWARD_ORDERS = (
    "ZB-H1",
    "ZB-V",
    "V-Half",
    "V-Min",
)  # orders with split backwards, unless ZeRO shards
AXIS_ORDERS = tuple(permutations(AXES))  # orders of the axes, the usual one first
SLICED_ORDERS = ("Seq1F1B", "TeraPipe")  # orders that slice sequences
SLICE_COUNTS = (1, 2, 4, 8, 16)  # numbers of slices that are tried by default
MIN_TOKENS = 1024  # minimal tokens of a rank of `cp`, or of a slice, where nothing is pinned


@dataclass(frozen=True)
class Job:
    """A batch to train on a cluster.

    ranks            of the cluster; `rows` of the batch of a full step
    length           tokens of a row, where it may be split; 0 where it may not
    experts          of a layer, where they may be spread over ranks; 0 where there are none
    can_slice        whether the model can run on slices of a row, one after the other
    tp_across_nodes  whether tensors may be sharded across nodes
    can_offload      whether activations and optimizer state may be on the host
    relative_speed   upper bound of the mean speed of a rank, where `cluster` has speed 1
    """

    ranks: int
    rows: int
    cluster: Cluster
    recipe: Recipe = Recipe()
    length: int = 0
    experts: int = 0
    can_slice: bool = False
    tp_across_nodes: bool = False
    can_offload: bool = True
    orders: tuple[str, ...] = tuple(ORDERS)
    relative_speed: float = 1.0


@dataclass(frozen=True)
class Candidates:
    """All candidates of placements that split tensors in the same way, in columns.

    one          index into `chains`, which differ in rows of a microbatch and in offloading
    order, axes  indices into `names` and into LAYS
    axis_orders  distinct orders of axes, by ranks of the pipeline
    """

    chains: tuple[Chain, ...]
    one: Ints
    pp: Ints
    dp: Ints
    micro: Ints
    order: Ints
    chunks: Ints
    zero: Ints
    axes: Ints
    names: tuple[str, ...]
    axis_orders: Mapping[int, tuple[int, ...]]

    def __len__(self) -> int:
        return len(self.pp)

    @property
    def chain(self) -> Chain:
        """The first chain."""
        return self.chains[0]

    @property
    def passes(self) -> Ints:
        """Forwards of each stage in a step."""
        return self.micro * self.chain.placement.slices

    @property
    def count(self) -> int:
        """Number of candidates, in all orders of their axes."""
        return int(self.count_axis_orders(np.arange(len(self))).sum())

    def setting(self, at: int) -> Setting:
        """Return candidate number `at`."""
        one, pp, dp, micro, order, chunks, zero, axes = (
            int(getattr(self, name)[at]) for name in COLUMNS
        )
        placement, laid = self.chains[one].placement, AXIS_ORDERS[axes]
        return Setting(placement, dp, pp, micro, self.names[order], chunks, zero, axes=laid)

    def select(self, some: Ints, **columns: Ints) -> Candidates:
        """Return the candidates of some indices, with other columns."""
        return replace(self, **{n: getattr(self, n)[some] for n in COLUMNS} | columns)

    def concatenate(self, other: Candidates) -> Candidates:
        """Concatenate these candidates and others of the same chains."""
        both = dict[str, Any]()
        for name in COLUMNS:
            both[name] = np.concatenate([getattr(self, name), getattr(other, name)])
        return replace(self, **both)

    def for_chains(self, chains: Sequence[Chain]) -> Candidates:
        """Repeat the candidates for each of `chains`, in the place of the first chain."""
        every = np.arange(len(self))
        some, one = np.tile(every, len(chains)), np.repeat(np.arange(len(chains)), len(self))
        return replace(self.select(some, one=one), chains=tuple(chains))

    def count_axis_orders(self, some: Ints) -> Ints:
        """Count the orders of axes of each candidate of some indices."""
        known, which = np.unique(self.pp[some], return_inverse=True)
        return np.array([len(self.axis_orders[pp]) for pp in known.tolist()], dtype=np.int64)[which]

    def in_all_axis_orders(self, some: Ints) -> tuple[Ints, Candidates]:
        """Repeat the candidates of some indices in every order of axes; also return each one's
        index."""
        rows, axes = [some[:0]], [some[:0]]
        for pp, lays in self.axis_orders.items():
            mine = some[self.pp[some] == pp]
            rows.append(np.repeat(mine, len(lays)))
            axes.append(np.tile(np.array(lays), len(mine)))
        every = np.concatenate(rows)
        return every, self.select(every, axes=np.concatenate(axes))


COLUMNS = ("one", "pp", "dp", "micro", "order", "chunks", "zero", "axes")


def concatenate_candidates(some: Sequence[Candidates]) -> Candidates:
    """Concatenate candidates of placements that split tensors in the same way."""
    first = np.cumsum([0, *(len(ways.chains) for ways in some)])
    columns = {n: np.concatenate([getattr(ways, n) for ways in some]) for n in COLUMNS}
    columns["one"] += np.repeat(first[:-1], [len(ways) for ways in some])
    chains = tuple(chain for ways in some for chain in ways.chains)
    lays = {pp: lays for ways in some for pp, lays in ways.axis_orders.items()}
    return Candidates(chains, names=some[0].names, axis_orders=lays, **columns)


def divisors(number: int) -> list[int]:
    """List all divisors of a number, in order."""
    low = [k for k in range(1, int(number**0.5) + 1) if number % k == 0]
    return sorted({*low, *(number // k for k in low)})


def iter_placements(job: Job, limits: Limits) -> Iterator[Placement]:
    """Yield the placements of a job with one row a microbatch, those that split tensors least
    first.

    Placements that differ in offloading alone follow one another.
    """
    sizes = [
        (tp * cp, ep, tp, cp)
        for tp in _tensors(job, limits)
        for cp in _contexts(job, limits, job.ranks // tp)
        for ep in _experts(job, limits, job.ranks // tp // cp)
    ]
    away = job.can_offload and ("offload" in limits.pinned or not isinstance(job.cluster, Nodes))
    hosts = limits.filter_admitted("offload", CHOICES["offload"] if away else ("none",))
    for _, ep, tp, cp in sorted(sizes):
        for sequence in limits.filter_admitted("sequence", (False, True) if tp > 1 else (False,)):
            plain = cp == ep == 1 and not sequence
            cut = {offload: _slices(job, limits, plain and offload == "none") for offload in hosts}
            for slices in sorted({k for some in cut.values() for k in some}):
                for offload in hosts:
                    if slices in cut[offload]:
                        yield Placement(1, tp, bool(sequence), cp, ep, str(offload), slices)


def distinct_axis_orders(
    job: Job, one: Placement, pp: int, dp: int, limits: Limits
) -> tuple[int, ...]:
    """Return orders of axes, as indices into LAYS, no two of which cost the same.

    Two orders cost the same where a node has equally many ranks of each axis in both.
    """
    found: dict[tuple[int, ...], int] = {}
    some = [at for at, order in enumerate(AXIS_ORDERS) if limits.admits("axes", "-".join(order))]
    if isinstance(job.cluster, Nodes) or job.ranks <= job.cluster.node:
        return tuple(some[:1])
    sizes, node = {"dp": dp, "pp": pp, "cp": one.cp, "tp": one.tp}, job.cluster.node
    # replicas are ranks of two axes, and tied weights of two stages may cross all of them
    most = {"dp": dp * one.cp, "pp": 2 * pp, "cp": dp * one.cp, "tp": one.tp}
    for at in some:
        order = AXIS_ORDERS[at]
        far = [math.prod(sizes[inner] for inner in order[k + 1 :]) for k in range(len(order))]
        near = {a: min(most[a], max(1, node // each)) for a, each in zip(order, far)}
        found.setdefault(tuple(near[axis] * (sizes[axis] > 1) for axis in AXES), at)
    return tuple(found.values())


def _slices(job: Job, limits: Limits, alone: bool = True) -> list[int]:
    """Numbers of slices of a row, where slices are known to run: never together with axes that
    split tokens."""
    pinned = [int(k) for k in limits.pinned.get("slices", ())]
    can_slice = job.can_slice and alone and not isinstance(job.cluster, Nodes)
    legal = (
        k
        for k in pinned or (SLICE_COUNTS if can_slice else (1,))
        if k == 1 or (can_slice and job.length >= k * (1 if pinned else MIN_TOKENS))
    )
    return _counts(limits, "slices", (k for k in legal if job.length % k == 0))


def _tensors(job: Job, limits: Limits) -> list[int]:
    most = job.ranks if job.tp_across_nodes or "tp" in limits.pinned else job.cluster.node
    return _counts(limits, "tp", (k for k in divisors(job.ranks) if k <= most))


def _contexts(job: Job, limits: Limits, ranks: int) -> list[int]:
    least = 2 if "cp" in limits.pinned else MIN_TOKENS
    legal = (
        k
        for k in divisors(ranks)
        if k == 1 or (job.length % (2 * k) == 0 and job.length >= k * least)
    )
    return _counts(limits, "cp", legal)


def _experts(job: Job, limits: Limits, replicas: int) -> list[int]:
    legal = (k for k in divisors(replicas) if k == 1 or (job.experts and job.experts % k == 0))
    return _counts(limits, "ep", legal)


def _counts(limits: Limits, name: str, legal: Iterable[int]) -> list[int]:
    return [int(value) for value in limits.filter_admitted(name, legal)]


def microbatch_rows(job: Job, group: Placement, limits: Limits) -> list[int]:
    """Rows that a microbatch of one rank may have, the fewest first.

    Slices are tried for want of rows: with slices only the fewest rows count, unless pinned.
    """
    found = _counts(limits, "rows", divisors(job.rows))
    return found[:1] if group.slices > 1 and "slices" not in limits.pinned else found


def list_candidates(job: Job, chain: Chain, limits: Limits) -> Candidates | None:
    """List all candidates of one placement that keep the hard rules, in the first order of axes;
    None where there is none.

    The rules: all ranks are used, the batch fills the microbatches, experts fit into the replicas,
    each stage has at least one unit, the order exists for its sizes.
    """
    one, found, each = chain.placement, [], dict[int, tuple[int, ...]]()
    rest, most = job.ranks // (one.tp * one.cp), chain.length
    more = [str(name) for name in limits.pinned.get("order", ()) if name not in job.orders]
    known = SLICED_ORDERS if one.slices > 1 else (*job.orders, *more)
    names = tuple(name for name in known if limits.admits("order", name))
    # ZeRO would gather shards again for a second half, so both halves run at once: only by a pin
    halved = {
        at
        for at, name in enumerate(names)
        if name in SPLIT_BACKWARD_ORDERS and "order" not in limits.pinned
    }
    for pp in _counts(limits, "pp", (k for k in divisors(rest) if k <= most)):
        dp = rest // pp
        if dp % one.ep or job.rows % (dp * one.rows) or not limits.admits("dp", dp):
            continue
        micro = job.rows // (dp * one.rows)
        if not limits.admits("micro", micro):
            continue
        zeros = _counts(limits, "zero", range(4) if dp > 1 else (0,))
        orders = _orders(names, pp, micro, most // pp, limits, one.slices)
        gathered = {zero for zero in zeros if zero and dp > 1}
        each[pp] = distinct_axis_orders(job, one, pp, dp, limits)
        found += [
            (0, pp, dp, micro, *way, zero, first)
            for first in each[pp][:1]
            for way in orders
            for zero in zeros
            if zero not in gathered or way[0] not in halved
        ]
    if not found:
        return None
    columns = dict(zip(COLUMNS, np.array(found, dtype=np.int64).T))
    return Candidates((chain,), names=names, axis_orders=each, **columns)


def _orders(
    names: Sequence[str], pp: int, micro: int, most: int, limits: Limits, slices: int = 1
) -> list[tuple[int, int]]:
    """Orders by their indices in `names`, with chunks; a single stage needs one order only."""
    if pp == 1:
        alone = [(at, 1) for at, name in enumerate(names) if name == "1F1B"]
        return alone if limits.admits("chunks", 1) else []
    return [
        (at, chunks)
        for at, name in enumerate(names)
        for chunks in _chunks(name, limits)
        if chunks <= most and has_order(name, pp, micro, chunks, slices)
    ]


def _chunks(name: str, limits: Limits) -> list[int]:
    own = ORDERS.get(name) or find_order(name).chunks or (2, 3, 4, 6, 8)
    if "chunks" in limits.pinned and len(own) > 1:
        own = tuple(int(value) for value in limits.pinned["chunks"])
    return _counts(limits, "chunks", own)


def check_job_limits(job: Job, limits: Limits) -> None:
    """Refuse (S109) limits that no value of an axis, or of `rows`, can meet in this job."""
    every, alike = divisors(job.ranks), not isinstance(job.cluster, Nodes)
    free = Limits({"cp": tuple(every)} if "cp" in limits.pinned else {})
    legal: dict[str, Sequence[Value]] = {
        **dict.fromkeys(("dp", "pp", "tp"), every),
        "cp": _contexts(job, free, job.ranks),
        "ep": _experts(job, Limits(), job.ranks),
        "rows": divisors(job.rows),
        "slices": sorted({*_slices(job, Limits()), *_slices(job, limits.for_name("slices"))}),
        "axes": ["-".join(order) for order in AXIS_ORDERS if alike or order[2:] == AXES[2:]],
    }
    for name, values in legal.items():
        if not limits.filter_admitted(name, values):
            sized = f"{job.rows} rows" if name == "rows" else f"{job.ranks} ranks"
            title = f"no way to lay {sized} has {limits.for_name(name).text()}"
            one_of = f"`{name}` may be {', '.join(map(str, values))}"
            raise Refusal.of("S109", title, helps=(one_of,))


def check_pinned_orders(limits: Limits) -> None:
    """Refuse (S109) pinned orders that cannot be priced."""
    for name in limits.pinned.get("order", ()):
        for chunks in _chunks(str(name), Limits()):
            try:
                order_timeline(str(name), 4, 8, chunks)
                break
            except OrderError as error:
                reason = error
        else:
            title = f"a search does not price `{name}`: {reason.reason}"
            raise Refusal.of("S109", title, helps=(reason.legal,))


@lru_cache(maxsize=100_000)
def has_order(name: str, pp: int, micro: int, chunks: int, slices: int = 1) -> bool:
    """Return whether an order of the catalogue exists for these sizes."""
    try:
        checked_size(find_order(name), pp, micro, chunks, slices=slices)
    except OrderError:
        return False
    return True
