"""Rows `verify(...)`: steps, modes, bounds and loss curves are checked or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.prove import Case, prove
from schedlang.passes.verify.requirements import Curve, requirements_of, steps_of
from schedlang.report import Report
from schedlang.runtime.launch.pool import Pool
from tests.proofs import make_plan
from tests.training.test_build import OddSizes, series

DP = "zero(stage=0, over=dp)\n"


class Net(nn.Module):
    """A network with one fault on ranks: in a late step, in eval mode, or in its working dtype."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.drop, self.two = nn.Linear(4, 6), nn.Dropout(0.3), nn.Linear(6, 1)
        self.wrong, self.steps = fault, 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.one(x).tanh())
        if dist.is_initialized() and not x.is_meta:
            h = h * self.factor(x)
        return self.two(h).square().mean()

    def factor(self, x: Tensor) -> float:
        self.steps += torch.is_grad_enabled()
        if self.wrong == "late":
            return 1 + 1e-6 * (self.steps > 3)
        if self.wrong == "eval":
            return 1 + 1e-6 * (not self.training and torch.is_grad_enabled())
        if self.wrong == "low":
            return 1 + 2e-6 * (x.dtype == torch.float32)
        return 1.0


def _batch(seed: int) -> dict[str, Tensor]:
    return {"x": torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))}


def _prove_report(pool: Pool, rows: str, wrong: str = "", dtype: str = "none") -> Report:
    plan = make_plan(Net(wrong), DP + rows, "dp=2")
    return prove(Case(plan, tuple(map(_batch, range(3))), dtype=dtype), pool=pool)


def test_more_steps(pool: Pool) -> None:
    """A fault in the fourth step is found only if four steps are requested."""
    assert _prove_report(pool, "", "late").ok
    report = _prove_report(pool, "verify(train, steps=4)", "late")
    assert report.exit_code == 1 and report.first is not None and report.first.step == 3


def test_eval_mode(pool: Pool) -> None:
    """A fault of eval mode is found only if eval mode is requested."""
    assert _prove_report(pool, "", "eval").ok
    report = _prove_report(pool, "verify(forward, backward, mode=eval)", "eval")
    assert report.first is not None and "eval" in report.first.condition


def test_a_bound_in_the_working_dtype(pool: Pool) -> None:
    """A bound below rounding errors fails, a larger one is shown; float64 keeps its own bound."""
    tight = _prove_report(pool, "verify(forward, backward, rtol=1e-9)", dtype="float32")
    failed_kinds = {row.kind for row in tight.rows if not row.ok}
    assert failed_kinds and all(kind.endswith("working dtype") for kind in failed_kinds)
    loose = _prove_report(pool, "verify(forward, backward, rtol=1e-2)", "low", dtype="float32")
    gates = {row.gate for row in loose.rows if row.kind == "gradients in working dtype"}
    assert gates == {1e-2}
    assert {row.gate for row in loose.rows if row.kind == "gradients"} == {1e-9}
    unchecked = _prove_report(pool, "verify(forward, rtol=1e-2)")
    assert unchecked.exit_code == 3 and "rtol" in unchecked.unchecked[0]


def test_a_loss_curve(pool: Pool) -> None:
    """The loss curve passes within the requested bound over the steps in the working dtype."""
    passing = _prove_report(pool, "verify(loss, within=0.001, steps=6)", dtype="float32")
    (row,) = (row for row in passing.rows if row.kind == "loss curve")
    assert row.ok and row.gate == 0.001 and "6 steps" in row.name
    failing = _prove_report(pool, "verify(loss, within=1e-8, steps=6)", "low", dtype="float32")
    assert any(row.kind == "loss curve" and not row.ok for row in failing.rows)


def test_all_rows_count_together() -> None:
    """Several rows combine: the most steps, the tightest bound, every curve."""
    rows = "verify(train, steps=5)\nverify(backward, rtol=1e-3)\nverify(rtol=1e-2)\n"
    plan = make_plan(OddSizes(), rows + "verify(loss, within=0.1, steps=9)\nverify(mode=eval)")
    requirements = requirements_of(plan)
    assert steps_of(plan) == 5 and requirements.evaluate
    assert requirements.rtol["gradients"] == 1e-3 and requirements.rtol["outputs"] == 1e-2
    assert requirements.curves == (Curve(0.1, 9, "rows.sched:7"),)


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ("verify(rtol=2.0)", "S304"),
        ("verify(exact, rtol=1e-3)", "S304"),
        ("verify(forward, steps=4)", "S305"),
        ("verify(forward, within=0.1)", "S305"),
    ],
)
def test_what_makes_no_sense_is_refused(row: str, code: str) -> None:
    """A meaningless row is refused at planning, before anything runs."""
    with pytest.raises(Refusal, match=code):
        make_plan(OddSizes(), row)


def test_bits_are_asked_of_exact_rows_only() -> None:
    """`exact` in a step with a rounding row is refused; the message says what to do."""
    with pytest.raises(Refusal) as caught:
        requirements_of(make_plan(OddSizes(), DP + "verify(exact)", "dp=2"))
    message = caught.value.render()
    assert "S709" in message and "into another step" in message
    fine: Any = make_plan(OddSizes(), "verify(exact)")
    assert requirements_of(fine).exact == ("rows.sched:4",)
    assert series(4, 1)
