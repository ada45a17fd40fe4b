"""Losses whose terms cancel: what is left of a loss or a gradient is rounding, not a difference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes import prove
from schedlang.passes.analyze.prepare import prepare
from schedlang.passes.prove import Case
from schedlang.passes.verify.probe import check_if_cheap
from tests.engine import Threads
from tests.proofs import make_plan

Loss = Callable[[Tensor, dict[str, Tensor]], Tensor]


def model() -> nn.Module:
    """Return a model of one score a row."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def batch() -> dict[str, Tensor]:
    """Return eight rows: four pairs, or two groups."""
    generator = torch.Generator().manual_seed(1)
    draw = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    return {"input": draw[:, :5], "reward": draw[:, 5]}


def preferred(score: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss of a reward model: row 2i is better than row 2i + 1.

    Where both rows of a pair are equal, the gradients of all parameters cancel.
    """
    score = score[:, 0] + 0.0 * batch["reward"]
    return -F.logsigmoid(score[0::2] - score[1::2]).mean()


def relative(score: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss of a policy by advantages relative to its group (GRPO): zero in value."""
    reward = batch["reward"].view(-1, 4)
    advantage = (reward - reward.mean(1, keepdim=True)) / reward.std(1, keepdim=True)
    ratio = (score[:, 0] - score[:, 0].detach()).exp()
    return -(ratio * advantage.view(-1)).mean()


def halves(score: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss of a reward model whose pairs lie in two halves of the batch."""
    better, worse = (score[:, 0] + 0.0 * batch["reward"]).chunk(2)
    return -F.logsigmoid(better - worse).mean()


@pytest.mark.parametrize("loss, refused", [(preferred, False), (relative, False), (halves, True)])
def test_what_cancels_is_no_difference(loss: Loss, refused: bool) -> None:
    """Pairs and groups that lie on one rank are right; pairs on two ranks are refused (S703)."""
    plan = make_plan(model(), "zero(stage=1, over=dp)", "dp=2")
    prepared = prepare(plan, {k: v[:4] for k, v in batch().items()}, loss)
    if not refused:
        check_if_cheap(plan, batch(), prepared, loss=loss)
        return
    with pytest.raises(Refusal, match="S703"):
        check_if_cheap(plan, batch(), prepared, loss=loss)


class Policy(nn.Module):
    """A policy that returns its loss alone, by advantages relative to groups of four rows."""

    def __init__(self) -> None:
        super().__init__()
        self.body = model()

    def forward(self, input: Tensor, reward: Tensor) -> Tensor:
        score, groups = self.body(input)[:, 0], reward.view(-1, 4)
        centred = groups - groups.mean(1, keepdim=True)
        advantage = centred / (groups.std(1, keepdim=True) + 1e-4)
        return -((score - score.detach()).exp() * advantage.view(-1)).mean()


@pytest.mark.parametrize("off, ok", [(0.0, True), (1e-12, False), (1e-6, False), (1.0, False)])
def test_a_loss_that_cancels_is_judged_by_its_terms(
    off: float, ok: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss that is a rounding in value holds; one that is off by more than roundings fails."""
    run_ranks = prove._run_ranks

    def run_wrongly(*args: object, **options: object) -> object:
        result = run_ranks(*args, **options)  # type: ignore[arg-type]
        for key, value in result[0].tensors.items():
            if key.kind == "loss" and value is not None:
                value += off
        return result

    monkeypatch.setattr(prove, "_run_ranks", run_wrongly)
    monkeypatch.setattr(prove, "_add_blame", lambda report, failure, pool: report)
    plan = make_plan(Policy(), "zero(stage=1, over=dp)", "dp=2")
    report = prove.prove(Case(plan, (batch(),), dtype="none"), pool=Threads())
    assert report.ok == ok, str(report)
    assert ("loss" in {row.kind for row in report.rows if not row.ok}) != ok
