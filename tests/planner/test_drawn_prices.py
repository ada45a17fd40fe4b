"""Prices of drawn settings: each is that of the played step of the schedule that is written."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from torch import nn

from schedlang.passes.planner.price import price
from schedlang.passes.planner.schedule_writer import stage_units
from schedlang.passes.planner.search_space import ORDERS, SPLIT_BACKWARD_ORDERS, has_order
from schedlang.passes.planner.values import Placement, Setting
from tests.planner import models
from tests.planner.test_profile import A100, FULL, MIXED, chain_of, exact

Make = Callable[[], nn.Module]
MODELS: dict[Make, int] = {models.llama: 10, models.gpt2: 10, models.mixtral: 6}  # and their units


def drawn(draw: random.Random) -> tuple[Make, str, Setting]:
    """A model, its dtype, and a setting that a search may choose for it.

    Left out: few rows, whose kernels only start (masks and positions that each stage makes have no
    price), and halves beside slices.
    """
    while True:
        make = draw.choice(list(MODELS))
        tp, cp, pp = draw.choice([1, 1, 2]), draw.choice([1, 1, 1, 2]), draw.choice([1, 2, 2, 4])
        ep = draw.choice([1, 2]) if make is models.mixtral else 1
        dp, micro = ep * draw.choice([1, 2]), draw.choice([2, 4, 8])
        order = draw.choice(list(ORDERS)) if pp > 1 else "1F1B"
        chunks, zero = draw.choice(ORDERS[order]), draw.choice([0, 1, 2, 3]) if dp > 1 else 0
        offload = draw.choice(["none", "none", "activations", "optimizer", "both"])
        sequence = tp > 1 and make is not models.mixtral and draw.random() < 0.5
        cuts = [0] * pp * chunks
        again = draw.choice(["none", "some", "all"])
        if (
            len(cuts) > MODELS[make]
            or tp * cp * dp * pp > 16
            or (order in SPLIT_BACKWARD_ORDERS and zero)
        ):
            continue
        if pp == 1 or has_order(order, pp, micro, chunks):
            break
    at = Placement(8, tp, sequence, cp, ep, offload)
    way, dtype = Setting(at, dp, pp, micro, order, chunks, zero), draw.choice(["", "bf16"])
    cuts = stage_units(chain_of(models.profiles(make, dtype), at), way)
    some = {"none": 0, "some": 1, "all": max(cuts)}[again]
    more = tuple(min(some, cut) for cut in cuts) if some else ()
    return make, dtype, replace(way, cuts=cuts, again=more)


def off(make: Make, dtype: str, way: Setting) -> tuple[float, float]:
    """How much larger the price is than what is played, of its time and of its fullest rank."""
    source = models.profiles(make, dtype)
    recipe = MIXED if dtype else replace(FULL, master=4 * (way.dp > 1 and way.zero > 0))
    priced = price(chain_of(source, way.placement), way, A100, recipe)
    took, most, _ = exact(source, way)
    update = 0.0 if way.placement.offloads_optimizer else priced.parts["optimizer"]
    return (priced.seconds - update) / took - 1, priced.peak / most - 1


def allowed(way: Setting) -> tuple[float, float]:
    """How far off a price may be, of its time and of its fullest rank."""
    if (
        way.placement.offloads_activations
    ):  # small storages stay, and copies are laid beside units, one by one
        return 0.2, 0.3
    return 0.1, 0.15 if way.zero > 2 and way.chunks > 1 else 0.1  # two units are counted whole


def near(make: Make, dtype: str, way: Setting) -> None:
    """A price is that of what is written, as far as it may be off."""
    seconds, peak = off(make, dtype, way)
    assert abs(seconds) < allowed(way)[0], (seconds, way)
    assert abs(peak) < allowed(way)[1], (peak, way)


@pytest.mark.parametrize("seed", [5, 34])
def test_a_drawn_price_is_that_of_the_schedule(seed: int) -> None:
    """Experts on two ranks, some computed again; activations that leave, under ZeRO."""
    near(*drawn(random.Random(seed)))


def test_one_stage_holds_one_microbatch_where_the_optimizer_has_left() -> None:
    """Its moments are the host's, and each backward follows its forward."""
    way = Setting(Placement(8, offload="optimizer"), micro=4, zero=0, cuts=(10,))
    seconds, peak = off(models.llama, "bf16", way)
    assert abs(seconds) < 0.1 and abs(peak) < 0.05


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(52))
def test_every_drawn_price_is_that_of_the_schedule(seed: int) -> None:
    """Models, sizes of axes, orders, stages of ZeRO, what leaves and what is computed again."""
    near(*drawn(random.Random(seed)))
