"""unroll: a loop over one module becomes a chain of calls between which stages meet."""

from __future__ import annotations

import pytest
import torch

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.analyze.prepare import prepare
from tests.engine import Threads
from tests.language.test_primitives import BATCHES, Toy
from tests.proofs import adamw, assert_near, planned, refused, sequential, trained

ROWS = "again  unroll(3)\nlayers, again  pipeline_split(over=pp)"


def _toy() -> Toy:
    torch.manual_seed(0)
    return Toy().double()


@pytest.mark.parametrize(
    ("rows", "mesh"),
    [
        (f'{ROWS}\npipeline(order="1F1B", micro=2)', "pp=2"),
        ("again  unroll(3)\nagain  pipeline_split(over=pp)", "pp=3"),
        (f"again  checkpoint()\n{ROWS}\nzero(stage=2, over=dp)", "pp=2, dp=2"),
        (
            "again, side  shard(col, output=R, over=tp)\nagain  unroll(3)\n"
            'again  pipeline_split(over=pp)\npipeline(order="GPipe", micro=3)',
            "pp=2, tp=2",
        ),
        ("layers.*  unroll(1)\nlayers  pipeline_split(over=pp, balance=time)", "pp=2"),
    ],
)
def test_it_trains_as_the_original(rows: str, mesh: str, threads: Threads) -> None:
    """Losses, gradients of the shared module, dropout inside layers, state: as without rows."""
    plan = planned(_toy(), rows, mesh)
    seen = trained(threads, plan, BATCHES, adamw, clip=0.5, seed=3)
    assert_near(seen, sequential(_toy(), BATCHES, adamw, clip=0.5, seed=3))


def test_draws_of_later_calls_are_their_own(threads: Threads) -> None:
    """Dropout in a module that is called again draws for that call, on whichever stage it runs."""
    rows = "layers.3  unroll(3)\nlayers.3  pipeline_split(over=pp)"

    def looped() -> Toy:
        toy = _toy()
        toy.again = toy.layers[3]
        return toy

    plan = planned(looped(), rows.replace("(3)", "(4)"), "pp=3")
    seen = trained(threads, plan, BATCHES, adamw, clip=0.5, seed=3)
    assert_near(seen, sequential(looped(), BATCHES, adamw, clip=0.5, seed=3))


def test_the_static_proof_sees_every_stage_of_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shared module's gradient is found on all stages that call it: a sum left out is told."""
    from schedlang.passes.analyze import holdings
    from schedlang.passes.static_checks.static import static

    plan = planned(_toy(), "again  unroll(3)\nagain  pipeline_split(over=pp)", "pp=3")
    assert not static(plan, BATCHES[0]).problems
    monkeypatch.setattr(holdings, "_tied", lambda *given: iter(()))
    assert any(told.code == "S711" for told in static(plan, BATCHES[0]).problems)


def test_equal_shares_of_the_calls() -> None:
    """Calls are counted as modules are."""
    plan = planned(_toy(), ROWS, "pp=7")
    made = prepare(plan, BATCHES[0]).staged.cut
    assert made.graph.labels[5:8] == ("again#0", "again#1", "again#2")
    assert made.stage_of == (0, 0, 1, 2, 3, 4, 5, 6, 6, 6)
    assert made.shared["again.weight"] == (4, 5, 6)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("again  unroll(0)", ("S304", "needs 1 call or more")),
        ("unroll(3)", ("S408", "called only once")),
        ("again  unroll(3)\nagain  unroll(3)", ("S501", "unrolled already")),
        ("layers.0  unroll(1)\nlayers.0.mlp  unroll(1)", ("S502", "lies inside")),
        ("layers  pipeline_split(over=pp)\nagain  unroll(3)", ("S503", "above `pipeline_split`")),
    ],
)
def test_rows_refused(rows: str, words: tuple[str, ...]) -> None:
    """What cannot be meant is refused where it is planned."""
    told = refused(_toy(), rows, "pp=2")
    assert all(word in told for word in words), told


def test_another_number_of_calls_is_refused_at_its_row() -> None:
    """The model's own number is told, with a cut and without."""
    for more in ("", "\nagain  pipeline_split(over=pp)"):
        plan = planned(_toy(), f"again  unroll(2){more}", "pp=2" if more else "")
        with pytest.raises(Refusal) as caught:
            prepare(plan, BATCHES[0])
        told = caught.value.render()
        assert "S601" in told and "called 3 times in one forward, not 2 times" in told
        assert "rows.sched:" in told and "`again  unroll(3)`" in told


@pytest.mark.parametrize("row", ["layers.1  checkpoint()", "layers.1  fuse()"])
def test_a_cut_inside_a_region_is_refused(row: str) -> None:
    """S603 names the region's row and the cut's."""
    plan = planned(_toy(), f"{row}\nlayers.1.mlp  pipeline_split(over=pp)", "pp=2")
    with pytest.raises(Refusal) as caught:
        prepare(plan, BATCHES[0])
    told = caught.value.render()
    assert "S603" in told and "as one" in told and "cuts it in two before `layers.1.mlp`" in told


def test_a_region_on_one_stage_may_hold_units() -> None:
    """A checkpointed block with units inside is fine where no cut falls between them."""
    rows = (
        "layers.1  checkpoint()\nlayers.1.mlp.down  unroll(1)\nlayers[2]  pipeline_split(over=pp)"
    )
    assert prepare(planned(_toy(), rows, "pp=2"), BATCHES[0]).staged.cut.stages == 2


def test_too_few_modules_name_their_list_and_the_calls_of_a_loop() -> None:
    """A list of one block, as ALBERT's, is no place for two stages; its calls would be."""
    toy = _toy()
    toy.layers = torch.nn.ModuleList([toy.again])
    told = refused(toy, "layers  pipeline_split(over=pp)", "pp=2")
    assert "S613" in told and "1 module cannot be cut into 2 stages" in told
    assert "these are all modules of `layers`" in told and "`unroll`" in told
