"""Hunt the bugs and print the table.

`python -m tests.zoo [--quick] [--blame] [--shuffle] [beginning of an id ...]`
"""

from __future__ import annotations

import random
import sys
import traceback

from schedlang.runtime.launch.pool import Pool
from tests.conftest import PRELOAD
from tests.zoo import ZOO
from tests.zoo.bug import Bug
from tests.zoo.hunt import Verdict, hunt
from tests.zoo.table import by_kind, last_line, line


def main(wanted: list[str]) -> int:
    """The table of the bugs whose ids begin so, or of all; 1 if one lives.

    With `--quick` no row to blame is looked for, `--blame` tells by kind how often it was the right
    one, `--shuffle` hunts in another order each time.
    """
    kinds, shuffle = "--blame" in wanted, "--shuffle" in wanted
    blame = "--quick" not in wanted
    wanted = [word for word in wanted if not word.startswith("--")]
    bugs = [b for b in ZOO.values() if not wanted or b.id.startswith(tuple(wanted))]
    if shuffle:
        random.shuffle(bugs)
    verdicts: list[Verdict] = []
    with Pool(preload=PRELOAD) as pool:
        for bug in bugs:
            if not bug.applies:
                print(line(bug, None), flush=True)
            for scene in bug.scenes if bug.applies else ():
                verdicts.append(_hunted(bug, scene, pool, blame))
                print(line(bug, verdicts[-1]), flush=True)
    if kinds:
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
    raise SystemExit(main(sys.argv[1:]))
