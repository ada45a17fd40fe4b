"""The price of a setting: its parts, critical paths of orders, stage cuts, and bytes."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest

from schedlang.passes.planner.critical_path import (
    count_in_flight,
    find_critical_path,
    known_paths_floor,
    order_timeline,
)
from schedlang.passes.planner.even_stages import split_evenly
from schedlang.passes.planner.price import (
    price,
    run_seconds,
    sending_axes,
    step_seconds_by_cause,
    unit_seconds,
)
from schedlang.passes.planner.stage_contents import units_by_stage
from schedlang.passes.planner.values import Chain, Placement, Recipe, Setting
from schedlang.passes.simulate.machine import CLUSTERS
from schedlang.pipeline.cost import Cost
from schedlang.pipeline.schedules import OrderError
from schedlang.pipeline.timeline.memory import peak_live
from schedlang.pipeline.timeline.simulation import simulate_timeline
from schedlang.pipeline.timeline.table import Kind
from tests.planner.decoders import decoder

A100 = CLUSTERS["a100"]
GPT = decoder(24, 4096, 32, 16384, 51200, 2048)
EXPERTS = decoder(8, 2048, 16, 4096, 32000, 2048, gated=True, experts=8)
PLACEMENT = Placement(1, 4, True)
SETTINGS = [
    Setting(PLACEMENT, 8, 4, 32),
    Setting(PLACEMENT, 8, 4, 32, zero=0, again=(3, 3, 3, 3)),
    Setting(PLACEMENT, 8, 4, 6, "GPipe", zero=2),
    Setting(Placement(2, 2), 16, 4, 64, "Interleaved1F1B", 2),
    Setting(Placement(1, 1, cp=4), 8, 4, 40, "ZB-H1"),
    Setting(PLACEMENT, 64, zero=3, micro=2),
    Setting(Placement(4), zero=0),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda one: f"{one.order} {one.zero} {one.pp}")
def test_parts_and_causes_add_up(setting: Setting) -> None:
    """Parts and causes sum up to the step, under weights too; no part is negative."""
    chain, weights = GPT(setting.placement), {"product": 1.5, "tp": 2.0, "dp": 3.0}
    for cause_weights in ({}, weights):
        priced = price(chain, setting, A100, weights=cause_weights)
        by_cause = step_seconds_by_cause(chain, setting, A100, weights=cause_weights)
        assert priced.seconds == pytest.approx(sum(priced.parts.values()))
        assert priced.seconds == pytest.approx(
            sum(cause_weights.get(name, 1.0) * seconds for name, seconds in by_cause.items())
        )
        assert min(priced.parts.values()) >= -1e-12
        assert len(priced.peaks) == setting.pp


def test_one_rank_computes() -> None:
    """On one rank a step is its operators and the update."""
    setting = Setting(Placement(1), micro=3, zero=0)
    chain, priced = GPT(setting.placement), price(GPT(setting.placement), setting, A100)
    run_times = [run.count * sum(unit_seconds(run.unit, setting, A100)[:2]) for run in chain.runs]
    assert priced.parts.keys() == {"computing", "gradients", "optimizer"}
    assert priced.parts["computing"] == pytest.approx(3 * sum(run_times))
    assert priced.parts["gradients"] == 0


def test_neighbours() -> None:
    """The stride of an axis is the product of the faster axes."""
    setting = Setting(Placement(1, 4, cp=2), dp=8, pp=3)
    assert [setting.stride(axis) for axis in ("tp", "cp", "pp", "dp", "ep")] == [1, 4, 8, 24, 24]
    outer = replace(setting, axes=("pp", "dp", "cp", "tp"))
    assert [outer.stride(axis) for axis in ("tp", "cp", "pp", "dp")] == [1, 4, 64, 8]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda one: f"{one.order} {one.zero} {one.pp}")
def test_quicker_machines_are_quicker(setting: Setting) -> None:
    """Doubling any rate never makes a step longer."""
    chain = GPT(setting.placement)
    base_seconds = price(chain, setting, A100).seconds
    for name in ("speed", "stream", "link", "network"):
        faster = replace(A100, **{name: 2 * getattr(A100, name)})
        assert price(chain, setting, faster).seconds <= base_seconds * (1 + 1e-12)


def test_a_ring_is_hidden_by_computing() -> None:
    """Ring messages overlap with attention; only the longer of both counts."""
    placement = Placement(1, cp=4)
    unit = GPT(placement).runs[1].unit
    setting, quiet = (
        Setting(placement),
        replace(unit, forward=replace(unit.forward, collectives=())),
    )
    compute_time, ring = unit_seconds(quiet, setting, A100)[0], unit.forward.collectives[0]
    quick = ring.count * A100.collective_seconds("send", ring.bytes, 4, 1)
    exposed = quick * (1 - A100.overlap)
    assert unit_seconds(unit, setting, A100)[0] == pytest.approx(compute_time + exposed)
    slow = replace(A100, link=1e9)
    send_time = ring.count * slow.collective_seconds("send", ring.bytes, 4, 1)
    hidden = compute_time * A100.overlap
    assert unit_seconds(unit, setting, slow)[0] == pytest.approx(send_time + compute_time - hidden)
    assert send_time > compute_time


# -- orders ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro", [6, 12, 105])
@pytest.mark.parametrize("order", ["BFS", "Interleaved1F1B"])
def test_a_path_that_was_critical_bounds_other_times(order: str, micro: int) -> None:
    """Whatever stages take, a step is no quicker than earlier critical paths say; nothing is said
    where many microbatches are extrapolated."""
    draw, floors = np.random.default_rng(5), list[float]()
    for _ in range(12):
        forward, backward = draw.exponential(size=(2, 6)) ** 2 + 0.01
        floors.append(known_paths_floor(order, 3, 2, micro, forward, backward, 0.1))
        times = forward, backward, 0 * backward, 0.1
        path = find_critical_path(order, 3, 2, micro, *times)
        assert floors[-1] <= path.seconds(*times) * (1 + 1e-12)
    assert (max(floors[1:]) > 0) == (micro < 100)


def path_and_played(
    order: str, ranks: int, chunks: int, micro: int, seed: int
) -> tuple[float, float]:
    """Return the seconds of the critical path and of the simulation, for random stages."""
    draw = np.random.default_rng(seed)
    stages = ranks * chunks
    forward = draw.uniform(0.7, 1.3, stages)
    halves = forward * draw.uniform(0.9, 1.2), forward * draw.uniform(0.6, 1.0)
    send = draw.uniform(0, 0.3)
    durations = np.zeros((len(Kind), stages))
    durations[Kind.F], durations[Kind.B], durations[Kind.I], durations[Kind.W] = (
        forward,
        sum(halves),
        *halves,
    )
    line = order_timeline(order, ranks, micro, chunks)
    true = simulate_timeline(line, durations[line.kind, line.stage], send).makespan
    path = find_critical_path(order, ranks, chunks, micro, forward, *halves, send)
    return path.seconds(forward, *halves, send), float(true)


SIZES = [
    (order, ranks, chunks, micro)
    for order, chunks, sizes in [
        ("1F1B", 1, [(2, 1), (3, 7), (4, 4), (4, 13), (6, 31), (8, 64)]),
        ("GPipe", 1, [(2, 3), (5, 9)]),
        ("ZB-H1", 1, [(4, 8), (4, 50)]),
        ("Interleaved1F1B", 2, [(4, 8), (4, 56)]),
        ("ZB-V", 2, [(4, 9), (4, 61)]),
        ("V-Half", 2, [(4, 40)]),
    ]
    for ranks, micro in sizes
]


@pytest.mark.parametrize(("order", "ranks", "chunks", "micro"), SIZES)
def test_the_longest_way_is_as_played(order: str, ranks: int, chunks: int, micro: int) -> None:
    """The path is never longer than the simulation, nor 3 % shorter; short steps are exact."""
    for seed in range(4):
        path_seconds, played = path_and_played(order, ranks, chunks, micro, seed)
        assert 0.97 * played <= path_seconds <= played * (1 + 1e-9)
        if micro <= 16:
            assert order == "1F1B" or path_seconds == pytest.approx(played)


def test_even_stages_wait_as_published() -> None:
    """(m + p - 1)(F + B), and interleaved (p - 1)/v of waiting (Narayanan et al. 2021)."""
    ones, halves = np.ones(8), np.ones(16) / 2
    one_f_one_b = find_critical_path("1F1B", 8, 1, 64, ones, ones, ones, 0.0).seconds(
        ones, ones, ones, 0.0
    )
    interleaved = find_critical_path("Interleaved1F1B", 8, 2, 64, halves, halves, halves, 0.0)
    assert one_f_one_b == pytest.approx(3 * (64 + 7))
    assert interleaved.seconds(halves, halves, halves, 0.0) == pytest.approx(3 * (64 + 7 / 2))


@pytest.mark.parametrize(("order", "ranks", "chunks", "micro"), SIZES)
def test_in_flight_is_what_the_timeline_holds(
    order: str, ranks: int, chunks: int, micro: int
) -> None:
    """The counts of a rank's stages sum up to its peak of live microbatches."""
    line = order_timeline(order, ranks, micro, chunks)
    in_flight = np.bincount(line.stage_rank, count_in_flight(order, ranks, micro, chunks)[0], ranks)
    assert in_flight.tolist() == peak_live(line).tolist()


