"""Bitwise comparison: rows that must be exact are, alone and among rows that round."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from schedlang.passes.prove import Case, prove
from schedlang.passes.verify.requirements import EXACT_ROWS, inexact_rules, without_exact_rows
from schedlang.report import Report
from schedlang.runtime import program
from schedlang.runtime.activation_memory import recompute
from schedlang.runtime.launch.pool import Pool
from tests import models
from tests.proofs import make_plan
from tests.training.test_build import GPT2, OddSizes, series
from tests.zoo.bug import Patch
from tests.zoo.pool import Mutated

ROWS = GPT2 + "transformer.h.* checkpoint()"
TOKENS = (models.tokens(rows=6, seed=5),)


def _report(rows: str, mesh: str, pool: Any) -> Report:
    return prove(Case(make_plan(models.gpt2(1, 0.1), rows, mesh), TOKENS, dtype="none"), pool=pool)


def test_recomputation_among_split_layers(pool: Pool) -> None:
    """Exact rows among rounding rows are compared with the plan without them."""
    report = _report(ROWS, "tp=2", pool)
    assert report.ok, str(report)
    exact_rows = [row for row in report.rows if row.kind == EXACT_ROWS]
    assert len(exact_rows) > 20 and all(row.gate == 0 for row in exact_rows)
    assert {row.name.partition(":")[0] for row in exact_rows} >= {
        "outputs",
        "gradients",
        "parameters",
    }


def recomputed_a_little_differently(patch: Patch) -> None:
    """Inject a recomputation with an error of one rounding, far below the float64 tolerance."""
    enter_context = recompute.restore_forward_context.__enter__
    layer_norm = torch.nn.functional.layer_norm

    def enter(self: Any) -> None:
        enter_context(self)
        patch.setattr(
            torch.nn.functional, "layer_norm", lambda *a, **k: layer_norm(*a, **k) * (1 + 4e-16)
        )

    patch.setattr(recompute.restore_forward_context, "__enter__", enter)


def test_a_rounding_too_many_is_found(pool: Pool) -> None:
    """Only the bitwise comparison detects it."""
    report = _report(ROWS, "tp=2", Mutated(pool, recomputed_a_little_differently))
    assert {row.kind for row in report.rows if not row.ok} == {EXACT_ROWS}, str(report)


def sliced_sums_rounded(patch: Patch) -> None:
    """Inject an error of one rounding into gradients of sliced state."""
    sum_gradients = program.sum_gradients

    def sums(parameters: Any, reductions: Any) -> None:
        sum_gradients(parameters, reductions)
        for parameter in parameters.values():
            if isinstance(parameter, DTensor) and parameter.grad is not None:
                parameter.grad.mul_(1 + 4e-16)

    patch.setattr(program, "sum_gradients", sums)


def test_sliced_state_is_whole_state(pool: Pool) -> None:
    """ZeRO over two replicas is bitwise equal to stage 0."""
    plan = make_plan(OddSizes(), "zero(stage=2, over=dp)", "dp=2")
    report = prove(Case(plan, (series(6, 1), series(7, 2)), dtype="none"), pool=pool)
    assert report.ok, str(report)
    assert any(row.kind == EXACT_ROWS for row in report.rows)
    pool = Mutated(pool, sliced_sums_rounded)  # type: ignore[assignment]
    report = prove(Case(plan, (series(6, 1), series(7, 2)), dtype="none"), pool=pool)
    assert {row.kind for row in report.rows if not row.ok} == {EXACT_ROWS}, str(report)


class Skips(nn.Module):
    """A model whose input projection is read by the first block twice, and by the head."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(5, 8)
        self.blocks = nn.ModuleList(Skip() for _ in range(2))
        self.leave = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        entered = x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return (self.leave(torch.cat([entered, x], -1)) ** 2).mean()


