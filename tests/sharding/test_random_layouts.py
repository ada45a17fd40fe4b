"""Dropout under several layouts: masks equal those of the original model."""

from __future__ import annotations

from typing import Any

import pytest

from tests import models
from tests.engine import Threads
from tests.proofs import assert_near, make_plan, train_on_ranks, train_sequential

TP = """
transformer.h.*.attn.c_attn  shard(col, blocks=3, over=tp)
transformer.h.*.attn.c_proj  shard(row, over=tp)
"""
CASES = {
    "heads, sliced rows": (TP + "zero(stage=3, over=dp)", "dp=2, tp=2"),
    "stages": ('transformer.h  pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)', "pp=2"),
}


@pytest.mark.parametrize("name", CASES)
def test_masks_are_the_originals(name: str, threads: Threads) -> None:
    """Losses, gradients and state of two steps with dropout are those of the plain loop."""
    rows, mesh = CASES[name]
    model = models.gpt2(2, dropout=0.2)
    batches: Any = [models.tokens(8, seed=seed) for seed in range(2)]
    observed = train_on_ranks(threads, make_plan(model, rows, mesh), batches, seed=3)
    assert_near(observed, train_sequential(model, batches, seed=3))
