"""Cost of one rank of a large world: python -m tests.benchmarks.ranks [--worlds 8 64 1024]

Seconds (under the profiler), bytes, groups, messages (collectives, requests to the job's store)
and Python calls of one rank's build, and of its load of a checkpoint of a world of that size. The
part of the model on a rank is the same in every world, or (`sliced`) smaller in larger worlds.
Nothing is sent: the other ranks are assumed to do the same. Rank 0 checks whether all agree.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.many_ranks import (
    CONSTANT_PART,
    SLICED,
    Count,
    build_program,
    fake_rank,
    measure,
    save_all_ranks,
)


def print_row(label: str, world: int, rank: int, count: Count) -> None:
    """Print one line of the table."""
    print(
        f"{label:14} {world:5} {rank:5} {count.seconds:8.2f} {count.bytes:10,} {count.groups:7} "
        f"{sum(count.collectives.values()):6} {sum(count.requests.values()):6} "
        f"{count.calls:10,}",
        flush=True,
    )


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.ranks", description=__doc__)
    parser.add_argument("--worlds", type=int, nargs="+", default=[8, 64, 1024])
    arguments = parser.parse_args()
    with fake_rank(0, 8):
        build_program(8, CONSTANT_PART)  # what is imported and found out once
    print("                world  rank        s      bytes  groups  coll.  store      calls")
    for kind, rows in (("", CONSTANT_PART), (", sliced", SLICED)):
        for world in arguments.worlds:
            for rank in (world - 1, 0):
                with fake_rank(rank, world) as count, TemporaryDirectory() as folder:
                    program = build_program(world, rows, count)
                    print_row(f"build{kind}", world, rank, count)
                    if rank == 0:
                        save_all_ranks(program, Path(folder))
                        with measure(count):
                            program.load(folder)
                        print_row(f"load{kind}", world, rank, count)


if __name__ == "__main__":
    main()
