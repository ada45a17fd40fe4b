"""Calibration of working precision, cell by cell, in lines of JSON: runs can be resumed.

A cell is a model under rows in a dtype on a seed (`model`), a schedule of the examples in its dtype
(`example`), a bug of the zoo in a scene and a dtype (`zoo`), or a program of the judge tests, right
or wrong, in a dtype on a seed (`judge`).
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


def cells(
    seeds: int, first_seed: int = 0
) -> Iterator[tuple[Cell, Callable[[], Mapping[str, Any]]]]:
    """Yield the name of each cell and the function that runs it, from the first seed on."""
    bugs = [bug for bug in ZOO.values() if bug.applies and not bug.late]
    zoo = [(bug, scene, dtype) for bug in bugs for scene in bug.scenes for dtype in _WORDS]
    per_seed = max(1, len(zoo) // seeds + 1)
    for seed in range(first_seed, seeds):
        for name in precision.SUBJECTS:
            for dtype in precision.DTYPES:
                yield (
                    ("model", name, dtype, str(seed)),
                    lambda n=name, w=dtype, s=seed: model(n, w, s),
                )
        for path in EXAMPLES:
            yield ("example", path, "as it works", str(seed)), lambda p=path, s=seed: example(p, s)
        for name, dtype, is_right, judge in programs():
            yield (
                ("judge", name, dtype, str(seed)),
                lambda m=judge, r=is_right, s=seed: {**_count_rows(m(s).rows), "right": r},
            )
        for bug, scene, dtype in zoo[seed * per_seed : (seed + 1) * per_seed]:
            yield ("zoo", bug.id, scene, dtype), lambda b=bug, c=scene, w=dtype: zoo_bug(b, c, w)


def example(path: str, seed: int) -> dict[str, Any]:
    """Run a schedule of the examples, in its model's dtype, and return its counts."""
    model_file = load_model_file(None, ROOT / path)
    case, steps = _example(path), range(seed * precision.STEPS, (seed + 1) * precision.STEPS)
    batches = tuple(model_file.batch(step) for step in steps)
    judged = precision.judge(replace(case, batches=batches, seed=seed), Threads())
    return {**_count_rows(judged.rows), "draws": judged.draws, "unsure": len(judged.unsure)}


@cache
def _example(path: str) -> Case:
    model_file = load_model_file(None, ROOT / path)
    plan = schedlang.load(ROOT / path, model_file.model()).plan()
    batches = tuple(model_file.batch(step) for step in range(precision.STEPS))
    return prepare_case(Case(plan, batches, model_file.loss, model_file.weight))


Judge = Callable[[int], Report]  # judges a program on weights and batches of a seed


def programs() -> Iterator[tuple[str, str, bool, Judge]]:
    """Yield programs of the judge tests: name, dtype, whether it is right, and its judge."""
    net_cases = [(k == 0, program) for k in (0, 1) for program in (RIGHT, WRONG)[k]]
    for number, (is_right, net_case) in enumerate(net_cases):
        yield f"{net_case[0].__name__} {number}", net_case[2], is_right, partial(_of_net, net_case)
    for is_right, program_table in ((True, eight_bits.RIGHT), (False, eight_bits.WRONG)):
        for name, program in program_table.items():
            yield name, FORMATS[0], is_right, _module_judge(eight_bits, program, FORMATS[0])
    for dtype in ("bfloat16", "float16"):
        for topic, module in (("experts", choices), ("dropout", dropout)):
            for is_right, group in ((True, module.RIGHT), (False, module.WRONG)):
                for program in group:
                    yield (
                        f"{topic}, {program.__name__}",
                        dtype,
                        is_right,
                        _module_judge(module, program, dtype),
                    )


def _module_judge(module: Any, program: Any, dtype: str) -> Judge:
    return lambda seed: module.judged(_pool(), program, dtype, seed=seed)


@cache
def _base(name: str, dtype: str) -> Case:
    return prepare_case(precision._case(precision.SUBJECTS[name], dtype))


def model(name: str, dtype: str, seed: int) -> dict[str, Any]:
    """Run a right schedlang program, and return counts of rows and false alarms."""
    case = replace(
        _base(name, dtype), batches=precision._batches(precision.SUBJECTS[name], seed), seed=seed
    )
    judged = precision.judge(case, Threads())
    return {**_count_rows(judged.rows), "draws": judged.draws, "unsure": len(judged.unsure)}


