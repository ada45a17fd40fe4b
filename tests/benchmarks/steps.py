"""A step beside hand-written torch, row by row: python -m tests.benchmarks.steps [ROW ...]

A decoder of plain torch trains under schedules and under what torch's documentation writes by hand
for the same (`step_rows`).  Counted on rank 0, alike on both sides: Python functions entered in a
step, collectives (and how many bytes the largest tensor of each has), and, of a model `--wider N`
times as wide, bytes of tensors that live between steps and at the peak of one, on the rank that
has most.  With `--pairs N`, the ratios of wall time of steps in turn, and of CPU time on the rank
where it is largest, with their 95 % intervals.  `--profile ROW` prints where our step calls most.
"""

from __future__ import annotations

import argparse
import gc
import pathlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

import schedlang
from schedlang.runtime.launch.pool import Pool, report_progress
from tests.benchmarks.allocated import Allocated
from tests.benchmarks.counting import Counted
from tests.benchmarks.pairs import Ratio, interleaved
from tests.benchmarks.step_rows import ROWS, Sizes, Step, scheduled


@dataclass(frozen=True)
class Counts:
    """Of one step of one side."""

    calls: int
    collectives: int
    sent: int
    live: int = 0
    peak: int = 0


Measured = tuple[list[Counts], tuple[Ratio, Ratio] | None]  # ours and the peer's


def calls_of(step: Step) -> int:
    """Python functions entered in a step; on a CPU, backward runs in this thread too."""
    found = 0

    def heard(frame: Any, event: str, arg: Any) -> None:
        nonlocal found
        found += event == "call"

    gc.collect()
    gc.disable()  # or whose finalizers run is chance
    sys.setprofile(heard)
    try:
        step()
    finally:
        sys.setprofile(None)
        gc.enable()
    return found


@contextmanager
def let_go(seconds: float = 0.004) -> Iterator[None]:
    """Pause after each wait for a collective, so that nobody holds its tensors any more.

    Gloo's threads let go of them after they have told who waits: how long after is a matter of
    processors, and moves the peak of a step that goes on at once, whoever wrote it.
    """

    def heard(frame: Any, event: str, arg: Any) -> None:
        if event == "c_return" and getattr(arg, "__name__", "") == "wait":
            time.sleep(seconds)

    sys.setprofile(heard)
    try:
        yield
    finally:
        sys.setprofile(None)


def bytes_of(make: Callable[[], Step], steps: int = 4) -> tuple[int, int]:
    """Count bytes of tensors between steps, and at most in one, of a program made here.

    Of some steps the least.
    """
    counted = Allocated()
    gc.collect()
    before = counted.now()
    step = make()
    step()
    live, peaks = list[int](), list[int]()
    for _ in range(steps):
        gc.collect()
        time.sleep(0.05)
        live.append(counted.now() - before)
        counted.anew()
        with let_go():
            step()
        peaks.append(counted.peak() - before)
    return min(live), min(peaks)


def measured(name: str, sizes: Sizes, pairs: int, wider: int) -> Measured:
    """One rank's part of a row: the counts of both sides.

    wider: times the width of the model whose bytes are counted; 0 leaves them out
    """
    torch.set_num_threads(1)
    row = ROWS[name]
    sizes = replace(sizes, dropout=row.dropout)
    makes = [partial(scheduled, row.ours, sizes), partial(row.peer, sizes)]
    held = [(0, 0), (0, 0)]
    if wider:
        wide = replace(sizes, hidden=sizes.hidden * wider)
        peer = row.knows or row.peer
        for side, make in enumerate((partial(scheduled, row.ours, wide), partial(peer, wide))):
            held[side] = bytes_of(make)
            report_progress()
    steps = [make() for make in makes]
    for _ in range(3):
        a, b = (float(step()) for step in steps)
        assert row.dropout or abs(a - b) < row.near, (a, b)
    counts = []
    for step, bytes_ in zip(steps, held):
        calls = calls_of(step)
        with Counted() as counted:
            step()
        sent = sum(counted.calls.values()), sum(counted.bytes.values())
        counts.append(Counts(calls, *sent, *bytes_))
        report_progress()
    return counts, interleaved(*steps, pairs) if pairs else None