def test_costs_of_a_table_are_told() -> None:
    """1F1B with the times of Zero Bubble's 1.5B model (Qi et al. 2024, table 9): as simulated."""
    f, i, w, send = 18.522, 18.086, 9.337, 0.601
    times = (np.full(8, f), np.full(8, i), np.full(8, w))
    path_seconds = find_critical_path("1F1B", 8, 1, 24, *times, send).seconds(*times, send)
    true = simulate_timeline(order_timeline("1F1B", 8, 24, 1), Cost(f, i, w, send))
    assert path_seconds == pytest.approx(float(true.makespan), rel=2e-3)


# -- stages ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", range(1, 7))
def test_even_cuts_have_the_least_slowest_stage(stages: int) -> None:
    """The cuts are the best of all divisions of an uneven chain."""
    for seed in range(5):
        times = tuple(np.random.default_rng(seed).uniform(0.2, 3, 3))
        chain = decoder(6, 64, 4, 256, 1000, 32)(Placement())
        flat = [times[0], *[times[1]] * 6, times[2]]

        def slowest(cuts: tuple[int, ...], flat: list[float] = flat) -> float:
            ends = np.cumsum([0, *cuts])
            return max(sum(flat[a:b]) for a, b in zip(ends, ends[1:]))

        tried = [
            tuple(int(n) for n in np.diff([0, *ends, len(flat)]))
            for ends in combinations(range(1, len(flat)), stages - 1)
        ]
        even_cuts = split_evenly(chain, stages, times)
        assert sum(even_cuts) == len(flat) and min(even_cuts) >= 1
        assert slowest(even_cuts) == pytest.approx(min(map(slowest, tried)))


