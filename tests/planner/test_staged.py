"""Planners of the literature find what brute force finds in their own model, or what they
published."""

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
from tests.planner.test_partition import forced
from tests.planner.vgg16 import LAYERS

SMALL = st.integers(0, 6).map(float)
LAYER = st.builds(Layer, SMALL, SMALL, SMALL, SMALL, SMALL, st.just(1.0), SMALL, SMALL)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Layer], Devices, int]:
    """Few layers on few devices, in nodes or not, that may be unlike."""
    layers = draw(st.lists(LAYER, min_size=2, max_size=4))
    count = draw(st.sampled_from([2, 3, 4]))
    speeds = draw(st.sampled_from([(), (1.0, 2.0, 1.0, 4.0)[:count]]))
    memory = draw(st.sampled_from([math.inf, 12.0, 24.0]))
    devices = Devices(count, memory, draw(st.sampled_from([1, 2, 4])), 2.0, 1.0, 1.0, 3.0, speeds)
    if speeds and memory < math.inf:
        devices = replace(devices, memories=(memory, memory / 2, memory / 4, memory)[:count])
    return layers, devices, draw(st.integers(1, 4))


def all_ways(
    planner: StagePlanner, layers: list[Layer], devices: Devices, micro: int, some: range
) -> Iterator[StageOption]:
    """All ways of a stage, each added up from scratch."""
    speed = min((devices.speeds or (1.0,) * devices.count)[some.start : some.stop])
    fills = (
        devices.memory / min(devices.memories[some.start : some.stop]) if devices.memories else 1.0
    )
    link = devices.bandwidth(some)
    for degree in planner.degrees(len(some)):
        if len(some) % degree:
            continue
        copies = len(some) // degree
        groups = [range(at, at + degree) for at in range(some.start, some.stop, degree)]
        ring = 2 * (degree - 1) / degree / min(devices.bandwidth(group) for group in groups)
        for chosen in product(planner.choices, repeat=len(layers)):
            ways = [choice(layer, devices) for choice, layer in zip(chosen, layers, strict=True)]
            extra = [
                (
                    ring * layer.exchanged,
                    ring * layer.exchanged * (2 if way.name == ("again",) else 1),
                )
                for way, layer in zip(ways, layers, strict=True)
            ]
            whole = StageOption(
                sum(w.forward / degree + e[0] for w, e in zip(ways, extra)) / speed / copies,
                sum(w.backward / degree + e[1] for w, e in zip(ways, extra)) / speed / copies,
                0.0,
                sum(w.held for w in ways) / degree * fills,
                sum(w.kept for w in ways) / degree / copies * fills,
            )
            weights = sum(layer.weights for layer in layers) / degree
            yield planner.replicas(whole, weights, copies, link, micro)


def least(planner: StagePlanner, layers: list[Layer], devices: Devices, micro: int) -> float:
    """The least value of all stages, devices, degrees and choices."""
    best = math.inf
    for order in planner._orders(devices):
        for fixed, count in planner._grids(layers, order, None):

            def menu(
                first: int,
                last: int,
                some: range,
                after: int,
                fixed: StagePlanner = fixed,
                order: Devices = order,
            ) -> list[StageOption]:
                return list(all_ways(fixed, layers[first:last], order, micro, some))

            plain: PartitionProblem = replace(fixed.problem(layers, order, micro, count), menu=menu)
            try:
                best = min(best, forced(plain, planner.objective))
            except ValueError:
                continue  # the devices cannot be dealt so
    return best


@pytest.mark.parametrize("name", STAGE_PLANNERS)
@given(case=cases())
@settings(max_examples=40)
def test_a_planner_finds_the_least_of_its_own_model(
    name: str, case: tuple[list[Layer], Devices, int]
) -> None:
    """Each planner equals the enumeration of stages, devices, degrees and choices."""
    planner = STAGE_PLANNERS[name]
    best = least(planner, *case)
    found = planner.plan(*case)
    if not math.isfinite(best):
        assert found is None
        return
    assert found is not None and found.value == pytest.approx(best)
    assert sum(found.units) == len(case[0]) and sum(found.devices) == case[1].count


@pytest.mark.parametrize("link", [1.25e9, 3.125e9])
def test_pipedream_puts_vgg16_on_16_devices_as_published(link: float) -> None:
    """The authors' profile gives the 15-1 of their Table 1 at 10 and 25 Gbit/s."""
    devices = Devices(16, node=16, link=link, network=link)
    found = STAGE_PLANNERS["pipedream"].plan(LAYERS, devices, 16)
    assert found is not None and found.devices == (15, 1)
    # the convolutions are copied, and the three products with nearly all weights are not
    assert found.units[0] <= 31


def test_messages_and_sums_of_gradients_by_hand() -> None:
    """A message is what the layer before it hands on; PipeDream sums weights twice, in turns."""
    layers = [Layer(1.0, 2.0, output=8.0), Layer(1.0, 2.0, output=100.0)]
    found = STAGE_PLANNERS["pipedream"].plan(layers, Devices(2, node=2, link=1.0), 4, 2)
    assert found is not None and found.value == 16.0  # eight bytes, each way
    alone = STAGE_PLANNERS["pipedream"].plan(
        [Layer(3.0, 6.0, weights=10.0)], Devices(3, node=3, link=5.0), 4
    )
    # a third of 9 s, and 4 (m - 1) / m of 10 bytes over 5 bytes a second, of which each has a third
    assert alone is not None and alone.value == pytest.approx(3.0 + 4 * 2 / 3 * 10 / 5 / 3)


