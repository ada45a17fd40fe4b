"""The search of a planner against every way priced, and what must hold whatever a machine has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import combinations, permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedlang.ir.limits import AXES, Limits
from schedlang.passes.planner.bounds import (
    ChainTimes,
    bytes_floor,
    pipeline_floor,
    replica_floor,
    step_bounds,
)
from schedlang.passes.planner.evaluation import EvaluatedSetting, Evaluator
from schedlang.passes.planner.limits import satisfies_limits
from schedlang.passes.planner.price import collective_seconds, price
from schedlang.passes.planner.search import NO_LIMITS, SearchResult, explain_rejection, search
from schedlang.passes.planner.search_space import (
    ORDERS,
    Job,
    concatenate_candidates,
    iter_placements,
    list_candidates,
    microbatch_rows,
)
from schedlang.passes.planner.values import Chain, Kind, Placement, Recipe, Setting
from schedlang.passes.simulate.machine import CLUSTERS, Cluster
from tests.planner.decoders import decoder

A100 = CLUSTERS["a100"]
Profiles = Callable[[Placement], Chain]
FEW = settings(max_examples=8, deadline=None)
OTHERS = tuple(one for one in ORDERS if one not in ("1F1B", "GPipe"))


@st.composite
def jobs(draw: st.DrawFn, some: bool = False) -> tuple[Profiles, Job]:
    """Small decoders on small clusters whose memory may be short, and links slow; `some` orders of
    pipelines, where all of them would take a test long."""
    experts = draw(st.sampled_from([0, 0, 4]))
    profiles = decoder(
        draw(st.integers(2, 6)),
        draw(st.sampled_from([256, 1024])),
        8,
        draw(st.sampled_from([512, 4096])),
        draw(st.sampled_from([512, 32000])),
        2048,
        flash=draw(st.booleans()),
        experts=experts,
    )
    cluster = replace(
        A100,
        node=draw(st.sampled_from([2, 8])),
        network=draw(st.sampled_from([1e9, 25e9])),
        memory=int(draw(st.floats(0.05, 8.0)) * 2**30),
    )
    ranks = draw(st.sampled_from([2, 4, 6, 8]))
    rows = ranks * draw(st.sampled_from([1, 2, 3]))
    job = Job(ranks, rows, cluster, Recipe(), 2048, experts, draw(st.booleans()))
    if some:
        orders = ("1F1B", "GPipe", *draw(st.sampled_from(list(combinations(OTHERS, 2)))))
        job = replace(job, orders=orders, can_offload=draw(st.booleans()))
    return profiles, job


def every(
    profiles: Profiles, job: Job, limits: Limits = NO_LIMITS
) -> list[tuple[ChainTimes, Setting]]:
    """All ways, with the times of their chains."""
    found = []
    for group in iter_placements(job, limits):
        for rows in microbatch_rows(job, group, limits):
            chain = profiles(replace(group, rows=rows))
            some = list_candidates(job, chain, limits)
            if some is not None:
                clock, (_, laid) = (
                    ChainTimes(chain, job),
                    some.in_all_axis_orders(np.arange(len(some))),
                )
                found += [(clock, laid.setting(at)) for at in range(len(laid))]
    return found


def test_chains_of_other_runs_are_bounded_each_by_itself() -> None:
    """Units that are alike in many rows may differ in few: then a chain has more runs."""
    job = Job(4, 8, A100, Recipe(), 2048)
    one = decoder(4, 256, 8, 512, 512, 2048)(Placement(1))
    runs = (part for run in one.runs for part in [replace(run, count=1)] * run.count)
    chains = one, replace(one, runs=tuple(runs))
    apart = [(list_candidates(job, chain, NO_LIMITS), ChainTimes(chain, job)) for chain in chains]
    some, clocks = zip(*apart)
    for laid in (True, False):
        each = [step_bounds(some, [clock], laid)[0] for some, clock in apart]
        whole = step_bounds(concatenate_candidates(some), clocks, laid)[0]
        assert np.allclose(whole, np.concatenate(each))


def in_all_orders(ways: list[tuple[ChainTimes, Setting]]) -> list[tuple[ChainTimes, Setting]]:
    """Ways with their axes in every order, whatever shares a node."""
    once = {replace(way, axes=AXES): clock for clock, way in ways}
    return [(c, replace(way, axes=one)) for way, c in once.items() for one in permutations(AXES)]


def last(profiles: Profiles, job: Job, limits: Limits = NO_LIMITS) -> SearchResult:
    *_, found = search(profiles, job, limits, moves=0)
    assert found.done
    return found


def seconds(found: SearchResult) -> float:
    return found.best.least if found.best else np.inf


@FEW
@given(jobs(some=True))
def test_what_is_found_is_the_best_of_all_ways(case):
    """What best-first search finds is the least of all ways filled in and priced, each better."""
    profiles, job = case
    filler = Evaluator(job)
    all_ = [filler.evaluate(clock, way) for clock, way in every(profiles, job)]
    fit = [one.least for one in all_ if one.priced is not None]
    for one in all_:
        assert one.priced is None or one.needs == one.priced.peak
    found = list(search(profiles, job, moves=0))
    assert seconds(found[-1]) == pytest.approx(min(fit, default=np.inf))
    assert found[-1].counts.all <= len(all_) and found[-1].counts.pruned >= 0
    assert found[-1].best is not None or found[-1].rejected[0].reason.startswith("needs")
    assert [seconds(one) for one in found[:-1]] == sorted({seconds(one) for one in found[:-1]})[
        ::-1
    ]
    assert all(one.floor <= seconds(found[-1]) for one in found)
    *_, moved = search(profiles, job, moves=20)
    assert seconds(moved) <= seconds(found[-1])
    if moved.best is not None:
        best = moved.best
        again = price(_chain(profiles, best), best.setting, job.cluster, job.recipe)
        assert again.seconds == best.least and again.peak <= job.cluster.memory


@settings(max_examples=3, deadline=None)
@given(jobs(some=True), st.sampled_from([("pp-dp",), ("tp-dp", "dp-tp-pp"), ("cp-pp-dp-tp",), ()]))
def test_axes_are_found_in_the_best_of_all_orders(case, pinned):
    """Orders that are left out cost the same as one that is not; what is pinned is kept."""
    profiles, job = case
    limits = Limits({"pp": tuple(range(2, 9)), "offload": ("none",), "zero": (0, 1)})
    limits = limits.with_limit("pin", "axes", pinned) if pinned else limits
    filler, some = Evaluator(job, limits), every(profiles, job, limits)
    tried = (
        filler.evaluate(clock, way) for clock, way in in_all_orders(some) if admitted(limits, way)
    )
    found = last(profiles, job, limits)
    fit = [one.least for one in tried if one.priced is not None]
    assert seconds(found) == pytest.approx(min(fit, default=np.inf), rel=1e-12)
    assert found.best is None or satisfies_limits(limits, found.best.setting)


def admitted(limits: Limits, way: Setting) -> bool:
    return limits.admits("axes", "-".join(way.axes))


def test_other_axes_are_worth_their_place():
    """Replicas that send much are laid side by side where a pipeline sends little."""
    profiles = decoder(8, 4096, 32, 16384, 512, 512)
    job = Job(16, 16, replace(A100, library=""), length=512, orders=("1F1B",), can_offload=False)
    limits = Limits({"pp": (2,), "tp": (1,), "cp": (1,)})
    found = last(profiles, job, limits)
    usual = last(profiles, job, limits.with_limit("pin", "axes", ("dp-pp",)))
    assert found.best is not None and found.best.setting.axes.index("pp") == 0
    assert seconds(usual) / seconds(found) > 1.02
    assert "axes" in {one.kind.split(" ")[0] for one in found.rejected}


def _chain(profiles: Profiles, filled: EvaluatedSetting) -> Chain:
    return profiles(filled.setting.placement)


@pytest.mark.parametrize(
    ("host", "memory", "best"),
    [(1e9, 0.75, "none"), (1e12, 1.2, "activations"), (1e12, 0.75, "both")],
)
def test_what_leaves_for_the_host_is_found(host, memory, best):
    """Where copies are quick and memory is short, that is the best of all ways; else it is not."""
    profiles = decoder(4, 1024, 8, 4096, 512, 2048)
    cluster = replace(A100, host=host, memory=int(memory * 2**30), library="")
    job = Job(2, 16, cluster, length=2048, orders=("1F1B", "GPipe"))
    limits = Limits(pinned={"tp": (1,), "zero": (0, 1)})
    filler = Evaluator(job, limits)
    all_ = [filler.evaluate(clock, way) for clock, way in every(profiles, job, limits)]
    found = last(profiles, job, limits)
    assert found.best is not None
    assert found.best.least == min(one.least for one in all_ if one.priced is not None)
    assert found.best.setting.placement.offload == best
    stays = last(profiles, job, Limits(pinned={"offload": ("none",)}).combined_with(limits))
    assert (seconds(stays) > seconds(found)) == (best != "none")


@pytest.mark.parametrize("layers", [6, 14])
def test_slices_are_found_where_a_pipeline_has_few_rows(layers):
    """They fill it, and are the best of all ways; none of a model that is not cut."""
    profiles = decoder(layers, 4096, 32, 16384, 512, 8192)
    job = Job(4, 2, replace(A100, library=""), length=8192, can_slice=True, can_offload=False)
    limits = Limits(pinned={"pp": (4,)})
    filler = Evaluator(job, limits)
    all_ = [filler.evaluate(clock, way) for clock, way in every(profiles, job, limits)]
    found = last(profiles, job, limits)
    assert found.best is not None and found.best.setting.placement.slices > 1
    assert found.best.least == min(one.least for one in all_ if one.priced is not None)
    assert seconds(last(profiles, replace(job, can_slice=False), limits)) > seconds(found)
    slow = Limits(pinned={"slices": (16,)}).combined_with(limits)
    assert {way.placement.slices for _, way in every(profiles, job, slow)} == {16}
    assert not every(profiles, replace(job, can_slice=False), slow)


@FEW
@given(jobs(), st.randoms(use_true_random=False))
def test_no_bound_is_above_a_price(case, random):
    """Bounds of seconds and bytes hold for any cuts and any units computed again."""
    profiles, job = case
    for group in iter_placements(job, Limits()):
        chain = profiles(replace(group, rows=random.choice(microbatch_rows(job, group, Limits()))))
        some = list_candidates(job, chain, Limits())
        if some is None:
            continue
        clock, at = ChainTimes(chain, job), random.randrange(len(some))
        low, least = step_bounds(some, [clock])[0][at], bytes_floor(some, job)[at]
        way = some.setting(at)
        stages = way.pp * way.chunks
        ends = sorted(random.sample(range(1, chain.length), stages - 1))
        cuts = tuple(b - a for a, b in zip([0, *ends], [*ends, chain.length]))
        again = tuple(random.randint(0, cut) for cut in cuts)
        one = replace(way, cuts=cuts, again=again)
        priced = price(chain, one, job.cluster, job.recipe)
        span = priced.seconds - priced.parts["gradients"] - priced.parts["optimizer"]
        assert max(low, pipeline_floor(clock, one)) <= span * (1 + 1e-9), one
        beside, after = (sums[at] for sums in replica_floor(some, job))
        assert max(low, beside) + after <= priced.seconds * (1 + 1e-9), one
        low = step_bounds(some, [clock], laid=False)[0][at]
        beside, after = (sums[at] for sums in replica_floor(some, job, laid=False))
        one = replace(one, axes=random.choice(list(permutations(AXES))))
        priced = price(chain, one, job.cluster, job.recipe)
        assert max(low, beside) + after <= priced.seconds * (1 + 1e-9), one
        assert least <= priced.peak * (1 + 1e-9), one


@settings(max_examples=12, deadline=None)
@given(jobs(), st.randoms(use_true_random=False), st.floats(-0.1, 1.1))
def test_the_fewest_units_are_computed_again(case, random, share):
    """Of all numbers of units computed again on each stage, those of the quickest that fits; of
    what leaves for the host the fewest or all, and then moved, are a tenth above it at most."""
    profiles, job = case
    some = [(c, w) for c, w in every(profiles, job) if w.chunks == 1 and w.pp < 4]
    clock, way = random.choice(some)
    roomy = Evaluator(replace(job, cluster=replace(job.cluster, memory=2**60)))
    cut = replace(roomy.evaluate(clock, way).setting, again=())
    prices = [
        price(clock.chain, replace(cut, again=again), job.cluster, job.recipe)
        for again in product(*(range(units + 1) for units in cut.cuts))
    ]
    peaks = sorted(one.peak for one in prices)
    memory = int(peaks[0] + share * (prices[0].peak - peaks[0]))
    filler = Evaluator(replace(job, cluster=replace(job.cluster, memory=memory)))
    filled = filler.evaluate(clock, way)
    fits = [one.seconds for one in prices if one.peak <= memory]
    assert (filled.priced is None) == (not fits)
    if fits and way.placement.offloads_activations:
        assert filler.move_units(clock, filled, 30).least <= 1.1 * min(fits)
    elif fits:
        assert filled.least == pytest.approx(min(fits))


@FEW
@given(jobs(), st.sampled_from(["Interleaved1F1B", "ZB-V", "V-Half"]), st.floats(0.0, 1.0))
def test_of_several_stages_on_a_rank_no_choice_is_better(case, order, share):
    """With units moved, no numbers computed again on two stages of each rank make it quicker."""
    profiles, job = case
    chain, job = profiles(Placement()), replace(job, ranks=2)
    if chain.length < 4:
        return
    clock = ChainTimes(chain, job)
    way = Setting(chain.placement, 1, 2, job.rows, order, 2, 0)
    roomy = replace(job, cluster=replace(job.cluster, memory=2**60))
    cut = Evaluator(roomy).evaluate(clock, way).setting
    prices = [
        price(chain, replace(cut, again=again), job.cluster, job.recipe)
        for again in product(*(range(units + 1) for units in cut.cuts))
    ]
    peaks = sorted(one.peak for one in prices)
    memory = int(peaks[0] + share * (prices[0].peak - peaks[0])) + 1
    filler = Evaluator(replace(job, cluster=replace(job.cluster, memory=memory)))
    filled = filler.evaluate(clock, way)
    if filled.priced is not None:
        fits = min(one.seconds for one in prices if one.peak <= memory)
        assert filler.move_units(clock, filled, 60).least <= fits * (1 + 1e-6)


@FEW
@given(jobs(), st.randoms(use_true_random=False))
def test_stages_of_the_programme_are_never_slower(case, random):
    """Where they are taken they fit, and are the price's own."""
    profiles, job = case
    filler = Evaluator(job)
    clock, way = random.choice([(c, w) for c, w in every(profiles, job) if w.chunks == 1])
    before = filler.evaluate(clock, way)
    if before.priced is not None:
        after = filler.split_by_programme(clock, before)
        assert after.least <= before.least and after.needs <= job.cluster.memory
        again = price(clock.chain, after.setting, job.cluster, job.recipe)
        assert again.seconds == after.least