def test_composition() -> None:
    """Stages get units of their runs; the first units are recomputed, except those that would
    save nothing."""
    chain = decoder(6, 64, 4, 256, 1000, 32)(Placement())
    unit_counts, recomputed = units_by_stage(chain, (3, 4, 1), (2, 9, 0))
    assert unit_counts.tolist() == [[1, 2, 0], [0, 4, 0], [0, 0, 1]]
    assert recomputed.tolist() == [[0, 1, 0], [0, 4, 0], [0, 0, 0]]
    with pytest.raises(ValueError, match="the cuts have 7 units, and there are 8"):
        units_by_stage(chain, (3, 4))
    with pytest.raises(ValueError, match="too few for 9 stages"):
        split_evenly(chain, 9, (1.0, 1.0, 1.0))
    with pytest.raises(ValueError, match="2 stages are cut, and there are 4"):
        price(chain, Setting(Placement(), pp=4, cuts=(4, 4)), A100)


# -- bytes -----------------------------------------------------------------------------------------


def test_gradients_wait_between_halves_of_a_backward() -> None:
    """The peak counts bytes, not microbatches; a first stage sends no gradient back."""
    ones = np.ones(8)
    for waiting, last in ((0.0, [8.0, 1.0]), (1.0, [7.0, 7.0])):
        in_flight = count_in_flight("ZB-V", 4, 8, 2, ones, waiting * ones)
        assert in_flight[:2, 3:5].sum(1).tolist() == last  # both stages of the last rank
    assert count_in_flight("ZB-H1", 2, 4, 1, ones[:2], ones[:2])[1].tolist() == [0, 2]
    assert (count_in_flight("1F1B", 4, 8, 1)[:2] == [[4, 3, 2, 1], [0] * 4]).all()