def profiled(name: str, sizes: Sizes, side: int) -> str:
    """Where one side's step on rank 0 enters functions: by the lines of ours (of the peer, all)."""
    torch.set_num_threads(1)
    row = ROWS[name]
    sizes = replace(sizes, dropout=row.dropout)
    step = [partial(scheduled, row.ours, sizes), partial(row.peer, sizes)][side]()
    for _ in range(3):
        step()
    found: Counter[str] = Counter()
    own = str(pathlib.Path(schedlang.__file__).parent)

    def heard(frame: Any, event: str, arg: Any) -> None:
        if event != "call":
            return
        where = frame.f_back
        while where is not None and own not in where.f_code.co_filename:
            where = where.f_back
        if where is None:
            found[f"outside: {frame.f_code.co_filename}:{frame.f_code.co_qualname}"] += 1
            return
        code = where.f_code
        file = code.co_filename.removeprefix(own)
        found[f"{file}:{where.f_lineno} {code.co_qualname} -> {frame.f_code.co_qualname}"] += 1

    sys.setprofile(heard)
    try:
        step()
    finally:
        sys.setprofile(None)
    return "\n".join(f"{count:7} {where}" for where, count in found.most_common(120))


def fullest(found: Sequence[Measured]) -> list[Counts]:
    """Return the counts of rank 0 for both sides, with the bytes of the rank that has most."""
    return [
        replace(
            count,
            live=max(counts[side].live for counts, _ in found),
            peak=max(counts[side].peak for counts, _ in found),
        )
        for side, count in enumerate(found[0][0])
    ]


def shown(name: str, found: Sequence[Measured]) -> str:
    """A row of the table, of what each rank has measured."""
    ours, peer = fullest(found)
    every = [ratios for _, ratios in found if ratios is not None]
    # all ranks take as long from barrier to barrier; of processors that is told which takes most
    ratios = (every[0][0], max((one for _, one in every), key=lambda r: r.median)) if every else ()
    cells = [
        f"{getattr(ours, key):,} / {getattr(peer, key):,}"
        for key in ("calls", "collectives", "sent", "live", "peak")
    ]
    calls = ours.calls / peer.calls
    title = f"{name} / {ROWS[name].name}"
    return (
        f"{title:36}{cells[0]:>18}{calls:6.2f}"
        + "".join(f"{cell:>{width}}" for cell, width in zip(cells[1:], (12, 24, 26, 26)))
        + "".join(f"   {name} {one}" for name, one in zip(("wall", "CPU"), ratios))
    )


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--pairs", type=int, default=0)
    parser.add_argument(
        "--wider", type=int, default=4, metavar="N", help="where bytes are counted; 0: nowhere"
    )
    parser.add_argument("--profile", choices=list(ROWS))
    parser.add_argument("--peer", action="store_true", help="profile the peer")
    for name in ("hidden", "layers", "seq", "rows", "ranks"):
        parser.add_argument(
            f"--{name}", type=int, default=getattr(Sizes(), name), dest=f"size_{name}", metavar="N"
        )
    asked = parser.parse_args()
    given = vars(asked)
    sizes = Sizes(**{n.removeprefix("size_"): v for n, v in given.items() if n[:5] == "size_"})
    with Pool() as pool:
        if asked.profile:
            fitted = ROWS[asked.profile].fitted(sizes)
            work = (profiled, fitted.ranks, asked.profile, fitted, int(asked.peer))
            print(pool.run(*work, hang_after=120.0)[0])
            return
        heads = ("Python calls", "collectives", "of bytes", "live bytes", "peak bytes")
        print(f"torch {torch.__version__}, {sizes}; ours / peer, rank 0")
        print(f"{'':36}" + "".join(f"{h:>{w}}" for h, w in zip(heads, (24, 12, 24, 26, 26))))
        for name in asked.rows or ROWS:
            fitted = ROWS[name].fitted(sizes)
            work = (measured, fitted.ranks, name, fitted, asked.pairs, asked.wider)
            print(shown(name, pool.run(*work, hang_after=180.0)), flush=True)


if __name__ == "__main__":
    main()
