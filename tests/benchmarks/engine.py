"""Time of a property example on both engines: python -m tests.benchmarks.engine [--repeat N]

Four ranks, dp=2 and tp=2, a two-layer MLP and a GPT-2 of two tiny layers, each in three forms:

* step   forward, backward and the comparison of loss and gradients with the original's
* cheap  as in property tests: outputs, one SGD step, and the state after it
* proof  `prove`: two optimizers, two batches, saved state

once on threads and once on processes.  Printed are medians of wall and CPU seconds of all ranks
together, and the parts of the CPU time on threads.
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
from tests.proofs import make_plan
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
    """Return a case with column and row parallel layers, and data parallelism."""
    rows = "up  shard(col, over=tp)\ndown  shard(row, over=tp)\nzero(stage=0, over=dp)"
    return Case(make_plan(Mlp(), rows, MESH), (_points(1), _points(2)), dtype="none")


def transformer() -> Case:
    """Return a GPT-2 case with tensor and data parallelism, split vocabulary and dropout."""
    plan = make_plan(models.gpt2(2, 0.1), GPT2 + "zero(stage=0, over=dp)", MESH)
    return Case(plan, tuple(models.tokens(rows=6, seed=s) for s in (5, 2)), dtype="none")


# -- the three forms -------------------------------------------------------------------------------


def _observation(loss: Tensor, gradients: Mapping[str, Tensor | None]) -> Observation:
    entries = {Key("step", "gradients", 0, name): value for name, value in gradients.items()}
    return Observation({Key("step", "loss", 0, "loss"): loss, **entries})


def _one_step(case: Case) -> Observation:
    with enter_modes(Float64()):
        program = build(case.plan, case.batches[0], seed=case.seed, prepared=case.prepared)
        return _observation(program.train_step(case.batches[0]), program.gradients())


def step(case: Case, engine: Any, spent: CpuTimes) -> bool:
    """Run one forward and backward, and compare; return whether all rows agree."""
    case = spent("trace", lambda: randomised_float64(prepare_case(case)))

    def alone() -> Observation:
        sequential, batch = Sequential(copy_original(case), loss=case.loss), case.batches[0]
        with enter_modes(*proof_modes(case)[0]):
            loss = sequential.forward_backward(batch, range(len(next(iter(batch.values())))))
        return _observation(loss, sequential.gradients())

    expected = spent("original", alone)
    actual = spent("ranks", lambda: engine.run(_one_step, WORLD, case)[0])
    return all(row.ok for row in spent("compare", lambda: compare(expected, actual)))


def one_sgd_step(case: Case, engine: Any, spent: CpuTimes) -> bool:
    """Run what a property test does for each example; return whether all rows agree."""
    case = spent(
        "trace", lambda: randomised_float64(prepare_case(replace(case, batches=case.batches[:1])))
    )
    spent("original", lambda: check_parts(case))
    conditions = standard_conditions(case.batches, 1.0)[:1]
    expected, _ = spent("original", lambda: run_original(case, conditions))
    actual = spent("ranks", lambda: engine.run(observe_on_rank, WORLD, case, conditions)[0])
    return all(row.ok for row in spent("compare", lambda: compare(expected, actual)))


def proof(case: Case, engine: Any, spent: CpuTimes) -> bool:
    """Run `prove`, and return whether it passes."""
    return spent("all", lambda: prove(case, pool=engine)).ok


# -- measuring -------------------------------------------------------------------------------------


class CpuTimes:
    """Collects CPU seconds of this process by part of an example."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}

    def __call__(self, part: str, action: Callable[[], Any]) -> Any:
        start = time.process_time()
        result = action()
        self.parts[part] = self.parts.get(part, 0.0) + time.process_time() - start
        return result


def measure(check: Any, case: Case, engine: Any, repeat: int) -> tuple[float, float, CpuTimes]:
    """Return median wall and CPU seconds, and the parts of the last example."""
    on_threads = isinstance(engine, Threads)

    def cpu() -> float:
        ranks = 0.0 if on_threads else sum(engine.run(time.process_time, WORLD))
        return time.process_time() + ranks

    assert check(case, engine, CpuTimes()), "the comparison does not hold"  # this also warms up
    walls, cpus, spent = [], [], CpuTimes()
    for _ in range(repeat):
        spent, cpu_before, start = CpuTimes(), cpu(), time.perf_counter()
        check(case, engine, spent)
        walls.append(time.perf_counter() - start)
        cpus.append(cpu() - cpu_before)
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
            for check in (step, one_sgd_step, proof):
                case = make()
                wall, cpu, spent = measure(check, case, threads, repeat)
                other_wall, other_cpu, _ = measure(check, case, pool, repeat)
                times = [f"{1000 * t:.0f}" for t in (wall, cpu, other_wall, other_cpu)]
                name = f"{make.__name__}, {check.__name__}"
                print(
                    f"{name:24}{times[0]:>14}{times[1]:>8}{times[2]:>16}{times[3]:>8}", flush=True
                )
                parts = ", ".join(f"{n} {1000 * t:.0f}" for n, t in spent.parts.items())
                print(f"{'':4}CPU on threads: {parts}", flush=True)


if __name__ == "__main__":
    main()
