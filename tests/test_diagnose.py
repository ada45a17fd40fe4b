"""Tests of diagnose: each kind of mistake gets its own words."""

import pytest
import torch

from schedlang.passes.diagnose import diagnose

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
