"""Saved bytes: the estimate without data equals those of a real step."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from schedlang.ir.memory import CLASSES
from schedlang.ir.plan import Plan
from schedlang.passes.analyze.prepare import prepare
from schedlang.passes.lower.build import build
from schedlang.passes.simulate.simulated_ranks import estimate_memory
from tests import models
from tests.proofs import make_plan
from tests.storage_counter import StorageCounter


def gpt2() -> torch.nn.Module:
    """Return five layers with eager attention: a fused kernel saves tensors that meta does not."""
    return models.hf(
        "GPT2LMHeadModel",
        n_embd=16,
        n_layer=5,
        n_head=2,
        n_positions=16,
        attn_implementation="eager",
        use_cache=False,
        **models.SIZES,
    )


ROWS = [
    "",
    "checkpoint(group=2)",
    "checkpoint(save=[linear])",
    "checkpoint(plan=rotor, memory=300KiB)",
    "checkpoint(plan=pareto, memory=300KiB)",
    "checkpoint(plan=dtr, memory=300KiB)",
]


@cache
def plain_estimate() -> tuple[int, int]:
    """Return the estimate for the model without rows."""
    return estimate_bytes(make_plan(gpt2(), ""), models.tokens(mask=False))


def estimate_bytes(plan: Plan, batch: Any) -> tuple[int, int]:
    """Return the estimated bytes of activations after the forward, and the peak without state."""
    (rank_memory,) = estimate_memory(plan, batch, None, prepare(plan, batch))
    (forward,) = [moment for moment in rank_memory.moments if moment.what == "0F0"]
    index = CLASSES.index("activations")
    return forward.end[index], rank_memory.passing


@pytest.mark.parametrize("row", ROWS)
def test_what_is_kept_is_what_was_estimated(row: str) -> None:
    """A program holds, to the byte, what the estimate says, between forward and backward; rows that
    recompute hold less."""
    batch = models.tokens(mask=False)
    plan = make_plan(gpt2(), f"transformer.h.*  {row}" if row else "")
    program = build(plan, batch)
    program.module.train()
    state = [*program.module.parameters(), *program.module.buffers(), *batch.values()]
    state_keys = {tensor.untyped_storage()._cdata for tensor in state}
    with StorageCounter() as counter:
        loss = program.module(**batch).loss  # its other outputs are the caller's
        assert counter.now
        saved_storages = (
            storage_ref() for key, storage_ref in counter.alive.items() if key not in state_keys
        )
        saved_bytes = sum(storage.nbytes() for storage in saved_storages)
    estimated, peak = estimate_bytes(plan, batch)
    assert loss.requires_grad and estimated == saved_bytes + sum(
        batch_tensor.nbytes for batch_tensor in batch.values()
    )
    if row:
        assert estimated < peak < plain_estimate()[1] and estimated < plain_estimate()[0] * 0.75
