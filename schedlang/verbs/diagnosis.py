"""Diagnosis of a job from the ledgers of its ranks: ranks waited for, slow ranks, rates of links.

Used by `schedlang doctor`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from schedlang.verbs.ledgers import Job, Ledger, Op

SILENT_AFTER = 10.0  # seconds without a sign of life of a rank that writes each second
STUCK_AFTER = 30.0  # default: seconds in one operation
SLOW_FACTOR = 1.2  # relative to the median rank's own time
LAST_STEPS = 32  # steps that are compared
LARGE_BYTES = 1 << 16  # smallest transfer in bytes that measures a link


@dataclass(frozen=True)
class PendingOp:
    """An operation in which ranks have waited for `seconds`, and the ranks that have not reached
    it."""

    op: Op
    ranks: tuple[int, ...]
    waiting: tuple[int, ...]
    absent: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class Divergence:
    """The first collective in which two ranks of a group differ: one of them has skipped
    something."""

    lane: str
    ranks: tuple[int, int]
    ops: tuple[Op, Op]


@dataclass(frozen=True)
class Pace:
    """The steps of a rank: median seconds from end to end, and without waiting (`own`)."""

    rank: int
    cycle: float
    own: float


@dataclass(frozen=True)
class Link:
    """Transfers among some ranks: count, median size, and median bytes per second of each rank."""

    ranks: tuple[int, ...]
    op: str
    count: int
    size: int
    rate: float


@dataclass(frozen=True)
class Diagnosis:
    """The findings about a job.

    after    seconds in one operation after which a job counts as stuck
    silent   ranks without a sign of life, with the seconds; `ended`: ranks that have ended
    causes   ranks that all others wait for, directly or not; () for a circle
    """

    job: Job
    after: float
    unrecorded: tuple[int, ...]
    silent: Mapping[int, float]
    ended: tuple[int, ...]
    missing: tuple[PendingOp, ...]
    differs: tuple[Divergence, ...]
    causes: tuple[int, ...]
    paces: tuple[Pace, ...]
    slow: tuple[Pace, ...]
    links: tuple[Link, ...]

    @property
    def is_stuck(self) -> bool:
        """Whether some rank waits for too long."""
        return any(pending.seconds >= self.after for pending in self.missing)

    @property
    def is_healthy(self) -> bool:
        """Whether there is nothing to report."""
        ended_early = [rank for rank in self.ended if len(self.ended) < len(self.job.ledgers)]
        failed = [ledger for ledger in self.job.ledgers.values() if ledger.error]
        return not (
            self.unrecorded or self.silent or self.is_stuck or self.slow or ended_early or failed
        )


def diagnose(job: Job, after: float = STUCK_AFTER) -> Diagnosis:
    """Diagnose a job from all its ledgers."""
    ended = tuple(rank for rank, one in job.ledgers.items() if one.over)
    silent = {
        rank: job.now - one.written
        for rank, one in job.ledgers.items()
        if one.live and not one.over and job.now - one.written > SILENT_AFTER
    }
    never = tuple(rank for rank in range(job.world) if rank not in job.ledgers)
    missing = tuple(_find_pending(job))
    stuck = any(one.seconds >= after for one in missing)
    paces = tuple(_measure_paces(job))
    return Diagnosis(
        *(job, after, never, silent, ended, missing),
        differs=tuple(_find_differences(job)) if stuck else (),
        causes=_find_causes(missing),
        paces=paces,
        slow=tuple(_find_slow(paces)),
        links=tuple(_measure_links(job)),
    )


# -- who waits for whom ----------------------------------------------------------------------------


def _find_pending(job: Job) -> Iterator[PendingOp]:
    """Yield every operation in which some rank waits, by start time."""
    pending: dict[object, list[tuple[int, Op]]] = {}
    for rank, ledger in sorted(job.ledgers.items()):
        if ledger.waits is not None and not ledger.over:
            op = ledger.waits
            key = (op.lane, op.number, op.ends, op.op if op.ends is not None else "")
            pending.setdefault(key, []).append((rank, op))
    for group in sorted(pending.values(), key=lambda group: min(op.began for _, op in group)):
        op, waiting = group[0][1], tuple(rank for rank, _ in group)
        ranks = op.ends or next(
            (job.ledgers[r].lanes[op.lane] for r in waiting if op.lane in job.ledgers[r].lanes), ()
        )
        absent = tuple(
            rank
            for rank in ranks
            if rank not in waiting and rank >= 0 and not _has_reached(job, rank, op)
        )
        ledgers = [job.ledgers[rank] for rank in waiting]
        latest = max(min(job.now, ledger.written + SILENT_AFTER) for ledger in ledgers)
        yield PendingOp(op, tuple(ranks), waiting, absent, latest - min(o.began for _, o in group))


_OTHER = {"send": "receive", "receive": "send"}


def _has_reached(job: Job, rank: int, op: Op) -> bool:
    """Return whether a rank has begun the same collective, or the other end of a message."""
    ledger = job.ledgers.get(rank)
    if ledger is None:
        return False
    if op.ends is None:
        return ledger.counts.get((op.lane, "", None), 0) >= op.number
    other = _OTHER.get(op.op, op.op)
    if not ledger.live:  # a flight recorder counts the messages per rank, not per pair
        return ledger.waits is not None and (ledger.waits.op, ledger.waits.ends) == (other, op.ends)
    return ledger.counts.get((op.lane, other, op.ends), 0) >= op.number


def _find_causes(missing: Sequence[PendingOp]) -> tuple[int, ...]:
    """Return the ranks that others wait for, and that wait for no rank.

    An operation counts if ranks have not reached it, or if all its ranks are stuck in it.
    """
    blocked = [
        pending for pending in missing if pending.absent or {*pending.waiting} == {*pending.ranks}
    ]
    waiting = {rank for pending in blocked for rank in pending.waiting}
    absent = {rank for pending in missing for rank in pending.absent}
    return tuple(sorted(absent - waiting))


def _find_differences(job: Job) -> Iterator[Divergence]:
    """Find in each group the first collective in which a rank differs from the group's first rank.

    Only operations that both ledgers still contain are compared. Shapes may differ, as in
    all-to-alls.
    """
    lanes: dict[str, tuple[int, ...]] = {}
    for ledger in job.ledgers.values():
        lanes.update(ledger.lanes)
    for lane, ranks in lanes.items():
        kept = {
            rank: _collectives_of(job.ledgers[rank], lane) for rank in ranks if rank in job.ledgers
        }
        if not kept:
            continue
        first, *others = kept
        for rank in others:
            shared = sorted(kept[first].keys() & kept[rank].keys())
            pairs = ((kept[first][k], kept[rank][k]) for k in shared)
            differing = next(((a, b) for a, b in pairs if (a.op, a.whose) != (b.op, b.whose)), None)
            if differing is not None:
                yield Divergence(lane, (first, rank), differing)
                break


def _collectives_of(ledger: Ledger, lane: str) -> dict[int, Op]:
    return {op.number: op for op in ledger.ops if op.lane == lane and op.ends is None}


# -- pace ------------------------------------------------------------------------------------------


def _measure_paces(job: Job) -> Iterator[Pace]:
    for rank, ledger in sorted(job.ledgers.items()):
        if steps := ledger.steps[-LAST_STEPS:]:
            cycle = median(seconds for _, seconds, _ in steps)
            yield Pace(rank, cycle, median(seconds - waited for _, seconds, waited in steps))


def _find_slow(paces: Sequence[Pace]) -> Iterator[Pace]:
    """Yield the ranks whose own time exceeds the median of the others by more than a tenth of a
    step."""
    for pace in paces:
        others = [other.own for other in paces if other is not pace]
        if (
            others
            and pace.own > SLOW_FACTOR * median(others)
            and pace.own - median(others) > pace.cycle / 10
        ):
            yield pace


# -- links -----------------------------------------------------------------------------------------

# the minimal share of the full tensor that each of n ranks sends: the bus bandwidth of NCCL's
# tests (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md)
_SHARES: Mapping[str, Callable[[int], float]] = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
}


def _measure_links(job: Job) -> Iterator[Link]:
    """Measure the rate of each group, from the last rank of a transfer, which waited for no other.

    Only where the host waits for transfers, or a dump contains their times.
    """
    samples: dict[tuple[tuple[int, ...], str], list[tuple[int, float]]] = {}
    for (ranks, op, size), times in _transfer_times(job).items():
        for seconds in times:
            samples.setdefault((ranks, op), []).append((size, seconds))
    for (ranks, op), transfers in sorted(samples.items()):
        share = _SHARES[op](len(ranks)) if op in _SHARES else 1.0
        rate = median(size * share / seconds for size, seconds in transfers)
        yield Link(ranks, op, len(transfers), int(median(size for size, _ in transfers)), rate)


def _transfer_times(job: Job) -> dict[tuple[tuple[int, ...], str, int], list[float]]:
    by_key: dict[object, dict[int, Op]] = {}
    for rank, ledger in job.ledgers.items():
        if ledger.device != "cpu" and ledger.live:
            continue
        for op in ledger.ops:
            if op.size >= LARGE_BYTES and op.ended > op.began and (op.ends or op.op in _SHARES):
                by_key.setdefault((op.lane, op.number, op.ends), {})[rank] = op
    times: dict[tuple[tuple[int, ...], str, int], list[float]] = {}
    for members in by_key.values():
        rank, first_op = next(iter(members.items()))
        ranks = first_op.ends or job.ledgers[rank].lanes.get(first_op.lane, ())
        if set(ranks) == members.keys():
            seconds = min(op.ended - op.began for op in members.values())
            kind = first_op.op if first_op.ends is None else "message"
            times.setdefault((tuple(ranks), kind, first_op.size), []).append(seconds)
    return times
