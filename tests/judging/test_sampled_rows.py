"""Rows that samplers give to two ranks or to none, layers in another order, and factors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from schedlang import TrainingProgram
from schedlang.passes.judge.batch_parts import ROWS
from schedlang.passes.judge.explanations import HOLDERS, MICROBATCHES, _add_holders
from schedlang.passes.judge.gradient_errors import describe_part_counts
from schedlang.passes.judge.module_comparison import ValueComparison
from schedlang.passes.judge.regions import RankCopy, Region
from schedlang.runtime.launch.pool import Pool
from tests.judging.catches.collectives import world_size
from tests.judging.test_shard_steps import judge_program, squared


def sampled(**options: Any) -> Any:
    """Return data parallel ranks whose rows a sampler of torch shuffles."""

    def program(model: Any) -> TrainingProgram:
        module = DistributedDataParallel(model)

        def step(batch: Any) -> Tensor:
            sampler = DistributedSampler(range(6), **{"seed": 3} | options)  # type: ignore[arg-type]
            part = {name: value[list(sampler)] for name, value in batch.items()}
            value = squared(module(part["input"]), part) * len(sampler) * world_size() / 6
            value.backward()
            return value

        return TrainingProgram(module, step)

    return program


def test_rows_that_count_twice_or_never(pool: Pool) -> None:
    """All ranks that take the first rank's rows are told by the rows that are left out."""
    assert judge_program(pool, sampled()).ok
    report = judge_program(pool, sampled(rank=0))
    rows = [*DistributedSampler(range(6), 2, 1, seed=3)]  # type: ignore[arg-type]
    text = f"rows {', '.join(map(str, sorted(rows)))} of the batch count 0 times, instead of once"
    assert f"{text}; all others count 2 times" in dict(report.localised)["gradients"], str(report)


def test_a_sentence_on_one_row() -> None:
    """Most rows come last."""
    text = "row 2 of the batch counts 0 times, instead of once; all others count 1 times"
    assert describe_part_counts([1.0, 1.0, 0.0, 1.0], ROWS) == text


def test_layers_in_another_order(pool: Pool) -> None:
    """The layer that takes the first one's input is named."""

    def program(model: Any) -> TrainingProgram:
        def step(batch: Any) -> Tensor:
            value = squared(model[0](torch.tanh(model[2](batch["input"]))), batch)
            value.backward()
            return value

        return TrainingProgram(model, step, world_loss="same")

    text = dict(judge_program(pool, program).localised)["first module"]
    assert "`2` takes on rank 0 what `0` takes in the original" in text, text


def test_the_number_of_ranks_that_hold_a_parameter() -> None:
    """Of ranks in stages, those that hold one stage are a factor, beside equal microbatches."""
    stages = [Region.from_numbers(torch.arange(2)), Region.from_numbers(torch.arange(2, 4))]
    copies = [RankCopy(rank, "w", *[stages[rank % 2]] * 2, None) for rank in range(4)]
    assert _add_holders({"ranks": 4}, copies, 4) == {"ranks": 4, HOLDERS: 2}
    sizes = _add_holders({"ranks": 4, MICROBATCHES: 2}, copies, 4)
    assert sizes == {"ranks": 4, f"{MICROBATCHES} (or {HOLDERS})": 2}
    assert _add_holders({"ranks": 4, "dp": 2}, copies, 4) == {"ranks": 4, "dp": 2}
    assert _add_holders({MICROBATCHES: 2}, copies, 2) == {MICROBATCHES: 2}  # averaged over all
    assert _add_holders({"ranks": 4}, copies[:1], 4) == {"ranks": 4}


def test_a_gradient_that_is_mostly_zero_has_no_factor() -> None:
    """Else all right values would count as zero, and wrong ones as ignored labels."""
    expected = torch.arange(1.0, 9.0, dtype=torch.float64)
    actual = torch.where(expected > 5, expected, 0.0)
    unused: Any = None
    assert ValueComparison(unused).factor(actual, expected) == 1.0
