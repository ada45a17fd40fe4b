"""Statistics of each replica's own: what evaluates is what is saved, as in PyTorch's DDP."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from schedlang.ir.plan import Plan
from schedlang.passes.lower.build import build
from tests.engine import Threads
from tests.proofs import make_plan, sgd
from tests.training.test_build import BatchNormed, series

Results = dict[str, Tensor]
BATCHES = [series(8, seed) for seed in range(5)]


def of_program(plan: Plan, folder: Path) -> Results:
    """Train, save, train on, load, and evaluate after each."""
    program, results = build(plan, BATCHES[0], optimizer=sgd), {}
    for step in range(2):
        program.train_step(BATCHES[step])
    program.save(folder)
    results["first"] = program.eval_step(BATCHES[4])
    results["again"] = program.eval_step(BATCHES[4])
    for step in (2, 3):
        program.train_step(BATCHES[step])
    results["last"] = program.eval_step(BATCHES[4])
    results |= program.state_dict()
    program.load(folder)
    results["loaded"] = program.eval_step(BATCHES[4])
    return results


def of_ddp(replicas: int) -> Results:
    """The same by a plain loop that does what DDP does without synchronised batch norms."""
    models = [BatchNormed() for _ in range(replicas)]
    optimizers = [sgd(model.named_parameters()) for model in models]
    results: Results = {}
    for step, batch in enumerate(BATCHES[:4], 1):
        for k, model in enumerate(models):  # DDP broadcasts buffers before each forward
            model.load_state_dict(models[0].state_dict())
            model(**{name: value.chunk(replicas)[k] for name, value in batch.items()}).backward()
        for parameters in zip(*(model.parameters() for model in models)):
            mean = torch.stack([p.grad for p in parameters]).mean(0)
            for parameter in parameters:
                parameter.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        names = {2: ("first", "again", "loaded"), 4: ("last",)}.get(step, ())
        evaluated = copy.deepcopy(models[0]).eval()(**BATCHES[4]).detach()
        results |= dict.fromkeys(names, evaluated)
    return results | models[0].state_dict()


@pytest.mark.parametrize(
    "rows, mesh", [("zero(stage=0, over=dp)", "dp=2"), ("zero(stage=3, over=dp)", "dp=4")]
)
def test_evaluation_is_that_of_the_saved_state(
    threads: Threads, tmp_path: Path, rows: str, mesh: str
) -> None:
    """On every rank: the statistics of the first replica, also in the state dict."""
    plan = make_plan(BatchNormed(), rows, mesh, "batch_stats")
    expected: Any = of_ddp(plan.mesh.world)
    for results in threads.run(of_program, plan.mesh.world, plan, tmp_path / "saved"):
        for name, value in expected.items():
            torch.testing.assert_close(results[name], value, rtol=1e-9, atol=1e-12)
