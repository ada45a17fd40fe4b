"""Tests of diagnose: each kind of mistake gets its own words."""

import pytest
import torch

from schedlang.passes.compare import compare
from schedlang.passes.diagnose import diagnose, explain
from schedlang.passes.observe import Key, Observation
from schedlang.report import Report

SIZES = {"tp": 2, "dp": 3, "microbatches": 4}
GEN = torch.Generator().manual_seed(0)
RIGHT = torch.randn(12, 12, generator=GEN, dtype=torch.float64)
OTHER = torch.randn(12, 12, generator=GEN, dtype=torch.float64)


def _one_block(value: float) -> torch.Tensor:
    wrong = RIGHT.clone()
    wrong[6:] *= value
    return wrong


@pytest.mark.parametrize(
    ("actual", "words"),
    [
        (RIGHT * 2, "tp = 2 times"),
        (RIGHT / 3, "1/dp = 1/3 times"),
        (RIGHT * 6, "tp · dp = 6 times"),
        (RIGHT * 2 / 3, "tp/dp = 2/3 times"),
        (RIGHT * 5, "5 times"),
        (-RIGHT, "-1 times"),
        (RIGHT * 1.37, "1.37 times"),
        (RIGHT * 0, "it is zero"),
        (RIGHT * float("nan"), "144 of 144 elements are not finite"),
        (_one_block(0.0), "only block 1 of 2 blocks along dim 0 (tp = 2) is zero"),
        (_one_block(0.3), "only block 1 of 2 blocks along dim 0 (tp = 2) is wrong"),
        (torch.cat(RIGHT.chunk(3, 1)[::-1], 1), "out of order: [2, 1, 0] of 3 blocks along dim 1"),
        (RIGHT[torch.randperm(12, generator=GEN)], "dim 0, in another order"),
        (RIGHT.T, "transposed"),
        (OTHER.clone(), "the value of other"),
        (RIGHT + OTHER, "the value of other has been added"),
        (RIGHT.float().double(), "float32 rounding"),
        (RIGHT.bfloat16().double(), "bfloat16"),
        (RIGHT[:6], "shape (6, 12) instead of (12, 12)"),
        (None, "detached"),
        (RIGHT + RIGHT.roll(1, 0) * OTHER, "no simple pattern"),
    ],
)
def test_the_pattern_is_named(actual, words: str) -> None:
    """The words name the number, block, order or tensor that explains the difference."""
    assert words in diagnose(actual, RIGHT, SIZES, {"other": OTHER})


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (RIGHT * 2, "tp = 2 times the right value everywhere; equal just before it in backward: a"),
        (OTHER * 1.0, "it is the value of w after step 1; equal"),
        (OTHER * 2.0, "it is the value of a; equal"),
    ],
)
def test_a_failing_row_is_explained(wrong: torch.Tensor, words: str) -> None:
    """The first difference comes with its pattern and with the last gradient that was right."""
    names = {("a", 0): OTHER * 2.0, ("w", 0): RIGHT, ("w", 1): OTHER * 1.0}
    tensors = {Key("", "gradients", step, name): v for (name, step), v in names.items()}
    expected = Observation(tensors, order=("a", "w"))
    actual = Observation({k: v.clone() for k, v in tensors.items()})
    actual.tensors[Key("", "gradients", 0, "w")] = wrong.clone()
    first = Report(compare(expected, actual)).first
    assert first is not None
    assert explain(first, expected, actual, SIZES).startswith(words)
