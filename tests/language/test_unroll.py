"""`unroll`: a module called in a loop becomes a chain of calls that pipeline stages can divide."""

from __future__ import annotations

import pytest
import torch

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.analyze.prepare import prepare
from tests.engine import Threads
from tests.language.test_primitive_examples import BATCHES, Toy
from tests.proofs import (
    adamw,
    assert_near,
    make_plan,
    refusal_text,
    train_on_ranks,
    train_sequential,
)

ROWS = "again  unroll(3)\nlayers, again  pipeline_split(over=pp)"


def _build_toy() -> Toy:
    """The toy model with fixed values, in float64."""
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
    """Losses, gradients of the shared module, dropout and state equal those of the model."""
    plan = make_plan(_build_toy(), rows, mesh)
    observed = train_on_ranks(threads, plan, BATCHES, adamw, clip=0.5, seed=3)
    assert_near(observed, train_sequential(_build_toy(), BATCHES, adamw, clip=0.5, seed=3))


def test_draws_of_later_calls_are_their_own(threads: Threads) -> None:
    """Dropout in a module that is called again has its own draws for each call, on any stage."""
    rows = "layers.3  unroll(3)\nlayers.3  pipeline_split(over=pp)"

    def looped() -> Toy:
        toy = _build_toy()
        toy.again = toy.layers[3]
        return toy

    plan = make_plan(looped(), rows.replace("(3)", "(4)"), "pp=3")
    observed = train_on_ranks(threads, plan, BATCHES, adamw, clip=0.5, seed=3)
    assert_near(observed, train_sequential(looped(), BATCHES, adamw, clip=0.5, seed=3))


def test_the_static_proof_sees_every_stage_of_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The static check finds the shared gradient on all calling stages; a missing sum is S711."""
    from schedlang.passes.analyze import holdings
    from schedlang.passes.static_checks.static import static

    plan = make_plan(_build_toy(), "again  unroll(3)\nagain  pipeline_split(over=pp)", "pp=3")
    assert not static(plan, BATCHES[0]).problems
    monkeypatch.setattr(holdings, "_tied", lambda *args: iter(()))
    assert any(problem.code == "S711" for problem in static(plan, BATCHES[0]).problems)


def test_equal_shares_of_the_calls() -> None:
    """Balancing stages counts calls as modules."""
    plan = make_plan(_build_toy(), ROWS, "pp=7")
    cut = prepare(plan, BATCHES[0]).staged.cut
    assert cut.graph.labels[5:8] == ("again#0", "again#1", "again#2")
    assert cut.stage_of == (0, 0, 1, 2, 3, 4, 5, 6, 6, 6)
    assert cut.shared["again.weight"] == (4, 5, 6)


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
    """Each impossible row is refused when it is planned."""
    text = refusal_text(_build_toy(), rows, "pp=2")
    assert all(fragment in text for fragment in words), text


def test_another_number_of_calls_is_refused_at_its_row() -> None:
    """A wrong number of calls is refused with the model's own number, with and without stages."""
    for cut_row in ("", "\nagain  pipeline_split(over=pp)"):
        plan = make_plan(_build_toy(), f"again  unroll(2){cut_row}", "pp=2" if cut_row else "")
        with pytest.raises(Refusal) as caught:
            prepare(plan, BATCHES[0])
        message = caught.value.render()
        assert "S601" in message and "called 3 times in one forward, not 2 times" in message
        assert "rows.sched:" in message and "`again  unroll(3)`" in message


@pytest.mark.parametrize("row", ["layers.1  checkpoint()", "layers.1  fuse()"])
def test_a_cut_inside_a_region_is_refused(row: str) -> None:
    """A stage that starts inside a region is refused (S603); both rows are named."""
    plan = make_plan(_build_toy(), f"{row}\nlayers.1.mlp  pipeline_split(over=pp)", "pp=2")
    with pytest.raises(Refusal) as caught:
        prepare(plan, BATCHES[0])
    message = caught.value.render()
    assert (
        "S603" in message
        and "as one" in message
        and "cuts it in two before `layers.1.mlp`" in message
    )


def test_a_region_on_one_stage_may_hold_units() -> None:
    """A checkpointed block may contain unrolled modules if no stage starts between them."""
    rows = (
        "layers.1  checkpoint()\nlayers.1.mlp.down  unroll(1)\nlayers[2]  pipeline_split(over=pp)"
    )
    assert prepare(make_plan(_build_toy(), rows, "pp=2"), BATCHES[0]).staged.cut.stages == 2


def test_too_few_modules_name_their_list_and_the_calls_of_a_loop() -> None:
    """A list of one block, as in ALBERT, cannot make two stages; `unroll` is offered."""
    toy = _build_toy()
    toy.layers = torch.nn.ModuleList([toy.again])
    message = refusal_text(toy, "layers  pipeline_split(over=pp)", "pp=2")
    assert "S613" in message and "1 module cannot be cut into 2 stages" in message
    assert "these are all modules of `layers`" in message and "`unroll`" in message
