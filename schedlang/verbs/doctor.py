"""doctor: find why a job is slow or stuck, from the records of its ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from schedlang.diagnostics.tables import format_bytes
from schedlang.verbs.exits import FAILS, show_json
from schedlang.verbs.ledgers import Job, Ledger, Op, read_job
from schedlang.verbs.options import AsJson, verb

_CALLS = 6  # shown of a rank that did not arrive


@verb
def doctor(
    folder: Annotated[
        Path,
        typer.Argument(help="Folder of records, or of flight-recorder dumps.", metavar="FOLDER"),
    ],
    *,
    stuck_after: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0.1,
            help="Time in one operation after which a job counts as stuck.",
        ),
    ] = 30.0,
    as_json: AsJson = False,
) -> None:
    """Show which rank a job waits for and in which operation, slow ranks, and the speed of
    links.

    If the variable SCHEDLANG_RECORD names a folder, ranks write records into it while they run.
    Read the folder during the run, or after a hang.  Dumps of torch's flight recorder work, too.

    Exit 1: a rank is slow, stuck or gone.
    """
    diag = diagnose(read_job(folder), stuck_after)
    code = 0 if diag.is_healthy else FAILS
    if as_json:
        show_json({"exit": code, **_facts(diag)})
    else:
        print("\n".join(_report_lines(folder, diag)))
    if code:
        raise typer.Exit(code)


# -- as text ---------------------------------------------------------------------------------------


def _report_lines(folder: Path, diag: Diagnosis) -> list[str]:
    job = diag.job
    lines = [_head_line(folder, diag), *_gone_lines(diag)]
    for rank in diag.causes:
        if diag.is_stuck:
            lines += ["", *_cause_lines(diag, rank)]
    if diag.is_stuck and not diag.causes:
        lines += ["", *_circle_lines(diag)]
    lines += [
        line for item in diag.differs for line in ("", *_difference_lines(item.ranks, item.ops))
    ]
    if diag.missing:
        lines += ["", "pending"]
        lines += [f"  {_pending_line(item)}" for item in diag.missing]
    if diag.paces:
        lines += ["", "steps  median of the last, in seconds: from end to end, without waiting"]
        slow = {item.rank for item in diag.slow}
        for pace in diag.paces:
            mark = "  slow" if pace.rank in slow else ""
            lines.append(f"  rank {pace.rank:<5} {pace.cycle:9.3f} {pace.own:9.3f}{mark}")
        lines += [line for pace in diag.slow for line in _slow_place(job.ledgers[pace.rank])]
    if diag.links:
        lines += ["", "links  bytes a second of each rank, median"]
        for link in diag.links:
            text = f"{link.op}, {link.count} of {format_bytes(link.size)}"
            lines.append(
                f"  ranks {_list_ranks(link.ranks):<16} {format_bytes(int(link.rate))}/s   {text}"
            )
    return lines


def _head_line(folder: Path, diag: Diagnosis) -> str:
    job = diag.job
    steps = [ledger.step for ledger in job.ledgers.values() if ledger.step >= 0]
    progress = f", step {min(steps)}" if steps else ""
    progress += f" to {max(steps)}" if steps and min(steps) != max(steps) else ""
    state = (
        "stuck"
        if diag.is_stuck
        else "slow"
        if diag.slow
        else "well"
        if diag.is_healthy
        else "failed"
    )
    if len(diag.ended) == len(job.ledgers):
        state = f"ended, {state}"
    return f"{folder.name}   {len(job.ledgers)} of {job.world} ranks{progress}   {state}"


def _gone_lines(diag: Diagnosis) -> list[str]:
    lines = [f"  rank {rank} has written nothing" for rank in diag.unrecorded]
    if diag.silent.keys() == diag.job.ledgers.keys():
        return [*lines, f"  no rank has written for {min(diag.silent.values()):.0f} s"]
    for rank, seconds in diag.silent.items():
        fate = "its process has ended without a message, or is stopped"
        host = diag.job.ledgers[rank].host
        lines.append(f"  rank {rank} ({host}) has not written for {seconds:.0f} s: {fate}")
    for rank, ledger in diag.job.ledgers.items():
        if ledger.error:
            lines.append(f"  rank {rank} ended by {ledger.error}")
        elif ledger.over and len(diag.ended) < len(diag.job.ledgers):
            lines.append(f"  rank {rank} has ended normally")
    return lines


def _cause_lines(diag: Diagnosis, rank: int) -> list[str]:
    """Describe a rank that others wait for, and where the rank is instead."""
    lines = []
    for wait in diag.missing:
        if rank in wait.absent:
            lines.append(f"rank {rank} has not reached {_describe_op(wait.op, wait.ranks)}")
            lines += [f"  row {wait.op.row}"] * bool(wait.op.row)
            lines.append(f"  {_who_waits(wait.waiting)} in it for {wait.seconds:.0f} s")
    ledger = diag.job.ledgers.get(rank)
    if ledger is not None and not ledger.over:
        lines.append("  it is in")
        lines += [f"    {call}" for call in _user_calls(ledger)]
    return lines


def _user_calls(ledger: Ledger) -> list[str]:
    """Return the innermost call, and the calls in the user's files."""
    first, *rest = ledger.stack or ("an unknown place",)
    others = ("site-packages", "/lib/python", "schedlang/", "<")
    user_calls = [call for call in rest if not any(part in call for part in others)]
    return [first, *user_calls][:_CALLS]


