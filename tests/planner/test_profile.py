"""Chains from simulation: their prices match the exact simulation of the written schedule."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from torch import nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.limits import Limits
from schedlang.ir.model import ModelFacts
from schedlang.ir.modelfile import load_model_file
from schedlang.ir.plan import Plan
from schedlang.passes.analyze.prepare import prepare
from schedlang.passes.complete.proposed_rows import RowTrial
from schedlang.passes.elaborate.expand import expand
from schedlang.passes.planner import profile
from schedlang.passes.planner.extrapolation import extrapolate_rows
from schedlang.passes.planner.heterogeneous import NODE_AXIS_ORDERS, HeterogeneousEvaluator
from schedlang.passes.planner.price import price
from schedlang.passes.planner.profile import Profiles, placements_to_simulate
from schedlang.passes.planner.schedule_writer import stage_units, write_schedule
from schedlang.passes.planner.search import search
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
    """Return the chain of a placement; fail if it is refused."""
    result = profiles(placement)
    assert isinstance(result, Chain), result.render()
    return result


def plan_of(profiles: Profiles, setting: Setting) -> Plan:
    """Return the plan of a setting's schedule text."""
    plan = expand(write_schedule(profiles, setting), profiles.facts).plan
    assert plan is not None and plan.mesh.world == setting.ranks
    return plan


def simulate_exact(
    profiles: Profiles, setting: Setting, cluster: Cluster = A100
) -> tuple[float, float, float]:
    """Return simulated seconds without the update, and peak and state bytes of a rank."""
    plan = plan_of(profiles, setting)
    rank_entry = profiles.sample_rows(setting.placement.rows)
    batch = repeat_sample(rank_entry, plan.shares * plan.micro)
    prepared = prepare(plan, largest_part(batch, plan.shares, plan.micro))
    simulated = simulate_ranks(plan, batch, None, prepared, works=True)
    seconds = time_step(plan, prepared, simulated, cluster).seconds
    # an update handles many parameters in one kernel
    ready = replace(cluster.slowest, start=0.0)
    update = max(
        sum(ready.computing_seconds(computation.work) for computation in p.rest)
        for p in simulated.by_class.values()
    )
    classes = rank_classes(plan, prepared.staged, prepared.holdings)
    peak = max(rank_entry.peak for rank_entry in memory_of_ranks(plan, prepared, simulated))
    return seconds - update, peak, max(rank_entry.state for rank_entry in classes)


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
OFFLOADED = [  # offloaded modules, recomputed or not; cases where gaps were found
    (models.gpt2, Setting(P(8, offload="activations"), micro=2, again=(10,), zero=0)),
    (models.gpt2, Setting(P(8, offload="activations"), micro=2, again=(3,), zero=0)),
    (models.llama, Setting(P(8), *(1, 2, 8, "V-Half", 2), zero=0)),
    (
        models.gpt2,
        Setting(P(8, offload="activations"), *(2, 2, 4, "V-Half", 2), zero=3, again=(0, 2, 1, 1)),
    ),
]
SLICED = Setting(P(8, slices=2), dp=2, pp=2, micro=2, order="Seq1F1B")
QUICK = [SETTINGS[2], SETTINGS[12], SLICED]  # cases of an ordinary test run


def assert_close(
    profiles: Profiles, setting: Setting, recipe: Recipe, seconds: float, peak: float
) -> None:
    """Assert that time and peak of a price match the exact simulation within tolerances."""
    chain = chain_of(profiles, setting.placement)
    setting = replace(setting, cuts=stage_units(chain, setting))
    priced = price(chain, setting, A100, recipe)
    exact_seconds, exact_peak, _ = simulate_exact(profiles, setting)
    assert priced.seconds - priced.parts["optimizer"] == pytest.approx(exact_seconds, rel=seconds)
    assert priced.peak == pytest.approx(exact_peak, rel=peak)


@pytest.mark.parametrize("setting", QUICK, ids=str)
def test_a_price_is_that_of_the_schedule(setting: Setting) -> None:
    """Adding up units that are simulated once equals simulating the written schedule.

    The simulation overlaps ZeRO's messages with the backward; a price does not.
    """
    assert_close(models.profiles(models.llama, "bf16"), setting, MIXED, 0.08, 0.03)


