"""Whether the ranks of a job get on, and where each of them stands if none does.

A rank gets on when its main thread sends something (`progress`, its result), or when CPU time is
spent by it or by processes that it started: compiling, importing and long single operators count,
waiting does not, because gloo sleeps in a collective that nobody else joins. It is a hang if during
`hang_after` seconds no rank sent anything, none spent 1/30 of that time on a CPU and none had, or
queued for, one for half of it: where others keep the processors busy, a rank that works may get
next to nothing of them. An endless loop is not recognised so; `timeout` is for that.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from schedlang.runtime.launching.cpu import cpu_seconds, queued_seconds
from schedlang.runtime.launching.job import Hang, Job, Rank, Times

_SLEEPING = 1 / 30  # of one core: below this a rank waits (one that polls a store takes 1/100)
_WANTING = 1 / 2  # of the time on a run queue: above this it works, and others take the processors
_DUMPING = 5.0  # seconds for a rank to write where it stands
_POLL = 0.25  # seconds between two looks at what it has written


def doubt(job: Job, ranks: Sequence[Rank], hang_after: float) -> None:
    """Raise Hang if no rank got on for `hang_after` seconds."""
    now = job.look()
    if now - max(job.moved, job.asked) < min(1.0, hang_after / 4) or job.failures:
        return  # asking reads a file for each thread of each rank
    job.asked, times = now, _spent(ranks)
    before = job.spent = job.spent or times
    if any(works(times[pid], before.get(pid, (0.0, 0.0)), hang_after) for pid in times):
        job.moved, job.spent = now, times
    elif now - job.moved > hang_after:
        raise Hang(f"no rank got on for {hang_after:g} s", stacks(job, ranks))


def _spent(ranks: Sequence[Rank]) -> Times:
    """Seconds that each process of these ranks had, and waited for, so far."""
    pids = [[rank.pid] for rank in ranks if rank.pid]
    return {one[0]: (cpu_seconds(one), queued_seconds(one)) for one in pids}


def works(now: tuple[float, float], then: tuple[float, float], hang_after: float) -> bool:
    """Whether a process that had so much of a processor, and waited so long for one, works."""
    ran, queued = now[0] - then[0], now[1] - then[1]
    return ran >= _SLEEPING * hang_after or ran + queued >= _WANTING * hang_after


def stacks(job: Job, ranks: Sequence[Rank]) -> dict[int, str]:
    """Where the main thread of each unfinished rank stands, innermost call first."""
    waiting = [r for r in ranks if r.pid and r.rank not in job.results]
    sizes = {r.rank: r.log.stat().st_size for r in waiting}
    for rank in waiting:
        os.kill(rank.pid, signal.SIGUSR1)
    end = time.monotonic() + _DUMPING
    return {r.rank: _main_thread(_dumped(r.log, sizes[r.rank], end)) for r in waiting}


def _dumped(log: Path, start: int, end: float) -> str:
    """What a rank writes of its threads from `start` on; whole once nothing comes any more."""
    text, more = "", log.read_bytes()[start:].decode(errors="replace")
    while (more != text or not more) and time.monotonic() < end:
        time.sleep(_POLL)
        text, more = more, log.read_bytes()[start:].decode(errors="replace")
    return more


def _main_thread(text: str) -> str:
    """The innermost calls of the main thread, which comes last."""
    return "\n".join(text.split("hread 0x")[-1].splitlines()[1:][:12])
