"""Blame after a failed proof: exactly the guilty rows are named, with a diagnosis."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from schedlang.passes.localize.blame import find_rows, plan_trials
from schedlang.passes.prove import Case, prove
from schedlang.passes.verify.observe import Condition, Observation
from schedlang.report import Report, Row
from schedlang.runtime.launch.pool import Pool
from tests import models
from tests.proofs import make_plan
from tests.zoo.memory import other_masks_in_recomputation
from tests.zoo.pipeline import last_microbatch_dropped
from tests.zoo.pool import Mutated
from tests.zoo.replicas import replicas_not_summed
from tests.zoo.saved import saved_wrong
from tests.zoo.scenes import GPT2
from tests.zoo.steps import clip_ignored
from tests.zoo.tensor import bias_on_every_rank


@given(st.integers(1, 200), st.data())
def test_a_single_row_is_found_in_few_runs(count: int, data: st.DataObject) -> None:
    """One bad row among n is found with about log2(n) runs."""
    bad = data.draw(st.integers(0, count - 1))
    culprits = find_rows(range(count), lambda rows: bad in rows)
    assert culprits.rows == (bad,) and culprits.prefix == bad + 1
    assert culprits.runs <= math.ceil(math.log2(count)) + 2


@given(st.integers(2, 40), st.data())
def test_rows_that_fail_together_are_found_together(count: int, data: st.DataObject) -> None:
    """A set of rows that fails only together is named completely, in order, and nothing else."""
    bad = data.draw(st.sets(st.integers(0, count - 1), min_size=2, max_size=4))
    culprits = find_rows(
        [f"row {i}" for i in range(count)], lambda rows: {f"row {i}" for i in bad} <= set(rows)
    )
    assert culprits.rows == tuple(f"row {i}" for i in sorted(bad))


@given(st.integers(1, 20), st.data())
def test_illegal_subsets_count_as_holding(count: int, data: st.DataObject) -> None:
    """If each row needs the one before it, the culprit is named with the rows it needs."""
    bad = data.draw(st.integers(0, count - 1))

    def fails(rows: tuple[int, ...]) -> bool:
        return rows == tuple(range(len(rows))) and bad in rows

    assert find_rows(range(count), fails).rows == tuple(range(bad + 1))


@given(st.integers(4, 12), st.data())
def test_rows_that_are_legal_only_together_are_left_out_together(
    count: int, data: st.DataObject
) -> None:
    """Two innocent rows that need each other are not named with the guilty one."""
    bad, first_needed, second_needed = data.draw(
        st.lists(st.integers(0, count - 1), min_size=3, max_size=3, unique=True)
    )

    def fails(rows: tuple[int, ...]) -> bool:
        return bad in rows and (first_needed in rows) == (second_needed in rows)

    assert find_rows(range(count), fails).rows == (bad,)


@given(st.integers(1, 12), st.randoms(use_true_random=False))
def test_whatever_fails_the_answer_fails(count: int, random) -> None:
    """For any predicate the named rows fail, and without one of them, except the last, do not."""
    table: dict[tuple[int, ...], bool] = {(): False, tuple(range(count)): True}

    def fails(rows: tuple[int, ...]) -> bool:
        return table.setdefault(rows, random.random() < 0.5)

    culprits = find_rows(range(count), fails).rows
    assert fails(culprits)
    for row in culprits[:-1]:
        assert not fails(tuple(r for r in culprits if r != row))


def test_a_failure_without_rows_blames_none() -> None:
    """If the empty schedule fails, no row is to blame."""
    assert find_rows([1, 2], lambda rows: True).rows == ()
    assert find_rows([], lambda rows: True).rows == ()


# ---- Whole proofs: the guilty row is named, and the diagnosis says what is wrong.


TOKENS = tuple(models.tokens(rows=6, seed=seed) for seed in (5, 2))


def _report(rows: str, mesh: str, bug: Any, pool: Pool) -> Report:
    plan = make_plan(models.gpt2(2, 0.1), rows, mesh)
    ranks: Any = Mutated(pool, bug)
    return prove(Case(plan, TOKENS, dtype="none"), pool=ranks, command="schedlang verify x.sched")


def _text_of(report: Report, head: str) -> str:
    return " | ".join(text for key, text in report.localised if key == head)


def test_the_module_leads_to_its_row(pool: Pool) -> None:
    """One layer has a wrong backward: of eight rows on four ranks only its row is named, at that
    layer only, without trials of other rows."""
    rows = GPT2 + "zero(stage=0, over=dp)"
    report = _report(rows, "dp=2, tp=2", "T03@transformer.h.1.mlp.c_proj", pool)
    assert len(report.blamed) == 1 and "mlp.c_proj" in report.blamed[0]
    assert "transformer.h.1.mlp.c_proj: given what is right" in _text_of(report, "suspect")
    assert "transformer.h.1.mlp.c_proj  shard(style=row" in _text_of(report, "smallest")
    line = report.blamed[0].split(":")[1]
    assert _text_of(report, "repeat these") == f"schedlang verify x.sched --only {line}"
    entries = report.to_json()["localised"]
    assert ["suspect", _text_of(report, "suspect")] in entries
    report_text = str(report)
    assert (
        "last good before" in report_text
        and "smallest" in report_text
        and "of 8 rows are needed" in report_text
    )


def test_a_bias_once_per_rank(pool: Pool) -> None:
    """The diagnosis names the bias, and the first activation that differs."""
    report = _report(GPT2, "tp=2", bias_on_every_rank, pool)
    assert "it holds its bias 2 times too often in every row: once per rank" in report.diagnosis
    assert "transformer.h.0.attn.c_proj" in _text_of(report, "first activation")
    assert "style=row" in report.blamed[0] and len(report.blamed) == 1


def test_a_missing_sum_names_its_axis(pool: Pool) -> None:
    """The diagnosis says that the sum of local gradients over the omitted axis is right."""
    rows = GPT2 + "zero(stage=0, over=dp)"
    report = _report(rows, "dp=2, tp=2", replicas_not_summed, pool)
    assert "the sum over dp of the ranks' values is right" in report.diagnosis
    assert len(report.blamed) == 1 and "zero(" in report.blamed[0]


def test_a_microbatch_that_is_missing(pool: Pool) -> None:
    """The diagnosis says that the share of the last part of the batch is missing."""
    report = _report('pipeline(order="GPipe", micro=3)', "", last_microbatch_dropped, pool)
    assert report.diagnosis == "the share of part 2 of 3 is missing"


def test_a_recomputation_is_named_at_the_fewest_modules(pool: Pool) -> None:
    """No module is guilty: the row is found by bisection, and then one of its sites."""
    rows = GPT2 + "transformer.h.* checkpoint()"
    report = _report(rows, "tp=2", other_masks_in_recomputation, pool)
    assert len(report.blamed) == 1 and "checkpoint()" in report.blamed[0]
    assert "no module" in _text_of(report, "suspect")
    assert _text_of(report, "smallest").endswith("transformer.h.0  checkpoint()")


@pytest.mark.parametrize("bug, kind", [(clip_ignored, "gradients"), (saved_wrong, "saved state")])
def test_what_shows_late_is_repeated_as_it_showed(bug: Any, kind: str, pool: Pool) -> None:
    """A bug of clipping or saving does not change the first steps of plain SGD: still only the
    guilty row is named."""
    rows = "transformer.h.0 checkpoint()\nzero(stage=2, over=dp)"
    report = _report(rows, "dp=2", bug, pool)
    assert report.first is not None and report.first.kind == kind
    assert "zero(stage=2" in report.blamed[0] and len(report.blamed) == 1


# -- trials that repeat a failure ----------------------------------------------------------------


def _failed_row(condition: str, kind: str, step: int | None) -> Row:
    return Row(condition, kind, "w", 1.0, 1e-9, False, step)


def _failure() -> Any:
    from schedlang.passes.localize.module_search import Failure

    batches = tuple({"n": k} for k in range(3))
    conditions = [Condition(name, lambda parameters: None, batches) for name in ("SGD", "AdamW")]  # type: ignore[arg-type, return-value]
    nothing = Observation()
    return Failure(None, None, conditions, nothing, nothing, lambda *_: [])  # type: ignore[arg-type]


def test_the_cheapest_way_comes_first() -> None:
    """Trials begin with the fewest steps under the failing condition; all steps come last."""
    rows = [
        _failed_row("AdamW", "gradients", 1),
        _failed_row("SGD", "gradients", 2),
        _failed_row("AdamW", "loss", 0),
    ]
    trials = plan_trials(rows, _failure())
    trial_sizes = [(trial.condition.name, len(trial.condition.batches)) for trial in trials]
    assert trial_sizes == [("AdamW", 1), ("AdamW", 2), ("AdamW", 3), ("SGD", 3)]


@pytest.mark.parametrize(
    "row, saved, working, kernels",
    [
        (_failed_row("AdamW", "saved state", 2), True, False, False),
        (_failed_row("SGD", "gradients in working dtype", 0), False, True, False),
        (_failed_row("kernels", "fuse itself", None), False, False, True),
        (_failed_row("AdamW", "optimizer exp_avg", 2), False, False, False),
    ],
)
def test_a_kind_is_looked_for_where_it_shows(
    row: Row, saved: bool, working: bool, kernels: bool
) -> None:
    """Saved state is tested by saving, the working dtype in it, kernels alone; one step first."""
    trial = plan_trials([row], _failure())[0]
    assert (trial.saved, trial.working, trial.kernels) == (saved, working, kernels)
    assert len(trial.condition.batches) == 1


class PreviousRows(nn.Module):
    """A loss that compares hidden rows with those of the previous batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.before = nn.Linear(4, 4), torch.zeros(0, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x))
        loss = hidden.square().mean()
        if len(self.before):
            count = min(len(hidden), len(self.before))
            loss = loss + (hidden[:count] - self.before[:count]).square().mean()
        self.before = hidden.detach()
        return loss