def test_what_runs_again_meets_again() -> None:
    """A layer split over two ranks that is computed again sends three times, not twice."""
    layers = [Layer(2.0, 4.0, kept=10.0, input=1.0, exchanged=3.0)]
    piper = replace(STAGE_PLANNERS["piper"], degrees=lambda count: (2,))
    kept = piper.plan(layers, Devices(2, 100.0, 2, 1.0), 1, 1)
    again = piper.plan(layers, Devices(2, 4.0, 2, 1.0), 1, 1)
    assert kept is not None and kept.value == 3.0 + 2 * 3.0
    assert again is not None and again.value == 4.0 + 3 * 3.0


def test_adapipe_recomputes_more_in_early_stages_and_beats_all_and_none() -> None:
    """Recomputation falls from stage to stage, and mixed beats uniform under the same cap."""
    layers = [Layer(1.0, 2.0, state=1.0, kept=3.0, input=1.0)] * 12
    devices = Devices(4, memory=36.0)
    planner = STAGE_PLANNERS["adapipe"]
    found = planner.plan(layers, devices, 8, 4)
    assert found is not None
    often = [way.name.count("again") for way in found.options]
    assert often == sorted(often, reverse=True) and often[0] > 0 == often[-1]
    each = [
        replace(planner, choices=(choice,)).plan(layers, devices, 8, 4)
        for choice in planner.choices
    ]
    for other in each:
        assert other is None or found.value < other.value
    assert any(other is not None for other in each)


def test_piper_is_no_slower_than_the_best_uniform_grid() -> None:
    """Stages that are unlike beat the best grid of stages that are alike."""
    layers = [Layer(1.0, 2.0, 80.0, 4.0, 2.0, 0.5, 1.0, 0.5)] * 4 + [Layer(4.0, 8.0, 20.0, 4.0)]
    devices = Devices(6, 24.0, 6, 10.0, 10.0)
    piper = STAGE_PLANNERS["piper"]
    uniform = replace(piper, equal_stages=True).plan(layers, devices, 8)
    found = piper.plan(layers, devices, 8)
    assert found is not None and uniform is not None
    assert found.value < uniform.value


def test_unlike_devices_get_layers_by_their_speed() -> None:
    """Unlike devices finish within 5 percent of each other; any order is tried for a worker."""
    layers = [Layer(1.0, 2.0)] * 12
    devices = Devices(3, speeds=(1.0, 3.0, 2.0))
    whale, blind = STAGE_PLANNERS["whale"].plan(layers, devices, 8), STAGE_PLANNERS["whale"]
    assert whale is not None and whale.units == (2, 6, 4)
    took = {way.seconds for way in whale.options}
    assert max(took) / min(took) < 1.05
    alike = blind.plan(layers, replace(devices, speeds=()), 8)
    assert alike is not None and alike.units == (4, 4, 4)
    worker = STAGE_PLANNERS["hetpipe"].plan(layers, devices, 8)
    assert worker is not None and worker.value == whale.value


def test_amp_beats_a_search_that_takes_devices_to_be_alike() -> None:
    """Cuts for unlike devices are quicker on them than cuts for alike ones."""
    layers = [Layer(1.0, 2.0, 1.0)] * 5 + [Layer(5.0, 10.0, 1.0)]
    devices = Devices(4, node=2, link=50.0, network=10.0, speeds=(1.0, 1.0, 3.0, 3.0))
    amp = STAGE_PLANNERS["amp"]
    found = amp.plan(layers, devices, 8, 2)
    blind = amp.plan(layers, replace(devices, speeds=()), 8, 2)
    assert found is not None and blind is not None
    ends = [0, blind.units[0], len(layers)]
    took = [
        sum(layer.forward + layer.backward for layer in layers[a:b]) / speed
        for (a, b), speed in zip(pairwise(ends), (2.0, 6.0), strict=True)
    ]
    there = sum(took) + 7 * max(took)  # the blind cut on the devices as they are, links left out
    assert found.units != blind.units and found.value < there


def test_mpress_prefers_the_quicker_link_and_fits_where_keeping_all_does_not() -> None:
    """Peers are chosen before the host, and recomputation where both links are slow."""
    layers = [Layer(1.0, 2.0, state=1.0, kept=2.0, input=0.5)] * 8
    devices = Devices(4, memory=10.0, host=1.0, peer=4.0)
    mpress = STAGE_PLANNERS["mpress"]
    assert replace(mpress, choices=mpress.choices[:1]).plan(layers, devices, 8, 4) is None
    found = mpress.plan(layers, devices, 8, 4)
    assert found is not None
    names = [name for way in found.options for name in way.name]
    assert "peer" in names and "swap" not in names
    slow = mpress.plan(layers, replace(devices, peer=0.2, host=0.1), 8, 4)
    assert slow is not None and "again" in [name for way in slow.options for name in way.name]


def test_mcap_balances_bytes_and_not_time() -> None:
    """The fullest device decides, whatever the time."""
    layers = [Layer(5.0, 9.0, state=1.0, kept=0.5)] * 4 + [Layer(0.1, 0.1, state=8.0, kept=1.0)] * 2
    devices = Devices(3)
    found, quick = (STAGE_PLANNERS[name].plan(layers, devices, 4, 3) for name in ("mcap", "whale"))
    assert found is not None and quick is not None
    assert found.units == (4, 1, 1) and quick.units != found.units
