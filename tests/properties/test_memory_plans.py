"""Property 3 of random schedules: checkpoint plans with the least memory keep every bit."""

from __future__ import annotations

import re
from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.verify.proof_case import prepare_case
from schedlang.runtime.float64 import Float64
from schedlang.runtime.modes import enter_modes
from tests.engine import Threads
from tests.proofs import assert_same
from tests.properties import engine, schedules
from tests.properties.drawn import Drawn, Step
from tests.properties.profiles import examples
from tests.properties.schedules import allowed
from tests.properties.small_limits import small_limits

EXTRA_BYTES = (0, 1, 40, 400)  # bytes above the minimum
LEAST = re.compile(r"each microbatch needs (\d+) bytes at least")


def plan_steps(drawn: Drawn) -> list[Step]:
    """Return the checkpoint steps with a memory plan for the blocks of a drawn model."""
    offers = schedules.checkpoint(drawn.config, dict(drawn.axes), drawn.length)
    return [plan_step for plan_step in offers if "plan=" in plan_step.rows[0]]


def with_memory(drawn: Drawn, plan_step: Step, memory: int) -> Drawn:
    """Put a plan step with the given bytes in front of the drawn schedule."""
    row = replace(plan_step, rows=(plan_step.rows[0].replace("1MiB", f"{memory}B"),))
    return replace(drawn, steps=allowed((row, *drawn.steps), drawn.config, drawn.axes))


def needed_bytes(drawn: Drawn) -> int | None:
    """Return the bytes that a microbatch needs if memory is too small; only plans."""
    try:
        with small_limits(drawn.little), enter_modes(Float64()):
            prepare_case(engine.case_of(drawn, 1))
    except Refusal as refusal:
        if refusal.diagnostic.code != "S841":
            raise
        match = LEAST.search(refusal.render())
        assert match, refusal.render()
        return int(match[1])
    return None


def least_memory(drawn: Drawn, plan_step: Step, extra: int) -> Drawn:
    """Return the schedule with the minimal memory that refusals ask for, plus extra bytes.

    A refusal counts one microbatch: more is needed only if stages hold several.
    """
    memory, times = 1, 0
    stages = dict(drawn.axes).get("pp", 1)
    while (needed := needed_bytes(with_memory(drawn, plan_step, memory))) is not None:
        times += 1
        assert times <= (stages * drawn.micro if stages > 1 else 1), (memory, needed)
        memory = needed * (memory // needed + 1)
    return with_memory(drawn, plan_step, memory + extra)


@examples(2)
@given(schedules.legal(), st.data())
def test_3_tight_plans_change_no_bit(threads: Threads, drawn: Drawn, data: st.DataObject) -> None:
    """Each memory plan, added to any schedule with minimal or slightly more memory, keeps training
    bitwise equal, with dropout."""
    other_steps = tuple(
        # `balance=memory` depends on recomputation, and norms are summed per stage
        replace(s, rows=tuple(row.replace("balance=memory", "balance=params") for row in s.rows))
        for s in drawn.steps
        if s.verb not in ("checkpoint", "offload")
    )
    drawn = replace(drawn, config=replace(drawn.config, dropout=0.25), steps=other_steps)
    offers = plan_steps(drawn)
    assume(offers and not drawn.refused)
    fitted = least_memory(
        drawn, data.draw(st.sampled_from(offers)), data.draw(st.sampled_from(EXTRA_BYTES))
    )
    without_plan = replace(fitted, steps=tuple(s for s in fitted.steps if s.verb != "checkpoint"))
    batches = engine.batches_of(drawn) * 2  # equal sizes: memory is counted for the first batch
    assert_same(
        engine.run_training(fitted, threads, batches),
        engine.run_training(without_plan, threads, batches),
    )
