"""Draw schedules over many models, and prove them: `python -m tests.drawn --count 200 --seed 1`.

Each number is one schedule of one model, the same every time: `--first 17 --count 1` is number 17
again. `--whole` proves as `verify` does, else every comparison of float64 is made after one step.
`--out FILE` keeps each outcome, as a line of JSON, as it comes; numbers that are there are done.
`--jobs` processes share the numbers; each runs the ranks as its threads (`--processes`: as gloo
does). `--least` finds the fewest rows that still end as each failure does.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from tests.drawn.judge import ABSENT, FAILED, PASSED, REFUSED, Outcome, judged, model_of
from tests.drawn.least import least


def main() -> None:
    """As the command says."""
    asked = _arguments()
    done = [json.loads(line) for line in _lines(asked.out)]
    known = {(one["number"], one["seed"]) for one in done}
    numbers = [
        k
        for k in range(asked.first, asked.first + asked.count)
        if fnmatch(model_of(k), asked.models) and (k, asked.seed) not in known
    ]
    shares = [numbers[k :: asked.jobs] for k in range(asked.jobs)]
    if asked.jobs == 1:
        _hunt(shares[0], asked)
    else:
        context = multiprocessing.get_context("fork")
        workers = [context.Process(target=_hunt, args=(share, asked)) for share in shares]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.drawn", description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", default="*")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--processes", action="store_true")
    parser.add_argument("--least", action="store_true")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def _lines(out: Path | None) -> list[str]:
    return out.read_text().splitlines() if out is not None and out.exists() else []


def _hunt(numbers: Sequence[int], asked: argparse.Namespace) -> None:
    counts: Counter[str] = Counter()
    for outcome in outcomes(numbers, asked.seed, asked.whole, asked.processes):
        counts[outcome.kind] += 1
        if asked.out is not None:
            with asked.out.open("a") as file:
                file.write(json.dumps(outcome.plain()) + "\n")
        told = outcome.why.strip().split("\n")[-1][:160]
        print(
            f"{outcome.number:5} {outcome.model:18} {outcome.seconds:6.1f} s  {outcome.kind}"
            f"  {told}",
            flush=True,
        )
        if outcome.kind not in (PASSED, REFUSED, ABSENT):
            more = f"\n{outcome.why}" if outcome.kind != FAILED else ""
            print(f"{outcome.text}{more}", flush=True)
            if asked.least:
                print(_least(outcome, asked), flush=True)
    print(dict(counts))


def _least(outcome: Outcome, asked: argparse.Namespace) -> str:
    """The fewest rows that end as a failure did."""
    with _ranks(asked.processes) as ranks:

        def same(text: str) -> bool:
            found = judged(outcome.number, outcome.seed, ranks, outcome.form, text)
            last = [one.why.strip().split("\n")[-1][:30] for one in (found, outcome)]
            return found.kind == outcome.kind and (last[0] == last[1] or found.kind == FAILED)

        return least(outcome.text, same)


def outcomes(
    numbers: Sequence[int], seed: int, whole: bool = False, processes: bool = False
) -> Iterator[Outcome]:
    """What comes of each number, one after the other, on ranks that stay warm."""
    with _ranks(processes) as ranks:
        for number in numbers:
            yield judged(number, seed, ranks, "whole" if whole else "quick")


def _ranks(processes: bool) -> Any:
    from schedlang.runtime.launch.forkserver import BASE_MODULES, PROGRAM_MODULES
    from schedlang.runtime.launch.pool import Pool
    from tests.engine import Threads

    found: Any = Pool(preload=(*BASE_MODULES, *PROGRAM_MODULES)) if processes else Threads()
    return found if hasattr(found, "__enter__") else nullcontext(found)


if __name__ == "__main__":
    main()
