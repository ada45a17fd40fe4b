"""The space of a search: every way to lay a job on its ranks, as columns of numbers.

A way is what a `Setting` says but for its cuts and what is computed again: these follow from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.limits import CHOICES, Limits
from schedlang.passes.planner.span import played
from schedlang.passes.planner.values import Chain, Placement, Recipe, Setting
from schedlang.passes.simulate.machine import Cluster
from schedlang.passes.simulate.nodes import Nodes
from schedlang.pipeline.schedules import OrderError, find, sized

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# orders of the catalogue that a search tries unasked, and the stages on each rank of each.  Those
# with more need no other message than these; the others must be pinned
ORDERS: dict[str, tuple[int, ...]] = {
    "1F1B": (1,),
    "Interleaved1F1B": (2, 3, 4, 6, 8),
    "ZB-H1": (1,),
    "ZB-V": (2,),
    "V-Half": (2,),
    "V-Min": (2,),
    "GPipe": (1,),
}
HALVED = ("ZB-H1", "ZB-V", "V-Half", "V-Min")  # a backward in halves, but beside slices of ZeRO
SLICED = ("Seq1F1B", "TeraPipe")  # those that cut sequences
PARTS = (1, 2, 4, 8, 16)  # slices that are tried unasked
SLICE = 1024  # tokens that a rank of `cp`, or a slice, has at least, where nothing is pinned


@dataclass(frozen=True)
class Job:
    """A batch to be trained on a cluster.

    ranks    of the cluster; `rows` of the batch of a whole step
    length   tokens of a row, where it may be split; 0: it may not
    experts  of a layer, where they may lie apart; 0: there are none
    sliced   its model may run on slices of a row, one after the other
    across   tensors may be split over nodes too
    offload  activations and the optimizer's state may lie on the host
    worth    of a rank beside one that is as quick as the cluster, in the mean: at most
    """

    ranks: int
    rows: int
    cluster: Cluster
    recipe: Recipe = Recipe()
    length: int = 0
    experts: int = 0
    sliced: bool = False
    across: bool = False
    offload: bool = True
    orders: tuple[str, ...] = tuple(ORDERS)
    worth: float = 1.0


@dataclass(frozen=True)
class Ways:
    """All ways of one placement, in columns."""

    chain: Chain
    pp: Ints
    dp: Ints
    micro: Ints
    order: Ints  # place in `names`
    chunks: Ints
    zero: Ints
    names: tuple[str, ...] = field(default=())

    def __len__(self) -> int:
        return len(self.pp)

    @property
    def passes(self) -> Ints:
        """Forwards of each stage in a step."""
        return self.micro * self.chain.placement.slices

    def setting(self, at: int) -> Setting:
        """Return one of them."""
        pp, dp, micro, order, chunks, zero = (
            int(column[at])
            for column in (self.pp, self.dp, self.micro, self.order, self.chunks, self.zero)
        )
        return Setting(self.chain.placement, dp, pp, micro, self.names[order], chunks, zero)


def divisors(number: int) -> list[int]:
    """All of them, in order."""
    low = [k for k in range(1, int(number**0.5) + 1) if number % k == 0]
    return sorted({*low, *(number // k for k in low)})


def groups(job: Job, limits: Limits) -> Iterator[Placement]:
    """Ways to split tensors, for one row; those without offloading come first, and of them those
    that split least."""
    sizes = [
        (tp * cp, ep, tp, cp)
        for tp in _tensors(job, limits)
        for cp in _contexts(job, limits, job.ranks // tp)
        for ep in _experts(job, limits, job.ranks // tp // cp)
    ]
    away = job.offload and ("offload" in limits.pinned or not isinstance(job.cluster, Nodes))
    for offload in limits.admitted("offload", CHOICES["offload"] if away else ("none",)):
        for _, ep, tp, cp in sorted(sizes):
            for sequence in limits.admitted("sequence", (False, True) if tp > 1 else (False,)):
                whole = cp == ep == 1 and not sequence and offload == "none"
                for slices in _slices(job, limits, whole):
                    yield Placement(1, tp, bool(sequence), cp, ep, str(offload), slices)


def _slices(job: Job, limits: Limits, whole: bool = True) -> list[int]:
    """Slices of a row, beside what has been seen to run with them: no ranks split it as well."""
    asked = [int(k) for k in limits.pinned.get("slices", ())]
    able = job.sliced and whole and not isinstance(job.cluster, Nodes)
    legal = (
        k
        for k in asked or (PARTS if able else (1,))
        if k == 1 or (able and job.length >= k * (1 if asked else SLICE))
    )
    return _counts(limits, "slices", (k for k in legal if job.length % k == 0))


def _tensors(job: Job, limits: Limits) -> list[int]:
    most = job.ranks if job.across or "tp" in limits.pinned else job.cluster.node
    return _counts(limits, "tp", (k for k in divisors(job.ranks) if k <= most))


def _contexts(job: Job, limits: Limits, ranks: int) -> list[int]:
    least = 2 if "cp" in limits.pinned else SLICE
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
    return [int(value) for value in limits.admitted(name, legal)]


def rows_of(job: Job, group: Placement, limits: Limits) -> list[int]:
    """Rows that a microbatch of one rank may have, the fewest first; beside slices, which are cut
    for want of rows, these alone where nothing is pinned."""
    found = _counts(limits, "rows", divisors(job.rows))
    return found[:1] if group.slices > 1 and "slices" not in limits.pinned else found


def ways(job: Job, chain: Chain, limits: Limits) -> Ways | None:
    """All ways of one placement that keep the hard rules; None where there is none.

    Ranks are used up, the batch fills the microbatches, experts fit into the replicas, a stage has
    a unit at least, the order exists for its sizes.
    """
    one, found = chain.placement, []
    rest = job.ranks // (one.tp * one.cp)
    more = [str(name) for name in limits.pinned.get("order", ()) if name not in job.orders]
    known = SLICED if one.slices > 1 else (*job.orders, *more)
    names = tuple(name for name in known if limits.admits("order", name))
    # slices are gathered anew for the second half, so both are run at once: worth a pin alone
    halved = {
        at for at, name in enumerate(names) if name in HALVED and "order" not in limits.pinned
    }
    for pp in _counts(limits, "pp", (k for k in divisors(rest) if k <= chain.length)):
        dp = rest // pp
        if dp % one.ep or job.rows % (dp * one.rows) or not limits.admits("dp", dp):
            continue
        micro = job.rows // (dp * one.rows)
        if not limits.admits("micro", micro):
            continue
        zeros = _counts(limits, "zero", range(4) if dp > 1 else (0,))
        orders = _orders(names, pp, micro, chain.length // pp, limits, one.slices)
        gathered = {zero for zero in zeros if zero and dp > 1}
        found += [
            (pp, dp, micro, *way, zero)
            for way in orders
            for zero in zeros
            if zero not in gathered or way[0] not in halved
        ]
    if not found:
        return None
    pps, dps, micros, at, chunks, stages = np.array(found, dtype=np.int64).T
    return Ways(chain, pps, dps, micros, at, chunks, stages, names)


def _orders(
    names: Sequence[str], pp: int, micro: int, most: int, limits: Limits, slices: int = 1
) -> list[tuple[int, int]]:
    """Orders by their places in `names`, and their chunks; one rank has no need of several."""
    if pp == 1:
        alone = [(at, 1) for at, name in enumerate(names) if name == "1F1B"]
        return alone if limits.admits("chunks", 1) else []
    return [
        (at, chunks)
        for at, name in enumerate(names)
        for chunks in _chunks(name, limits)
        if chunks <= most and exists(name, pp, micro, chunks, slices)
    ]


def _chunks(name: str, limits: Limits) -> list[int]:
    own = ORDERS.get(name) or find(name).chunks or (2, 3, 4, 6, 8)
    if "chunks" in limits.pinned and len(own) > 1:
        own = tuple(int(value) for value in limits.pinned["chunks"])
    return _counts(limits, "chunks", own)


def demand(job: Job, limits: Limits) -> None:
    """Refuse (S109) limits that no value of an axis, or of `rows`, can meet in this job."""
    every = divisors(job.ranks)
    free = Limits({"cp": tuple(every)} if "cp" in limits.pinned else {})
    legal = {
        **dict.fromkeys(("dp", "pp", "tp"), every),
        "cp": _contexts(job, free, job.ranks),
        "ep": _experts(job, Limits(), job.ranks),
        "rows": divisors(job.rows),
        "slices": sorted({*_slices(job, Limits()), *_slices(job, limits.of("slices"))}),
    }
    for name, values in legal.items():
        if not limits.admitted(name, values):
            sized = f"{job.rows} rows" if name == "rows" else f"{job.ranks} ranks"
            title = f"no way to lay {sized} has {limits.of(name).text()}"
            one_of = f"`{name}` may be {', '.join(map(str, values))}"
            raise Refusal.of("S109", title, helps=(one_of,))


def check(limits: Limits) -> None:
    """Refuse (S109) orders that are pinned, and cannot be priced."""
    for name in limits.pinned.get("order", ()):
        for chunks in _chunks(str(name), Limits()):
            try:
                played(str(name), 4, 8, chunks)
                break
            except OrderError as error:
                reason = error
        else:
            title = f"a search does not price `{name}`: {reason.reason}"
            raise Refusal.of("S109", title, helps=(reason.legal,))


@lru_cache(maxsize=100_000)
def exists(name: str, pp: int, micro: int, chunks: int, slices: int = 1) -> bool:
    """Return whether an order of the catalogue exists for these sizes."""
    try:
        sized(find(name), pp, micro, chunks, slices=slices)
    except OrderError:
        return False
    return True
