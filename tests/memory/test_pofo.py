"""Kept, recomputed or moved to the host: the quickest choice there is, and it changes no bit."""

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
from tests.proofs import planned, proven, refused

BATCHES = [models.tokens(seed=seed) for seed in (1, 2, 3)]
ROW = "transformer.h.*  checkpoint(plan=pofo, memory={}, bandwidth={})\n"


def chain(n: int, seed: int) -> list[ModuleCost]:
    """Unequal modules, in small whole numbers; some bytes cannot be moved."""
    draw = random.Random(100 * n + seed)
    made = []
    for _ in range(n):
        entered = draw.randint(0, 4)
        saved = entered + draw.randint(1, 9)
        made.append(
            ModuleCost(
                1.0,
                saved,
                entered,
                forward=float(draw.randint(1, 9)),
                small=draw.randint(0, 2) if saved > 3 else 0,
            )
        )
    return made


def bytes_of(costs: Sequence[ModuleCost], ways: Sequence[Treatment]) -> int:
    """The most bytes at a time: what is held, what is on its way, and the module that runs."""
    held = flight = most = 0
    for cost, way in zip(costs, ways):
        most = max(most, held + flight + cost.saved + (way == "recompute") * cost.input)
        held += {"keep": cost.saved, "recompute": cost.input, "offload": cost.small}[way]
        flight = cost.saved - cost.small if way == "offload" else flight
    return most


def time_of(costs: Sequence[ModuleCost], ways: Sequence[Treatment], ratio: float) -> float:
    """Two clocks, of the device and of the copies, run through a forward and a backward."""
    clock = copied = 0.0  # when the device, and when the copies out, are done
    moved = [k for k, way in enumerate(ways) if way == "offload"]
    size = {k: (costs[k].saved - costs[k].small) * ratio for k in moved}
    for k, cost in enumerate(costs):
        clock += cost.forward
        if k in size:  # the copy before is waited for, then this one begins
            clock = max(clock, copied)
            copied = clock + size[k]
    clock = max(clock, copied)
    there: dict[int, float] = {}  # when what was moved is back
    for k in reversed(range(len(costs))):
        if k in size:
            clock = max(clock, there.get(k, clock + size[k]))
            before = [other for other in moved if other < k]
            if before:
                there[before[-1]] = clock + size[before[-1]]
        clock += costs[k].forward * (3 if ways[k] == "recompute" else 2)
    return clock - 3 * sum(cost.forward for cost in costs)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7])
def test_no_choice_is_quicker(n: int) -> None:
    """For every limit the plan fits and takes the least time, among all choices for each module,
    by clocks that are run through each choice; below the least bytes there is none."""
    for seed in range({5: 3, 6: 2, 7: 1}.get(n, 6)):
        costs, ratio = chain(n, seed), (0.25, 1.0, 2.0)[seed % 3]
        known = [
            (bytes_of(costs, ways), time_of(costs, ways, ratio))
            for ways in itertools.product(TREATMENTS, repeat=n)
        ]
        smallest = min(size for size, _ in known)
        assert min_memory(costs) == smallest and pofo(costs, smallest - 1, ratio) is None
        for memory in range(smallest, sum(cost.saved for cost in costs) + 2):
            found = pofo(costs, memory, ratio)
            assert found is not None and bytes_of(costs, found.treatments) <= memory
            assert found.time == time_of(costs, found.treatments, ratio)
            assert found.time == min(time for size, time in known if size <= memory)


def test_all_three_ways_are_worth_it() -> None:
    """There are chains and limits at which the best plan keeps, recomputes and moves, and beats
    second runs alone and copies alone."""
    costs, best = chain(7, 0), 0
    for memory in range(min_memory(costs), sum(cost.saved for cost in costs)):
        found, runs, copies = (
            pofo(costs, memory, 1.0, among)
            for among in (TREATMENTS, ("keep", TREATMENTS[1]), ("keep", TREATMENTS[2]))
        )
        assert found is not None
        others = [one.time for one in (runs, copies) if one is not None]
        assert all(found.time <= time for time in others)
        best += set(found.treatments) == set(TREATMENTS) and all(
            found.time < time for time in others
        )
    assert best


