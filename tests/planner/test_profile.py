"""Chains by playing: what a price says of them is what the exact simulation of the text says."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.limits import Limits
from schedlang.ir.model import ModelFacts
from schedlang.ir.modelfile import load_model_file
from schedlang.ir.plan import Plan
from schedlang.passes.analyze.prepare import prepare
from schedlang.passes.elaborate.expand import expand
from schedlang.passes.planner.extrapolation import extrapolate_rows
from schedlang.passes.planner.heterogeneous import NODE_AXIS_ORDERS, HeterogeneousEvaluator
from schedlang.passes.planner.price import price
from schedlang.passes.planner.profile import Profiles
from schedlang.passes.planner.schedule_writer import stage_units, write_schedule
from schedlang.passes.planner.search_space import ORDERS, Job
from schedlang.passes.planner.tuning import job_of
from schedlang.passes.planner.values import Chain, Placement, Recipe, Setting, Work
from schedlang.passes.simulate.machine import CLUSTERS, Cluster
from schedlang.passes.simulate.memory import rank_classes
from schedlang.passes.simulate.node_cluster import Node, cluster_of_nodes
from schedlang.passes.simulate.one_rank_step import repeat_sample
from schedlang.passes.simulate.simulated_ranks import memory_of_ranks, simulate_ranks
from schedlang.passes.simulate.step_time import time_step
from schedlang.runtime.batch import largest_part
from tests.planner import models

# -- the exact simulation --------------------------------------------------------------------------


A100 = CLUSTERS["a100"]
EXAMPLES = Path(__file__).parents[2] / "examples"
FULL, MIXED = Recipe(4, 4, 8, 0), Recipe(2, 4, 8, 4)  # float32; `cast(bf16, params=true)`


def chain_of(profiles: Profiles, placement: Placement) -> Chain:
    """The chain, of which there must be one."""
    found = profiles(placement)
    assert isinstance(found, Chain), found.render()
    return found


def plan_of(profiles: Profiles, setting: Setting) -> Plan:
    """The plan of the text of a setting."""
    plan = expand(write_schedule(profiles, setting), profiles.facts).plan
    assert plan is not None and plan.mesh.world == setting.ranks
    return plan


def exact(
    profiles: Profiles, setting: Setting, cluster: Cluster = A100
) -> tuple[float, float, float]:
    """Seconds but for the update, bytes of the fullest rank, and of its state, as simulated."""
    plan = plan_of(profiles, setting)
    one = profiles.sample_rows(setting.placement.rows)
    batch = repeat_sample(one, plan.shares * plan.micro)
    prepared = prepare(plan, largest_part(batch, plan.shares, plan.micro))
    played = simulate_ranks(plan, batch, None, prepared, works=True)
    took = time_step(plan, prepared, played, cluster).seconds
    # an update goes over many parameters in one kernel
    ready = replace(cluster.slowest, start=0.0)
    update = max(
        sum(ready.computing_seconds(run.work) for run in p.rest) for p in played.by_class.values()
    )
    classes = rank_classes(plan, prepared.staged, prepared.holdings)
    peak = max(one.peak for one in memory_of_ranks(plan, prepared, played))
    return took - update, peak, max(one.state for one in classes)


P = Placement
SETTINGS = [
    Setting(P(8), micro=4),
    Setting(P(8), dp=2, micro=2, zero=0),
    Setting(P(8), dp=4, micro=2, zero=1),
    Setting(P(8), dp=4, micro=2, zero=3),
    Setting(P(8, tp=2), micro=2),
    Setting(P(8, tp=2, sequence=True), micro=2),
    Setting(P(8, cp=2), micro=2),
    Setting(P(8), pp=2, micro=4),
    Setting(P(8), pp=2, micro=4, order="GPipe"),
    Setting(P(8), pp=2, micro=4, order="Interleaved1F1B", chunks=2),
    Setting(P(8), pp=2, micro=4, order="ZB-H1"),
    Setting(P(8), pp=2, micro=8, order="ZB-H2"),
    Setting(P(8), pp=4, micro=8, order="ZB-V", chunks=2),
    Setting(P(8), pp=2, micro=4, cuts=(4, 6)),
    Setting(P(8), pp=2, micro=4, again=(9, 9)),
    Setting(P(8, tp=2), dp=2, pp=2, micro=4, again=(2, 1)),
    Setting(P(8), dp=2, pp=2, micro=4, order="ZB-H1"),
    Setting(P(8), pp=2, micro=4, order="ZB-H1", again=(3, 0)),
]
DRAWN = [  # offloaded modules, computed again or not; where gaps were found
    (models.gpt2, Setting(P(8, offload="activations"), micro=2, again=(10,), zero=0)),
    (models.gpt2, Setting(P(8, offload="activations"), micro=2, again=(3,), zero=0)),
    (models.llama, Setting(P(8), *(1, 2, 8, "V-Half", 2), zero=0)),
    (
        models.gpt2,
        Setting(P(8, offload="activations"), *(2, 2, 4, "V-Half", 2), zero=3, again=(0, 2, 1, 1)),
    ),
]
SLICED = Setting(P(8, slices=2), dp=2, pp=2, micro=2, order="Seq1F1B")
NEAR = [SETTINGS[2], SETTINGS[12], SLICED]  # what an ordinary run looks at


def near(profiles: Profiles, setting: Setting, recipe: Recipe, seconds: float, peak: float) -> None:
    """A price is that of the exact simulation, within so large a part."""
    chain = chain_of(profiles, setting.placement)
    setting = replace(setting, cuts=stage_units(chain, setting))
    priced = price(chain, setting, A100, recipe)
    took, most, _ = exact(profiles, setting)
    assert priced.seconds - priced.parts["optimizer"] == pytest.approx(took, rel=seconds)
    assert priced.peak == pytest.approx(most, rel=peak)


@pytest.mark.parametrize("setting", NEAR, ids=str)
def test_a_price_is_that_of_the_schedule(setting: Setting) -> None:
    """Playing units once and adding them up is playing the schedule as it is written.

    The simulation hides in the backward what ZeRO sends; a price lets it wait.
    """
    near(models.profiles(models.llama, "bf16"), setting, MIXED, 0.08, 0.03)


@pytest.mark.deep
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("make", [models.llama, models.gpt2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("dtype", ["", "bf16"])
def test_every_price_is_that_of_the_schedule(make: object, dtype: str, setting: Setting) -> None:
    """Both dtypes, a tied head; what the third stage of ZeRO copies, too."""
    recipe = MIXED if dtype else replace(FULL, master=4 * (setting.dp > 1 and setting.zero > 0))
    off = 0.02 if setting.zero == 3 else 0.08
    near(models.profiles(make, dtype), setting, recipe, off, 0.05)  # type: ignore[arg-type]


@pytest.mark.deep
@pytest.mark.parametrize(("make", "setting"), DRAWN, ids=str)
@pytest.mark.parametrize("dtype", ["", "bf16"])
def test_prices_of_what_is_offloaded_are_those_of_the_schedule(
    make: object, dtype: str, setting: Setting
) -> None:
    """Only inputs of what is computed again leave, and a first stage hands nothing back."""
    recipe = MIXED if dtype else replace(FULL, master=4 * (setting.dp > 1 and setting.zero > 0))
    near(models.profiles(make, dtype), setting, recipe, 0.08, 0.06)  # type: ignore[arg-type]


def on_unlike_nodes(order: str, seed: int, off: float) -> None:
    """A price is that of the simulation, of stages and replicas on devices that are drawn."""
    profiles, draw = models.profiles(models.llama, "bf16"), random.Random(seed)
    kinds = draw.sample(["a100", "v100", "h100"], 2)
    nodes = cluster_of_nodes("mixed", [Node(replace(CLUSTERS[kind], node=2)) for kind in kinds])
    chunks = ORDERS[order][0]
    way = Setting(
        *(P(8), 2, 2, 8, order, chunks, draw.choice([0, 1, 2])),
        axes=draw.choice(NODE_AXIS_ORDERS),
        nodes=(0, 1),
    )
    filler = HeterogeneousEvaluator(Job(4, 128, nodes, MIXED), Limits(), profiles)
    (cuts, rows), *_ = filler._shaped(way)
    priced = filler._priced(way, cuts, rows).priced
    assert priced is not None
    took, most, _ = exact(profiles, replace(way, cuts=cuts), nodes)
    assert priced.seconds - priced.parts["optimizer"] == pytest.approx(took, rel=off)
    assert priced.peak == pytest.approx(most, rel=0.05)


def test_a_price_on_unlike_nodes_is_that_of_the_schedule() -> None:
    """Where slices are gathered no backward is run in halves, whatever the order; a rank may be
    fullest before its gradients are there."""
    on_unlike_nodes("V-Half", 1, 0.1)


@pytest.mark.deep
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("seed", range(4))
def test_every_price_on_unlike_nodes_is_that_of_the_schedule(order: str, seed: int) -> None:
    """All orders that are searched, clusters and stages of ZeRO as they are drawn."""
    on_unlike_nodes(order, seed, 0.15)


# -- chains ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", [P(tp=2), P(cp=2)], ids=str)
def test_many_rows_are_told_by_few(placement: Placement) -> None:
    """All that a unit costs is affine in the rows: what was played for 8 is what 2 and 4 tell."""
    source = models.profiles(models.llama, "bf16", 64)
    few, more = (chain_of(source, replace(placement, rows=rows)) for rows in (2, 4))
    played, told = source.simulate(replace(placement, rows=8)), extrapolate_rows(few, more, 8)
    assert told is not None
    assert told.placement == played.placement
    assert [run.count for run in told.runs] == [run.count for run in played.runs]
    for first, second in ((a.unit, b.unit) for a, b in zip(told.runs, played.runs)):
        assert (first.name, first.numel) == (second.name, second.numel)
        for name in ("kept", "input", "output", "entering"):
            assert getattr(first, name) == pytest.approx(getattr(second, name), rel=0.01)
        for work, exactly in ((first.forward, second.forward), (first.backward, second.backward)):
            assert work.collectives == exactly.collectives
            for kind in ("product", "attention"):
                assert flops(work, kind) == pytest.approx(flops(exactly, kind), rel=1e-9)


def flops(work: Work, kind: str) -> float:
    """Operations of one kind."""
    return sum(one.flops * one.count for one in work.operators if one.kind == kind)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_only_a_model_that_runs_on_slices_is_cut(name: str) -> None:
    """It is tried with values: BERT sees later tokens, so its search has no slices to pin."""
    own = load_model_file(str(EXAMPLES / name / "model.py"), None)
    source = Profiles(ModelFacts(own.model()), own.batch(0), own.loss, own.weight, "")
    asked = [Limits({"slices": (2,)})]
    if name == "llama":
        assert source.slicing_refusal is None and job_of(source, A100, 2).can_slice
        return
    assert not job_of(source, A100, 2).can_slice
    assert isinstance(source(P(1, slices=2)), Refusal)
    with pytest.raises(Refusal, match="S655"):
        job_of(source, A100, 2, limits=asked)


def test_ranks_of_one_sequence_may_draw_masks() -> None:
    """GPT-2 drops weights of its attention, also where ranks split the sequence."""
    chain = chain_of(models.profiles(models.gpt2, "", 64), P(2, cp=2))
    assert {one.axis for run in chain.runs for one in run.unit.forward.collectives} == {"cp"}


def test_layers_are_played_once() -> None:
    """A Llama of 100 layers: its chain is that of one with 8, but for how many there are."""
    few, many = (
        chain_of(models.profiles(make, "", 64), P(2, tp=2)) for make in (models.llama, of_hundred)
    )
    assert [run.unit for run in few.runs] == [run.unit for run in many.runs]
    assert (few.length, many.length) == (10, 102)
    assert models.profiles(of_hundred, "", 64).names[-2:] == ("model.layers.99", "model.norm")


def of_hundred() -> nn.Module:
    """A Llama of 100 layers."""
    return models.llama(100)


def test_chains_hold_what_the_model_holds() -> None:
    """Every parameter, tied ones at both ends; of experts each rank has a share."""
    source = models.profiles(models.gpt2, "", 64)
    chain = chain_of(source, P(2))
    held = sum(run.count * run.unit.numel for run in chain.runs)
    shared = models.WORDS * models.WIDTH
    assert held == sum(one.numel for one in source.facts.unique_parameters.values()) + shared
    assert chain.tied == ((0, len(chain.runs) - 1),)
    whole, spread = (
        chain_of(models.profiles(models.mixtral, "", 64), P(2, ep=ep)).runs[1].unit for ep in (1, 2)
    )
    experts = 3 * 4 * models.WIDTH * models.INNER
    assert (whole.expert_numel, spread.expert_numel) == (0, experts // 2)
    assert whole.numel - spread.numel == experts // 2
    each = 2 * 3 * models.WIDTH * models.INNER + 3 * models.WIDTH**2 + 4 * models.WIDTH
    for unit in (whole, spread):  # two experts for each token, as 16-bit operations
        assert flops(unit.forward, "product") == 2 * 2 * (2 * 64) * each
    assert {one.axis for one in spread.forward.collectives} == {"ep"}
    assert "all_to_all" in {one.op for one in spread.forward.collectives}