def test_gradients_come_with_the_first_backward() -> None:
    """V-Min holds most before the first backward of each rank; with large gradients, later."""
    ones = np.ones(4)
    for grown, has_gradients in ((0.0, [1, 0, 0, 1]), (9.0, [1, 1, 1, 1])):
        in_flight = count_in_flight("V-Min", 2, 8, 2, ones, 0 * ones, grown=grown * ones)
        assert in_flight[2].tolist() == has_gradients


@pytest.mark.parametrize(("zero", "billions"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_state_as_published(zero: int, billions: float) -> None:
    """7.5 billion parameters over 64 ranks, 16 bytes each (Rajbhandari et al. 2020, figure 1)."""
    chain = decoder(1, 64, 4, 256, 1000, 32)(Placement(0))
    ones = [replace(run, unit=replace(run.unit, numel=0, peak=0.0)) for run in chain.runs]
    ones[1] = replace(ones[1], unit=replace(ones[1].unit, numel=7_500_000_000))
    priced = price(replace(chain, runs=tuple(ones)), Setting(Placement(0), dp=64, zero=zero), A100)
    gathered = 4 * 7.5e9 * (zero == 3)  # of one unit that is the model
    assert (priced.peak - gathered) / 1e9 == pytest.approx(billions, rel=0.02)


def test_experts_are_split_over_fewer() -> None:
    """Expert state is sharded over ep times fewer replicas; other parameters over all."""
    placement = Placement(1, ep=4)
    expert_numel, numel = (
        sum(run.count * getattr(run.unit, name) for run in EXPERTS(placement).runs)
        for name in ("expert_numel", "numel")
    )
    recipe = Recipe(parameter=0, gradient=0, moments=0, master=1)
    bare_chain = replace(EXPERTS(placement), runs=tuple(
        replace(run, unit=replace(run.unit, kept=0.0, peak=0.0)) for run in EXPERTS(placement).runs
    ))  # fmt: skip
    priced = price(bare_chain, Setting(placement, dp=8, zero=1), A100, recipe)
    assert priced.peak == pytest.approx((numel - expert_numel) / 8 + expert_numel / 2)


def test_shared_parameters_are_held_once() -> None:
    """A rank with both ends holds a tied weight once; two ranks hold copies and sum gradients."""
    tied, loose = (decoder(6, 64, 4, 256, 1000, 32, tied=tied) for tied in (True, False))
    one_stage = Setting(Placement(), micro=2, zero=0)  # the second finds gradients allocated
    peaks = [price(make(Placement()), one_stage, A100).peak for make in (tied, loose)]
    assert peaks[1] - peaks[0] == 16 * 64 * 1000
    two_stages = replace(one_stage, pp=2, micro=4)
    priced = [price(make(Placement()), two_stages, A100) for make in (tied, loose)]
    assert priced[0].peaks == priced[1].peaks
    assert priced[0].parts["gradients"] > priced[1].parts["gradients"] == 0


def test_orders_that_are_not_priced() -> None:
    """Orders with stage copies, moved activations or updates inside a step are refused."""
    chain = GPT(Placement())
    for order in ("Chimera", "BPipe", "PipeDream"):
        with pytest.raises(OrderError, match=f"{order} has copies of its stages, moves"):
            price(chain, Setting(Placement(), pp=4, micro=8, order=order), A100)


def test_gathers_of_parameters_go_by_units() -> None:
    """ZeRO-3 on a slow network: two all-gathers and a reduce-scatter per unit and microbatch.

    The part that overlaps with computing is subtracted.
    """
    setting = Setting(Placement(1), 64, zero=3, micro=3)
    slow = replace(A100, network=1e9, link=1e9)
    chain = GPT(setting.placement)
    priced = price(chain, setting, slow)
    unit_numel = sum(run.unit.numel * run.count for run in chain.runs) / chain.length
    send_time = 2 * slow.collective_seconds("all_gather", 2 * unit_numel, 64, 1)
    send_time += slow.collective_seconds("reduce_scatter", 2 * unit_numel, 64, 1)
    hidden = slow.overlap * priced.parts["computing"]
    # casts of slices, copies in and out, minus the sums of full gradients that slices do not need
    copied_bytes = 2 * (4 + 10 / 64) - 6 * (1 - 1 / 64)
    copies = slow.operator_seconds("other", 0, 3 * chain.length * unit_numel * copied_bytes)
    assert priced.parts["gradients"] == pytest.approx(
        3 * chain.length * send_time - hidden + copies
    )
    quick = price(chain, setting, replace(A100, link=1e13, network=1e13))
    assert quick.parts["gradients"] < 0.1 * priced.parts["gradients"]


def test_memory_of_stages() -> None:
    """The first stage holds most microbatches; recomputation leaves inputs and one layer."""
    setting = Setting(PLACEMENT, 2, 4, 16, cuts=(6, 6, 6, 8))
    chain = GPT(PLACEMENT)
    layer = chain.runs[1].unit
    base = price(chain, setting, A100)
    recomputed = price(chain, replace(setting, again=(0, 6, 0, 0)), A100)
    assert base.peaks[0] > base.peaks[1] > base.peaks[2]
    less = (3 * 6 - 1) * (layer.kept - layer.input)
    assert base.peaks[1] - recomputed.peaks[1] == pytest.approx(less)
    assert base.peaks[0] == recomputed.peaks[0]
    assert recomputed.seconds > base.seconds


def test_what_is_computed_again_stays_off_the_host() -> None:
    """With recomputation only inputs are offloaded: on a slow host that is quicker, and keeps one
    layer's activations without copies."""
    setting = Setting(Placement(offload="activations"), 1, 2, 8, "ZB-H1", zero=0, cuts=(13, 13))
    chain, layer = GPT(setting.placement), GPT(setting.placement).runs[1].unit
    slow = replace(A100, host=1e9)
    base = price(chain, setting, slow)
    recomputed = price(chain, replace(setting, again=(13, 13)), slow)
    copied = sum(step_seconds_by_cause(chain, replace(setting, again=(13, 13)), slow).values())
    assert recomputed.seconds < base.seconds / 4 and copied == pytest.approx(recomputed.seconds)
    assert 0 < recomputed.parts["host"] <= 8 * 13 * 2 * slow.copy_seconds(layer.input)
    assert base.peaks[0] - recomputed.peaks[0] == pytest.approx(layer.kept - 2 * layer.input)


@pytest.mark.parametrize("order", ["ZB-V", "V-Half"])
def test_the_first_stage_hands_nothing_back(order: str) -> None:
    """The first stage has no input gradient; its price equals the simulation and the causes."""
    chain, times = GPT(Placement()), list[tuple[float, ...]]()
    cuts = split_evenly(chain, 4, (1.0, 1.0, 1.0))
    setting = Setting(chain.placement, 1, 2, 8, order, 2, 0, cuts)
    for run in chain.runs:
        times += [unit_seconds(run.unit, setting, A100)[:2]] * run.count
    ends = np.cumsum((0, *setting.cuts))
    f, b = (np.add.reduceat([t[k] for t in times], ends[:-1]) for k in (0, 1))
    priced = price(chain, setting, A100)
    assert priced.seconds == pytest.approx(
        sum(step_seconds_by_cause(chain, setting, A100).values())
    )
    line = order_timeline(order, 2, 8, 2)
    durations = np.zeros((len(Kind), 4))
    _, tables = run_seconds(chain, sending_axes(setting), A100)
    unit_counts, _ = units_by_stage(chain, setting.cuts)
    durations[Kind.F], durations[Kind.B], durations[Kind.W] = f, b, unit_counts @ tables[2].sum(1)
    durations[Kind.W, 0] = b[0]
    durations[Kind.I] = b - durations[Kind.W]
    send_time = A100.collective_seconds("send", chain.runs[1].unit.output, 2, 1)
    played = float(simulate_timeline(line, durations[line.kind, line.stage], send_time).makespan)
    span = priced.seconds - priced.parts["optimizer"]
    assert span == pytest.approx(played, rel=1e-6)


@pytest.mark.parametrize(("rows", "tp", "cp"), list(product((1, 2), (1, 2, 4), (1, 2)))[1:])
def test_a_decoder_shares_its_work(rows: int, tp: int, cp: int) -> None:
    """The FLOPs of all ranks together are those of one rank with the same rows."""
    base_chain, split_chain = GPT(Placement()), GPT(Placement(rows, tp, cp=cp))

    def flops(chain: Chain) -> float:
        return sum(
            run.count * op.count * op.flops
            for run in chain.runs
            for op in run.unit.forward.operators
        )

    assert flops(split_chain) * tp * cp == pytest.approx(rows * flops(base_chain))
    assert sum(run.count * run.unit.kept for run in split_chain.runs) < rows * sum(
        run.count * run.unit.kept for run in base_chain.runs
    ) / cp * (1 + 1e-9)
