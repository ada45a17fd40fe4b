"""The proof: injected bugs are found with their row, correct programs pass; exit codes."""

from __future__ import annotations

import functools
import os
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from typer.testing import CliRunner, Result

from schedlang.cli import app
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.plan import Plan
from schedlang.passes.elaborate.rows import plan_of_lines
from schedlang.passes.prove import Case, check_world, prove
from schedlang.report import Report
from schedlang.runtime.launch.pool import Pool, RankDied
from tests import models
from tests.proofs import make_plan
from tests.training.test_build import GPT2, LLAMA, LLAMA_ENDS, OddSizes, series
from tests.zoo import Mutated

ROOT = Path(__file__).parents[2]
TOKENS = [models.tokens(rows=6, seed=seed) for seed in (5, 2)]  # labels are uneven


def _gpt2_plan(rows: str, mesh: str) -> Plan:
    return make_plan(models.gpt2(2, 0.1), rows, mesh)


PLANS = {
    "tp": lambda: _gpt2_plan(GPT2, "tp=2"),
    "tp, recomputed": lambda: _gpt2_plan(GPT2 + "transformer.h.* checkpoint()", "tp=2"),
    "dp": lambda: _gpt2_plan("zero(stage=0, over=dp)", "dp=2"),
    "sliced": lambda: _gpt2_plan("zero(stage=2, over=dp)", "dp=2"),
    "sp": lambda: make_plan(models.llama(1), LLAMA + LLAMA_ENDS, "tp=2"),
    "pp": lambda: _gpt2_plan(
        'transformer.h pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)', "pp=2"
    ),
    "odd": lambda: make_plan(OddSizes(), "zero(stage=1, over=dp)", "dp=2"),
}


def _prove_plan(name: str, pool: Any) -> Report:
    batches = [series(7, seed) for seed in (1, 2)] if name == "odd" else TOKENS
    return prove(Case(PLANS[name](), tuple(batches), dtype="none"), pool=pool)


@pytest.mark.parametrize("name", PLANS)
def test_no_false_alarm(name: str, pool: Pool) -> None:
    """A correct program passes under every plan, far below the tolerance."""
    report = _prove_plan(name, pool)
    assert report.ok, str(report)
    assert max(row.error for row in report.rows) < 1e-12
    assert report.blamed == () and report.exit_code == 0


def test_the_row_is_named_alone(pool: Pool) -> None:
    """Of a dozen rows only the wrong one is blamed, with its line."""
    rows = GPT2.replace("lm_head  shard(vocab, over=tp)", "") + "zero(stage=0, over=dp)"
    rows = rows.replace("transformer.wte  shard(vocab, over=tp)", "")
    plan = _gpt2_plan(rows, "dp=2, tp=2")
    case = Case(plan, tuple(TOKENS), dtype="none")
    report = prove(case, pool=Mutated(pool, "D02"))  # type: ignore[arg-type]
    assert len(report.blamed) == 1 and "zero(stage=0, over=" in report.blamed[0]
    assert report.blamed[0].startswith("rows.sched:")


# -- runs that crash or hang -------------------------------------------------------------------


def _kill_rank(patch: pytest.MonkeyPatch) -> None:
    def step(self: Any, batch: Any, **options: Any) -> Any:
        if dist.get_rank() == 1:
            os._exit(7)
        dist.barrier()

    patch.setattr("schedlang.runtime.program.Program.train_step", step)


def test_a_dead_rank_ends_the_proof(pool: Pool) -> None:
    """A dead rank is named with its exit, and the pool can run the next proof."""
    with pytest.raises(RankDied, match="rank 1 failed"):
        _prove_plan("dp", Mutated(pool, _kill_rank))
    assert _prove_plan("dp", pool).ok


MODEL = """
    import os, time
    import torch
    import torch.distributed as dist
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(3, 2)
            self.two = nn.Linear(2, 1)

        def forward(self, x):
            if dist.is_initialized() and dist.get_rank() == 1 and not x.is_meta:
                ACTION
            return self.two(self.one(x)).square().mean()

    def model():
        return Net()

    def batch(seed):
        return {"x": torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))}
"""
ROWS = 'schedule 1 for Net\n\nmesh(dp=2)\n\nstep "a" {\n  zero(stage=0, over=dp)\n}\n'


