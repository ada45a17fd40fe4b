"""One rank of many: python -m tests.benchmarks.ranks [--worlds 8 64 1024]

Seconds (of a process that is profiled), bytes, groups, messages (collectives, requests of the job's
store) and Python calls of one rank's build and of its load of what a world of that size has saved.
The part of the model on a rank is the same in every world, or (`sliced`) becomes smaller with it.
Nothing is sent: the other ranks are taken to do as this one. Rank 0 judges whether all agree.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.many_ranks import ALIKE, SLICED, Count, being, measured, program_of, saved


def told(what: str, world: int, rank: int, count: Count) -> None:
    """One line."""
    print(
        f"{what:14} {world:5} {rank:5} {count.seconds:8.2f} {count.bytes:10,} {count.groups:7} "
        f"{sum(count.collectives.values()):6} {sum(count.requests.values()):6} "
        f"{count.calls:10,}",
        flush=True,
    )


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.ranks", description=__doc__)
    parser.add_argument("--worlds", type=int, nargs="+", default=[8, 64, 1024])
    asked = parser.parse_args()
    with being(0, 8):
        program_of(8, ALIKE)  # what is imported and found out once
    print("                world  rank        s      bytes  groups  coll.  store      calls")
    for kind, rows in (("", ALIKE), (", sliced", SLICED)):
        for world in asked.worlds:
            for rank in (world - 1, 0):
                with being(rank, world) as count, TemporaryDirectory() as folder:
                    program = program_of(world, rows, count)
                    told(f"build{kind}", world, rank, count)
                    if rank == 0:
                        saved(program, Path(folder))
                        with measured(count):
                            program.load(folder)
                        told(f"load{kind}", world, rank, count)


if __name__ == "__main__":
    main()
