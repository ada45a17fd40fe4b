"""Prices of random settings: each is near the simulated step of the schedule that is written."""

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
from tests.planner.test_profile import A100, FULL, MIXED, chain_of, simulate_exact

Make = Callable[[], nn.Module]
MODELS: dict[Make, int] = {models.llama: 10, models.gpt2: 10, models.mixtral: 6}  # and their units


def random_setting(draw: random.Random) -> tuple[Make, str, Setting]:
    """Return a random model, its dtype, and a setting that a search may choose for it.

    Left out: few rows, where only kernel starts matter (masks and positions of each stage have no
    price), and split backwards together with slices.
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
        recompute = draw.choice(["none", "some", "all"])
        if (
            len(cuts) > MODELS[make]
            or tp * cp * dp * pp > 16
            or (order in SPLIT_BACKWARD_ORDERS and zero)
        ):
            continue
        if pp == 1 or has_order(order, pp, micro, chunks):
            break
    placement = Placement(8, tp, sequence, cp, ep, offload)
    setting, dtype = (
        Setting(placement, dp, pp, micro, order, chunks, zero),
        draw.choice(["", "bf16"]),
    )
    cuts = stage_units(chain_of(models.profiles(make, dtype), placement), setting)
    per_stage = {"none": 0, "some": 1, "all": max(cuts)}[recompute]
    recomputed = tuple(min(per_stage, cut) for cut in cuts) if per_stage else ()
    return make, dtype, replace(setting, cuts=cuts, again=recomputed)


def price_errors(make: Make, dtype: str, setting: Setting) -> tuple[float, float]:
    """Return the relative error of the price against simulation: of time and of peak memory."""
    source = models.profiles(make, dtype)
    recipe = MIXED if dtype else replace(FULL, master=4 * (setting.dp > 1 and setting.zero > 0))
    priced = price(chain_of(source, setting.placement), setting, A100, recipe)
    seconds, peak, _ = simulate_exact(source, setting)
    update = 0.0 if setting.placement.offloads_optimizer else priced.parts["optimizer"]
    return (priced.seconds - update) / seconds - 1, priced.peak / peak - 1


def tolerances(setting: Setting) -> tuple[float, float]:
    """Return the allowed relative errors of time and of peak memory."""
    if (
        setting.placement.offloads_activations
    ):  # small storages stay, and copies are laid beside units, one by one
        return 0.2, 0.3
    return (
        0.1,
        0.15 if setting.zero > 2 and setting.chunks > 1 else 0.1,
    )  # two units are counted whole


def assert_close(make: Make, dtype: str, setting: Setting) -> None:
    """Assert that a price is within the allowed errors."""
    seconds, peak = price_errors(make, dtype, setting)
    assert abs(seconds) < tolerances(setting)[0], (seconds, setting)
    assert abs(peak) < tolerances(setting)[1], (peak, setting)


@pytest.mark.parametrize("seed", [5, 34])
def test_a_drawn_price_is_that_of_the_schedule(seed: int) -> None:
    """Experts on two ranks, some recomputed; offloaded activations under ZeRO."""
    assert_close(*random_setting(random.Random(seed)))


def test_one_stage_holds_one_microbatch_where_the_optimizer_has_left() -> None:
    """With the optimizer on the host, each backward follows its forward."""
    setting = Setting(Placement(8, offload="optimizer"), micro=4, zero=0, cuts=(10,))
    seconds, peak = price_errors(models.llama, "bf16", setting)
    assert abs(seconds) < 0.1 and abs(peak) < 0.05


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(52))
def test_every_drawn_price_is_that_of_the_schedule(seed: int) -> None:
    """Random models, axis sizes, orders, ZeRO stages, offloading and recomputation."""
    assert_close(*random_setting(random.Random(seed)))
