"""Several mistakes in one file: all reported at once, in text order, without follow-ups."""

from __future__ import annotations

from pathlib import Path

import pytest

from schedlang.diagnostics.codes import Example
from tests.refusals.run_examples import command_output

TEXT = """\
schedule 1 for Net

knob tp: int = 2.5
knob pp: int = 2 in [1, 2, 4]
mesh(tp=tp, pp=pp)
require pp > nothing
view both of (tp, dp)

def half(over: axis) {
  up  shard(cool, over=over)
}

step "one" relax(speed) {
  layer.*       checkpoint()
  layers.*      chekpoint()
  layers[7]     checkpoint(sav=[linear])
  layers.*.up   shard(rows, over=pq)
  at layers.* where widht > 3 { checkpoint() }
  when pp { layers.*  checkpoint() }
}

step "one" {
  head  pad(vocab, multiple=0)
  verify(backwards)
}

expect time < 3
"""


@pytest.mark.parametrize("verb", ["check", "plan"])
def test_all_mistakes_at_once(tmp_path: Path, verb: str) -> None:
    """One run reports all mistakes; `check` reports those that need no model."""
    output = command_output(
        Example(f"schedlang {verb} x.sched", {"x.sched": TEXT}, ""), tmp_path, None
    )
    lines = [line for line in output.split("\n") if line.startswith("error[")]
    places = [line.split(":")[1] for line in output.split("\n") if line.lstrip().startswith("-->")]
    assert places == sorted(places, key=int)
    codes = [line[6:10] for line in lines]
    always = {"S102", "S210", "S303", "S301", "S302", "S204", "S304", "S101", "S861"}
    assert always <= set(codes), output
    if verb == "plan":
        assert {"S201", "S202", "S208"} <= set(codes), output
