"""Stage planners of the literature: optimal in their own model, or equal to published
plans."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedlang.passes.partition.stage_partition import PartitionProblem, StageOption
from schedlang.passes.planner.stage_options import Devices, Layer
from schedlang.passes.planner.stage_planners import STAGE_PLANNERS, StagePlanner
from tests.planner.test_partition import brute_force
from tests.planner.vgg16 import LAYERS

SMALL_NUMBERS = st.integers(0, 6).map(float)
LAYER = st.builds(
    Layer,
    SMALL_NUMBERS,
    SMALL_NUMBERS,
    SMALL_NUMBERS,
    SMALL_NUMBERS,
    SMALL_NUMBERS,
    st.just(1.0),
    SMALL_NUMBERS,
    SMALL_NUMBERS,
)


@st.composite
def random_cases(draw: st.DrawFn) -> tuple[list[Layer], Devices, int]:
    """Random small cases: few layers on few devices, possibly in nodes or of unequal speed."""
    layers = draw(st.lists(LAYER, min_size=2, max_size=4))
    count = draw(st.sampled_from([2, 3, 4]))
    speeds = draw(st.sampled_from([(), (1.0, 2.0, 1.0, 4.0)[:count]]))
    memory = draw(st.sampled_from([math.inf, 12.0, 24.0]))
    devices = Devices(count, memory, draw(st.sampled_from([1, 2, 4])), 2.0, 1.0, 1.0, 3.0, speeds)
    if speeds and memory < math.inf:
        devices = replace(devices, memories=(memory, memory / 2, memory / 4, memory)[:count])
    return layers, devices, draw(st.integers(1, 4))


def all_options(
    planner: StagePlanner, layers: list[Layer], devices: Devices, micro: int, device_range: range
) -> Iterator[StageOption]:
    """Yield all options of a stage, each computed from scratch."""
    speed = min((devices.speeds or (1.0,) * devices.count)[device_range.start : device_range.stop])
    fills = (
        devices.memory / min(devices.memories[device_range.start : device_range.stop])
        if devices.memories
        else 1.0
    )
    link = devices.bandwidth(device_range)
    for degree in planner.degrees(len(device_range)):
        if len(device_range) % degree:
            continue
        copies = len(device_range) // degree
        groups = [
            range(begin, begin + degree)
            for begin in range(device_range.start, device_range.stop, degree)
        ]
        ring = 2 * (degree - 1) / degree / min(devices.bandwidth(group) for group in groups)
        for choices_made in product(planner.choices, repeat=len(layers)):
            layer_options = [
                choice(layer, devices) for choice, layer in zip(choices_made, layers, strict=True)
            ]
            extra = [
                (
                    ring * layer.exchanged,
                    ring * layer.exchanged * (2 if layer_option.name == ("again",) else 1),
                )
                for layer_option, layer in zip(layer_options, layers, strict=True)
            ]
            option = StageOption(
                sum(w.forward / degree + e[0] for w, e in zip(layer_options, extra))
                / speed
                / copies,
                sum(w.backward / degree + e[1] for w, e in zip(layer_options, extra))
                / speed
                / copies,
                0.0,
                sum(w.held for w in layer_options) / degree * fills,
                sum(w.kept for w in layer_options) / degree / copies * fills,
            )
            weights = sum(layer.weights for layer in layers) / degree
            yield planner.replicas(option, weights, copies, link, micro)


def least_of_all(planner: StagePlanner, layers: list[Layer], devices: Devices, micro: int) -> float:
    """Return the least value over all stages, devices, degrees and choices."""
    best = math.inf
    for order in planner._orders(devices):
        for fixed, count in planner._grids(layers, order, None):

            def menu(
                begin: int,
                end: int,
                device_range: range,
                after: int,
                fixed: StagePlanner = fixed,
                order: Devices = order,
            ) -> list[StageOption]:
                return list(all_options(fixed, layers[begin:end], order, micro, device_range))

            enumerated: PartitionProblem = replace(
                fixed.problem(layers, order, micro, count), menu=menu
            )
            try:
                best = min(best, brute_force(enumerated, planner.objective))
            except ValueError:
                continue  # the devices cannot be assigned so
    return best


@pytest.mark.parametrize("name", STAGE_PLANNERS)
@given(case=random_cases())
@settings(max_examples=40)
def test_a_planner_finds_the_least_of_its_own_model(
    name: str, case: tuple[list[Layer], Devices, int]
) -> None:
    """Each planner equals the enumeration of stages, devices, degrees and choices."""
    planner = STAGE_PLANNERS[name]
    best = least_of_all(planner, *case)
    plan = planner.plan(*case)
    if not math.isfinite(best):
        assert plan is None
        return
    assert plan is not None and plan.value == pytest.approx(best)
    assert sum(plan.units) == len(case[0]) and sum(plan.devices) == case[1].count


@pytest.mark.parametrize("link", [1.25e9, 3.125e9])
def test_pipedream_puts_vgg16_on_16_devices_as_published(link: float) -> None:
    """The authors' profile gives the 15-1 plan of their Table 1 at 10 and 25 Gbit/s."""
    devices = Devices(16, node=16, link=link, network=link)
    plan = STAGE_PLANNERS["pipedream"].plan(LAYERS, devices, 16)
    assert plan is not None and plan.devices == (15, 1)
    # convolutions are replicated, the three linear layers with most weights are not
    assert plan.units[0] <= 31


