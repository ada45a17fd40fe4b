"""Steps against hand-written torch, row by row: python -m tests.benchmarks.steps [ROW ...]

A plain torch decoder trains under schedules and under equivalent hand-written torch (`step_rows`).
Counted on rank 0 for both sides: Python functions entered in a step, collectives (and the bytes of
the largest tensor of each), and, for a model `--wider N` times as wide, bytes of tensors that live
between steps and at the peak of a step, on the rank with most.  `--pairs N` prints ratios of wall
time of alternating steps, and of CPU time on the slowest rank, with 95 % intervals.
`--profile ROW` prints where schedlang's step makes most calls.
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
from tests.benchmarks.counting import CollectiveCounter
from tests.benchmarks.pairs import Ratio, interleaved_ratios
from tests.benchmarks.step_rows import ROWS, Sizes, Step, scheduled


@dataclass(frozen=True)
class Counts:
    """Counts of one step of one side."""

    calls: int
    collectives: int
    sent: int
    live: int = 0
    peak: int = 0


Measured = tuple[list[Counts], tuple[Ratio, Ratio] | None]  # schedlang's and the peer's


def count_calls(step: Step) -> int:
    """Count Python functions entered in a step; on a CPU, backward runs in this thread too."""
    calls = 0

    def heard(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call"

    gc.collect()
    gc.disable()  # otherwise finalizers run at random
    sys.setprofile(heard)
    try:
        step()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


@contextmanager
def pause_waits(seconds: float = 0.004) -> Iterator[None]:
    """Pause after each wait for a collective, so that its tensors are freed.

    Gloo's threads free them some time after they signal completion, which would change the peak of
    a step that continues at once.
    """

    def heard(frame: Any, event: str, arg: Any) -> None:
        if event == "c_return" and getattr(arg, "__name__", "") == "wait":
            time.sleep(seconds)

    sys.setprofile(heard)
    try:
        yield
    finally:
        sys.setprofile(None)


def measure_bytes(make: Callable[[], Step], steps: int = 4) -> tuple[int, int]:
    """Return tensor bytes between steps and at the peak of a step, for a program built here.

    Each is the least of several steps.
    """
    allocated = Allocated()
    gc.collect()
    base = allocated.now()
    step = make()
    step()
    live, peaks = list[int](), list[int]()
    for _ in range(steps):
        gc.collect()
        time.sleep(0.05)
        live.append(allocated.now() - base)
        allocated.anew()
        with pause_waits():
            step()
        peaks.append(allocated.peak() - base)
    return min(live), min(peaks)


def measure_row(name: str, sizes: Sizes, pairs: int, wider: int) -> Measured:
    """Measure a row on one rank: the counts of both sides, and the ratios.

    wider: factor of the width for counting bytes; 0 skips it
    """
    torch.set_num_threads(1)
    row = ROWS[name]
    sizes = replace(sizes, dropout=row.dropout)
    makes = [partial(scheduled, row.ours, sizes), partial(row.peer, sizes)]
    live_and_peak = [(0, 0), (0, 0)]
    if wider:
        wide_sizes = replace(sizes, hidden=sizes.hidden * wider)
        peer = row.knows or row.peer
        for side, make in enumerate(
            (partial(scheduled, row.ours, wide_sizes), partial(peer, wide_sizes))
        ):
            live_and_peak[side] = measure_bytes(make)
            report_progress()
    steps = [make() for make in makes]
    for _ in range(3):
        a, b = (float(step()) for step in steps)
        assert row.dropout or abs(a - b) < row.near, (a, b)
    counts = []
    for step, bytes_ in zip(steps, live_and_peak):
        calls = count_calls(step)
        with CollectiveCounter() as counted:
            step()
        sent = sum(counted.calls.values()), sum(counted.bytes.values())
        counts.append(Counts(calls, *sent, *bytes_))
        report_progress()
    return counts, interleaved_ratios(*steps, pairs) if pairs else None


def profile_step(name: str, sizes: Sizes, side: int) -> str:
    """Return the call sites with most calls of one side's step, by lines of schedlang."""
    torch.set_num_threads(1)
    row = ROWS[name]
    sizes = replace(sizes, dropout=row.dropout)
    step = [partial(scheduled, row.ours, sizes), partial(row.peer, sizes)][side]()
    for _ in range(3):
        step()
    entries: Counter[str] = Counter()
    package_dir = str(pathlib.Path(schedlang.__file__).parent)

    def heard(frame: Any, event: str, arg: Any) -> None:
        if event != "call":
            return
        caller = frame.f_back
        while caller is not None and package_dir not in caller.f_code.co_filename:
            caller = caller.f_back
        if caller is None:
            entries[f"outside: {frame.f_code.co_filename}:{frame.f_code.co_qualname}"] += 1
            return
        code = caller.f_code
        file = code.co_filename.removeprefix(package_dir)
        entries[f"{file}:{caller.f_lineno} {code.co_qualname} -> {frame.f_code.co_qualname}"] += 1

    sys.setprofile(heard)
    try:
        step()
    finally:
        sys.setprofile(None)
    return "\n".join(f"{count:7} {site}" for site, count in entries.most_common(120))


