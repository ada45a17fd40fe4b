"""Tests of what a built program holds: its parts, and nothing of the model it was built from."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
from torch import nn

from schedlang.passes.lower.build import build
from tests import models
from tests.engine import Threads
from tests.proofs import adamw, planned

PIPE = 'transformer.h  pipeline_split(over=x)\npipeline(order="1F1B", micro=2)\n'
MLP = "transformer.h.*.mlp.c_fc  shard(col, over=x)\ntransformer.h.*.mlp.c_proj  shard(row, over=x)"


def parameters() -> Iterator[nn.Parameter]:
    """Those of this process that have memory, slices apart."""
    for one in gc.get_objects():
        # not `isinstance`, which asks torch for each of a million objects; slices are DTensors
        if type(one) is nn.Parameter and not one.is_meta and one.untyped_storage().nbytes():
            yield one


def held(rows: str) -> tuple[list[str], int]:
    """After a step with dropout: the original's parameters that are alive, and the whole
    parameters that are there beside slices of them."""
    before = {id(one): weakref.ref(one) for one in parameters()}  # of others in this process
    model = models.gpt2(2, dropout=0.1)
    mine = {name: weakref.ref(p) for name, p in model.named_parameters()}
    plan, batch = planned(model, rows, "x=2"), models.tokens(rows=4)
    program = build(plan, batch, optimizer=adamw, seed=0)
    del model, plan
    program.train_step(batch)
    gc.collect()
    seen = ((before.get(id(one), lambda: None)(), one) for one in parameters())
    whole = sum(known is not one for known, one in seen)
    return [name for name, p in mine.items() if p() is not None], whole


@pytest.mark.parametrize("rows", ["zero(stage=3, over=x)", "zero(stage=0, over=x)", PIPE, MLP])
def test_nothing_of_the_model_is_held(rows: str, threads: Threads) -> None:
    """Neither masks, nor plans, nor slices keep the parameters that a program was built from."""
    gc.collect()
    for left, whole in threads.run(held, 2, rows):
        assert not left
        assert not whole or "stage=3" not in rows, "fully_shard holds slices only"
