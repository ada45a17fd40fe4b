"""Expert parallelism over some data axes, with ZeRO over the others."""

from __future__ import annotations

from typing import Any

import pytest

from schedlang.passes.analyze.prepare import prepare
from schedlang.passes.simulate.account import account
from tests import expert_models as models
from tests.proofs import assert_proven, make_plan, static_holds

ROW = "layers.*.experts  expert_parallel(over=ep)\n"
MESH = "dp=2, ep=2"
BATCHES = [models.batch(0), models.batch(1, rows=4)]


@pytest.mark.parametrize("stage", [3, *(pytest.param(s, marks=pytest.mark.deep) for s in (1, 2))])
def test_every_stage_equals_the_original(stage: int, threads: Any) -> None:
    """Outputs, losses, gradients, three steps and a save agree; static proofs hold."""
    rows = ROW + f"zero(stage={stage}, over=(dp, ep))"
    plan = make_plan(models.tiny_model(layers=1), rows, MESH)
    assert_proven(threads, plan, BATCHES)
    static_holds(plan, BATCHES[0])


def test_experts_lie_in_slices_of_the_other_axis() -> None:
    """Experts are sliced over `dp` only, all other parameters over both axes."""
    plan = make_plan(models.tiny_model(), ROW + "zero(stage=1, over=(dp, ep))", MESH)
    prepared = prepare(plan, models.batch(0, rows=2))
    sliced = {name: holding.sliced for name, holding in prepared.holdings.items()}
    assert {axes for name, axes in sliced.items() if ".experts." in name} == {("dp",)}
    assert {axes for name, axes in sliced.items() if ".experts." not in name} == {("dp", "ep")}


def test_what_is_sent_for_slices() -> None:
    """Experts are gathered and reduced over `dp` alone, other units over both."""
    plan = make_plan(models.tiny_model(), ROW + "zero(stage=3, over=(dp, ep))", MESH)
    collectives = account(plan, models.batch(0, rows=4)).collectives
    gathers = {
        collective.fqn: (collective.axes, collective.bytes)
        for collective in collectives
        if collective.what == "parameters"
    }
    experts = models.tiny_model().layers[0].experts  # type: ignore[union-attr, index]
    size = sum(p.numel() * 8 for p in experts.parameters())
    assert gathers["layers.0.experts"] == (("dp",), size // 2)
    assert gathers["layers.0"][0] == ("dp", "ep")


@pytest.mark.deep
def test_beside_an_inner_cut(threads: Any) -> None:
    """Experts over one axis, cut over another, sliced over a third."""
    rows = ROW.replace("over=ep", "over=ep, inner=tp") + "zero(stage=3, over=(dp, ep))"
    assert_proven(threads, make_plan(models.tiny_model(layers=1), rows, f"{MESH}, tp=2"), BATCHES)
