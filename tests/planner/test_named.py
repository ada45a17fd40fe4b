"""Planners by name: what searches find, and settings cut as each of them would."""

from __future__ import annotations

from dataclasses import replace

import pytest

from schedlang.passes.planner.menus import Layer
from schedlang.passes.planner.named import PLANNERS, SEARCHED, cut_as, layers_of
from schedlang.passes.planner.price import price, unit_times
from schedlang.passes.planner.search import search
from schedlang.passes.planner.space import Job
from schedlang.passes.planner.values import Placement, Recipe, Setting
from schedlang.passes.simulate.machine import CLUSTERS
from tests.planner.decoders import decoder

A100 = CLUSTERS["a100"]
SMALL = decoder(12, 2048, 16, 8192, 32000, 1024)
LARGE = decoder(40, 5120, 40, 13824, 128000, 2048, gated=True)
WAY = Setting(Placement(1, 2), dp=4, pp=8, micro=32)


def test_each_planner_says_whose_it_is_and_what_it_leaves_out() -> None:
    assert {"alpa", "piper", "amp", "whale", "dapple", "pipedream", "kwai", "flexflow"} < {
        *PLANNERS
    }
    assert {"mpress", "swapadvisor", "adapipe", "ptd-p", "layouts", "pytorch"} < {*PLANNERS}
    for planner in PLANNERS.values():
        assert planner.paper and planner.leaves


def test_kwai_is_within_three_percent_of_all_and_fits() -> None:
    job = Job(16, 64, replace(A100, memory=24 << 30), length=1024)
    found = SEARCHED["kwai"].plan(SMALL, job)
    *_, every = search(SMALL, job)
    assert found is not None and found.priced is not None
    assert every.best is not None and every.best.priced is not None
    assert found.priced.seconds <= 1.03 * every.best.priced.seconds
    assert found.priced.peak <= job.cluster.memory


@pytest.mark.parametrize("seed", [0, 1])
def test_flexflow_comes_to_the_optimum_of_a_small_space(seed: int) -> None:
    job = Job(8, 32, replace(A100, memory=16 << 30), orders=("1F1B", "GPipe"))
    found = SEARCHED["flexflow"].plan(SMALL, job, seed)
    *_, every = search(SMALL, job)
    assert found is not None and found.priced is not None and every.best is not None
    assert every.best.priced is not None
    assert found.priced.seconds == pytest.approx(every.best.priced.seconds, rel=0.01)
    begun = replace(SEARCHED["flexflow"], steps=1).plan(SMALL, job, seed)
    assert begun is not None and begun.priced is not None
    assert begun.priced.seconds > 1.05 * found.priced.seconds
    starved = SEARCHED["flexflow"].plan(SMALL, replace(job, cluster=replace(A100, memory=1)))
    assert starved is None


def test_a_setting_cut_by_dapple_beats_even_stages_and_mcap_holds_least() -> None:
    chain = LARGE(WAY.placement)
    even = price(chain, WAY, A100)
    cut = {name: cut_as(name, chain, WAY, A100) for name in ("dapple", "mcap", "pipedream")}
    took = {name: price(chain, way, A100) for name, way in cut.items() if way is not None}
    assert len(took) == 3
    assert took["dapple"].seconds < min(even.seconds, took["pipedream"].seconds)
    assert took["mcap"].peak < min(even.peak, took["dapple"].peak)
    assert cut["dapple"] is not None and sum(cut["dapple"].cuts) == chain.length


def test_adapipe_recomputes_what_memory_asks_and_no_more() -> None:
    chain = LARGE(WAY.placement)
    tight = replace(A100, memory=int(9.5 * 2**30))
    assert price(chain, WAY, tight).peak > tight.memory
    way = cut_as("adapipe", chain, WAY, tight)
    assert way is not None and any(way.again)
    made = price(chain, way, tight)
    assert made.peak <= tight.memory
    every = replace(WAY, cuts=way.cuts, again=way.cuts)
    assert made.seconds < price(chain, every, tight).seconds
    assert cut_as("adapipe", chain, WAY, replace(A100, memory=1 << 30)) is None


def test_cuts_of_several_stages_on_a_rank_are_refused() -> None:
    chain = LARGE(WAY.placement)
    with pytest.raises(ValueError, match="several"):
        cut_as("alpa", chain, replace(WAY, order="Interleaved1F1B", chunks=2), A100)
    with pytest.raises(ValueError, match="do not make"):
        cut_as("alpa", chain, replace(WAY, pp=64), A100)


def test_layers_have_the_seconds_and_bytes_of_their_units() -> None:
    chain = LARGE(WAY.placement)
    layers = layers_of(chain, WAY, A100, Recipe())
    assert len(layers) == chain.length == 42
    unit = chain.runs[1].unit
    forward, backward, _ = unit_times(unit, WAY, A100)
    # weights and gradients in 16 bits, and a quarter of 12 bytes for the optimizer
    state = unit.numbers * (2 + 2 + 12 / 4)
    assert layers[1] == Layer(
        forward, backward, unit.numbers * 2, state, unit.kept, unit.input, unit.handed
    )
    whole = layers_of(chain, replace(WAY, zero=0), A100, Recipe())
    assert whole[1].state == unit.numbers * 16
