"""AdaPipe: balanced cuts with recomputation per stage, against all other cuts."""

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
from tests.memory.test_saved_operators import all_choices, random_module
from tests.proofs import assert_proven, make_plan, refusal_text

BATCHES = [models.tokens(seed=seed) for seed in (1, 2, 3)]
ROW = "transformer.h.*  checkpoint(plan=adapipe, memory={})\n"
CUT = 'transformer.h  pipeline_split(over=pp)\npipeline(order="1F1B", micro={})'


def least_repeat(chain: list, memory: int) -> float:
    """The least recomputation of a stage's modules within its memory, by trying all choices."""
    best = math.inf
    for choices in itertools.product(*map(all_choices, chain)):
        before, fits = 0, True
        for kept, during, _ in choices:
            fits = fits and before + kept + during <= memory
            before += kept
        if fits:
            best = min(best, sum(repeat for _, _, repeat in choices))
    return best


@pytest.mark.parametrize("seed", range(4))
def test_no_cut_with_any_choices_is_lighter(seed: int) -> None:
    """No other cut with any choices of recomputation has a lighter heaviest stage."""
    chain = [random_module(1 + (seed + k) % 2, 7 * seed + k) for k in range(5)]
    works = [2.0 + k % 3 for k in range(5)]
    all_saved = sum(cost.saved for cost in chain)
    memory = [all_saved // (3 - stage) // 2 + 6 for stage in range(3)]
    repeated = RunCosts(chain, memory)

    def weight(stage: int, start: int, end: int) -> float:
        return 3 * sum(works[start:end]) + repeated.of(stage, start, end)

    def heaviest(starts: tuple[int, ...]) -> float:
        ends = [0, *starts, 5]
        return max(weight(s, a, b) for s, (a, b) in enumerate(itertools.pairwise(ends)))

    best = math.inf
    for starts in itertools.combinations(range(1, 5), 2):
        ends = [0, *starts, 5]
        times = [
            3 * sum(works[a:b]) + least_repeat(chain[a:b], memory[stage])
            for stage, (a, b) in enumerate(itertools.pairwise(ends))
        ]
        assert heaviest(starts) == max(times)
        best = min(best, max(times))
    stage_of = balanced_stages([ChainUnit(f"h.{k}", 1) for k in range(5)], 3, weight)
    assert best < math.inf
    assert heaviest(tuple(stage_of.index(stage) for stage in (1, 2))) == best


def stage_sizes(memory: str, mesh: str = "pp=4", micro: int = 8, layers: int = 8) -> tuple:
    """The number of layers and the recomputed work of each stage."""
    plan = make_plan(models.gpt2(layers), ROW.format(memory) + CUT.format(micro), mesh)
    prepared = prepare(plan, BATCHES[0])
    ((_, stages_found),) = prepared.chains.items()
    return [len(names) for names, _ in stages_found], [
        sum(c.again for c in costs) for _, costs in stages_found
    ]


def test_early_stages_repeat_more_and_have_fewer_layers() -> None:
    """With equal memory, early stages of 1F1B, which keep more microbatches, recompute more for
    each layer and have no more layers."""
    layers, repeats = stage_sizes("1MiB")
    assert sum(layers) == 8 and repeats[0] / layers[0] > repeats[-1] / layers[-1]
    assert layers[0] <= layers[-2]
    roomy, none = stage_sizes("1GiB")
    assert sum(roomy) == 8 and none == [0, 0, 0, 0]


def test_too_little_memory_is_refused() -> None:
    """Too little memory is refused (S841)."""
    with pytest.raises(Refusal, match="S841"):
        prepare(make_plan(models.gpt2(), ROW.format("20KiB") + CUT.format(3), "pp=2"), BATCHES[0])


@pytest.mark.parametrize(
    "cut",
    [
        "transformer.h  pipeline_split(over=pp, balance=time)",
        "transformer.h[2]  pipeline_split(over=pp)",
    ],
)
def test_two_rows_that_say_where_stages_begin(cut: str) -> None:
    """A second row that chooses where stages start is refused (S845)."""
    message = refusal_text(models.gpt2(), ROW.format("1GiB") + cut, "pp=2")
    assert "S845" in message and "two rows choose where stages start" in message
    assert "checkpoint(plan=adapipe" in message and "help:" in message


@pytest.mark.deep
def test_stages_with_memory_of_their_own_train_as_the_original(threads: Threads) -> None:
    """Stages that recompute differently train as the original, with dropout."""
    rows = ROW.format("500KiB") + CUT.format(3)
    plan = make_plan(models.gpt2(5, dropout=0.1), rows, "pp=2")
    ((_, stages_found),) = prepare(plan, BATCHES[0]).chains.items()
    assert len({sum(c.again for c in costs) for _, costs in stages_found}) == 2
    assert_proven(threads, plan, BATCHES)
