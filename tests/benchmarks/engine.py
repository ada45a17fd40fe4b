"""Time of a property example on both engines: python -m tests.benchmarks.engine [--repeat N]

Four ranks, dp=2 and tp=2, a two-layer MLP and a GPT-2 of two tiny layers, each in three forms:

* step   forward, backward and the comparison of loss and gradients with the original's
* cheap  as the property tests do: with outputs, one step of SGD, and state after it
* proof  `prove`: two optimizers, two batches, saved state

once on threads and once on processes.  Printed are the medians of seconds on the wall and of CPU,
all ranks together; and where the CPU time of a form goes on threads.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.passes.lower.build import build
from schedlang.passes.prove import prove
from schedlang.passes.verify.compare import compare
from schedlang.passes.verify.observe import Key, Observation, standard_conditions
from schedlang.passes.verify.original import Sequential
from schedlang.passes.verify.probe import check_parts
from schedlang.passes.verify.proof_case import (
    Case,
    copy_original,
    observe_on_rank,
    prepare_case,
    proof_modes,
    randomised_float64,
    run_original,
)
from schedlang.runtime.float64 import Float64
from schedlang.runtime.launch.pool import Pool
from schedlang.runtime.modes import enter_modes
from tests import models
from tests.conftest import PRELOAD
from tests.engine import Threads
from tests.proofs import planned
from tests.training.test_build import GPT2

MESH = "dp=2, tp=2"
WORLD = 4


class Mlp(nn.Module):
    """Two layers and a squared error."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ((self.down(torch.tanh(self.up(x))) - y) ** 2).mean()


def _points(seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {n: torch.randn(8, k, generator=g, dtype=torch.float64) for n, k in (("x", 8), ("y", 4))}


def mlp() -> Case:
    """Column then row parallel, and data parallel."""
    rows = "up  shard(col, over=tp)\ndown  shard(row, over=tp)\nzero(stage=0, over=dp)"
    return Case(planned(Mlp(), rows, MESH), (_points(1), _points(2)), dtype="none")


def transformer() -> Case:
    """Tensor parallel throughout, the vocabulary too, dropout on, and data parallel."""
    plan = planned(models.gpt2(2, 0.1), GPT2 + "zero(stage=0, over=dp)", MESH)
    return Case(plan, tuple(models.tokens(rows=6, seed=s) for s in (5, 2)), dtype="none")


# -- the three forms -------------------------------------------------------------------------------


def _seen(loss: Tensor, gradients: Mapping[str, Tensor | None]) -> Observation:
    found = {Key("step", "gradients", 0, name): value for name, value in gradients.items()}
    return Observation({Key("step", "loss", 0, "loss"): loss, **found})


def _one_step(case: Case) -> Observation:
    with enter_modes(Float64()):
        program = build(case.plan, case.batches[0], seed=case.seed, prepared=case.prepared)
        return _seen(program.train_step(case.batches[0]), program.gradients())


def step(case: Case, engine: Any, spent: Spent) -> bool:
    """One forward and one backward, compared."""
    case = spent("trace", lambda: randomised_float64(prepare_case(case)))

    def alone() -> Observation:
        subject, batch = Sequential(copy_original(case), loss=case.loss), case.batches[0]
        with enter_modes(*proof_modes(case)[0]):
            loss = subject.forward_backward(batch, range(len(next(iter(batch.values())))))
        return _seen(loss, subject.gradients())

    expected = spent("original", alone)
    actual = spent("ranks", lambda: engine.run(_one_step, WORLD, case)[0])
    return all(row.ok for row in spent("compare", lambda: compare(expected, actual)))


def cheap(case: Case, engine: Any, spent: Spent) -> bool:
    """What a property test does for each example."""
    case = spent(
        "trace", lambda: randomised_float64(prepare_case(replace(case, batches=case.batches[:1])))
    )
    spent("original", lambda: check_parts(case))
    told = standard_conditions(case.batches, 1.0)[:1]
    expected, _ = spent("original", lambda: run_original(case, told))
    actual = spent("ranks", lambda: engine.run(observe_on_rank, WORLD, case, told)[0])
    return all(row.ok for row in spent("compare", lambda: compare(expected, actual)))


def proof(case: Case, engine: Any, spent: Spent) -> bool:
    """The whole."""
    return spent("all", lambda: prove(case, pool=engine)).ok


# -- measuring -------------------------------------------------------------------------------------


class Spent:
    """CPU seconds of this process by part of an example."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}

    def __call__(self, part: str, work: Callable[[], Any]) -> Any:
        start = time.process_time()
        result = work()
        self.parts[part] = self.parts.get(part, 0.0) + time.process_time() - start
        return result


def measured(form: Any, case: Case, engine: Any, repeat: int) -> tuple[float, float, Spent]:
    """Medians of seconds on the wall and of CPU, and the parts of the last example."""
    here = isinstance(engine, Threads)

    def cpu() -> float:
        ranks = 0.0 if here else sum(engine.run(time.process_time, WORLD))
        return time.process_time() + ranks

    assert form(case, engine, Spent()), "the comparison does not hold"  # and all is warm
    walls, cpus, spent = [], [], Spent()
    for _ in range(repeat):
        spent, before, start = Spent(), cpu(), time.perf_counter()
        form(case, engine, spent)
        walls.append(time.perf_counter() - start)
        cpus.append(cpu() - before)
    return statistics.median(walls), statistics.median(cpus), spent


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=5)
    repeat = parser.parse_args().repeat
    print(f"{'milliseconds':24}{'threads wall':>14}{'CPU':>8}{'processes wall':>16}{'CPU':>8}")
    with Threads() as threads, Pool(preload=PRELOAD) as pool:
        for make in (mlp, transformer):
            for form in (step, cheap, proof):
                case = make()
                wall, cpu, spent = measured(form, case, threads, repeat)
                other_wall, other_cpu, _ = measured(form, case, pool, repeat)
                times = [f"{1000 * t:.0f}" for t in (wall, cpu, other_wall, other_cpu)]
                name = f"{make.__name__}, {form.__name__}"
                print(
                    f"{name:24}{times[0]:>14}{times[1]:>8}{times[2]:>16}{times[3]:>8}", flush=True
                )
                parts = ", ".join(f"{n} {1000 * t:.0f}" for n, t in spent.parts.items())
                print(f"{'':4}CPU on threads: {parts}", flush=True)


if __name__ == "__main__":
    main()
