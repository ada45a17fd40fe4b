"""except_last equals its model on two ranks, and runs again all microbatches but one."""

import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import schedlang
from schedlang.cli import app
from schedlang.ir.modelfile import load_model_file

SCHEDULE = Path(__file__).parent / "except_last.sched"


def test_it_equals_the_model() -> None:
    """Outputs, loss, gradients and three steps in two stages, with dropout, in float64."""
    result = CliRunner().invoke(app, ["verify", str(SCHEDULE)])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("rows", [12, 5])
def test_the_last_microbatch_runs_once(rows: int) -> None:
    """The oracle: four blocks run for three microbatches, and again for the first two, which are
    the larger ones where rows do not divide."""
    file = load_model_file(None, SCHEDULE)
    net = file.model()
    calls = vars(sys.modules[type(net).__module__])["calls"]
    sch = schedlang.create_schedule(net)
    with sch.step("all but the last"):
        sch["blocks.*"].except_last()
        sch.pipeline(order="GPipe", micro=3)
    batch = {name: value[:rows] for name, value in file.batch(0).items()}
    program = sch.build(batch=batch, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    calls.clear()
    program.train_step(batch)
    cut = [4, 4, 4] if rows == 12 else [2, 2, 1]
    assert sorted(calls) == sorted(4 * cut + 4 * cut[:2])


def test_one_microbatch_is_refused() -> None:
    """Nothing would be recomputed."""
    file = load_model_file(None, SCHEDULE)
    sch = schedlang.create_schedule(file.model())
    sch["blocks.*"].except_last()
    with pytest.raises(schedlang.Refusal, match="the only microbatch"):
        sch.build(batch=file.batch(0))
