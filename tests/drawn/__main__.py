"""Draw schedules over many models, and prove them: `python -m tests.drawn --count 200 --seed 1`.

Each number is one fixed schedule of one model: `--first 17 --count 1` repeats number 17.
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

from tests.drawn.judge import ABSENT, FAILED, PASSED, REFUSED, Outcome, judge_schedule, model_of
from tests.drawn.shrink_text import shrink_text


def main() -> None:
    """Run the command."""
    options = _parse_arguments()
    records = [json.loads(line) for line in _read_lines(options.out)]
    done_keys = {(record["number"], record["seed"]) for record in records}
    numbers = [
        k
        for k in range(options.first, options.first + options.count)
        if fnmatch(model_of(k), options.models) and (k, options.seed) not in done_keys
    ]
    shares = [numbers[k :: options.jobs] for k in range(options.jobs)]
    if options.jobs == 1:
        _judge_numbers(shares[0], options)
    else:
        context = multiprocessing.get_context("fork")
        workers = [
            context.Process(target=_judge_numbers, args=(share, options)) for share in shares
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()


def _parse_arguments() -> argparse.Namespace:
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


def _read_lines(path: Path | None) -> list[str]:
    return path.read_text().splitlines() if path is not None and path.exists() else []


def _judge_numbers(numbers: Sequence[int], options: argparse.Namespace) -> None:
    counts: Counter[str] = Counter()
    for outcome in outcomes(numbers, options.seed, options.whole, options.processes):
        counts[outcome.kind] += 1
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(json.dumps(outcome.plain()) + "\n")
        last_line = outcome.why.strip().split("\n")[-1][:160]
        print(
            f"{outcome.number:5} {outcome.model:18} {outcome.seconds:6.1f} s  {outcome.kind}"
            f"  {last_line}",
            flush=True,
        )
        if outcome.kind not in (PASSED, REFUSED, ABSENT):
            details = f"\n{outcome.why}" if outcome.kind != FAILED else ""
            print(f"{outcome.text}{details}", flush=True)
            if options.least:
                print(_smallest_failure(outcome, options), flush=True)
    print(dict(counts))


def _smallest_failure(outcome: Outcome, options: argparse.Namespace) -> str:
    """Return the smallest schedule that ends like a failure."""
    with _make_ranks(options.processes) as ranks:

        def same(text: str) -> bool:
            result = judge_schedule(outcome.number, outcome.seed, ranks, outcome.form, text)
            last = [
                judged_outcome.why.strip().split("\n")[-1][:30]
                for judged_outcome in (result, outcome)
            ]
            return result.kind == outcome.kind and (last[0] == last[1] or result.kind == FAILED)

        return shrink_text(outcome.text, same)


def outcomes(
    numbers: Sequence[int], seed: int, whole: bool = False, processes: bool = False
) -> Iterator[Outcome]:
    """Yield the outcome of each number, one after the other, on warm ranks."""
    with _make_ranks(processes) as ranks:
        for number in numbers:
            yield judge_schedule(number, seed, ranks, "whole" if whole else "quick")


def _make_ranks(processes: bool) -> Any:
    from schedlang.runtime.launch.forkserver import BASE_MODULES, PROGRAM_MODULES
    from schedlang.runtime.launch.pool import Pool
    from tests.engine import Threads

    pool: Any = Pool(preload=(*BASE_MODULES, *PROGRAM_MODULES)) if processes else Threads()
    return pool if hasattr(pool, "__enter__") else nullcontext(pool)


if __name__ == "__main__":
    main()