def test_stages_of_the_programme_give_a_full_rank_fewer_units():
    """A first stage that computes much again makes way, further than moves alone come."""
    profiles = decoder(40, 5120, 40, 13824, 128000, 2048, gated=True)
    way = Setting(Placement(1, 2), dp=4, pp=8, micro=32)
    job = Job(64, 128, replace(A100, memory=int(9.5 * 2**30)), length=2048)
    clock, filler = ChainTimes(profiles(way.placement), job), Evaluator(job)
    even = filler.evaluate(clock, way)
    cut = filler.split_by_programme(clock, even)
    assert cut.least < 0.95 * even.least
    both = (filler.move_units(clock, one, 60).least for one in (cut, even))
    assert next(both) < 0.98 * next(both)


@FEW
@given(jobs(some=True), st.sampled_from(["memory", "network", "link", "host"]), st.floats(1.0, 4.0))
def test_more_memory_or_bandwidth_is_never_slower(case, what, times):
    """A cluster that has more of one thing never makes the plan slower."""
    profiles, job = case
    more = replace(
        job.cluster, **{what: type(job.cluster.memory)(getattr(job.cluster, what) * times)}
    )
    before, after = last(profiles, job), last(profiles, replace(job, cluster=more))
    assert seconds(after) <= seconds(before) * (1 + 1e-9)


