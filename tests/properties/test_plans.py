"""Property 3, of plans: with as little memory as a refusal says is enough, no bit changes."""

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
from tests.properties.little import little
from tests.properties.profiles import examples
from tests.properties.schedules import allowed

MORE = (0, 1, 40, 400)  # bytes above the least
LEAST = re.compile(r"each microbatch needs (\d+) bytes at least")


def plans(drawn: Drawn) -> list[Step]:
    """The rows that fit the blocks of a drawn model into memory."""
    offers = schedules.checkpoint(drawn.config, dict(drawn.axes), drawn.length)
    return [one for one in offers if "plan=" in one.rows[0]]


def within(drawn: Drawn, one: Step, memory: int) -> Drawn:
    """With such a row first, of so many bytes."""
    row = replace(one, rows=(one.rows[0].replace("1MiB", f"{memory}B"),))
    return replace(drawn, steps=allowed((row, *drawn.steps), drawn.config, drawn.axes))


def asked(drawn: Drawn) -> int | None:
    """The bytes that a microbatch needs, if these are too few: planned, nothing is run."""
    try:
        with little(drawn.little), enter_modes(Float64()):
            prepare_case(engine.case_of(drawn, 1))
    except Refusal as refusal:
        if refusal.diagnostic.code != "S841":
            raise
        said = LEAST.search(refusal.render())
        assert said, refusal.render()
        return int(said[1])
    return None


def tight(drawn: Drawn, one: Step, more: int) -> Drawn:
    """With the least memory that the refusals of too little lead to, and some bytes more.

    The number is of a microbatch: only where stages hold several of them is more needed.
    """
    memory, times = 1, 0
    stages = dict(drawn.axes).get("pp", 1)
    while (need := asked(within(drawn, one, memory))) is not None:
        times += 1
        assert times <= (stages * drawn.micro if stages > 1 else 1), (memory, need)
        memory = need * (memory // need + 1)
    return within(drawn, one, memory + more)


@examples(2)
@given(schedules.legal(), st.data())
def test_3_tight_plans_change_no_bit(threads: Threads, drawn: Drawn, data: st.DataObject) -> None:
    """Each way to fit blocks into memory, put into any schedule with the least memory that it says
    is enough, or little more, leaves every bit as it was, with dropout, in training."""
    kept = tuple(
        # stages of one memory are others where blocks are computed again, and norms add up by stage
        replace(s, rows=tuple(row.replace("balance=memory", "balance=params") for row in s.rows))
        for s in drawn.steps
        if s.verb not in ("checkpoint", "offload")
    )
    drawn = replace(drawn, config=replace(drawn.config, dropout=0.25), steps=kept)
    offers = plans(drawn)
    assume(offers and not drawn.refused)
    fitted = tight(drawn, data.draw(st.sampled_from(offers)), data.draw(st.sampled_from(MORE)))
    plain = replace(fitted, steps=tuple(s for s in fitted.steps if s.verb != "checkpoint"))
    batches = engine.batches_of(drawn) * 2  # of one size: it is for such that memory is counted
    assert_same(engine.seen(fitted, threads, batches), engine.seen(plain, threads, batches))
