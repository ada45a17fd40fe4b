"""Losses that programs report in evaluation: of the full batch, or averaged wrongly over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from schedlang import TrainingProgram, verify_program
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.launch.pool import Pool
from tests.judging.net import batch_part

CLASSES = 5


def labelled(seed: int) -> dict[str, Tensor]:
    """Return five rows, of which some have no label: ranks have three and two."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (5,), generator=draw)
    labels[3 + seed % 2] = -100
    return {"input": torch.randn(5, 6, generator=draw), "labels": labels}


def classify(output: Any, batch: Any) -> Tensor:
    """Return the mean over rows with a label."""
    return F.cross_entropy(output, batch["labels"])


def mean_of_means(module: Any, batch: Any) -> Tensor:
    value = classify(module(batch["input"]), batch)
    dist.all_reduce(value)
    return value / dist.get_world_size()


def mean_of_labels(module: Any, batch: Any) -> Tensor:
    value = F.cross_entropy(module(batch["input"]), batch["labels"], reduction="sum")
    both = torch.stack([value, (batch["labels"] != -100).sum().to(value.dtype)])
    dist.all_reduce(both)
    return both[0] / both[1]


def own_mean(module: Any, batch: Any) -> Tensor:
    return classify(module(batch["input"]), batch)


def with_dropout(module: Any, batch: Any) -> Tensor:
    """Wrong: dropout is on, as if `eval()` was forgotten."""
    module.train()
    return mean_of_labels(module, batch)


def no_number(module: Any, batch: Any) -> Tensor:
    output: Tensor = module(batch["input"])
    return output


def evaluating(metric: Any) -> Any:
    """Return data parallel ranks that train rightly, and report a metric in evaluation."""

    def program(model: Any) -> TrainingProgram:
        rank, size = dist.get_rank(), dist.get_world_size()
        module = DistributedDataParallel(model, broadcast_buffers=False)

        def step(batch: Any) -> Tensor:
            part = batch_part(batch, rank, size)
            total = F.cross_entropy(module(part["input"]), part["labels"], reduction="sum")
            value = total * size / (batch["labels"] != -100).sum()
            value.backward()
            return value

        def evaluate_loss(batch: Any) -> Tensor:
            return metric(model, batch_part(batch, rank, size))

        return TrainingProgram(module, step, evaluate_loss=evaluate_loss)

    return program


def judge_metric(pool: Pool, metric: Any) -> Any:
    """Return the report on ranks with this metric."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, CLASSES))
    inputs = {"model": model, "batch": labelled, "loss": classify, "ranks": 2, "pool": pool}
    return verify_program(evaluating(metric), **inputs)


def test_a_loss_of_all_labels_passes(pool: Pool) -> None:
    """Each batch is a row; nothing is dropped."""
    report = judge_metric(pool, mean_of_labels)
    rows = [row for row in report.rows if row.kind == "evaluation loss"]
    assert report.ok and len(rows) >= 3, str(report)


@pytest.mark.parametrize(
    "metric, said", [(mean_of_means, "the plain mean"), (own_mean, " instead of ")]
)
def test_a_wrong_mean_is_told(metric: Any, said: str, pool: Pool) -> None:
    """Training is right, so that only the reported loss fails."""
    report = judge_metric(pool, metric)
    assert {row.kind for row in report.rows if not row.ok} == {"evaluation loss"}, str(report)
    assert report.exit_code == 1 and said in report.localised[0][1], str(report)


def test_a_metric_with_dropout_fails(pool: Pool) -> None:
    """The module that drops is named."""
    report = judge_metric(pool, with_dropout)
    text = "`2`: ranks drop there in `evaluate_loss`, and the original drops nothing in evaluation"
    assert report.exit_code == 1 and dict(report.localised) == {"dropout": text}, str(report)


def test_what_is_no_number_is_refused(pool: Pool) -> None:
    """The message says what to return."""
    with pytest.raises(Refusal) as caught:
        judge_metric(pool, no_number)
    assert caught.value.diagnostic.code == "S766" and "evaluate_loss" in str(caught.value)
