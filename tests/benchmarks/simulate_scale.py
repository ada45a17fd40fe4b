"""Simulation at scale: python -m tests.benchmarks.simulate_scale [--large]

Wall and CPU seconds to build large timelines, to simulate them, to find their peaks and to check
them, also with transfers; and the peak memory of the process. `--large` adds 1F1B on 1,024 ranks
with 4,096 microbatches.
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


def timed_step(label: str, action: Callable[[], Any]) -> Any:
    """Call a function, print its wall and CPU time, and return its result."""
    start, spent = time.perf_counter(), time.process_time()
    result = action()
    wall, spent = time.perf_counter() - start, time.process_time() - spent
    print(f"  {label:<28} {wall:7.2f} s  {spent:7.2f} s")
    return result


def run_case(name: str, ranks: int, micro: int) -> None:
    """Build, simulate and check one timeline."""
    print(f"{name}, {ranks} ranks, {micro} microbatches")
    line = timed_step("made", lambda: make_order(name, ranks, micro, cost=COST))
    bubble = timed_step("timed", lambda: simulate_timeline(line, COST).span_bubble)
    print(f"  {len(line)} operations, bubble {float(bubble):.4f}")
    timed_step("timed in exact fractions", lambda: simulate_timeline(line, Cost()).makespan)
    timed_step("peaks", lambda: peak_activations(line, COST))
    timed_step("proven", lambda: check_timeline(line))
    full = timed_step("with transfers", lambda: with_transfers(line))
    timed_step("proven with transfers", lambda: check_timeline(full))
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"  greatest memory so far {peak_gib:.2f} GiB")


def main() -> None:
    """Time each case once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true", help="1,024 ranks too")
    for case_args in CASES + ([LARGE] if parser.parse_args().large else []):
        run_case(*case_args)


if __name__ == "__main__":
    main()
