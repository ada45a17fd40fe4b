"""Hunt the bugs and print the table: `python -m tests.zoo --help`."""

from __future__ import annotations

import argparse
import random
import traceback

from schedlang.runtime.launch.pool import Pool
from tests.conftest import PRELOAD
from tests.zoo import ZOO
from tests.zoo.bug import Bug
from tests.zoo.hunt import Verdict, hunt
from tests.zoo.table import by_kind, last_line, line


def main() -> int:
    """The table of the bugs whose ids begin so, or of all; 1 if one lives."""
    parser = argparse.ArgumentParser(prog="tests.zoo", description="Hunt the bugs of the zoo.")
    parser.add_argument("--quick", action="store_true", help="look for no row to blame")
    parser.add_argument("--blame", action="store_true", help="count by kind how often it was right")
    parser.add_argument("--shuffle", action="store_true", help="hunt in another order each time")
    parser.add_argument("ids", nargs="*", help="beginnings of ids; without one, all bugs")
    asked = parser.parse_args()
    bugs = [b for b in ZOO.values() if not asked.ids or b.id.startswith(tuple(asked.ids))]
    if asked.shuffle:
        random.shuffle(bugs)
    verdicts: list[Verdict] = []
    with Pool(preload=PRELOAD) as pool:
        for bug in bugs:
            if not bug.applies:
                print(line(bug, None), flush=True)
            for scene in bug.scenes if bug.applies else ():
                verdicts.append(_hunted(bug, scene, pool, not asked.quick))
                print(line(bug, verdicts[-1]), flush=True)
    if asked.blame:
        print(by_kind(verdicts))
    print(last_line(bugs, verdicts))
    return int(any(not v.killed for v in verdicts))


def _hunted(bug: Bug, scene: str, pool: Pool, blame: bool) -> Verdict:
    """What became of a bug; a mutation that fails by itself shows nothing, and ends no hunt."""
    try:
        return hunt(bug.id, scene, pool, blame=blame)
    except Exception:
        traceback.print_exc()
        return Verdict(bug.id, bug, scene, killed=False, by="MUTATION FAILS")


if __name__ == "__main__":
    raise SystemExit(main())
