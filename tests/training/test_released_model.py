"""Memory of a built program: its own parts, and no parameter of the model it was built from."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
from torch import nn

from schedlang.passes.lower.build import build
from tests import models
from tests.engine import Threads
from tests.proofs import adamw, make_plan

STAGES = 'transformer.h  pipeline_split(over=x)\npipeline(order="1F1B", micro=2)\n'
MLP = "transformer.h.*.mlp.c_fc  shard(col, over=x)\ntransformer.h.*.mlp.c_proj  shard(row, over=x)"


def live_parameters() -> Iterator[nn.Parameter]:
    """Yield the parameters of this process that have memory, except slices."""
    for candidate in gc.get_objects():
        # not `isinstance`, slow for a million objects; slices are DTensors
        if (
            type(candidate) is nn.Parameter
            and not candidate.is_meta
            and candidate.untyped_storage().nbytes()
        ):
            yield candidate


def live_after_step(rows: str) -> tuple[list[str], int]:
    """Train a step with dropout: return the original parameters still alive, and how many new full
    parameters exist."""
    before = {
        id(parameter): weakref.ref(parameter) for parameter in live_parameters()
    }  # of other tests in this process
    model = models.gpt2(2, dropout=0.1)
    originals = {name: weakref.ref(p) for name, p in model.named_parameters()}
    plan, batch = make_plan(model, rows, "x=2"), models.tokens(rows=4)
    program = build(plan, batch, optimizer=adamw, seed=0)
    del model, plan
    program.train_step(batch)
    gc.collect()
    pairs = (
        (before.get(id(parameter), lambda: None)(), parameter) for parameter in live_parameters()
    )
    count = sum(earlier is not parameter for earlier, parameter in pairs)
    return [name for name, p in originals.items() if p() is not None], count


@pytest.mark.parametrize("rows", ["zero(stage=3, over=x)", "zero(stage=0, over=x)", STAGES, MLP])
def test_nothing_of_the_model_is_held(rows: str, threads: Threads) -> None:
    """Neither masks, nor plans, nor slices keep the parameters of the original model alive."""
    gc.collect()
    for alive, count in threads.run(live_after_step, 2, rows):
        assert not alive
        assert not count or "stage=3" not in rows, "fully_shard holds slices only"