@pytest.mark.parametrize(
    "rows, mesh",
    [("zero(stage=0, over=dp)", "dp=2"), ('pipeline(order="1F1B", micro=2)', "dp=1")],
)
def test_rows_that_a_forward_leaves_for_the_next_are_named(
    rows: str, mesh: str, pool: Pool
) -> None:
    """An attribute with rows of a batch that the next forward reads is named as suspect."""
    batches = [
        {"x": torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))} for seed in range(2)
    ]
    plan = make_plan(PreviousRows(), rows, mesh)
    report = prove(Case(plan, tuple(batches), dtype="none"), pool=pool)
    assert not report.ok
    assert ("suspect", "`before`: the loss depends on what an earlier forward left there") in (
        report.localised
    )


class Measured(nn.Module):
    """A mean over counted labels, and in evaluation the share of all tokens that are right."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        scores = self.head(x)
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())
        right = (scores.argmax(-1) == labels).double()
        return {"loss": loss} if self.training else {"loss": loss, "accuracy": right.mean()}


def test_a_number_for_each_part_is_named(pool: Pool) -> None:
    """A metric that the weights of the loss do not fit is named, with what would be equal."""
    generator = torch.Generator().manual_seed(0)
    x, labels = torch.randn(4, 6, 4, generator=generator), torch.arange(24).view(4, 6) % 5
    labels[0, :5] = -100
    plan = make_plan(Measured(), "zero(stage=0, over=dp)", "dp=2")
    report = prove(Case(plan, ({"x": x, "labels": labels},), dtype="none"), pool=pool)
    assert not report.ok
    assert ("suspect", "accuracy: one number for each of 2 parts of the batch") in report.localised
