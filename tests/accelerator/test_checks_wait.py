"""Consistency checks between ranks on simulated devices: how often the host waits for them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from schedlang.passes.lower.build import build
from schedlang.testing.accelerator import current, spawn, unavailable
from tests.accelerator.test_features_run import (
    STEPS,
    ZERO_0,
    LanguageModel,
    batch,
    check_training,
    language_model,
    sgd,
    single_process,
    train_on_ranks,
)
from tests.proofs import make_plan

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "it is there")


def waits_by_step() -> list[int]:
    """Return on a rank how often the host waits in steps whose loss is not read."""
    program = build(make_plan(language_model().to("sim"), ZERO_0, "dp=2"), batch(0), optimizer=sgd)
    simulation, counts = current(), []
    for step in range(STEPS):
        inputs = {k: v.to("sim") for k, v in batch(step).items()}
        simulation.reset()
        program.train_step(inputs)
        counts.append(sum("step_batch.py" in str(wait) for wait in simulation.synchronisations()))
    return counts


def test_the_first_batch_alone_is_compared() -> None:
    """Ranks compare values of the first batch, on the host; of later batches none."""
    for counts in spawn(waits_by_step):
        assert counts[0] > 0 and counts[1:] == [0] * (STEPS - 1)


class DataDependent(LanguageModel):
    """A model whose order of blocks depends on a value that is the same for all rows."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        backwards = bool(self.head.bias.detach().sum() > 0)
        for block in reversed(self.blocks) if backwards else self.blocks:
            x = block(x)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def data_dependent_model() -> nn.Module:
    torch.manual_seed(0)
    return DataDependent(depth=2).double()


def data_dependent_waits() -> list[str]:
    """Return on a rank where the host waits in a step whose loss is not read."""
    rows = "zero(stage=2, over=dp)"
    program = build(
        make_plan(data_dependent_model().to("sim"), rows, "dp=2"), batch(0), optimizer=sgd
    )
    batches = [{k: v.to("sim") for k, v in batch(step).items()} for step in range(STEPS)]
    for item in batches[:-1]:
        program.train_step(item)
    simulation = current()
    simulation.reset()
    program.train_step(batches[-1])
    return [str(item) for item in simulation.synchronisations()]


def test_an_order_that_values_choose() -> None:
    """It trains as the model in one process, which waits for that value; one more wait is for the
    ranks to agree on what they summed."""
    rows = "zero(stage=2, over=dp)"
    check_training(
        train_on_ranks(data_dependent_model, "dp=2", rows, "sim"),
        single_process(data_dependent_model),
    )
    for waits in spawn(data_dependent_waits):
        model_waits = [wait for wait in waits if "test_checks_wait.py" not in wait]
        assert len(model_waits) == 1 < len(waits), waits
