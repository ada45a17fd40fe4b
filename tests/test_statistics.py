"""Router losses under data parallelism: statistics of the whole batch, on ranks that see parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from schedlang.passes.static import static
from tests import expert_models as models
from tests.proofs import planned, proven

ZERO = "zero(stage={}, over=dp)"
ROUTED = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5}


def padded(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch with some padding on both sides, which neither loss counts."""
    mask = torch.ones_like(batch["input_ids"])
    mask[0, 5:] = 0
    mask[2, :3] = 0
    labels = batch["labels"].masked_fill(mask == 0, -100)
    return {**batch, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize("pad", [False, True])
def test_router_losses_of_transformers(pad: bool, threads: Any) -> None:
    """Loss, router gradients and three steps are those of the whole batch; static proofs hold."""
    model, batch = models.transformers_model("Mixtral", **ROUTED, num_hidden_layers=1)
    batch = padded(batch) if pad else batch
    plan = planned(model, ZERO.format(1), "dp=2")
    report = proven(threads, plan, [batch])
    assert report.equivalence == "algebraic"
    found = static(plan, batch)
    assert not found.problems
    assert all(claim.checked for claim in found.claims)
