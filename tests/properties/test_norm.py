"""Property: the norm of all gradients is the original's, however their parts are spread."""

from __future__ import annotations

from typing import Any

from hypothesis import given

from tests.engine import Threads
from tests.proofs import adamw, assert_near, sequential, steps
from tests.properties import engine, schedules
from tests.properties.profiles import examples
from tests.properties.schedules import Drawn

FAR, DEEP = 10.0, 0.02  # bounds, as multiples of the norm: one that does nothing, one that shortens


@examples(4)
@given(schedules.legal())
def test_the_norm_is_that_of_all_gradients(threads: Threads, drawn: Drawn) -> None:
    """Split, copied, sliced, tied, frozen and staged parameters count once each: the norm of a
    step, and what is trained under a bound far above it or deep below, are the original's."""
    if drawn.refused:
        return
    case = engine.case_of(drawn, 1)
    model, batches = case.plan.model.model, case.batches
    options: dict[str, Any] = {"loss": case.loss, "seed": engine.SEED}
    plain = sequential(model, batches, adamw, loss=case.loss, seed=engine.SEED)
    norm = float(plain["norm 0"])
    for clip in (FAR * norm, DEEP * norm):
        wanted = sequential(model, batches, adamw, clip=clip, loss=case.loss, seed=engine.SEED)
        found = threads.run(steps, drawn.world, case.plan, batches, adamw, clip, options)[0]
        assert_near(found, wanted)
        assert abs(float(found["norm 0"]) - norm) <= 1e-9 * norm
        total = sum(float(g.square().sum()) for n, g in found.items() if n.startswith("grad 0"))
        bound = min(norm, clip)
        assert abs(total**0.5 - bound) <= 1e-4 * bound
