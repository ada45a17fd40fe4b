"""Calibration of working precision, cell by cell, in lines of JSON: a run goes on where one ended.

A cell is a model under rows in a dtype on a seed (`model`), a schedule of the examples in its dtype
(`example`), a bug of the zoo in a scene and a dtype (`zoo`), or a program that somebody else wrote,
right or wrong, in a dtype on a seed (`judge`).
`--report` counts what a file has: cells, rows, false alarms, bugs, and those above ten bounds that
were not found.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

import schedlang
from schedlang import verify_program
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.modelfile import load_model_file
from schedlang.passes.judge.low_dtype import FORMATS
from schedlang.passes.prove import Case
from schedlang.passes.verify.proof_case import prepare_case
from schedlang.report import Report, Row
from schedlang.runtime.launch.pool import Pool
from tests.benchmarks import working_precision as precision
from tests.engine import Threads
from tests.judging import net
from tests.judging import test_choices as choices
from tests.judging import test_dropout_rounded as dropout
from tests.judging import test_eight_bits as eight_bits
from tests.judging.test_rounded import RIGHT, WRONG
from tests.zoo import ZOO

Cell = tuple[str, ...]
ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(str(one.relative_to(ROOT)) for one in ROOT.glob("examples/*/*.sched"))
LARGE = 10.0  # bounds that a bug must move a tensor by to have to be found
_WORDS = ("float32", "bfloat16")


def cells(seeds: int, first: int = 0) -> Iterator[tuple[Cell, Callable[[], Mapping[str, Any]]]]:
    """Yield cells by name from the first seed on, seed after seed, and what runs each."""
    bugs = [bug for bug in ZOO.values() if bug.applies and not bug.late]
    zoo = [(bug, scene, word) for bug in bugs for scene in bug.scenes for word in _WORDS]
    every = max(1, len(zoo) // seeds + 1)
    for seed in range(first, seeds):
        for name in precision.SUBJECTS:
            for word in precision.DTYPES:
                yield (
                    ("model", name, word, str(seed)),
                    lambda n=name, w=word, s=seed: model(n, w, s),
                )
        for path in EXAMPLES:
            yield ("example", path, "as it works", str(seed)), lambda p=path, s=seed: example(p, s)
        for name, word, right, made in programs():
            yield (
                ("judge", name, word, str(seed)),
                lambda m=made, r=right, s=seed: {**_counted(m(s).rows), "right": r},
            )
        for bug, scene, word in zoo[seed * every : (seed + 1) * every]:
            yield ("zoo", bug.id, scene, word), lambda b=bug, c=scene, w=word: hunted(b, c, w)


def example(path: str, seed: int) -> dict[str, Any]:
    """A schedule of the examples: as `model`, in the dtype that its model works in."""
    found = load_model_file(None, ROOT / path)
    case, steps = _example(path), range(seed * precision.STEPS, (seed + 1) * precision.STEPS)
    batches = tuple(found.batch(step) for step in steps)
    done = precision.judged(replace(case, batches=batches, seed=seed), Threads())
    return {**_counted(done.rows), "draws": done.draws, "unsure": len(done.unsure)}


@cache
def _example(path: str) -> Case:
    found = load_model_file(None, ROOT / path)
    plan = schedlang.load(ROOT / path, found.model()).plan()
    batches = tuple(found.batch(step) for step in range(precision.STEPS))
    return prepare_case(Case(plan, batches, found.loss, found.weight))


Judge = Callable[[int], Report]  # of a program, on weights and batches of a seed


def programs() -> Iterator[tuple[str, str, bool, Judge]]:
    """Yield programs that somebody else wrote: name, dtype, whether it is right, and its judge."""
    every = [(k == 0, one) for k in (0, 1) for one in (RIGHT, WRONG)[k]]
    for place, (right, made) in enumerate(every):
        yield f"{made[0].__name__} {place}", made[2], right, partial(_of_net, made)
    for right, named in ((True, eight_bits.RIGHT), (False, eight_bits.WRONG)):
        for name, one in named.items():
            yield name, FORMATS[0], right, _by(eight_bits, one, FORMATS[0])
    for word in ("bfloat16", "float16"):
        for what, home in (("experts", choices), ("dropout", dropout)):
            for right, several in ((True, home.RIGHT), (False, home.WRONG)):
                for one in several:
                    yield f"{what}, {one.__name__}", word, right, _by(home, one, word)


def _by(home: Any, program: Any, word: str) -> Judge:
    return lambda seed: home.judged(_pool(), program, word, seed=seed)


@cache
def _base(name: str, word: str) -> Case:
    return prepare_case(precision._case(precision.SUBJECTS[name], word))


def model(name: str, word: str, seed: int) -> dict[str, Any]:
    """A right program of ours: rows, and those that are false alarms."""
    case = replace(
        _base(name, word), batches=precision._batches(precision.SUBJECTS[name], seed), seed=seed
    )
    done = precision.judged(case, Threads())
    return {**_counted(done.rows), "draws": done.draws, "unsure": len(done.unsure)}


def _of_net(made: tuple[Any, int, str, Mapping[str, Any]], seed: int) -> Report:
    """A program of the small decoder, right or wrong."""
    one, ranks, word, sizes = made
    torch.manual_seed(seed)
    return verify_program(
        one,
        model=net.Net(**sizes),
        batch=net.batch,
        loss=net.loss,
        ranks=ranks,
        dtype=word,
        seed=7 * seed,
        pool=_pool(),
    )


@cache
def _pool() -> Pool:
    return Pool()


def hunted(bug: Any, scene: str, word: str) -> dict[str, Any]:
    """A bug of the zoo in a dtype alone: how far it moves a tensor at most, and if it is found."""
    found = precision._hunted(bug, scene, word)
    return {"times": found.times, "found": found.found, "said": found.said}


def _counted(rows: Any) -> dict[str, Any]:
    bad: list[Row] = [row for row in rows if not row.ok]
    times = [row.error for row in rows if row.error == row.error and "dtype" in row.kind]
    said = [f"{r.condition}: {r.kind} {r.name} {r.step} {r.error:.3g} {r.note}" for r in bad[:6]]
    return {"rows": len(rows), "bad": len(bad), "worst": max(times, default=0.0), "said": said}


def run(out: Path, seeds: int, kinds: list[str], first: int = 0) -> None:
    """Run the cells that a file has not, and add a line for each."""
    done = {tuple(line["cell"]) for line in _lines(out)}
    with out.open("a") as file:
        for cell, made in cells(seeds, first):
            if cell in done or cell[0] not in kinds:
                continue
            start = time.process_time()
            try:
                found: Mapping[str, Any] = made()
            except Refusal as refusal:
                found = {"refused": refusal.diagnostics[0].title}
            except Exception as error:  # a cell that fails is a line that says so
                found = {"failed": f"{type(error).__name__}: {error}".split("\n")[0][:200]}
            took = round(time.process_time() - start, 2)
            file.write(json.dumps({"cell": cell, **found, "cpu": took}) + "\n")
            file.flush()


def _lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def report(out: Path) -> None:
    """Count what a file has."""
    lines = _lines(out)
    for kind in ("model", "example", "judge", "zoo"):
        mine = [line for line in lines if line["cell"][0] == kind]
        ran = [line for line in mine if not line.keys() & {"refused", "failed"}]
        right = [line for line in ran if kind in ("model", "example") or line.get("right")]
        alarms = [line for line in right if line["bad"]]
        print(f"{kind}: {len(mine)} cells, {len(ran)} ran, {len(mine) - len(ran)} did not")
        if right:
            rows = sum(line["rows"] for line in right)
            print(f"  right: {len(right)}, {rows} rows, {len(alarms)} cells with false alarms")
        wrong = [line for line in ran if kind == "zoo" or line.get("right") is False]
        caught = [line for line in wrong if line.get("found", line.get("bad"))]
        if wrong:
            print(f"  wrong: {len(wrong)}, {len(caught)} found")
        missed = [one for one in wrong if one not in caught]
        large = [one for one in missed if one.get("times", one.get("worst", 0)) > LARGE]
        for line in [*alarms, *large, *(one for one in mine if one not in ran)][:40]:
            print("   ", json.dumps(line)[:300])


def main() -> None:
    """Run cells, or report on a file of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="seed: pieces may run side by side")
    parser.add_argument("--kinds", nargs="*", default=["model", "example", "judge", "zoo"])
    parser.add_argument("--report", action="store_true")
    given = parser.parse_args()
    if given.report:
        report(given.out)
    else:
        run(given.out, given.seeds, given.kinds, given.first)


if __name__ == "__main__":
    main()