def fullest_rank(measured_ranks: Sequence[Measured]) -> list[Counts]:
    """Return the counts of rank 0 for both sides, with the bytes of the rank that has most."""
    return [
        replace(
            count,
            live=max(counts[side].live for counts, _ in measured_ranks),
            peak=max(counts[side].peak for counts, _ in measured_ranks),
        )
        for side, count in enumerate(measured_ranks[0][0])
    ]


def table_row(name: str, measured_ranks: Sequence[Measured]) -> str:
    """Return a row of the table from the measurements of all ranks."""
    schedlang_counts, peer = fullest_rank(measured_ranks)
    all_ratios = [ratios for _, ratios in measured_ranks if ratios is not None]
    # wall time between barriers is equal on all ranks; of CPU time the largest ratio is taken
    ratios = (
        (all_ratios[0][0], max((ratio for _, ratio in all_ratios), key=lambda r: r.median))
        if all_ratios
        else ()
    )
    cells = [
        f"{getattr(schedlang_counts, key):,} / {getattr(peer, key):,}"
        for key in ("calls", "collectives", "sent", "live", "peak")
    ]
    calls = schedlang_counts.calls / peer.calls
    heading = f"{name} / {ROWS[name].name}"
    return (
        f"{heading:36}{cells[0]:>18}{calls:6.2f}"
        + "".join(f"{cell:>{width}}" for cell, width in zip(cells[1:], (12, 24, 26, 26)))
        + "".join(f"   {name} {ratio}" for name, ratio in zip(("wall", "CPU"), ratios))
    )


def main() -> None:
    """Print the table."""
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
    arguments = parser.parse_args()
    values = vars(arguments)
    sizes = Sizes(**{n.removeprefix("size_"): v for n, v in values.items() if n[:5] == "size_"})
    with Pool() as pool:
        if arguments.profile:
            fitted = ROWS[arguments.profile].fitted(sizes)
            job = (profile_step, fitted.ranks, arguments.profile, fitted, int(arguments.peer))
            print(pool.run(*job, hang_after=120.0)[0])
            return
        heads = ("Python calls", "collectives", "of bytes", "live bytes", "peak bytes")
        print(f"torch {torch.__version__}, {sizes}; ours / peer, rank 0")
        print(f"{'':36}" + "".join(f"{h:>{w}}" for h, w in zip(heads, (24, 12, 24, 26, 26))))
        for name in arguments.rows or ROWS:
            fitted = ROWS[name].fitted(sizes)
            job = (measure_row, fitted.ranks, name, fitted, arguments.pairs, arguments.wider)
            print(table_row(name, pool.run(*job, hang_after=180.0)), flush=True)


if __name__ == "__main__":
    main()
