"""The planner's search against pricing all settings, and properties for any machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import combinations, permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedlang.ir.limits import AXES, Limits
from schedlang.passes.planner import search as search_module
from schedlang.passes.planner.bounds import (
    ChainTimes,
    bytes_floor,
    pipeline_floor,
    replica_floor,
    step_bounds,
)
from schedlang.passes.planner.evaluation import EvaluatedSetting, Evaluator, RecomputeBytes
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
OTHER_ORDERS = tuple(one for one in ORDERS if one not in ("1F1B", "GPipe"))


@st.composite
def random_jobs(draw: st.DrawFn, some: bool = False) -> tuple[Profiles, Job]:
    """Random small decoders on small clusters, with little memory or slow links; with `some`, a few
    pipeline orders only, since all would take long."""
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
        orders = ("1F1B", "GPipe", *draw(st.sampled_from(list(combinations(OTHER_ORDERS, 2)))))
        job = replace(job, orders=orders, can_offload=draw(st.booleans()))
    return profiles, job


def all_settings(
    profiles: Profiles, job: Job, limits: Limits = NO_LIMITS
) -> list[tuple[ChainTimes, Setting]]:
    """Return all settings, with the times of their chains."""
    settings_found = []
    for group in iter_placements(job, limits):
        for rows in microbatch_rows(job, group, limits):
            chain = profiles(replace(group, rows=rows))
            candidates = list_candidates(job, chain, limits)
            if candidates is not None:
                clock, (_, laid) = (
                    ChainTimes(chain, job),
                    candidates.in_all_axis_orders(np.arange(len(candidates))),
                )
                settings_found += [(clock, laid.setting(k)) for k in range(len(laid))]
    return settings_found


def test_chains_of_other_runs_are_bounded_each_by_itself() -> None:
    """Bounds of several chains at once equal the bounds of each chain."""
    job = Job(4, 8, A100, Recipe(), 2048)
    base_chain = decoder(4, 256, 8, 512, 512, 2048)(Placement(1))
    runs = (part for run in base_chain.runs for part in [replace(run, count=1)] * run.count)
    chains = base_chain, replace(base_chain, runs=tuple(runs))
    separate = [
        (list_candidates(job, chain, NO_LIMITS), ChainTimes(chain, job)) for chain in chains
    ]
    candidate_sets, clocks = zip(*separate)
    for laid in (True, False):
        separate_bounds = [
            step_bounds(candidate_sets, [clock], laid)[0] for candidate_sets, clock in separate
        ]
        joint_bounds = step_bounds(concatenate_candidates(candidate_sets), clocks, laid)[0]
        assert np.allclose(joint_bounds, np.concatenate(separate_bounds))


def with_all_axes(
    timed_settings: list[tuple[ChainTimes, Setting]],
) -> list[tuple[ChainTimes, Setting]]:
    """Return the settings with their axes in every order."""
    clocks = {replace(setting, axes=AXES): clock for clock, setting in timed_settings}
    return [
        (c, replace(setting, axes=axes))
        for setting, c in clocks.items()
        for axes in permutations(AXES)
    ]


def search_result(profiles: Profiles, job: Job, limits: Limits = NO_LIMITS) -> SearchResult:
    *_, result = search(profiles, job, limits, moves=0)
    assert result.done
    return result


def best_seconds(result: SearchResult) -> float:
    return result.best.least if result.best else np.inf


@FEW
@given(random_jobs(some=True))
def test_what_is_found_is_the_best_of_all_ways(case):
    """Best-first search finds the least of all evaluated settings; each result improves."""
    profiles, job = case
    filler = Evaluator(job)
    evaluated = [filler.evaluate(clock, setting) for clock, setting in all_settings(profiles, job)]
    fit = [item.least for item in evaluated if item.priced is not None]
    for item in evaluated:
        assert item.priced is None or item.needs == item.priced.peak
    results = list(search(profiles, job, moves=0))
    assert best_seconds(results[-1]) == pytest.approx(min(fit, default=np.inf))
    assert results[-1].counts.all <= len(evaluated) and results[-1].counts.pruned >= 0
    assert results[-1].best is not None or results[-1].rejected[0].reason.startswith("needs")
    assert [best_seconds(item) for item in results[:-1]] == sorted(
        {best_seconds(item) for item in results[:-1]}
    )[::-1]
    assert all(item.floor <= best_seconds(results[-1]) for item in results)
    *_, moved = search(profiles, job, moves=20)
    assert best_seconds(moved) <= best_seconds(results[-1])
    if moved.best is not None:
        best = moved.best
        repriced = price(_chain(profiles, best), best.setting, job.cluster, job.recipe)
        assert repriced.seconds == best.least and repriced.peak <= job.cluster.memory


@settings(max_examples=3, deadline=None)
@given(
    random_jobs(some=True),
    st.sampled_from([("pp-dp",), ("tp-dp", "dp-tp-pp"), ("cp-pp-dp-tp",), ()]),
)
def test_axes_are_found_in_the_best_of_all_orders(case, pinned):
    """Skipped axis orders cost the same as a searched one; pins are kept."""
    profiles, job = case
    limits = Limits({"pp": tuple(range(2, 9)), "offload": ("none",), "zero": (0, 1)})
    limits = limits.with_limit("pin", "axes", pinned) if pinned else limits
    filler, candidates = Evaluator(job, limits), all_settings(profiles, job, limits)
    tried = (
        filler.evaluate(clock, setting)
        for clock, setting in with_all_axes(candidates)
        if admits_axes(limits, setting)
    )
    result = search_result(profiles, job, limits)
    fit = [evaluated.least for evaluated in tried if evaluated.priced is not None]
    assert best_seconds(result) == pytest.approx(min(fit, default=np.inf), rel=1e-12)
    assert result.best is None or satisfies_limits(limits, result.best.setting)


def admits_axes(limits: Limits, setting: Setting) -> bool:
    return limits.admits("axes", "-".join(setting.axes))


def test_other_axes_are_worth_their_place():
    """Replicas that send much are placed in a node where a pipeline sends little."""
    profiles = decoder(8, 4096, 32, 16384, 512, 512)
    job = Job(16, 16, replace(A100, library=""), length=512, orders=("1F1B",), can_offload=False)
    limits = Limits({"pp": (2,), "tp": (1,), "cp": (1,)})
    result = search_result(profiles, job, limits)
    fixed_axes = search_result(profiles, job, limits.with_limit("pin", "axes", ("dp-pp",)))
    assert result.best is not None and result.best.setting.axes.index("pp") == 0
    assert best_seconds(fixed_axes) / best_seconds(result) > 1.02
    assert "axes" in {rejected.kind.split(" ")[0] for rejected in result.rejected}


def _chain(profiles: Profiles, filled: EvaluatedSetting) -> Chain:
    return profiles(filled.setting.placement)


@pytest.mark.parametrize(
    ("host", "memory", "best"),
    [(1e9, 0.75, "none"), (1e12, 1.2, "activations"), (1e12, 0.75, "both")],
)
def test_what_leaves_for_the_host_is_found(host, memory, best):
    """Offloading is chosen where copies are quick and memory is short, and only there."""
    profiles = decoder(4, 1024, 8, 4096, 512, 2048)
    cluster = replace(A100, host=host, memory=int(memory * 2**30), library="")
    job = Job(2, 16, cluster, length=2048, orders=("1F1B", "GPipe"))
    limits = Limits(pinned={"tp": (1,), "zero": (0, 1)})
    filler = Evaluator(job, limits)
    evaluated = [
        filler.evaluate(clock, setting) for clock, setting in all_settings(profiles, job, limits)
    ]
    result = search_result(profiles, job, limits)
    assert result.best is not None
    assert result.best.least == min(item.least for item in evaluated if item.priced is not None)
    assert result.best.setting.placement.offload == best
    stays = search_result(
        profiles, job, Limits(pinned={"offload": ("none",)}).combined_with(limits)
    )
    assert (best_seconds(stays) > best_seconds(result)) == (best != "none")


@pytest.mark.parametrize("layers", [6, 14])
def test_slices_are_found_where_a_pipeline_has_few_rows(layers):
    """Slices fill the pipeline and are the best setting; models that cannot be sliced have none."""
    profiles = decoder(layers, 4096, 32, 16384, 512, 8192)
    job = Job(4, 2, replace(A100, library=""), length=8192, can_slice=True, can_offload=False)
    limits = Limits(pinned={"pp": (4,)})
    filler = Evaluator(job, limits)
    evaluated = [
        filler.evaluate(clock, setting) for clock, setting in all_settings(profiles, job, limits)
    ]
    result = search_result(profiles, job, limits)
    assert result.best is not None and result.best.setting.placement.slices > 1
    assert result.best.least == min(item.least for item in evaluated if item.priced is not None)
    assert best_seconds(
        search_result(profiles, replace(job, can_slice=False), limits)
    ) > best_seconds(result)
    slow = Limits(pinned={"slices": (16,)}).combined_with(limits)
    assert {setting.placement.slices for _, setting in all_settings(profiles, job, slow)} == {16}
    assert not all_settings(profiles, replace(job, can_slice=False), slow)


@FEW
@given(random_jobs(), st.randoms(use_true_random=False))
def test_no_bound_is_above_a_price(case, random):
    """Lower bounds of seconds and bytes hold for any cuts and any recomputed units."""
    profiles, job = case
    for group in iter_placements(job, Limits()):
        chain = profiles(replace(group, rows=random.choice(microbatch_rows(job, group, Limits()))))
        candidates = list_candidates(job, chain, Limits())
        if candidates is None:
            continue
        clock, k = ChainTimes(chain, job), random.randrange(len(candidates))
        lower_bound, min_bytes = (
            step_bounds(candidates, [clock])[0][k],
            bytes_floor(candidates, job)[k],
        )
        setting = candidates.setting(k)
        stages = setting.pp * setting.chunks
        ends = sorted(random.sample(range(1, chain.length), stages - 1))
        cuts = tuple(b - a for a, b in zip([0, *ends], [*ends, chain.length]))
        recomputed = tuple(random.randint(0, cut) for cut in cuts)
        varied = replace(setting, cuts=cuts, again=recomputed)
        priced = price(chain, varied, job.cluster, job.recipe)
        pipeline_time = priced.seconds - priced.parts["gradients"] - priced.parts["optimizer"]
        assert max(lower_bound, pipeline_floor(clock, varied)) <= pipeline_time * (1 + 1e-9), varied
        overlapped, afterwards = (sums[k] for sums in replica_floor(candidates, job))
        assert max(lower_bound, overlapped) + afterwards <= priced.seconds * (1 + 1e-9), varied
        lower_bound = step_bounds(candidates, [clock], laid=False)[0][k]
        overlapped, afterwards = (sums[k] for sums in replica_floor(candidates, job, laid=False))
        varied = replace(varied, axes=random.choice(list(permutations(AXES))))
        priced = price(chain, varied, job.cluster, job.recipe)
        assert max(lower_bound, overlapped) + afterwards <= priced.seconds * (1 + 1e-9), varied
        assert min_bytes <= priced.peak * (1 + 1e-9), varied


@settings(max_examples=12, deadline=None)
@given(random_jobs(), st.randoms(use_true_random=False), st.floats(-0.1, 1.1))
def test_the_fewest_units_are_computed_again(case, random, share):
    """The numbers of recomputed units per stage are those of the quickest fit; with offloading the
    heuristic is at most a tenth slower."""
    profiles, job = case
    candidates = [(c, w) for c, w in all_settings(profiles, job) if w.chunks == 1 and w.pp < 4]
    clock, setting = random.choice(candidates)
    roomy = Evaluator(replace(job, cluster=replace(job.cluster, memory=2**60)))
    cut = replace(roomy.evaluate(clock, setting).setting, again=())
    prices = [
        price(clock.chain, replace(cut, again=recomputed), job.cluster, job.recipe)
        for recomputed in product(*(range(units + 1) for units in cut.cuts))
    ]
    peaks = sorted(priced.peak for priced in prices)
    memory = int(peaks[0] + share * (prices[0].peak - peaks[0]))
    filler = Evaluator(replace(job, cluster=replace(job.cluster, memory=memory)))
    filled = filler.evaluate(clock, setting)
    fits = [priced.seconds for priced in prices if priced.peak <= memory]
    assert (filled.priced is None) == (not fits)
    if fits and setting.placement.offloads_activations:
        assert filler.move_units(clock, filled, 30).least <= 1.1 * min(fits)
    elif fits:
        assert filled.least == pytest.approx(min(fits))


@FEW
@given(random_jobs(), st.randoms(use_true_random=False))
def test_bytes_of_many_choices_are_those_of_each(case, random):
    """All numbers of recomputed units are counted in one call, also where halves of backwards
    differ between stages."""
    profiles, job = case
    clock, setting = random.choice([(c, w) for c, w in all_settings(profiles, job) if w.pp > 1])
    usage = RecomputeBytes(clock.chain, job, clock.split_stages(setting)[0])
    choices = [[random.randint(0, units) for units in usage.cut.cuts] for _ in range(5)]
    together = usage.bytes(np.array(choices))
    assert (together == [usage.bytes(np.array(choice)) for choice in choices]).all()
    calls = list[np.ndarray]()
    usage.bytes = lambda again: calls.append(again) or RecomputeBytes.bytes(usage, again)
    usage.fewest_recomputed(float(together.max()), True, True, True)
    assert len(calls) <= 2


@FEW
@given(random_jobs(), st.sampled_from(["Interleaved1F1B", "ZB-V", "V-Half"]), st.floats(0.0, 1.0))
def test_of_several_stages_on_a_rank_no_choice_is_better(case, order, share):
    """With units moved, no other numbers of recomputed units on two stages per rank are quicker."""
    profiles, job = case
    chain, job = profiles(Placement()), replace(job, ranks=2)
    if chain.length < 4:
        return
    clock = ChainTimes(chain, job)
    setting = Setting(chain.placement, 1, 2, job.rows, order, 2, 0)
    roomy = replace(job, cluster=replace(job.cluster, memory=2**60))
    cut = Evaluator(roomy).evaluate(clock, setting).setting
    prices = [
        price(chain, replace(cut, again=recomputed), job.cluster, job.recipe)
        for recomputed in product(*(range(units + 1) for units in cut.cuts))
    ]
    peaks = sorted(priced.peak for priced in prices)
    memory = int(peaks[0] + share * (prices[0].peak - peaks[0])) + 1
    filler = Evaluator(replace(job, cluster=replace(job.cluster, memory=memory)))
    filled = filler.evaluate(clock, setting)
    if filled.priced is not None:
        fits = min(priced.seconds for priced in prices if priced.peak <= memory)
        assert filler.move_units(clock, filled, 60).least <= fits * (1 + 1e-6)


@FEW
@given(random_jobs(), st.randoms(use_true_random=False))
def test_stages_of_the_programme_are_never_slower(case, random):
    """Stages by dynamic programming fit, are never slower, and have the exact price."""
    profiles, job = case
    filler = Evaluator(job)
    clock, setting = random.choice(
        [(c, w) for c, w in all_settings(profiles, job) if w.chunks == 1]
    )
    before = filler.evaluate(clock, setting)
    if before.priced is not None:
        after = filler.split_by_programme(clock, before)
        assert after.least <= before.least and after.needs <= job.cluster.memory
        repriced = price(clock.chain, after.setting, job.cluster, job.recipe)
        assert repriced.seconds == after.least


def test_stages_of_the_programme_give_a_full_rank_fewer_units():
    """A first stage with much recomputation gets fewer units, beyond what single moves reach."""
    profiles = decoder(40, 5120, 40, 13824, 128000, 2048, gated=True)
    setting = Setting(Placement(1, 2), dp=4, pp=8, micro=32)
    job = Job(64, 128, replace(A100, memory=int(9.5 * 2**30)), length=2048)
    clock, filler = ChainTimes(profiles(setting.placement), job), Evaluator(job)
    even = filler.evaluate(clock, setting)
    cut = filler.split_by_programme(clock, even)
    assert cut.least < 0.95 * even.least
    moved_times = (filler.move_units(clock, start, 60).least for start in (cut, even))
    assert next(moved_times) < 0.98 * next(moved_times)


@FEW
@given(random_jobs(some=True), st.floats(0.3, 1.0))
def test_a_search_continues_with_less_memory(case, share):
    """What a continued search finds is as quick as what a new search finds, and as its price says;
    a third one continues from the second."""
    profiles, job = case
    before = search_result(profiles, job)
    for _ in range(2):
        job = replace(job, cluster=job.cluster.with_memory_share(share))
        anew = search_result(profiles, job)
        *_, before = search(profiles, job, moves=0, before=before)
        assert before.done and best_seconds(before) == pytest.approx(best_seconds(anew), rel=1e-12)
        assert before.counts.pruned >= 0
        if before.best is None:
            assert before.rejected[0].reason.startswith("needs")
            continue
        best = before.best
        repriced = price(_chain(profiles, best), best.setting, job.cluster, job.recipe)
        assert repriced.seconds == best.least and repriced.peak <= job.cluster.memory


def test_a_continued_search_evaluates_only_what_may_be_the_best(monkeypatch):
    """Candidates that were too slow with more memory are not evaluated again; reasons stay."""
    profiles = decoder(24, 4096, 32, 16384, 50304, 2048)
    job = Job(64, 256, A100, Recipe(), 2048, orders=("1F1B", "Interleaved1F1B"))
    evaluated = list[Setting]()
    evaluate = Evaluator.evaluate

    def counted(self, clock, setting, *bounds):
        evaluated.append(setting)
        return evaluate(self, clock, setting, *bounds)

    monkeypatch.setattr(Evaluator, "evaluate", counted)
    monkeypatch.setattr(search_module, "TRIES_PER_KIND", 0)
    before, counts = search_result(profiles, job), [len(evaluated)]
    less = replace(job, cluster=job.cluster.with_memory_share(0.98))
    results = [search_result(profiles, less)]
    counts.append(len(evaluated) - sum(counts))
    results += [list(search(profiles, less, moves=0, before=before))[-1]]
    counts.append(len(evaluated) - sum(counts))
    assert results[0].best == results[1].best and results[0].best is not None
    assert counts[2] < 0.3 * counts[1], counts


@FEW
@given(
    random_jobs(some=True),
    st.sampled_from(["memory", "network", "link", "host"]),
    st.floats(1.0, 4.0),
)
def test_more_memory_or_bandwidth_is_never_slower(case, what, times):
    """A cluster with more memory or bandwidth never makes the plan slower."""
    profiles, job = case
    larger = replace(
        job.cluster, **{what: type(job.cluster.memory)(getattr(job.cluster, what) * times)}
    )
    before, after = (
        search_result(profiles, job),
        search_result(profiles, replace(job, cluster=larger)),
    )
    assert best_seconds(after) <= best_seconds(before) * (1 + 1e-9)


@dataclass(frozen=True)
class SlowedCluster(Cluster):
    """A cluster on which everything takes `times` as long as on another one."""

    base: Cluster = A100
    times: float = 1.0

    def operator_seconds(self, kind: Kind, flops: float, moved_bytes: float) -> float:
        """Seconds of one operator."""
        return self.times * self.base.operator_seconds(kind, flops, moved_bytes)

    def collective_seconds(self, op: str, size: float, ranks: int, stride: int) -> float:
        """Seconds of one collective."""
        return self.times * collective_seconds(self.base, op, size, ranks, stride)

    def copy_seconds(self, size: float) -> float:
        """Seconds of a copy to the host, or back."""
        return self.times * self.base.copy_seconds(size)


@FEW
@given(random_jobs(some=True), st.floats(0.1, 10.0))
def test_scaled_times_leave_the_choice(case, times):
    """Scaling all times by c scales the best plan by c."""
    profiles, job = case
    values = {field_.name: getattr(job.cluster, field_.name) for field_ in fields(Cluster)}
    before = search_result(profiles, job)
    after = search_result(
        profiles, replace(job, cluster=SlowedCluster(**values, base=job.cluster, times=times))
    )
    assert best_seconds(after) == pytest.approx(best_seconds(before) * times)


@FEW
@given(
    random_jobs(some=True),
    st.sampled_from([("tp", 2), ("pp", 2), ("zero", 0), ("rows", 1), ("order", "GPipe")]),
)
def test_what_is_pinned_is_kept_and_never_better(case, pin):
    """A pinned search satisfies its pin, and never beats the free search."""
    profiles, job = case
    free, name = search_result(profiles, job), pin[0]
    limits = Limits(pinned={name: (pin[1],)})
    pinned = search_result(profiles, job, limits)
    assert best_seconds(pinned) >= best_seconds(free) * (1 - 1e-12)
    assert pinned.best is None or satisfies_limits(limits, pinned.best.setting)
    if free.best is not None:
        explanation = explain_rejection(profiles, job, limits, free)
        assert explanation.reason