def _of_net(net_case: tuple[Any, int, str, Mapping[str, Any]], seed: int) -> Report:
    """Judge a program of the small decoder, right or wrong."""
    program, ranks, dtype, sizes = net_case
    torch.manual_seed(seed)
    return verify_program(
        program,
        model=net.Net(**sizes),
        batch=net.batch,
        loss=net.loss,
        ranks=ranks,
        dtype=dtype,
        seed=7 * seed,
        pool=_pool(),
    )


@cache
def _pool() -> Pool:
    return Pool()


def zoo_bug(bug: Any, scene: str, dtype: str) -> dict[str, Any]:
    """Run a bug of the zoo in one dtype: the largest error over its bound, and if it is found."""
    result = precision._hunt_bug(bug, scene, dtype)
    return {"times": result.times, "found": result.found, "said": result.said}


def _count_rows(rows: Any) -> dict[str, Any]:
    failed_rows: list[Row] = [row for row in rows if not row.ok]
    times = [row.error for row in rows if row.error == row.error and "dtype" in row.kind]
    messages = [
        f"{r.condition}: {r.kind} {r.name} {r.step} {r.error:.3g} {r.note}" for r in failed_rows[:6]
    ]
    return {
        "rows": len(rows),
        "bad": len(failed_rows),
        "worst": max(times, default=0.0),
        "said": messages,
    }


def run_cells(out_path: Path, seeds: int, kinds: list[str], first_seed: int = 0) -> None:
    """Run the cells that are missing in a file, and add a line for each."""
    finished = {tuple(line["cell"]) for line in _lines(out_path)}
    with out_path.open("a") as file:
        for cell, run_cell in cells(seeds, first_seed):
            if cell in finished or cell[0] not in kinds:
                continue
            start = time.process_time()
            try:
                outcome: Mapping[str, Any] = run_cell()
            except Refusal as refusal:
                outcome = {"refused": refusal.diagnostics[0].title}
            except Exception as error:  # a failed cell gets a line, too
                outcome = {"failed": f"{type(error).__name__}: {error}".split("\n")[0][:200]}
            seconds = round(time.process_time() - start, 2)
            file.write(json.dumps({"cell": cell, **outcome, "cpu": seconds}) + "\n")
            file.flush()


def _lines(out_path: Path) -> list[dict[str, Any]]:
    return (
        [json.loads(line) for line in out_path.read_text().splitlines()]
        if out_path.exists()
        else []
    )


def report(out_path: Path) -> None:
    """Print counts of a file's cells."""
    lines = _lines(out_path)
    for kind in ("model", "example", "judge", "zoo"):
        of_kind = [line for line in lines if line["cell"][0] == kind]
        done = [line for line in of_kind if not line.keys() & {"refused", "failed"}]
        right = [line for line in done if kind in ("model", "example") or line.get("right")]
        alarms = [line for line in right if line["bad"]]
        print(f"{kind}: {len(of_kind)} cells, {len(done)} ran, {len(of_kind) - len(done)} did not")
        if right:
            rows = sum(line["rows"] for line in right)
            print(f"  right: {len(right)}, {rows} rows, {len(alarms)} cells with false alarms")
        wrong = [line for line in done if kind == "zoo" or line.get("right") is False]
        caught = [line for line in wrong if line.get("found", line.get("bad"))]
        if wrong:
            print(f"  wrong: {len(wrong)}, {len(caught)} found")
        missed = [entry for entry in wrong if entry not in caught]
        large = [entry for entry in missed if entry.get("times", entry.get("worst", 0)) > LARGE]
        for line in [*alarms, *large, *(entry for entry in of_kind if entry not in done)][:40]:
            print("   ", json.dumps(line)[:300])


def main() -> None:
    """Run cells, or report on a file of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="seed: pieces may run side by side")
    parser.add_argument("--kinds", nargs="*", default=["model", "example", "judge", "zoo"])
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    if arguments.report:
        report(arguments.out)
    else:
        run_cells(arguments.out, arguments.seeds, arguments.kinds, arguments.first)


if __name__ == "__main__":
    main()
