"""What a step asks of itself on simulated devices: how often the host waits for that."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from schedlang.passes.lower.build import build
from schedlang.testing.accelerator import current, spawn, unavailable
from tests.accelerator.test_features_run import (
    STEPS,
    SUM,
    Words,
    alone,
    batch,
    check,
    on_ranks,
    sgd,
    words,
)
from tests.proofs import planned

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "it is there")


def first_waits() -> list[int]:
    """On a rank: how often the host waits in each of some steps whose loss nobody reads."""
    program = build(planned(words().to("sim"), SUM, "dp=2"), batch(0), optimizer=sgd)
    seen, found = current(), []
    for step in range(STEPS):
        given = {k: v.to("sim") for k, v in batch(step).items()}
        seen.reset()
        program.train_step(given)
        found.append(sum("step_batch.py" in str(one) for one in seen.synchronisations()))
    return found


def test_the_first_batch_alone_is_compared() -> None:
    """Its values are read for that, on the device's world, and of later steps none."""
    for found in spawn(first_waits):
        assert found[0] > 0 and found[1:] == [0] * (STEPS - 1)


class Wandering(Words):
    """Lets a value, the same for all rows, choose in which order its blocks are called."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        turned = bool(self.head.bias.detach().sum() > 0)
        for block in reversed(self.blocks) if turned else self.blocks:
            x = block(x)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def wandering() -> nn.Module:
    torch.manual_seed(0)
    return Wandering(depth=2).double()


def wandering_waits() -> list[str]:
    """On a rank: where the host waits in a step whose loss nobody reads."""
    rows = "zero(stage=2, over=dp)"
    program = build(planned(wandering().to("sim"), rows, "dp=2"), batch(0), optimizer=sgd)
    given = [{k: v.to("sim") for k, v in batch(step).items()} for step in range(STEPS)]
    for one in given[:-1]:
        program.train_step(one)
    seen = current()
    seen.reset()
    program.train_step(given[-1])
    return [str(one) for one in seen.synchronisations()]


def test_an_order_that_values_choose() -> None:
    """It trains as the model alone, which waits for the value; that ranks agree on what they summed
    is one wait more."""
    rows = "zero(stage=2, over=dp)"
    check(on_ranks(wandering, "dp=2", rows, "sim"), alone(wandering))
    for found in spawn(wandering_waits):
        own = [one for one in found if "test_checks_wait.py" not in one]
        assert len(own) == 1 < len(found), found