def _circle_lines(diag: Diagnosis) -> list[str]:
    """Describe ranks that wait for each other, or an operation that all ranks have reached."""
    lines = []
    for wait in diag.missing:
        for rank in wait.absent:
            lines.append(
                f"rank {rank} has not reached {_describe_op(wait.op, wait.ranks)}: it waits, too"
            )
    return lines or [
        "all ranks have reached the operation that they wait for: the network does not deliver it"
    ]


def _difference_lines(ranks: tuple[int, int], ops: tuple[Op, Op]) -> list[str]:
    first, second = ops
    lines = [f"ranks {ranks[0]} and {ranks[1]} differ from collective {first.number} of a group on"]
    for rank, op in zip(ranks, ops):
        lines.append(f"  rank {rank}: {op.op}{_op_details(op)}")
        lines += [f"    row {op.row}"] * bool(op.row)
    return [*lines, "  the other rank has skipped what only one of them does"]


def _pending_line(op: PendingOp) -> str:
    text = f"{_who_waits(op.waiting)} for {op.seconds:.1f} s in {_describe_op(op.op, op.ranks)}"
    return text + (f", for {_ranks_phrase(op.absent)}" if op.absent else "")


def _who_waits(ranks: tuple[int, ...]) -> str:
    return _ranks_phrase(ranks) + (" wait" if len(ranks) > 1 else " waits")


def _ranks_phrase(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {_list_ranks(ranks)}"


def _list_ranks(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _describe_op(op: Op, ranks: tuple[int, ...]) -> str:
    if op.ends is not None:
        return f"message {op.number} from rank {op.ends[0]} to rank {op.ends[1]}{_op_details(op)}"
    return f"{op.op} {op.number} of ranks {_list_ranks(ranks)}{_op_details(op)}"


def _op_details(op: Op) -> str:
    owner = f" for `{op.whose}`" if op.whose else ""
    size_text = f", {format_bytes(op.size)}" if op.size else ""
    return owner + (" in backward" if op.backward else "") + size_text


def _slow_place(ledger: Ledger) -> list[str]:
    """Describe the place where a slow rank was seen at work most often."""
    total = sum(n for *_, n in ledger.where)
    lines = []
    for module, line, row, n in ledger.where[:1]:
        owner = f"`{module}`, " if module else ""
        lines.append(
            f"  rank {ledger.rank} was found at work in {owner}{line} ({n} of {total} looks)"
        )
        lines += [f"    row {row}"] * bool(row)
    return lines


# -- for machines ----------------------------------------------------------------------------------


def _facts(diag: Diagnosis) -> dict[str, Any]:
    job = diag.job
    return {
        "world": job.world,
        "ranks": sorted(job.ledgers),
        "stuck": diag.is_stuck,
        "never": list(diag.unrecorded),
        "silent": {str(rank): seconds for rank, seconds in diag.silent.items()},
        "over": list(diag.ended),
        "errors": {str(rank): item.error for rank, item in job.ledgers.items() if item.error},
        "causes": list(diag.causes),
        "pending": [
            {
                **_op_json(item.op),
                "ranks": list(item.ranks),
                "waiting": list(item.waiting),
                "absent": list(item.absent),
                "seconds": item.seconds,
            }
            for item in diag.missing
        ],
        "differs": [
            {"ranks": list(item.ranks), "ops": [_op_json(op) for op in item.ops]}
            for item in diag.differs
        ],
        "steps": [vars(item) for item in diag.paces],
        "slow": [item.rank for item in diag.slow],
        "where": {
            str(item.rank): [
                dict(zip(("module", "line", "row", "looks"), look))
                for look in job.ledgers[item.rank].where
            ]
            for item in diag.slow
        },
        "links": [{**vars(item), "ranks": list(item.ranks)} for item in diag.links],
        "stacks": {str(rank): list(item.stack) for rank, item in job.ledgers.items()},
    }


def _op_json(op: Op) -> dict[str, Any]:
    return {
        "op": op.op,
        "number": op.number,
        "module": op.whose,
        "row": op.row,
        "bytes": op.size,
        "backward": op.backward,
        "ends": list(op.ends) if op.ends is not None else None,
    }


# -- diagnosis from the ledgers of ranks -----------------------------------------------------------

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
