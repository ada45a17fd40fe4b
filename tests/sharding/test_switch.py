"""Parts of one dim become parts of another: models with two sequences, of space and of time."""

from __future__ import annotations

from schedlang.passes.analyze.prepare import prepare
from schedlang.passes.simulate.traffic import list_collectives
from tests.context.test_context import same
from tests.engine.threads import Threads
from tests.proofs import planned, refused, static_holds
from tests.spacetime import WIDTH, Video, batch

ROWS = """
  blocks.*.space   shard(input=S(1), output=S(1), over=sp)
  blocks.0.time    shard(input=S(2), output=S(2), over=sp)
  blocks.1.time    shard(input=S(2), output=R, over=sp)
"""


def test_it_trains_as_alone(threads: Threads) -> None:
    """Frames are split while space is attended to, patches while time is: nothing else differs."""
    model = Video()
    same(threads, planned(model, ROWS, "sp=2"), model, [batch(1), batch(2, 2)])


def test_a_module_may_switch_on_its_way_out(threads: Threads) -> None:
    """`output=` names another dim than what was computed: the switch stands behind the module."""
    rows = """
  blocks.*.space  shard(input=S(1), output=S(2), over=sp)
  blocks.0.time   shard(input=S(2), output=S(1), over=sp)
  blocks.1.time   shard(input=S(2), output=R, over=sp)
"""
    model = Video()
    same(threads, planned(model, rows, "sp=2"), model, [batch(1)])


def test_what_is_sent() -> None:
    """Each switch is one all-to-all of a rank's part, M/N numbers, and one back (DSP, 2024)."""
    plan, given = planned(Video(), ROWS, "sp=2"), batch(1)
    ready = prepare(plan, given)
    found = list_collectives(plan, ready, given)
    sent = [one for one in found if one.kind == "all-to-all"]
    part = 3 * 4 * 6 * WIDTH // 2
    assert [(one.phase, one.fqn, one.bytes) for one in sent] == [
        (phase, fqn, part * 8)
        for phase, names in (
            ("forward", ("blocks.0.time", "blocks.1.space", "blocks.1.time")),
            ("backward", ("blocks.1.time", "blocks.1.space", "blocks.0.time")),
        )
        for fqn in names
    ]
    assert {one.what for one in sent} == {"input", "input grad"}


def test_the_static_proofs_hold() -> None:
    """Sums, gradients and messages are proven without ranks."""
    static_holds(planned(Video(), ROWS, "sp=2"), batch(1))


def test_what_is_refused() -> None:
    """A module that attends along the dim that is split, and has no row, is refused by name."""
    rows = ROWS.replace("blocks.0.time    shard(input=S(2), output=S(2), over=sp)", "")
    said = refused(Video(), rows, "sp=2", batch(1))
    assert "S405" in said and "blocks.0.time" in said, said


def test_a_dim_that_cannot_be_divided() -> None:
    """Six patches on four ranks: the refusal names the row's placement and the pad."""
    said = refused(Video(), ROWS, "sp=4", batch(1))
    assert "S420" in said and "S(2)" in said, said
