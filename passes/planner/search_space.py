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
    sums_batch       whether the loss has sums over the batch: ranks with tokens of the same rows
                     share them, and microbatches cannot
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
    sums_batch: bool = False
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

    def setting(self, index: int) -> Setting:
        """Return candidate number `index`."""
        chain_index, pp, dp, micro, order, chunks, zero, axes = (
            int(getattr(self, name)[index]) for name in COLUMNS
        )
        placement, axis_order = self.chains[chain_index].placement, AXIS_ORDERS[axes]
        return Setting(placement, dp, pp, micro, self.names[order], chunks, zero, axes=axis_order)

    def select(self, indices: Ints, **columns: Ints) -> Candidates:
        """Return the candidates of some indices, with other columns."""
        return replace(self, **{n: getattr(self, n)[indices] for n in COLUMNS} | columns)

    def concatenate(self, other: Candidates) -> Candidates:
        """Concatenate these candidates and others of the same chains."""
        columns = dict[str, Any]()
        for name in COLUMNS:
            columns[name] = np.concatenate([getattr(self, name), getattr(other, name)])
        return replace(self, **columns)

    def for_chains(self, chains: Sequence[Chain]) -> Candidates:
        """Repeat the candidates for each of `chains`, in the place of the first chain."""
        indices = np.arange(len(self))
        rows, index = np.tile(indices, len(chains)), np.repeat(np.arange(len(chains)), len(self))
        return replace(self.select(rows, one=index), chains=tuple(chains))

    def count_axis_orders(self, indices: Ints) -> Ints:
        """Count the orders of axes of each candidate of some indices."""
        sizes, index = np.unique(self.pp[indices], return_inverse=True)
        return np.array([len(self.axis_orders[pp]) for pp in sizes.tolist()], dtype=np.int64)[index]

    def in_all_axis_orders(self, indices: Ints) -> tuple[Ints, Candidates]:
        """Repeat the candidates of some indices in every order of axes; also return each one's
        index."""
        rows, axes = [indices[:0]], [indices[:0]]
        for pp, orders in self.axis_orders.items():
            selected = indices[self.pp[indices] == pp]
            rows.append(np.repeat(selected, len(orders)))
            axes.append(np.tile(np.array(orders), len(selected)))
        repeated = np.concatenate(rows)
        return repeated, self.select(repeated, axes=np.concatenate(axes))


COLUMNS = ("one", "pp", "dp", "micro", "order", "chunks", "zero", "axes")


def concatenate_candidates(parts: Sequence[Candidates]) -> Candidates:
    """Concatenate candidates of placements that split tensors in the same way."""
    offsets = np.cumsum([0, *(len(part.chains) for part in parts)])
    columns = {n: np.concatenate([getattr(part, n) for part in parts]) for n in COLUMNS}
    columns["one"] += np.repeat(offsets[:-1], [len(part) for part in parts])
    chains = tuple(chain for part in parts for chain in part.chains)
    orders = {pp: orders for part in parts for pp, orders in part.axis_orders.items()}
    return Candidates(chains, names=parts[0].names, axis_orders=orders, **columns)


