"""Activations and sums of gradients in fewer bits, put into schedules that leave them whole."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from schedlang.diagnostics.diagnostic import Refusal
from tests.engine import Threads
from tests.properties import engine, schedules
from tests.properties.profiles import examples
from tests.properties.schedules import MESHES, Drawn, allowed, coarse_sums, fewer_bits

WHOLE = [m for m in MESHES if {axis for axis, size in m if size > 1} <= {"dp", "pp", "tp"}]


@examples(2)
@given(schedules.legal(WHOLE), st.data())
def test_one_process_that_rounds_alike(threads: Threads, drawn: Drawn, data: st.DataObject) -> None:
    """Blocks of all kinds, replicas, stages, microbatches, slices of state, equal parts of weights:
    outputs, loss, every gradient and a step are those of the original whose blocks round what they
    save."""
    assume(all(block.kind != "experts" for block in drawn.config.blocks))
    some = data.draw(st.lists(st.sampled_from(fewer_bits(drawn.config)), min_size=1, max_size=3))
    steps = allowed([*some, *drawn.steps], drawn.config, drawn.axes)
    try:
        engine.holds(replace(drawn, steps=steps), threads)
    except Refusal as refusal:
        assume(refusal.diagnostics[0].code != "S935")  # ranks that save unequal parts
        raise


@examples(2)
@given(schedules.legal([m for m in WHOLE if "dp" in dict(m)]), st.data())
def test_one_process_that_sums_alike(threads: Threads, drawn: Drawn, data: st.DataObject) -> None:
    """Each code of gradients, with what it left out added to the next step's or not, beside stages,
    microbatches, parts of weights and rows of memory: three steps are those of one process that
    codes the parts of the batch as the ranks do."""
    one = data.draw(st.sampled_from(coarse_sums(drawn.config, dict(drawn.axes))))
    steps = allowed([one, *drawn.steps], drawn.config, drawn.axes)
    engine.holds(replace(drawn, steps=steps), threads, engine.whole)
