"""Losses of models that are too large to be tried before they train: judged by their sums alone.

A program takes the mean of its parts' losses. A loss that is no such mean is refused, or warned of;
a model that is quick to run is tried instead, and the two must agree.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.analyze.prepare import prepare
from schedlang.passes.verify import probe
from tests.engine import Threads
from tests.proofs import assert_proven, make_plan

DP, MICRO = ("zero(stage=1, over=dp)", "dp=2"), ('pipeline(order="GPipe", micro=2)', "dp=1")
# the loss -> what is said of it over ranks, and over microbatches: a code, or "" if it is right
LOSSES: dict[str, tuple[str, str]] = {
    "F.mse_loss(scores, target)": ("", ""),
    "F.kl_div(scores.log_softmax(-1), target, reduction='batchmean')": ("", ""),
    "((scores - target) ** 2).sum() / len(x)": ("", ""),
    "((scores - target) ** 2).sum() * (1.0 / float(x.shape[0] * x.shape[1]))": ("", ""),
    "((losses * counted).sum(1) / counted.sum(1).clamp(min=1)).mean()": ("", ""),
    "F.nll_loss(scores.flatten(0, 1).log_softmax(-1), labels.flatten())": ("", ""),
    "(losses * counted).sum() / counted.sum()": ("", "S668"),
    "(losses * counted).sum() * (1 / counted.double().sum())": ("", "S668"),
    "losses[counted].sum() / counted.sum()": ("", "S668"),
    "losses[counted].mean()": ("", "S668"),
    "losses.masked_select(counted).mean()": ("", "S668"),
    "losses[counted].sum() / len(losses[counted])": ("W704", "W704"),
    "F.mse_loss(scores[counted], target[counted])": ("W704", "W704"),
    "(scores - target).norm()": ("W704", "W704"),
    "(scores - target).square().mean() + scores.std(0).mean()": ("W704", "W704"),
    "(scores - target).square().max()": ("W704", "W704"),
    "F.mse_loss(scores, target, reduction='sum')": ("S703", "S703"),
    "losses.sum()": ("S703", "S703"),
    "losses.sum() / 3": ("S703", "S703"),
    "F.cross_entropy(scores.mT, labels, reduction='sum')": ("S703", "S703"),
}


class Scored(nn.Module):
    """Scores of five classes for each token; `loss` is the text of its loss."""

    def __init__(self, loss: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.loss = nn.Linear(3, 5).double(), compile(loss, "loss", "eval")

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return the loss."""
        scores, counted = self.head(x), labels >= 0
        target = F.one_hot(labels.clamp(min=0), 5).double()
        losses = F.cross_entropy(scores.mT, labels, reduction="none")
        names = {"F": F, "x": x, "labels": labels, "scores": scores}
        loss: Tensor = eval(
            self.loss, {**names, "counted": counted, "target": target, "losses": losses}
        )
        return loss


def _batch(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 6, 3, generator=generator, dtype=torch.float64)
    labels = torch.randint(5, (4, 6), generator=generator)
    labels[0, 1:] = labels[1, 4:] = -100
    return {"x": x, "labels": labels}


def _answer(loss: str, rows: str, mesh: str) -> str:
    """Return the code that `build` refuses or warns with; "" for none."""
    plan, batch = make_plan(Scored(loss), rows, mesh), _batch()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            probe.check_if_cheap(plan, batch, prepare(plan, batch))
        except Refusal as refusal:
            return refusal.diagnostic.code
    return "W704" if any("W704" in str(warning.message) for warning in caught) else ""


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_is_judged_by_its_sums(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is right passes, and what is wrong when it is tried is refused or warned of."""
    tried = [bool(_answer(loss, *parts)) for parts in (DP, MICRO)]
    monkeypatch.setattr(probe, "CHEAP_WORK", 0)
    answers = tuple(_answer(loss, *parts) for parts in (DP, MICRO))
    assert answers == LOSSES[loss]
    assert [bool(answer) for answer in answers] == tried


@pytest.mark.parametrize("rows", [DP, ("zero(stage=3, over=dp)", "dp=4")])
@pytest.mark.parametrize("select", ["losses[counted]", "losses.masked_select(counted)"])
def test_a_mean_of_selected_elements_is_that_of_all_ranks(
    select: str, rows: tuple[str, str], threads: Threads
) -> None:
    """Ranks share it, with how many elements each has; a weight says it for microbatches."""
    model: Any = Scored(f"{select}.mean()")
    assert_proven(threads, make_plan(model, *rows), [_batch(seed) for seed in range(3)])


def test_a_weight_takes_a_mean_of_selected_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the weight that the help names, microbatches are right, and are not refused."""
    monkeypatch.setattr(probe, "CHEAP_WORK", 0)
    plan, batch = make_plan(Scored("losses[counted].mean()"), *MICRO), _batch()

    def weight(part: dict[str, Tensor]) -> Tensor:
        return (part["labels"] >= 0).sum()

    probe.check_if_cheap(plan, batch, prepare(plan, batch, weight=weight), weight=weight)
