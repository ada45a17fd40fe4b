"""Property of random schedules: the gradient norm equals the original's; clipping uses it."""

from __future__ import annotations

from typing import Any

from hypothesis import given

from tests.engine import Threads
from tests.proofs import adamw, assert_near, train_sequential, train_steps
from tests.properties import engine, schedules
from tests.properties.profiles import examples
from tests.properties.schedules import Drawn

LARGE_CLIP, SMALL_CLIP = 10.0, 0.02  # clip bounds as multiples of the norm: without and with effect


@examples(4)
@given(schedules.legal())
def test_the_norm_is_that_of_all_gradients(threads: Threads, drawn: Drawn) -> None:
    """Sharded, replicated, sliced, tied, frozen and staged parameters count once each: the norm,
    and training with a clip bound far above or below it, equal the original's."""
    if drawn.refused:
        return
    case = engine.case_of(drawn, 1)
    model, batches = case.plan.model.model, case.batches
    options: dict[str, Any] = {"loss": case.loss, "seed": engine.SEED}
    unclipped = train_sequential(model, batches, adamw, loss=case.loss, seed=engine.SEED)
    norm = float(unclipped["norm 0"])
    for clip in (LARGE_CLIP * norm, SMALL_CLIP * norm):
        expected = train_sequential(
            model, batches, adamw, clip=clip, loss=case.loss, seed=engine.SEED
        )
        result = threads.run(train_steps, drawn.world, case.plan, batches, adamw, clip, options)[0]
        assert_near(result, expected)
        assert abs(float(result["norm 0"]) - norm) <= 1e-9 * norm
        total = sum(float(g.square().sum()) for n, g in result.items() if n.startswith("grad 0"))
        bound = min(norm, clip)
        assert abs(total**0.5 - bound) <= 1e-4 * bound