def test_messages_and_sums_of_gradients_by_hand() -> None:
    """A message is the output of the layer before it; PipeDream's gradient sums by hand."""
    layers = [Layer(1.0, 2.0, output=8.0), Layer(1.0, 2.0, output=100.0)]
    plan = STAGE_PLANNERS["pipedream"].plan(layers, Devices(2, node=2, link=1.0), 4, 2)
    assert plan is not None and plan.value == 16.0  # eight bytes, each way
    one_stage = STAGE_PLANNERS["pipedream"].plan(
        [Layer(3.0, 6.0, weights=10.0)], Devices(3, node=3, link=5.0), 4
    )
    # a third of 9 s, and 4 (m - 1) / m of 10 bytes over 5 bytes a second, of which each has a third
    assert one_stage is not None and one_stage.value == pytest.approx(3.0 + 4 * 2 / 3 * 10 / 5 / 3)


def test_what_runs_again_meets_again() -> None:
    """A split layer that is recomputed sends three times, not twice."""
    layers = [Layer(2.0, 4.0, kept=10.0, input=1.0, exchanged=3.0)]
    piper = replace(STAGE_PLANNERS["piper"], degrees=lambda count: (2,))
    saved = piper.plan(layers, Devices(2, 100.0, 2, 1.0), 1, 1)
    recomputed = piper.plan(layers, Devices(2, 4.0, 2, 1.0), 1, 1)
    assert saved is not None and saved.value == 3.0 + 2 * 3.0
    assert recomputed is not None and recomputed.value == 4.0 + 3 * 3.0


def test_adapipe_recomputes_more_in_early_stages_and_beats_all_and_none() -> None:
    """Later stages recompute less, and mixed recomputation beats uniform under the same limit."""
    layers = [Layer(1.0, 2.0, state=1.0, kept=3.0, input=1.0)] * 12
    devices = Devices(4, memory=36.0)
    planner = STAGE_PLANNERS["adapipe"]
    plan = planner.plan(layers, devices, 8, 4)
    assert plan is not None
    recompute_counts = [option.name.count("again") for option in plan.options]
    assert (
        recompute_counts == sorted(recompute_counts, reverse=True)
        and recompute_counts[0] > 0 == recompute_counts[-1]
    )
    uniform_plans = [
        replace(planner, choices=(choice,)).plan(layers, devices, 8, 4)
        for choice in planner.choices
    ]
    for uniform in uniform_plans:
        assert uniform is None or plan.value < uniform.value
    assert any(uniform is not None for uniform in uniform_plans)


