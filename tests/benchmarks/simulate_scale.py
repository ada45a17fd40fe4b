"""Simulation at scale: python -m tests.benchmarks.simulate_scale [--large]

Seconds (wall, and of the processor) to make large timelines, to time them, to find their peaks and
to prove them, also with their transfers; and the greatest memory of the process. `--large` adds
1F1B on 1,024 ranks with 4,096 microbatches.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from typing import Any

from schedlang.pipeline.cost import Cost
from schedlang.pipeline.schedules import make_order
from schedlang.pipeline.timeline.memory import peak_activations
from schedlang.pipeline.timeline.proof import check_timeline, with_transfers
from schedlang.pipeline.timeline.simulation import simulate_timeline

COST = Cost(f=18.5, i=18.1, w=9.3, comm=0.6)
CASES = [(name, 64, 512) for name in ("GPipe", "1F1B", "ZB-H1", "Interleaved1F1B", "ZB-V")]
LARGE = ("1F1B", 1024, 4096)


def clocked(what: str, work: Callable[[], Any]) -> Any:
    """What the work makes; prints what it took."""
    start, spent = time.perf_counter(), time.process_time()
    made = work()
    wall, spent = time.perf_counter() - start, time.process_time() - spent
    print(f"  {what:<28} {wall:7.2f} s  {spent:7.2f} s")
    return made


def case(name: str, ranks: int, micro: int) -> None:
    """Make, time and prove one timeline."""
    print(f"{name}, {ranks} ranks, {micro} microbatches")
    line = clocked("made", lambda: make_order(name, ranks, micro, cost=COST))
    bubble = clocked("timed", lambda: simulate_timeline(line, COST).span_bubble)
    print(f"  {len(line)} operations, bubble {float(bubble):.4f}")
    clocked("timed in exact fractions", lambda: simulate_timeline(line, Cost()).makespan)
    clocked("peaks", lambda: peak_activations(line, COST))
    clocked("proven", lambda: check_timeline(line))
    full = clocked("with transfers", lambda: with_transfers(line))
    clocked("proven with transfers", lambda: check_timeline(full))
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"  greatest memory so far {most:.2f} GiB")


def main() -> None:
    """Time each case once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true", help="1,024 ranks too")
    for one in CASES + ([LARGE] if parser.parse_args().large else []):
        case(*one)


if __name__ == "__main__":
    main()