class Skip(nn.Module):
    """A projection with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.up(x))


def test_gradients_that_add_up_in_another_order(pool: Pool) -> None:
    """Gradients added in another order are no false alarm; a rounding error is still found."""
    torch.manual_seed(0)
    plan = make_plan(Skips().double(), "zero(stage=1, over=dp)", "dp=2")
    batches = tuple({"x": torch.randn(6, 5, dtype=torch.float64)} for _ in range(2))
    report = prove(Case(plan, batches, dtype="none"), pool=pool)
    assert report.ok, str(report)
    passed = [row for row in report.rows if row.kind == EXACT_ROWS and row.gate]
    assert {row.name.split(": ")[1] for row in passed} <= {"enter.weight", "enter.bias", "x"}
    assert passed, "no gradient was added in another order: this shows nothing"
    pool = Mutated(pool, sliced_sums_rounded)  # type: ignore[assignment]
    report = prove(Case(plan, batches, dtype="none"), pool=pool)
    assert {row.kind for row in report.rows if not row.ok} == {EXACT_ROWS}, str(report)


class Shared(Skips):
    """A model whose first weight has two names: a parameter, and an entry of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(5, 8)
        self.again.weight = self.enter.weight

    def forward(self, x: Tensor) -> Tensor:
        return 100 * (super().forward(x) + self.again(x).square().mean())


def test_a_weight_of_two_names_that_adds_up_in_another_order(pool: Pool) -> None:
    """After the update both names hold bitwise equal values."""
    torch.manual_seed(0)
    plan = make_plan(Shared().double(), "zero(stage=1, over=dp)", "dp=2")
    batches = tuple({"x": torch.randn(6, 5, dtype=torch.float64)} for _ in range(2))
    report = prove(Case(plan, batches, dtype="none"), pool=pool)
    assert report.ok, str(report)
    passed = {row.name for row in report.rows if row.kind == EXACT_ROWS and row.gate}
    assert "other state: again.weight" in passed, "it adds up in the same order: this shows nothing"
    pool = Mutated(pool, sliced_sums_rounded)  # type: ignore[assignment]
    report = prove(Case(plan, batches, dtype="none"), pool=pool)
    assert {row.kind for row in report.rows if not row.ok} == {EXACT_ROWS}, str(report)


def test_an_order_with_copies_of_its_own(pool: Pool) -> None:
    """Two replicas of two stage copies sum four gradients in another order when sliced."""
    rows = "blocks pipeline_split(over=pp)\nzero(stage=1, over=dp)\n"
    rows += 'pipeline(order="Chimera", micro=2)'
    plan = make_plan(models.Stack(Skip() for _ in range(4)).double(), rows, "dp=2, pp=2")
    batches = tuple({"x": torch.randn(8, 8, dtype=torch.float64)} for _ in range(2))
    report = prove(Case(plan, batches, dtype="none"), pool=pool)
    assert report.ok, str(report)
    assert not any(row.kind == EXACT_ROWS for row in report.rows)


def test_what_is_compared_bit_by_bit() -> None:
    """Reductions per microbatch, or over more than two replicas, are not compared bitwise."""
    pipe = 'transformer.h pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)\n'
    model = models.gpt2(2)

    def words(rows: str, mesh: str) -> str:
        reference = without_exact_rows(make_plan(model, rows, mesh))
        return reference[1] if reference else ""

    assert words("zero(stage=3, over=dp)", "dp=2") == "zero at stage 0"
    assert words("zero(stage=3, over=dp)", "dp=4") == ""
    assert words("zero(stage=0, over=dp)", "dp=2") == ""
    assert words(pipe + "zero(stage=1, over=dp)", "dp=2, pp=2") == "zero at stage 0"
    assert words(pipe + "zero(stage=2, over=dp)", "dp=2, pp=2") == ""
    assert words("transformer.h.* checkpoint()", "") == "without checkpoint"


@pytest.mark.parametrize("rows", [GPT2, GPT2 + "transformer.h.* checkpoint()"])
def test_a_mesh_of_ones_is_exact(rows: str, pool: Pool) -> None:
    """With one rank and one microbatch the program is bitwise equal to the original."""
    plan = make_plan(models.gpt2(1, 0.1), rows, "tp=1")
    assert not inexact_rules(plan) and plan.gives_up
    report = prove(Case(plan, TOKENS, dtype="none"), pool=pool)
    assert report.ok, str(report)
    assert report.equivalence == "exact"
    assert all(row.gate == 0 for row in report.rows)
