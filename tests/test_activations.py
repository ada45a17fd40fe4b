"""Bytes that are kept for a backward: counted without data, they are those of a real step."""

from __future__ import annotations

import pytest
import torch
import transformers

from schedlang.passes.activations import activations
from schedlang.passes.build import build
from schedlang.runtime.alive import Alive
from tests import models
from tests.proofs import planned


def gpt2() -> torch.nn.Module:
    """Five layers whose attention is written out, so that no kernel keeps what meta does not."""
    config = transformers.GPT2Config(
        n_embd=16, n_layer=5, n_head=2, n_positions=16, attn_implementation="eager",
        use_cache=False, **models.SIZES,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).double()


ROWS = [
    "",
    "checkpoint(group=2)",
    "checkpoint(save=[linear])",
    "checkpoint(plan=rotor, memory=300KiB)",
]


@pytest.mark.parametrize("row", ROWS)
def test_what_is_kept_is_what_was_counted(row: str) -> None:
    """Between forward and backward a real program holds, byte for byte, what the count on the meta
    device says; and a row that keeps less is seen to."""
    batch = models.tokens(mask=False)
    plan = planned(gpt2(), f"transformer.h.*  {row}" if row else "")
    told = activations(plan, batch)
    program = build(plan, batch)
    program.module.train()
    with Alive(program.module) as alive:
        loss = program.module(**batch).loss  # what else it gives is the caller's to hold
        assert alive.bytes() == told.kept
        loss.backward()
    assert told.peak == pytest.approx(alive.peak, rel=0.02)
    if row:
        assert told.kept < activations(planned(gpt2(), ""), batch).kept * 0.75
