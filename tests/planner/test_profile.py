"""Chains by playing: what a price says of them is what the exact simulation of the text says."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from schedlang.diagnostics.source import Source
from schedlang.ir.plan import Plan
from schedlang.language.syntax import parse
from schedlang.passes.analyze.prepare import prepare
from schedlang.passes.elaborate.expand import expand
from schedlang.passes.planner.price import price
from schedlang.passes.planner.profile import Profiles
from schedlang.passes.planner.values import Chain, Placement, Recipe, Setting
from schedlang.passes.planner.write import cuts_of, written
from schedlang.passes.simulate.machine import CLUSTERS, Cluster
from schedlang.passes.simulate.memory import rank_classes
from schedlang.passes.simulate.played_step import repeated
from schedlang.passes.simulate.rehearse import held, rehearse
from schedlang.passes.simulate.step_time import SHARES, step_time
from schedlang.runtime.batch import sample_of
from tests.planner import models

# -- the exact simulation --------------------------------------------------------------------------


class Bound(Cluster):
    """A cluster of which every operator takes its roofline, as the exact simulation has it."""

    def operator(self, kind: str, flops: float, moved: float) -> float:
        """Seconds of an operator."""
        return max(flops / self.speed, moved / self.stream)

    def collective(self, op: str, size: float, ranks: int, stride: int) -> float:
        """Seconds of a collective, or of a message."""
        if ranks < 2:
            return 0.0
        if op == "send":
            return size / (self.link if stride < self.node else self.network)
        return SHARES[op](ranks) * size / self.bandwidth([k * stride for k in range(ranks)])


A100 = Bound(*(getattr(CLUSTERS["a100"], one.name) for one in fields(Cluster)))
FULL, MIXED = Recipe(4, 4, 8, 0), Recipe(2, 4, 8, 4)  # float32; `cast(bf16, params=true)`


def chain_of(profiles: Profiles, placement: Placement) -> Chain:
    """The chain, of which there must be one."""
    found = profiles(placement)
    assert isinstance(found, Chain), found.render()
    return found


def plan_of(profiles: Profiles, setting: Setting) -> Plan:
    """The plan of the text of a setting."""
    text = written(profiles, setting)
    plan = expand(parse(Source("written", text)), profiles.facts).plan
    assert plan is not None and plan.mesh.world == setting.ranks
    return plan


def exact(profiles: Profiles, setting: Setting) -> tuple[float, float, float]:
    """Seconds but for the update, bytes of the fullest rank, and of its state, as simulated."""
    plan = plan_of(profiles, setting)
    one = profiles.some_rows(setting.placement.rows)
    batch = repeated(one, plan.shares * plan.micro)
    prepared = prepare(plan, sample_of(batch, plan.shares, plan.micro))
    played = rehearse(plan, batch, None, prepared, works=True)
    took = step_time(plan, prepared, played, A100).seconds
    update = max(sum(A100.computing(run.work) for run in p.rest) for p in played.of.values())
    classes = rank_classes(plan, prepared.staged, prepared.holdings)
    peak = max(one.peak for one in held(plan, prepared, played))
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
    Setting(P(8), pp=2, micro=4, cuts=(4, 6)),
    Setting(P(8), pp=2, micro=4, again=(9, 9)),
    Setting(P(8, tp=2), dp=2, pp=2, micro=4, again=(2, 1)),
]
NEAR = [SETTINGS[2], SETTINGS[12]]  # what an ordinary run looks at


def near(profiles: Profiles, setting: Setting, recipe: Recipe, seconds: float, peak: float) -> None:
    """A price is that of the exact simulation, within so large a part."""
    chain = chain_of(profiles, setting.placement)
    setting = replace(setting, cuts=cuts_of(chain, setting))
    priced = price(chain, setting, A100, recipe)
    took, most, _ = exact(profiles, setting)
    assert priced.seconds - priced.parts["optimizer"] == pytest.approx(took, rel=seconds)
    assert priced.peak == pytest.approx(most, rel=peak)


@pytest.mark.parametrize("setting", NEAR, ids=str)
def test_a_price_is_that_of_the_schedule(setting: Setting) -> None:
    """Playing units once and adding them up is playing the schedule as it is written."""
    near(models.profiles(models.llama, "bf16"), setting, MIXED, 0.03, 0.03)


@pytest.mark.deep
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("make", [models.llama, models.gpt2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("dtype", ["", "bf16"])
def test_every_price_is_that_of_the_schedule(make: object, dtype: str, setting: Setting) -> None:
    """Both dtypes, a tied head; copies of ZeRO are left out of prices, which are 8 % lower then."""
    recipe = MIXED if dtype else replace(FULL, master=4 * (setting.dp > 1 and setting.zero > 0))
    near(models.profiles(make, dtype), setting, recipe, 0.08, 0.05)  # type: ignore[arg-type]