@pytest.mark.parametrize(
    "setting",
    [
        Setting(P(8), dp=8, micro=2, zero=3),
        Setting(P(8, ep=2), dp=8, micro=2, zero=1),
        Setting(P(8), dp=6, micro=2, zero=3),
    ],
    ids=str,
)
def test_few_experts_are_sharded_along_another_dim(setting: Setting) -> None:
    """ZeRO shards 4 experts over 8 ranks along the first dim that these divide, and copies them
    where they are gathered; 6 ranks divide none: they hold one expert or none, and messages are
    padded."""
    assert_close(models.profiles(models.mixtral, "bf16"), setting, MIXED, 0.08, 0.05)


@pytest.mark.deep
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("make", [models.llama, models.gpt2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("dtype", ["", "bf16"])
def test_every_price_is_that_of_the_schedule(make: object, dtype: str, setting: Setting) -> None:
    """Both dtypes, a tied head, and the copies of ZeRO's third stage."""
    recipe = MIXED if dtype else replace(FULL, master=4 * (setting.dp > 1 and setting.zero > 0))
    off = 0.02 if setting.zero == 3 else 0.08
    assert_close(models.profiles(make, dtype), setting, recipe, off, 0.05)  # type: ignore[arg-type]


@pytest.mark.deep
@pytest.mark.parametrize(("make", "setting"), OFFLOADED, ids=str)
@pytest.mark.parametrize("dtype", ["", "bf16"])
def test_prices_of_what_is_offloaded_are_those_of_the_schedule(
    make: object, dtype: str, setting: Setting
) -> None:
    """Only inputs of recomputed modules are offloaded; a first stage sends no gradient back."""
    recipe = MIXED if dtype else replace(FULL, master=4 * (setting.dp > 1 and setting.zero > 0))
    assert_close(models.profiles(make, dtype), setting, recipe, 0.08, 0.06)  # type: ignore[arg-type]


def check_mixed_nodes(order: str, seed: int, off: float) -> None:
    """Assert that the price matches the simulation, on randomly drawn devices."""
    profiles, draw = models.profiles(models.llama, "bf16"), random.Random(seed)
    kinds = draw.sample(["a100", "v100", "h100"], 2)
    nodes = cluster_of_nodes("mixed", [Node(replace(CLUSTERS[kind], node=2)) for kind in kinds])
    chunks = ORDERS[order][0]
    setting = Setting(
        *(P(8), 2, 2, 8, order, chunks, draw.choice([0, 1, 2])),
        axes=draw.choice(NODE_AXIS_ORDERS),
        nodes=(0, 1),
    )
    filler = HeterogeneousEvaluator(Job(4, 128, nodes, MIXED), Limits(), profiles)
    (cuts, rows), *_ = filler._shaped(setting)
    priced = filler._priced(setting, cuts, rows).priced
    assert priced is not None
    seconds, peak, _ = simulate_exact(profiles, replace(setting, cuts=cuts), nodes)
    assert priced.seconds - priced.parts["optimizer"] == pytest.approx(seconds, rel=off)
    assert priced.peak == pytest.approx(peak, rel=0.05)


def test_a_price_on_unlike_nodes_is_that_of_the_schedule() -> None:
    """With gathered slices no backward is split, whatever the order; a rank may be fullest before
    its gradients exist."""
    check_mixed_nodes("V-Half", 1, 0.1)


@pytest.mark.deep
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("seed", range(4))
def test_every_price_on_unlike_nodes_is_that_of_the_schedule(order: str, seed: int) -> None:
    """All searched orders, with random clusters and ZeRO stages."""
    check_mixed_nodes(order, seed, 0.15)


# -- chains ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", [P(tp=2), P(cp=2)], ids=str)
def test_many_rows_are_told_by_few(placement: Placement) -> None:
    """Costs of a unit are affine in rows: 8 rows are extrapolated from 2 and 4."""
    source = models.profiles(models.llama, "bf16", 64)
    few, four_rows = (chain_of(source, replace(placement, rows=rows)) for rows in (2, 4))
    simulated, extrapolated_chain = (
        source.simulate(replace(placement, rows=8)),
        extrapolate_rows(few, four_rows, 8),
    )
    assert extrapolated_chain is not None
    assert extrapolated_chain.placement == simulated.placement
    assert [run.count for run in extrapolated_chain.runs] == [run.count for run in simulated.runs]
    for extrapolated, second in (
        (a.unit, b.unit) for a, b in zip(extrapolated_chain.runs, simulated.runs)
    ):
        assert (extrapolated.name, extrapolated.numel) == (second.name, second.numel)
        for name in ("kept", "input", "output", "entering"):
            assert getattr(extrapolated, name) == pytest.approx(getattr(second, name), rel=0.01)
        for actual, exactly in (
            (extrapolated.forward, second.forward),
            (extrapolated.backward, second.backward),
        ):
            assert actual.collectives == exactly.collectives
            for kind in ("product", "attention"):
                assert flops(actual, kind) == pytest.approx(flops(exactly, kind), rel=1e-9)


def flops(work: Work, kind: str) -> float:
    """Return the FLOPs of one kind of operator."""
    return sum(
        operator.flops * operator.count for operator in work.operators if operator.kind == kind
    )


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_only_a_model_that_runs_on_slices_is_cut(name: str) -> None:
    """Slicing is tried with real values: BERT attends to later tokens, so it cannot be sliced."""
    model_file = load_model_file(str(EXAMPLES / name / "model.py"), None)
    source = Profiles(
        ModelFacts(model_file.model()), model_file.batch(0), model_file.loss, model_file.weight, ""
    )
    pinned = [Limits({"slices": (2,)})]
    if name == "llama":
        assert source.slicing_refusal is None and job_of(source, A100, 2).can_slice
        return
    assert not job_of(source, A100, 2).can_slice
    assert isinstance(source(P(1, slices=2)), Refusal)
    with pytest.raises(Refusal, match="S655"):
        job_of(source, A100, 2, limits=pinned)


def test_ranks_of_one_sequence_may_draw_masks() -> None:
    """GPT-2 with attention dropout can be split along the sequence."""
    chain = chain_of(models.profiles(models.gpt2, "", 64), P(2, cp=2))
    assert {
        collective.axis for run in chain.runs for collective in run.unit.forward.collectives
    } == {"cp"}


def test_layers_are_played_once() -> None:
    """The chain of a Llama with 100 layers is that of one with 8, except for the count."""
    few, many = (
        chain_of(models.profiles(make, "", 64), P(2, tp=2)) for make in (models.llama, llama_100)
    )
    assert [run.unit for run in few.runs] == [run.unit for run in many.runs]
    assert (few.length, many.length) == (10, 102)
    assert models.profiles(llama_100, "", 64).names[-2:] == ("model.layers.99", "model.norm")


@pytest.mark.parametrize(
    ("make", "placement"),
    [(models.llama, P(16, tp=2, sequence=True)), (models.gpt2, P(16, cp=2))],
    ids=["llama", "gpt2"],
)
def test_many_rows_are_prepared_as_two(
    make: object, placement: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan that was prepared with two rows has the same chain for more as one prepared with
    these."""
    chains = [chain_of(models.profiles(make, "bf16", 64), placement)]
    monkeypatch.setattr(profile, "SIMULATED_ROWS", (16, 32))
    chains.append(chain_of(models.profiles(make, "bf16", 64), placement))
    assert chains[0] == chains[1]


def test_a_search_simulates_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search simulates at most three steps for each way to split tensors, and prepares two of
    them, whatever the number of layers and ranks."""
    prepared, simulated = list[Plan](), list[Placement]()
    prepare_, simulate_ = prepare, Profiles.simulate

    def preparing(plan: Plan, *rest: object) -> object:
        prepared.append(plan)
        return prepare_(plan, *rest)  # type: ignore[arg-type]

    def simulating(self: Profiles, placement: Placement) -> Chain:
        simulated.append(placement)
        return simulate_(self, placement)

    monkeypatch.setattr(profile, "prepare", preparing)
    monkeypatch.setattr(Profiles, "simulate", simulating)
    limits = Limits({"tp": (1, 2), "order": ("1F1B",), "offload": ("none",)})
    seen = []
    for layers, ranks in ((8, 8), (16, 64)):
        source = models.profiles(partial(models.llama, layers), "bf16", 64)
        job = job_of(source, A100, ranks, 256, [limits])
        *_, result = search(source, job, limits)
        assert result.best is not None and len(simulated) == len(set(simulated))
        assert {*simulated} <= {*placements_to_simulate(job, limits)}
        assert len({replace(one, rows=1) for one in simulated}) == 3 and len(prepared) <= 2 * 3
        seen.append({*simulated})
        simulated.clear()
        prepared.clear()
    assert seen[0] == seen[1] and len(seen[0]) <= 3 * 3


AHEAD = """
import os
os.sched_getaffinity = lambda pid: {0, 1}
from schedlang.verbs.inputs import use_one_thread
use_one_thread()
from schedlang.garbage_collection import ProcessState
from schedlang.ir.limits import Limits
from schedlang.passes.planner.profile import Profiles, placements_to_simulate
from schedlang.passes.planner.tuning import job_of
from schedlang.passes.simulate.machine import CLUSTERS
from tests.planner import models

ProcessState.own = True
simulate, here = Profiles.simulate, []
Profiles.simulate = lambda self, placement: here.append(placement) or simulate(self, placement)
limits = Limits({"tp": (1, 2)})
ahead, alone = (models.profiles(models.llama, "bf16", 64) for _ in range(2))
placements = placements_to_simulate(job_of(alone, CLUSTERS["a100"], 8, 64), limits)
with ahead.simulating_ahead(placements):
    chains = [ahead(placement) for placement in placements]
assert 1 < len(here) < len(placements), "some are simulated by the fork, and some here"
assert chains == [alone(placement) for placement in placements]
print("equal")
"""


def test_chains_of_a_fork_are_those_of_this_process() -> None:
    """A command simulates placements in a fork too, and gets the same chains."""
    process = subprocess.run(
        [sys.executable, "-c", AHEAD],
        cwd=EXAMPLES.parent,
        env={k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")},
        capture_output=True,
        text=True,
    )
    assert process.stdout == "equal\n", process.stderr


def llama_100() -> nn.Module:
    """Return a Llama of 100 layers."""
    return models.llama(100)


def test_rows_are_found_once_for_each_size_of_an_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of other sizes of other axes are known, and so is a refusal."""
    source, trials = models.profiles(models.mixtral, "", 64), list[str]()
    find_refusal = RowTrial.find_refusal

    def counted(trial: RowTrial, rows: object, axis: str, ranks: int) -> object:
        trials.append(axis)
        return find_refusal(trial, rows, axis, ranks)  # type: ignore[arg-type]

    monkeypatch.setattr(RowTrial, "find_refusal", counted)
    first, second = source.rows(P(tp=2, ep=2)), source.rows(P(tp=4, ep=4, cp=2))
    with pytest.raises(Refusal):
        source.rows(P(tp=2, ep=2, sequence=True))
    count = len(trials)
    assert count and source.rows(P(tp=2, ep=4)) == {**first, "experts": second["experts"]}
    for placement in (P(tp=2, ep=2, sequence=True), P(tp=2, ep=4, sequence=True, cp=2)):
        with pytest.raises(Refusal):
            source.rows(placement)
    assert len(trials) == count


def test_chains_hold_what_the_model_holds() -> None:
    """A chain has every parameter, tied ones at both ends, and a rank's share of experts."""
    source = models.profiles(models.gpt2, "", 64)
    chain = chain_of(source, P(2))
    chain_numel = sum(run.count * run.unit.numel for run in chain.runs)
    shared = models.WORDS * models.WIDTH
    assert (
        chain_numel == sum(item.numel for item in source.facts.unique_parameters.values()) + shared
    )
    assert chain.tied == ((0, len(chain.runs) - 1),)
    unsplit_unit, split_unit = (
        chain_of(models.profiles(models.mixtral, "", 64), P(2, ep=ep)).runs[1].unit for ep in (1, 2)
    )
    experts = 3 * 4 * models.WIDTH * models.INNER
    assert (unsplit_unit.expert_numel, split_unit.expert_numel) == (0, experts // 2)
    assert unsplit_unit.numel - split_unit.numel == experts // 2
    layer_numel = 2 * 3 * models.WIDTH * models.INNER + 3 * models.WIDTH**2 + 4 * models.WIDTH
    for unit in (unsplit_unit, split_unit):  # two experts for each token, as 16-bit operations
        assert flops(unit.forward, "product") == 2 * 2 * (2 * 64) * layer_numel
    assert {item.axis for item in split_unit.forward.collectives} == {"ep"}
    assert "all_to_all" in {item.op for item in split_unit.forward.collectives}