@dataclass(frozen=True)
class Slowed(Cluster):
    """A cluster on which everything takes so many times as long as on another one."""

    base: Cluster = A100
    times: float = 1.0

    def operator_seconds(self, kind: Kind, flops: float, moved: float) -> float:
        """Seconds of one operator."""
        return self.times * self.base.operator_seconds(kind, flops, moved)

    def collective_seconds(self, op: str, size: float, ranks: int, apart: int) -> float:
        """Seconds of one collective."""
        return self.times * collective_seconds(self.base, op, size, ranks, apart)

    def copy_seconds(self, size: float) -> float:
        """Seconds of a copy to the host, or back."""
        return self.times * self.base.copy_seconds(size)


@FEW
@given(jobs(some=True), st.floats(0.1, 10.0))
def test_scaled_times_leave_the_choice(case, times):
    """Where everything takes c times as long, so does the best."""
    profiles, job = case
    own = {one.name: getattr(job.cluster, one.name) for one in fields(Cluster)}
    before = last(profiles, job)
    after = last(profiles, replace(job, cluster=Slowed(**own, base=job.cluster, times=times)))
    assert seconds(after) == pytest.approx(seconds(before) * times)


@FEW
@given(
    jobs(some=True),
    st.sampled_from([("tp", 2), ("pp", 2), ("zero", 0), ("rows", 1), ("order", "GPipe")]),
)
def test_what_is_pinned_is_kept_and_never_better(case, pin):
    """A pinned search keeps its pin, and never beats the free one."""
    profiles, job = case
    free, name = last(profiles, job), pin[0]
    limits = Limits(pinned={name: (pin[1],)})
    pinned = last(profiles, job, limits)
    assert seconds(pinned) >= seconds(free) * (1 - 1e-12)
    assert pinned.best is None or satisfies_limits(limits, pinned.best.setting)
    if free.best is not None:
        told = explain_rejection(profiles, job, limits, free)
        assert told.reason
