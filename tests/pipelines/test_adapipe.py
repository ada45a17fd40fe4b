"""Stages that each repeat what their memory makes them, cut in balance: against every way."""

from __future__ import annotations

import itertools
import math

import pytest

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.analyze.prepare import prepare
from schedlang.passes.partition.stage_assignment import ChainUnit, balanced_stages
from schedlang.remat.operators import RunCosts
from tests import models
from tests.engine import Threads
from tests.memory.test_chosen import drawn, ways
from tests.proofs import planned, proven, refused

BATCHES = [models.tokens(seed=seed) for seed in (1, 2, 3)]
ROW = "transformer.h.*  checkpoint(plan=adapipe, memory={})\n"
CUT = 'transformer.h  pipeline_split(over=pp)\npipeline(order="1F1B", micro={})'


def best_of(chain: list, memory: int) -> float:
    """The least work again of modules on a stage, by trying all."""
    best = math.inf
    for chosen in itertools.product(*map(ways, chain)):
        before, fits = 0, True
        for held, during, _ in chosen:
            fits = fits and before + held + during <= memory
            before += held
        if fits:
            best = min(best, sum(again for _, _, again in chosen))
    return best


@pytest.mark.parametrize("seed", range(4))
def test_no_cut_with_any_choices_is_lighter(seed: int) -> None:
    """The heaviest stage of the cut is as light as that of the best of all cuts with the best of
    all choices on each stage; a stage whose memory holds nothing weighs without end."""
    chain = [drawn(1 + (seed + k) % 2, 7 * seed + k) for k in range(5)]
    works = [2.0 + k % 3 for k in range(5)]
    whole = sum(cost.saved for cost in chain)
    memory = [whole // (3 - stage) // 2 + 6 for stage in range(3)]
    repeated = RunCosts(chain, memory)

    def weight(stage: int, low: int, high: int) -> float:
        return 3 * sum(works[low:high]) + repeated.of(stage, low, high)

    def heaviest(starts: tuple[int, ...]) -> float:
        ends = [0, *starts, 5]
        return max(weight(s, a, b) for s, (a, b) in enumerate(itertools.pairwise(ends)))

    best = math.inf
    for starts in itertools.combinations(range(1, 5), 2):
        ends = [0, *starts, 5]
        times = [
            3 * sum(works[a:b]) + best_of(chain[a:b], memory[stage])
            for stage, (a, b) in enumerate(itertools.pairwise(ends))
        ]
        assert heaviest(starts) == max(times)
        best = min(best, max(times))
    found = balanced_stages([ChainUnit(f"h.{k}", 1) for k in range(5)], 3, weight)
    assert best < math.inf
    assert heaviest(tuple(found.index(stage) for stage in (1, 2))) == best


def stages(memory: str, mesh: str = "pp=4", micro: int = 8, layers: int = 8) -> tuple:
    """Layers, and the work again, of each stage."""
    plan = planned(models.gpt2(layers), ROW.format(memory) + CUT.format(micro), mesh)
    made = prepare(plan, BATCHES[0])
    ((_, found),) = made.chains.items()
    return [len(names) for names, _ in found], [sum(c.again for c in one) for _, one in found]


def test_early_stages_repeat_more_and_have_fewer_layers() -> None:
    """With the memory of all ranks equal, the first stage of 1F1B, which keeps most microbatches,
    repeats more for each layer, and where it must repeat it has no more layers than the last."""
    layers, again = stages("1MiB")
    assert sum(layers) == 8 and again[0] / layers[0] > again[-1] / layers[-1]
    assert layers[0] <= layers[-2]
    roomy, none = stages("1GiB")
    assert sum(roomy) == 8 and none == [0, 0, 0, 0]


def test_too_little_memory_is_refused() -> None:
    """S841, as of every plan."""
    with pytest.raises(Refusal, match="S841"):
        prepare(planned(models.gpt2(), ROW.format("20KiB") + CUT.format(3), "pp=2"), BATCHES[0])


@pytest.mark.parametrize(
    "cut",
    [
        "transformer.h  pipeline_split(over=pp, balance=time)",
        "transformer.h[2]  pipeline_split(over=pp)",
    ],
)
def test_two_rows_that_say_where_stages_begin(cut: str) -> None:
    """S845 where a cut is named, or balanced by something else."""
    told = refused(models.gpt2(), ROW.format("1GiB") + cut, "pp=2")
    assert "S845" in told and "two rows choose where stages start" in told
    assert "checkpoint(plan=adapipe" in told and "help:" in told


@pytest.mark.deep
def test_stages_with_memory_of_their_own_train_as_the_original(threads: Threads) -> None:
    """A pipeline whose stages each repeat something else trains as the original, with dropout."""
    rows = ROW.format("500KiB") + CUT.format(3)
    plan = planned(models.gpt2(5, dropout=0.1), rows, "pp=2")
    ((_, found),) = prepare(plan, BATCHES[0]).chains.items()
    assert len({sum(c.again for c in one) for _, one in found}) == 2
    proven(threads, plan, BATCHES)
