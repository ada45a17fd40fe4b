"""checkpoint(plan=pofo), keep, recompute or offload: the fastest choice, equal gradients."""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.language.value import Bytes
from schedlang.passes.analyze.prepare import prepare
from schedlang.primitives.checkpoint import checkpoint
from schedlang.remat import pofo as plans
from schedlang.remat.pofo import TREATMENTS, Treatment, min_memory, pofo
from schedlang.remat.rotor import ModuleCost
from schedlang.runtime.offload import offloaded_activations
from schedlang.runtime.storage.tiers import TierCounter
from tests import models
from tests.engine import Threads
from tests.proofs import assert_proven, make_plan, refusal_text

BATCHES = [models.tokens(seed=seed) for seed in (1, 2, 3)]
ROW = "transformer.h.*  checkpoint(plan=pofo, memory={}, bandwidth={})\n"


def random_chain(n: int, seed: int) -> list[ModuleCost]:
    """Return different modules, in small integers; some bytes cannot be offloaded."""
    rng = random.Random(100 * n + seed)
    costs = []
    for _ in range(n):
        input_bytes = rng.randint(0, 4)
        saved = input_bytes + rng.randint(1, 9)
        costs.append(
            ModuleCost(
                1.0,
                saved,
                input_bytes,
                forward=float(rng.randint(1, 9)),
                small=rng.randint(0, 2) if saved > 3 else 0,
            )
        )
    return costs


def peak_bytes(costs: Sequence[ModuleCost], treatments: Sequence[Treatment]) -> int:
    """Return the peak bytes: held tensors, copies in flight, and the running module."""
    held_bytes = in_flight = peak = 0
    for cost, treatment in zip(costs, treatments):
        peak = max(
            peak, held_bytes + in_flight + cost.saved + (treatment == "recompute") * cost.input
        )
        held_bytes += {"keep": cost.saved, "recompute": cost.input, "offload": cost.small}[
            treatment
        ]
        in_flight = cost.saved - cost.small if treatment == "offload" else in_flight
    return peak


def extra_time(costs: Sequence[ModuleCost], treatments: Sequence[Treatment], ratio: float) -> float:
    """Return the extra time, by clocks of device and copies through forward and backward."""
    clock = copied = 0.0  # when the device and the copies out are done
    offloaded = [k for k, treatment in enumerate(treatments) if treatment == "offload"]
    size = {k: (costs[k].saved - costs[k].small) * ratio for k in offloaded}
    for k, cost in enumerate(costs):
        clock += cost.forward
        if k in size:  # the copy before is waited for, then this one begins
            clock = max(clock, copied)
            copied = clock + size[k]
    clock = max(clock, copied)
    returned: dict[int, float] = {}  # when offloaded tensors are back
    for k in reversed(range(len(costs))):
        if k in size:
            clock = max(clock, returned.get(k, clock + size[k]))
            before = [other for other in offloaded if other < k]
            if before:
                returned[before[-1]] = clock + size[before[-1]]
        clock += costs[k].forward * (3 if treatments[k] == "recompute" else 2)
    return clock - 3 * sum(cost.forward for cost in costs)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7])
def test_no_choice_is_quicker(n: int) -> None:
    """For every limit the plan fits and is the fastest of all choices, by simulated clocks; below
    the least bytes there is none."""
    for seed in range({5: 3, 6: 2, 7: 1}.get(n, 6)):
        costs, ratio = random_chain(n, seed), (0.25, 1.0, 2.0)[seed % 3]
        possible = [
            (peak_bytes(costs, treatments), extra_time(costs, treatments, ratio))
            for treatments in itertools.product(TREATMENTS, repeat=n)
        ]
        smallest = min(size for size, _ in possible)
        assert min_memory(costs) == smallest and pofo(costs, smallest - 1, ratio) is None
        for memory in range(smallest, sum(cost.saved for cost in costs) + 2):
            plan = pofo(costs, memory, ratio)
            assert plan is not None and peak_bytes(costs, plan.treatments) <= memory
            assert plan.time == extra_time(costs, plan.treatments, ratio)
            assert plan.time == min(time for size, time in possible if size <= memory)


def test_all_three_ways_are_worth_it() -> None:
    """For some chain and limit the best plan uses all three, and beats recomputation or offloading
    alone."""
    costs, best = random_chain(7, 0), 0
    for memory in range(min_memory(costs), sum(cost.saved for cost in costs)):
        plan, runs, copies = (
            pofo(costs, memory, 1.0, among)
            for among in (TREATMENTS, ("keep", TREATMENTS[1]), ("keep", TREATMENTS[2]))
        )
        assert plan is not None
        times = [single.time for single in (runs, copies) if single is not None]
        assert all(plan.time <= time for time in times)
        best += set(plan.treatments) == set(TREATMENTS) and all(plan.time < time for time in times)
    assert best