def _run_verify(folder: Path, action: str, *options: str, rows: str = ROWS) -> Result:
    (folder / "model.py").write_text(textwrap.dedent(MODEL).replace("ACTION", action))
    (folder / "x.sched").write_text(rows)
    return CliRunner().invoke(app, ["verify", str(folder / "x.sched"), *options])


def test_exit_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 0: equal; 1: different; 3, with the rank's message: a crash or a hang."""
    result = _run_verify(tmp_path, "pass")
    assert result.exit_code == 0 and "PASS" in result.stdout, result.output
    result = _run_verify(tmp_path, "x = x * 1.01", "--html", str(tmp_path / "x.html"))
    assert result.exit_code == 1 and "FAIL" in result.stdout
    page = (tmp_path / "x.html").read_text()
    assert "FAIL" in page and "to blame" in page and "zero(stage=0" in page
    assert "to blame" in result.stdout and "zero(stage=0" in result.stdout
    output = "".join(result.stdout.split())  # a terminal folds long lines
    assert f"schedlangverify{tmp_path}/x.sched--seed0--meshdp=2" in output
    result = _run_verify(tmp_path, 'raise RuntimeError("no more")')
    assert result.exit_code == 3 and "rank 1" in result.stderr and "no more" in result.stderr
    result = _run_verify(tmp_path, "os._exit(9)")
    assert result.exit_code == 3 and "exit code 9" in result.stderr
    impatient = functools.partialmethod(Pool.run, hang_after=3.0)
    monkeypatch.setattr(Pool, "run", impatient)
    result = _run_verify(tmp_path, "time.sleep(600)")
    assert result.exit_code == 3 and "no rank made progress for 3 s" in result.stderr
    assert "sleep" in result.stderr or "forward" in result.stderr


# -- parts of a schedule, and sizes ------------------------------------------------------------


def test_only_some_lines() -> None:
    """Only rows of the given lines are kept; unused axes of the mesh get size 1."""
    plan = _gpt2_plan("transformer.h.*  checkpoint()\nzero(stage=1, over=dp)", "dp=2, tp=1")
    line = plan.actions[0].span.line  # type: ignore[union-attr]
    small = plan_of_lines(plan, str(line))
    assert [a.name for a in small.actions] == ["checkpoint"] and small.mesh.sizes["dp"] == 1
    two_lines = plan_of_lines(plan, f"{line}-{line + 1}")
    assert [a.name for a in two_lines.actions] == [
        "checkpoint",
        "zero",
    ] and two_lines.mesh.world == 2
    for lines_text, message in (("900", "no row is"), ("a-b", "cannot read the lines")):
        with pytest.raises(Refusal, match=message):
            plan_of_lines(plan, lines_text)


def test_only_on_the_command_line(tmp_path: Path) -> None:
    """`--only` leaves out the row with the bug: the proof passes."""
    rows = ROWS.replace("  zero", "  one  checkpoint()\n  zero")
    assert _run_verify(tmp_path, "x = x * 1.01", "--only", "6", rows=rows).exit_code == 0


@pytest.mark.parametrize(
    "mesh, small",
    [
        ("dp=16", "dp=2"),
        ("dp=4, pp=2, tp=2", "dp=2,pp=2,tp=2"),
        ("a=2, b=2, c=2, d=2", "a=1,b=2,c=2,d=2"),
    ],
)
def test_more_than_eight_ranks_are_refused(mesh: str, small: str) -> None:
    """More than eight ranks are refused, with a smaller mesh that keeps every row."""
    model: nn.Module = OddSizes()
    with pytest.raises(Refusal) as caught:
        check_world(make_plan(model, "verify(loss)", mesh))
    message = caught.value.render()
    assert "S702" in message and f"`--mesh {small}`" in message
    check_world(make_plan(model, "verify(loss)", small.replace(",", ", ")))


def test_the_model_is_not_changed_by_its_proof(pool: Pool) -> None:
    """Values, dtypes and flags of the user's module stay unchanged."""
    model = models.gpt2(1, 0.1).float()
    old_state = {name: value.clone() for name, value in model.state_dict().items()}
    mode = model.training
    prove(Case(make_plan(model, "zero(stage=1, over=dp)", "dp=2"), tuple(TOKENS)), pool=pool)
    new_state = model.state_dict()
    assert all(
        torch.equal(new_state[n], v) and new_state[n].dtype == v.dtype for n, v in old_state.items()
    )
    assert model.training == mode and all(p.grad is None for p in model.parameters())
