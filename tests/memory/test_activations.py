"""Bytes that are kept for a backward: estimated without data, they are those of a real step."""

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
from tests.counting import Counter
from tests.proofs import planned


def gpt2() -> torch.nn.Module:
    """Five layers whose attention is written out, so that no kernel keeps what meta does not."""
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
def plain() -> tuple[int, int]:
    """What is told of the model as it is."""
    return told(planned(gpt2(), ""), models.tokens(mask=False))


def told(plan: Plan, batch: Any) -> tuple[int, int]:
    """Bytes of activations after the forward, and of all but the state at most, as estimated."""
    (one,) = estimate_memory(plan, batch, None, prepare(plan, batch))
    (forward,) = [moment for moment in one.moments if moment.what == "0F0"]
    first = CLASSES.index("activations")
    return forward.end[first], one.passing


@pytest.mark.parametrize("row", ROWS)
def test_what_is_kept_is_what_was_estimated(row: str) -> None:
    """Between forward and backward a real program holds, byte for byte, what the estimate says,
    beside the batch, of which a step has its own; and a row that keeps less is seen to."""
    batch = models.tokens(mask=False)
    plan = planned(gpt2(), f"transformer.h.*  {row}" if row else "")
    program = build(plan, batch)
    program.module.train()
    state = [*program.module.parameters(), *program.module.buffers(), *batch.values()]
    known = {tensor.untyped_storage()._cdata for tensor in state}
    with Counter() as counter:
        loss = program.module(**batch).loss  # what else it gives is the caller's to hold
        assert counter.now
        left = (seen() for key, seen in counter.alive.items() if key not in known)
        kept = sum(storage.nbytes() for storage in left)
    found, most = told(plan, batch)
    assert loss.requires_grad and found == kept + sum(each.nbytes for each in batch.values())
    if row:
        assert found < most < plain()[1] and found < plain()[0] * 0.75
