"""Hunt the injected bugs and print the table: `python -m tests.zoo --help`."""

from __future__ import annotations

import argparse
import random
import traceback

from schedlang.runtime.launch.pool import Pool
from tests.conftest import PRELOAD
from tests.zoo import ZOO
from tests.zoo.bug import Bug
from tests.zoo.hunt import Verdict, hunt
from tests.zoo.table import primitive_table, summary_line, verdict_line


def main() -> int:
    """Print the table of bugs by prefixes of ids, or of all; returns 1 if a bug was not found."""
    parser = argparse.ArgumentParser(prog="tests.zoo", description="Hunt the bugs of the zoo.")
    parser.add_argument("--quick", action="store_true", help="look for no row to blame")
    parser.add_argument("--blame", action="store_true", help="count by kind how often it was right")
    parser.add_argument("--shuffle", action="store_true", help="hunt in another order each time")
    parser.add_argument("ids", nargs="*", help="beginnings of ids; without one, all bugs")
    options = parser.parse_args()
    bugs = [b for b in ZOO.values() if not options.ids or b.id.startswith(tuple(options.ids))]
    if options.shuffle:
        random.shuffle(bugs)
    verdicts: list[Verdict] = []
    with Pool(preload=PRELOAD) as pool:
        for bug in bugs:
            if not bug.applies:
                print(verdict_line(bug, None), flush=True)
            for scene in bug.scenes if bug.applies else ():
                verdicts.append(_hunt_safely(bug, scene, pool, not options.quick))
                print(verdict_line(bug, verdicts[-1]), flush=True)
    if options.blame:
        print(primitive_table(verdicts))
    print(summary_line(bugs, verdicts))
    return int(any(not v.killed for v in verdicts))


def _hunt_safely(bug: Bug, scene: str, pool: Pool, blame: bool) -> Verdict:
    """Hunt a bug and return the verdict; a mutation that itself fails does not stop the hunt."""
    try:
        return hunt(bug.id, scene, pool, blame=blame)
    except Exception:
        traceback.print_exc()
        return Verdict(bug.id, bug, scene, killed=False, by="MUTATION FAILS")


if __name__ == "__main__":
    raise SystemExit(main())