def test_fewer_points_still_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where partial plans are told apart in steps, the plan fits, is found wherever there is one,
    and is no slower than second runs alone or copies alone."""
    monkeypatch.setattr(plans, "MAX_PLANS", 12)
    costs = chain(12, 1)
    for memory in range(min_memory(costs), sum(cost.saved for cost in costs) + 1, 3):
        found = pofo(costs, memory, 1.0)
        assert found is not None and bytes_of(costs, found.treatments) <= memory
        for way in TREATMENTS[1:]:
            alone = pofo(costs, memory, 1.0, ("keep", way))
            assert alone is None or found.time <= alone.time


def chosen(memory: str, bandwidth: str, rows: str = "", mesh: str = "dp=1") -> tuple:
    """A plan, and what is done with each module of each stage."""
    model = models.gpt2(5, dropout=0.1)
    plan = planned(model, ROW.format(memory, bandwidth) + rows, mesh)
    ((_, found),) = prepare(plan, BATCHES[0]).chains.items()
    return plan, [one.treatments for _, one in found]


def test_quick_copies_move_and_slow_ones_recompute(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same memory the row moves where copies are quick, repeats where they are slow;
    what no store would move is not counted as moved."""
    assert set(chosen("800KiB", "200TiB")[1][0]) == {"keep", "recompute"}  # all is too small
    monkeypatch.setattr(offloaded_activations, "MIN_BYTES", 1)
    assert set(chosen("800KiB", "200TiB")[1][0]) == {"keep", "offload"}
    assert set(chosen("800KiB", "1GiB")[1][0]) == {"keep", "recompute"}


@pytest.mark.deep
def test_a_mixed_plan_trains_as_the_original(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules kept, repeated and on the host in one model, sharded over ranks, with dropout."""
    monkeypatch.setattr(offloaded_activations, "MIN_BYTES", 1)
    plan, (ways,) = chosen("476KiB", "33TiB", "zero(stage=1, over=dp)", "dp=2")
    assert set(ways) == set(TREATMENTS)
    proven(threads, plan, BATCHES)


class Stack(nn.Module):
    """Modules each of which saves its input, and as much again."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        made = (
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.0), nn.Linear(8, 8))
            for _ in range(count)
        )
        self.layers = nn.ModuleList(made)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def held(ways: Sequence[Treatment]) -> tuple[dict[str, int], list[torch.Tensor]]:
    """Bytes by tier between forward and backward, but for parameters and output; gradients."""
    model = Stack(len(ways))
    names = tuple(f"layers.{k}" for k in range(len(ways)))
    row = checkpoint(plan="pofo", memory=Bytes(1), bandwidth=Bytes(1))
    build = SimpleNamespace(
        at=model.get_submodule, chains={names: ((names, plans.MixedPlan(tuple(ways), 0.0, 0.0)),)}
    )
    row.lower(tuple(SimpleNamespace(fqn=name) for name in names), build)
    with TierCounter() as residence:
        out = model(torch.ones(16, 8))
        gc.collect()
        now = residence.ledger.alive_bytes()
    beside = [out, *model.parameters()]
    now["device"] -= sum(one.untyped_storage().nbytes() for one in beside)
    out.square().sum().backward()
    return now, [one.grad for one in model.parameters() if one.grad is not None]


def test_what_is_held_is_what_was_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kept module holds what it saves, a recomputed one its input, a moved one nothing on the
    device and all on the host; no gradient differs in a bit."""
    monkeypatch.setattr(offloaded_activations, "MIN_BYTES", 1)
    row = 16 * 8 * 4  # bytes of an input, and of what is saved besides
    _, wanted = held(["keep"] * 4)
    for ways in (TREATMENTS, ("offload", "recompute", "offload", "keep"), ("offload",) * 4):
        now, found = held(ways)
        assert now["device"] == 2 * row * ways.count("keep") + row * ways.count("recompute")
        assert now["cpu"] == 2 * row * ways.count("offload")
        if len(ways) == 4:
            assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))


def test_too_little_memory_is_refused() -> None:
    """S841 says how much the least plan needs, and that much is enough."""
    with pytest.raises(Refusal, match="S841") as caught:
        chosen("20KiB", "25GiB")
    need = int(caught.value.render().split("each microbatch needs ")[1].split()[0])
    chosen(f"{need}B", "25GiB")
    with pytest.raises(Refusal, match="S841"):
        chosen(f"{need - 1}B", "25GiB")


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
    """Each refusal says what is wrong and what would be legal."""
    told = refused(models.gpt2(), f"transformer.h.*  {row}")
    assert code in told and words in told and "help:" in told


def test_no_more_than_two_are_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a moved module has run, the copies of the one before it are waited for, and no other:
    that is what the count of bytes takes for granted."""
    monkeypatch.setattr(offloaded_activations, "MIN_BYTES", 1)
    marks: list[SimpleNamespace] = []
    waited: list[tuple[int, int]] = []

    def mark(device: torch.device) -> SimpleNamespace:
        number = len(marks)
        marks.append(SimpleNamespace(synchronize=lambda: waited.append((number, len(marks)))))
        return marks[-1]

    monkeypatch.setattr(offloaded_activations.copies, "record_copies", mark)
    held(("offload", "keep", "offload", "recompute", "offload"))
    assert len(marks) == 3 and waited == [(0, 2), (1, 3)]
