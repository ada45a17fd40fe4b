"""Random lossy compression of activations and gradients: equal to one process that rounds so."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from schedlang.diagnostics.diagnostic import Refusal
from tests.engine import Threads
from tests.properties import engine, schedules
from tests.properties.profiles import examples
from tests.properties.schedules import (
    MESHES,
    Drawn,
    activation_compression,
    allowed,
    gradient_compression,
)

FULL_MESHES = [m for m in MESHES if {axis for axis, size in m if size > 1} <= {"dp", "pp", "tp"}]


@examples(2)
@given(schedules.legal(FULL_MESHES), st.data())
def test_one_process_that_rounds_alike(threads: Threads, drawn: Drawn, data: st.DataObject) -> None:
    """With compressed activations, outputs, loss, gradients and a step equal those of an original
    whose blocks round saved activations in the same way."""
    assume(all(block.kind != "experts" for block in drawn.config.blocks))
    compression_steps = data.draw(
        st.lists(st.sampled_from(activation_compression(drawn.config)), min_size=1, max_size=3)
    )
    steps = allowed([*compression_steps, *drawn.steps], drawn.config, drawn.axes)
    try:
        engine.assert_holds(replace(drawn, steps=steps), threads)
    except Refusal as refusal:
        assume(refusal.diagnostics[0].code != "S935")  # ranks save unequal parts
        raise


@examples(2)
@given(schedules.legal([m for m in FULL_MESHES if "dp" in dict(m)]), st.data())
def test_one_process_that_sums_alike(threads: Threads, drawn: Drawn, data: st.DataObject) -> None:
    """With compressed gradients, with and without error feedback, three steps equal those of one
    process that compresses the parts of the batch as the ranks do."""
    compression_step = data.draw(
        st.sampled_from(gradient_compression(drawn.config, dict(drawn.axes)))
    )
    steps = allowed([compression_step, *drawn.steps], drawn.config, drawn.axes)
    engine.assert_holds(replace(drawn, steps=steps), threads, engine.whole)