def test_fewer_points_still_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer partial plans a plan is still found, fits, and is no slower than recomputation or
    offloading alone."""
    monkeypatch.setattr(plans, "MAX_PLANS", 12)
    costs = random_chain(12, 1)
    for memory in range(min_memory(costs), sum(cost.saved for cost in costs) + 1, 3):
        plan = pofo(costs, memory, 1.0)
        assert plan is not None and peak_bytes(costs, plan.treatments) <= memory
        for treatment in TREATMENTS[1:]:
            single = pofo(costs, memory, 1.0, ("keep", treatment))
            assert single is None or plan.time <= single.time


def choose_plan(memory: str, bandwidth: str, rows: str = "", mesh: str = "dp=1") -> tuple:
    """Return a plan, and the treatment of each module of each stage."""
    model = models.gpt2(5, dropout=0.1)
    plan = make_plan(model, ROW.format(memory, bandwidth) + rows, mesh)
    ((_, stages),) = prepare(plan, BATCHES[0]).chains.items()
    return plan, [mixed.treatments for _, mixed in stages]


def test_quick_copies_move_and_slow_ones_recompute(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same memory fast copies offload and slow ones recompute; tensors too small to move
    do not count as moved."""
    assert set(choose_plan("800KiB", "200TiB")[1][0]) == {"keep", "recompute"}  # all is too small
    monkeypatch.setattr(offloaded_activations, "MIN_BYTES", 1)
    assert set(choose_plan("800KiB", "200TiB")[1][0]) == {"keep", "offload"}
    assert set(choose_plan("800KiB", "1GiB")[1][0]) == {"keep", "recompute"}


@pytest.mark.deep
def test_a_mixed_plan_trains_as_the_original(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All three treatments in one model, with ZeRO and dropout."""
    monkeypatch.setattr(offloaded_activations, "MIN_BYTES", 1)
    plan, (treatments,) = choose_plan("476KiB", "33TiB", "zero(stage=1, over=dp)", "dp=2")
    assert set(treatments) == set(TREATMENTS)
    assert_proven(threads, plan, BATCHES)


class Stack(nn.Module):
    """Modules that save their input, and as much again."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = (
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.0), nn.Linear(8, 8))
            for _ in range(count)
        )
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def run_treatments(treatments: Sequence[Treatment]) -> tuple[dict[str, int], list[torch.Tensor]]:
    """Return bytes by tier between forward and backward, without parameters and output; and
    gradients."""
    model = Stack(len(treatments))
    names = tuple(f"layers.{k}" for k in range(len(treatments)))
    primitive = checkpoint(plan="pofo", memory=Bytes(1), bandwidth=Bytes(1))
    build = SimpleNamespace(
        at=model.get_submodule,
        chains={names: ((names, plans.MixedPlan(tuple(treatments), 0.0, 0.0)),)},
    )
    primitive.lower(tuple(SimpleNamespace(fqn=name) for name in names), build)
    with TierCounter() as residence:
        out = model(torch.ones(16, 8))
        gc.collect()
        sizes = residence.ledger.alive_bytes()
    excluded = [out, *model.parameters()]
    sizes["device"] -= sum(tensor.untyped_storage().nbytes() for tensor in excluded)
    out.square().sum().backward()
    return sizes, [tensor.grad for tensor in model.parameters() if tensor.grad is not None]


def test_what_is_held_is_what_was_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kept module holds what it saves, a recomputed one its input, an offloaded one nothing on
    the device; gradients are bitwise equal."""
    monkeypatch.setattr(offloaded_activations, "MIN_BYTES", 1)
    input_bytes = 16 * 8 * 4  # bytes of an input, and of what is saved besides
    _, expected = run_treatments(["keep"] * 4)
    for treatments in (TREATMENTS, ("offload", "recompute", "offload", "keep"), ("offload",) * 4):
        sizes, grads = run_treatments(treatments)
        assert sizes["device"] == 2 * input_bytes * treatments.count(
            "keep"
        ) + input_bytes * treatments.count("recompute")
        assert sizes["cpu"] == 2 * input_bytes * treatments.count("offload")
        if len(treatments) == 4:
            assert len(grads) == len(expected) and all(map(torch.equal, grads, expected))


def test_too_little_memory_is_refused() -> None:
    """S841 gives the least memory, and that is enough."""
    with pytest.raises(Refusal, match="S841") as caught:
        choose_plan("20KiB", "25GiB")
    needed = int(caught.value.render().split("each microbatch needs ")[1].split()[0])
    choose_plan(f"{needed}B", "25GiB")
    with pytest.raises(Refusal, match="S841"):
        choose_plan(f"{needed - 1}B", "25GiB")


@pytest.mark.parametrize(
    "row, code, words",
    [
        ("checkpoint(plan=pofo, memory=1GiB)", "S842", "must be given together"),
        ("checkpoint(plan=rotor, memory=1GiB, bandwidth=1GiB)", "S842", "must be given together"),
        ("checkpoint(plan=rotor, memory=1GiB, tflops=10)", "S842", "must be given together"),
        ("checkpoint(plan=pofo, memory=1GiB, bandwidth=1GiB, tflops=0)", "S842", "must be above 0"),
        (
            "checkpoint(plan=pofo, memory=1GiB, bandwidth=1GiB)\n"
            "transformer.h.1  offload(activations)",
            "S847",
            "already chooses which",
        ),
    ],
)
def test_what_means_nothing_is_refused(row: str, code: str, words: str) -> None:
    """Each refusal says what is wrong and what is legal."""
    message = refusal_text(models.gpt2(), f"transformer.h.*  {row}")
    assert code in message and words in message and "help:" in message


def test_no_more_than_two_are_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """When an offloaded module has run, only the copies of the one before are waited for, as the
    count of bytes assumes."""
    monkeypatch.setattr(offloaded_activations, "MIN_BYTES", 1)
    marks: list[SimpleNamespace] = []
    waited: list[tuple[int, int]] = []

    def mark(device: torch.device) -> SimpleNamespace:
        number = len(marks)
        marks.append(SimpleNamespace(synchronize=lambda: waited.append((number, len(marks)))))
        return marks[-1]

    monkeypatch.setattr(offloaded_activations.copies, "record_copies", mark)
    run_treatments(("offload", "keep", "offload", "recompute", "offload"))
    assert len(marks) == 3 and waited == [(0, 2), (1, 3)]