def divisors(number: int) -> list[int]:
    """List all divisors of a number, in order."""
    small = [k for k in range(1, int(number**0.5) + 1) if number % k == 0]
    return sorted({*small, *(number // k for k in small)})


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
    hosted = job.can_offload and ("offload" in limits.pinned or not isinstance(job.cluster, Nodes))
    offloads = limits.filter_admitted("offload", CHOICES["offload"] if hosted else ("none",))
    for _, ep, tp, cp in sorted(sizes):
        for sequence in limits.filter_admitted("sequence", (False, True) if tp > 1 else (False,)):
            single = cp == ep == 1 and not sequence
            slices_of = {
                offload: _slices(job, limits, single and offload == "none") for offload in offloads
            }
            for slices in sorted({k for counts in slices_of.values() for k in counts}):
                for offload in offloads:
                    if slices in slices_of[offload]:
                        yield Placement(1, tp, bool(sequence), cp, ep, str(offload), slices)


def distinct_axis_orders(
    job: Job, placement: Placement, pp: int, dp: int, limits: Limits
) -> tuple[int, ...]:
    """Return orders of axes, as indices into LAYS, no two of which cost the same.

    Two orders cost the same where a node has equally many ranks of each axis in both.
    """
    found: dict[tuple[int, ...], int] = {}
    permitted = [i for i, order in enumerate(AXIS_ORDERS) if limits.admits("axes", "-".join(order))]
    if isinstance(job.cluster, Nodes) or job.ranks <= job.cluster.node:
        return tuple(permitted[:1])
    sizes, node = {"dp": dp, "pp": pp, "cp": placement.cp, "tp": placement.tp}, job.cluster.node
    # replicas are ranks of two axes, and tied weights of two stages may cross all of them
    extent = {"dp": dp * placement.cp, "pp": 2 * pp, "cp": dp * placement.cp, "tp": placement.tp}
    for i in permitted:
        order = AXIS_ORDERS[i]
        strides = [math.prod(sizes[inner] for inner in order[k + 1 :]) for k in range(len(order))]
        inside = {a: min(extent[a], max(1, node // stride)) for a, stride in zip(order, strides)}
        found.setdefault(tuple(inside[axis] * (sizes[axis] > 1) for axis in AXES), i)
    return tuple(found.values())


def _slices(job: Job, limits: Limits, single: bool = True) -> list[int]:
    """Numbers of slices of a row, where slices are known to run: never together with axes that
    split tokens."""
    pinned = [int(k) for k in limits.pinned.get("slices", ())]
    can_slice = job.can_slice and single and not isinstance(job.cluster, Nodes)
    counts = (
        k
        for k in pinned or (SLICE_COUNTS if can_slice else (1,))
        if k == 1 or (can_slice and job.length >= k * (1 if pinned else MIN_TOKENS))
    )
    return _counts(limits, "slices", (k for k in counts if job.length % k == 0))


def _tensors(job: Job, limits: Limits) -> list[int]:
    limit = job.ranks if job.tp_across_nodes or "tp" in limits.pinned else job.cluster.node
    return _counts(limits, "tp", (k for k in divisors(job.ranks) if k <= limit))


def _contexts(job: Job, limits: Limits, ranks: int) -> list[int]:
    min_tokens = 2 if "cp" in limits.pinned else MIN_TOKENS
    sizes = (
        k
        for k in divisors(ranks)
        if k == 1 or (job.length % (2 * k) == 0 and job.length >= k * min_tokens)
    )
    return _counts(limits, "cp", sizes)


def _experts(job: Job, limits: Limits, replicas: int) -> list[int]:
    sizes = (k for k in divisors(replicas) if k == 1 or (job.experts and job.experts % k == 0))
    return _counts(limits, "ep", sizes)


def _counts(limits: Limits, name: str, values: Iterable[int]) -> list[int]:
    return [int(value) for value in limits.filter_admitted(name, values)]


def microbatch_rows(job: Job, group: Placement, limits: Limits) -> list[int]:
    """Rows that a microbatch of one rank may have, the fewest first.

    Slices are tried for want of rows: with slices only the fewest rows count, unless pinned.
    """
    row_counts = _counts(limits, "rows", divisors(job.rows))
    return row_counts[:1] if group.slices > 1 and "slices" not in limits.pinned else row_counts


def list_candidates(job: Job, chain: Chain, limits: Limits) -> Candidates | None:
    """List all candidates of one placement that keep the hard rules, in the first order of axes;
    None where there is none.

    The rules: all ranks are used, the batch fills the microbatches, experts fit into the replicas,
    each stage has at least one unit, the order exists for its sizes.
    """
    placement, rows, axis_orders = chain.placement, [], dict[int, tuple[int, ...]]()
    ranks_left, max_stages = job.ranks // (placement.tp * placement.cp), chain.length
    pinned = [str(name) for name in limits.pinned.get("order", ()) if name not in job.orders]
    tried = SLICED_ORDERS if placement.slices > 1 else (*job.orders, *pinned)
    names = tuple(name for name in tried if limits.admits("order", name))
    # ZeRO would gather shards again for a second half, so both halves run at once: only by a pin
    split_orders = {
        index
        for index, name in enumerate(names)
        if name in SPLIT_BACKWARD_ORDERS and "order" not in limits.pinned
    }
    for pp in _counts(limits, "pp", (k for k in divisors(ranks_left) if k <= max_stages)):
        dp = ranks_left // pp
        if dp % placement.ep or job.rows % (dp * placement.rows) or not limits.admits("dp", dp):
            continue
        micro = job.rows // (dp * placement.rows)
        if not limits.admits("micro", micro) or job.sums_batch and placement.cp > 1 < micro:
            continue
        zeros = _counts(limits, "zero", range(4) if dp > 1 else (0,))
        orders = _orders(names, pp, micro, max_stages // pp, limits, placement.slices)
        gathered = {zero for zero in zeros if zero and dp > 1}
        axis_orders[pp] = distinct_axis_orders(job, placement, pp, dp, limits)
        rows += [
            (0, pp, dp, micro, *order_chunks, zero, axis_order)
            for axis_order in axis_orders[pp][:1]
            for order_chunks in orders
            for zero in zeros
            if zero not in gathered or order_chunks[0] not in split_orders
        ]
    if not rows:
        return None
    columns = dict(zip(COLUMNS, np.array(rows, dtype=np.int64).T))
    return Candidates((chain,), names=names, axis_orders=axis_orders, **columns)


def _orders(
    names: Sequence[str], pp: int, micro: int, max_chunks: int, limits: Limits, slices: int = 1
) -> list[tuple[int, int]]:
    """Orders by their indices in `names`, with chunks; a single stage needs one order only."""
    if pp == 1:
        single = [(index, 1) for index, name in enumerate(names) if name == "1F1B"]
        return single if limits.admits("chunks", 1) else []
    return [
        (index, chunks)
        for index, name in enumerate(names)
        for chunks in _chunks(name, limits)
        if chunks <= max_chunks and has_order(name, pp, micro, chunks, slices)
    ]


def _chunks(name: str, limits: Limits) -> list[int]:
    counts = ORDERS.get(name) or find_order(name).chunks or (2, 3, 4, 6, 8)
    if "chunks" in limits.pinned and len(counts) > 1:
        counts = tuple(int(value) for value in limits.pinned["chunks"])
    return _counts(limits, "chunks", counts)


def check_job_limits(job: Job, limits: Limits) -> None:
    """Refuse (S109) limits that no value of an axis, or of `rows`, can meet in this job."""
    rank_counts, equal_ranks = divisors(job.ranks), not isinstance(job.cluster, Nodes)
    free = Limits({"cp": tuple(rank_counts)} if "cp" in limits.pinned else {})
    permitted: dict[str, Sequence[Value]] = {
        **dict.fromkeys(("dp", "pp", "tp"), rank_counts),
        "cp": _contexts(job, free, job.ranks),
        "ep": _experts(job, Limits(), job.ranks),
        "rows": divisors(job.rows),
        "slices": sorted({*_slices(job, Limits()), *_slices(job, limits.for_name("slices"))}),
        "axes": ["-".join(order) for order in AXIS_ORDERS if equal_ranks or order[2:] == AXES[2:]],
    }
    for name, values in permitted.items():
        if not limits.filter_admitted(name, values):
            sized = f"{job.rows} rows" if name == "rows" else f"{job.ranks} ranks"
            message = f"no way to lay {sized} has {limits.for_name(name).text()}"
            one_of = f"`{name}` may be {', '.join(map(str, values))}"
            raise Refusal.of("S109", message, helps=(one_of,))
    if job.sums_batch and not limits.admits("cp", 1) and not limits.admits("micro", 1):
        message = f"no way has {limits.for_name('cp').text()} and {limits.for_name('micro').text()}"
        note = (
            "the loss has sums over the batch, which microbatches of split sequences cannot share"
        )
        raise Refusal.of("S109", message, notes=(note,), helps=("allow `micro=1`", "or `cp=1`"))


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
            message = f"a search does not price `{name}`: {reason.reason}"
            raise Refusal.of("S109", message, helps=(reason.legal,))


@lru_cache(maxsize=100_000)
def has_order(name: str, pp: int, micro: int, chunks: int, slices: int = 1) -> bool:
    """Return whether an order of the catalogue exists for these sizes."""
    try:
        checked_size(find_order(name), pp, micro, chunks, slices=slices)
    except OrderError:
        return False
    return True
