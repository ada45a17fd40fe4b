"""State dicts of torch in files: a rank loads its own, and refuses that of another rank."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.lower.build import build
from schedlang.runtime.comm import world
from schedlang.runtime.program import Program
from tests.engine import Threads
from tests.proofs import make_plan
from tests.training.test_user_loop import SLICED, SUMMED, TENSOR_ROWS, Net, batch

STAGES = "down  pipeline_split(over=pp)"
ROWS = {
    "slices": (SLICED, "dp=2"),
    "shards": (TENSOR_ROWS, "tp=2"),
    "stages": (STAGES, "pp=2"),
    "replicas": (SUMMED, "dp=2"),
}


def make_program(rows: str, mesh: str) -> Program:
    def adam(named: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(named, lr=0.1)

    return build(make_plan(Net(), rows, mesh), batch(0), optimizer=adam)


@pytest.mark.parametrize("layout", ROWS)
def test_an_optimizer_goes_on_from_its_own_file(layout: str, threads: Threads) -> None:
    """Each rank from its file; all from the first rank's only where they hold the same."""

    def body() -> Any:
        program, resumed = (make_program(*ROWS[layout]) for _ in range(2))
        for seed in range(2):
            program.train_step(batch(seed))
        assert program.optimizer is not None and resumed.optimizer is not None
        file = io.BytesIO()
        torch.save(program.optimizer.state_dict(), file)
        state, codes = program.state_dict(), []
        for data in (world.broadcast_object(0, file.getvalue()), file.getvalue()):
            try:
                resumed.optimizer.load_state_dict(torch.load(io.BytesIO(data)))
            except Refusal as refusal:
                codes.append(refusal.diagnostic.code)
        resumed.load_state_dict(state)
        for later in (program, resumed):
            later.train_step(batch(2))
        return codes, program.state_dict(), resumed.state_dict()

    results = threads.run(body, 2)
    assert [codes for codes, *_ in results] == [[], [] if layout == "replicas" else ["S617"]]
    for _, expected, state in results:
        assert all(torch.equal(state[name], value) for name, value in expected.items())


def test_a_module_is_loaded_from_its_own_file(threads: Threads) -> None:
    """torch's file of slices has those of the rank that wrote it."""

    def body() -> Any:
        program, resumed = (make_program(*ROWS["slices"]) for _ in range(2))
        program.train_step(batch(0))
        file = io.BytesIO()
        torch.save(program.module.state_dict(), file)
        codes = []
        for data in (world.broadcast_object(0, file.getvalue()), file.getvalue()):
            try:
                resumed.module.load_state_dict(torch.load(io.BytesIO(data)))
            except Refusal as refusal:
                codes.append(refusal.diagnostic.code)
        return codes, program.state_dict(), resumed.state_dict()

    results = threads.run(body, 2)
    assert [codes for codes, *_ in results] == [[], ["S617"]]
    for _, expected, state in results:
        assert all(torch.equal(state[name], value) for name, value in expected.items())