def test_piper_is_no_slower_than_the_best_uniform_grid() -> None:
    """Stages of different shape beat the best grid of equal stages."""
    layers = [Layer(1.0, 2.0, 80.0, 4.0, 2.0, 0.5, 1.0, 0.5)] * 4 + [Layer(4.0, 8.0, 20.0, 4.0)]
    devices = Devices(6, 24.0, 6, 10.0, 10.0)
    piper = STAGE_PLANNERS["piper"]
    uniform = replace(piper, equal_stages=True).plan(layers, devices, 8)
    plan = piper.plan(layers, devices, 8)
    assert plan is not None and uniform is not None
    assert plan.value < uniform.value


def test_unlike_devices_get_layers_by_their_speed() -> None:
    """Unequal devices finish within 5 percent of each other; a worker tries all device orders."""
    layers = [Layer(1.0, 2.0)] * 12
    devices = Devices(3, speeds=(1.0, 3.0, 2.0))
    whale, blind = STAGE_PLANNERS["whale"].plan(layers, devices, 8), STAGE_PLANNERS["whale"]
    assert whale is not None and whale.units == (2, 6, 4)
    stage_times = {option.seconds for option in whale.options}
    assert max(stage_times) / min(stage_times) < 1.05
    equal_speeds = blind.plan(layers, replace(devices, speeds=()), 8)
    assert equal_speeds is not None and equal_speeds.units == (4, 4, 4)
    worker = STAGE_PLANNERS["hetpipe"].plan(layers, devices, 8)
    assert worker is not None and worker.value == whale.value


def test_amp_beats_a_search_that_takes_devices_to_be_alike() -> None:
    """Cuts for unequal devices are quicker on them than cuts that assume equal ones."""
    layers = [Layer(1.0, 2.0, 1.0)] * 5 + [Layer(5.0, 10.0, 1.0)]
    devices = Devices(4, node=2, link=50.0, network=10.0, speeds=(1.0, 1.0, 3.0, 3.0))
    amp = STAGE_PLANNERS["amp"]
    plan = amp.plan(layers, devices, 8, 2)
    blind = amp.plan(layers, replace(devices, speeds=()), 8, 2)
    assert plan is not None and blind is not None
    ends = [0, blind.units[0], len(layers)]
    stage_times = [
        sum(layer.forward + layer.backward for layer in layers[a:b]) / speed
        for (a, b), speed in zip(pairwise(ends), (2.0, 6.0), strict=True)
    ]
    blind_time = sum(stage_times) + 7 * max(stage_times)  # the cut for equal devices, without links
    assert plan.units != blind.units and plan.value < blind_time


def test_mpress_prefers_the_quicker_link_and_fits_where_keeping_all_does_not() -> None:
    """Swapping to peers is preferred to the host, and recomputation where both links are slow."""
    layers = [Layer(1.0, 2.0, state=1.0, kept=2.0, input=0.5)] * 8
    devices = Devices(4, memory=10.0, host=1.0, peer=4.0)
    mpress = STAGE_PLANNERS["mpress"]
    assert replace(mpress, choices=mpress.choices[:1]).plan(layers, devices, 8, 4) is None
    plan = mpress.plan(layers, devices, 8, 4)
    assert plan is not None
    names = [name for option in plan.options for name in option.name]
    assert "peer" in names and "swap" not in names
    slow = mpress.plan(layers, replace(devices, peer=0.2, host=0.1), 8, 4)
    assert slow is not None and "again" in [name for option in slow.options for name in option.name]


def test_mcap_balances_bytes_and_not_time() -> None:
    """MCAP minimises the bytes of the fullest device, whatever the time."""
    layers = [Layer(5.0, 9.0, state=1.0, kept=0.5)] * 4 + [Layer(0.1, 0.1, state=8.0, kept=1.0)] * 2
    devices = Devices(3)
    plan, quick = (STAGE_PLANNERS[name].plan(layers, devices, 4, 3) for name in ("mcap", "whale"))
    assert plan is not None and quick is not None
    assert plan.units == (4, 1, 1) and quick.units != plan.units
