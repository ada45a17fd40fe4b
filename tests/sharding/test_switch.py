"""Sharding switches from one sequence dim to another: models with space and time."""

from __future__ import annotations

from schedlang.passes.analyze.prepare import prepare
from schedlang.passes.simulate.traffic import list_collectives
from tests.context.test_context import assert_same_training
from tests.engine.threads import Threads
from tests.proofs import make_plan, refusal_text, static_holds
from tests.spacetime import WIDTH, Video, batch

ROWS = """
  blocks.*.space   shard(input=S(1), output=S(1), over=sp)
  blocks.0.time    shard(input=S(2), output=S(2), over=sp)
  blocks.1.time    shard(input=S(2), output=R, over=sp)
"""


def test_it_trains_as_alone(threads: Threads) -> None:
    """Frames are split in space attention, patches in time attention: it trains as the original."""
    model = Video()
    assert_same_training(threads, make_plan(model, ROWS, "sp=2"), model, [batch(1), batch(2, 2)])


def test_a_module_may_switch_on_its_way_out(threads: Threads) -> None:
    """With another dim in `output=` the switch follows the module."""
    rows = """
  blocks.*.space  shard(input=S(1), output=S(2), over=sp)
  blocks.0.time   shard(input=S(2), output=S(1), over=sp)
  blocks.1.time   shard(input=S(2), output=R, over=sp)
"""
    model = Video()
    assert_same_training(threads, make_plan(model, rows, "sp=2"), model, [batch(1)])


def test_what_is_sent() -> None:
    """Each switch is one all-to-all of a rank's part, M/N numbers, and one back (DSP, 2024)."""
    plan, inputs = make_plan(Video(), ROWS, "sp=2"), batch(1)
    ready = prepare(plan, inputs)
    collectives = list_collectives(plan, ready, inputs)
    switches = [collective for collective in collectives if collective.kind == "all-to-all"]
    part = 3 * 4 * 6 * WIDTH // 2
    assert [(collective.phase, collective.fqn, collective.bytes) for collective in switches] == [
        (phase, fqn, part * 8)
        for phase, names in (
            ("forward", ("blocks.0.time", "blocks.1.space", "blocks.1.time")),
            ("backward", ("blocks.1.time", "blocks.1.space", "blocks.0.time")),
        )
        for fqn in names
    ]
    assert {collective.what for collective in switches} == {"input", "input grad"}


def test_the_static_proofs_hold() -> None:
    """Sums, gradients and messages are proven without ranks."""
    static_holds(make_plan(Video(), ROWS, "sp=2"), batch(1))


def test_what_is_refused() -> None:
    """A module without a row that attends along the split dim is refused by name."""
    rows = ROWS.replace("blocks.0.time    shard(input=S(2), output=S(2), over=sp)", "")
    message = refusal_text(Video(), rows, "sp=2", batch(1))
    assert "S405" in message and "blocks.0.time" in message, message


def test_a_dim_that_cannot_be_divided() -> None:
    """Six patches on four ranks: the refusal names the row's placement and the pad."""
    message = refusal_text(Video(), ROWS, "sp=4", batch(1))
    assert "S420" in message and "S(2)" in message, message
