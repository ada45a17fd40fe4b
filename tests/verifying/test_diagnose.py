"""Tests of diagnose: each kind of mistake gets its own words."""

import pytest
import torch

from schedlang.ir.mesh import Mesh
from schedlang.passes.localize.diagnosis import (
    diagnose,
    explain_by_parts,
    explain_by_ranks,
    explain_row,
)
from schedlang.passes.verify.compare import compare
from schedlang.passes.verify.observe import Key, Observation
from schedlang.report import Report

SIZES = {"tp": 2, "dp": 3, "microbatches": 4}
GEN = torch.Generator().manual_seed(0)
RIGHT = torch.randn(12, 12, generator=GEN, dtype=torch.float64)
EYE = torch.eye(12, dtype=torch.float64)
CHECKED = (torch.arange(12)[:, None] + torch.arange(12)) % 2
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
        (RIGHT + 0.5, "0.5 is added everywhere"),
        (RIGHT + 0.5 * CHECKED + 1e-15, "a constant is added: 0.5 to 72 elements"),
        (RIGHT + 0.5 * EYE + 0.25 * (1 - EYE), "is added: 0.25 to 132 and 0.5 to 12 elements"),
        (OTHER.clone(), "the value of other"),
        (RIGHT + OTHER, "the value of other has been added"),
        (RIGHT + 2 * OTHER, "tp = 2 times the value of other has been added"),
        (RIGHT + 1.37 * OTHER, "no simple pattern"),
        (RIGHT.float().double(), "float32 rounding"),
        (RIGHT.bfloat16().double(), "bfloat16"),
        (RIGHT[:6], "shape (6, 12) instead of (12, 12)"),
        (None, "detached"),
        (RIGHT + RIGHT.roll(1, 0) * OTHER, "no simple pattern"),
    ],
)
def test_the_pattern_is_named(actual, words: str) -> None:
    """The words name the number, block, order or tensor that explains the difference."""
    assert words in diagnose(actual, RIGHT, SIZES, {"other": OTHER}).text


def test_few_wrong_rows_are_no_rounding() -> None:
    """An error of that size in some places is told by the places, not as a rounding."""
    wrong = RIGHT.clone()
    wrong[[1, 4, 5, 9]] *= 1 + 0.01 * torch.randn(4, 12, generator=GEN, dtype=torch.float64)
    assert 1e-3 < float((wrong - RIGHT).norm() / RIGHT.norm()) < 1e-2
    said = diagnose(wrong, RIGHT, {}, {}).text
    assert said == "right, but for places [1, 4, 5, 9] of dim 0, which are wrong"


def test_many_wrong_places_are_counted() -> None:
    """Only the first of them are listed: a generator's state has thousands."""
    right = torch.randn(5000, generator=GEN, dtype=torch.float64)
    wrong = right.clone()
    wrong[::3] = 7.0
    said = diagnose(wrong, right, {}, {}).text
    assert " and 1651 more of dim 0, which are wrong" in said and len(said) < 200, said


BIAS = torch.randn(12, generator=GEN, dtype=torch.float64)


@pytest.mark.parametrize(
    ("actual", "words"),
    [
        (RIGHT + BIAS, "it holds its bias 1 times too often in every row: once per rank"),
        (RIGHT + 3 * BIAS, "it holds its bias 3 times too often in every row: once per rank"),
        (RIGHT - BIAS, "it holds its bias 1 times less in every row: once per rank"),
        (RIGHT + 0.5 * BIAS, "no simple pattern fits"),
    ],
)
def test_a_vector_in_every_row(actual, words: str) -> None:
    """A bias that is added on every rank is told from any other multiple of it."""
    assert diagnose(actual, RIGHT, SIZES, {"its bias": BIAS}).text == words


def test_few_wrong_elements_are_counted() -> None:
    """A tail that was lost is called the last elements; scattered ones are only counted."""
    tail, holes = RIGHT.clone(), RIGHT.clone()
    tail[-1, -2:] = 0
    holes[3, 1] = holes[9, 5] = 7.0
    assert diagnose(tail, RIGHT, {}).text == "only the last 2 of 144 elements are wrong and zero"
    assert diagnose(holes, RIGHT, {}).text == "only 2 of 144 elements are wrong"


MESH = Mesh((("dp", 2), ("tp", 2)))


@pytest.mark.parametrize(
    ("held", "words"),
    [
        ([RIGHT - OTHER, OTHER, RIGHT - OTHER, OTHER], "sum over tp of the ranks' values is right"),
        ([OTHER, OTHER, RIGHT - OTHER, RIGHT - OTHER], "sum over dp of the ranks' values is right"),
        ([OTHER, 2 * RIGHT - OTHER] * 2, "mean over tp of the ranks' values is right"),
        ([RIGHT, None, RIGHT, None], "only place 0 along tp has the right value"),
        ([OTHER] * 4, ""),
    ],
)
def test_the_ranks_own_values_tell_the_missing_reduction(held, words: str) -> None:
    """Which reduction over which axis would have made the right value of theirs."""
    found = explain_by_ranks(held, [RIGHT] * 4, MESH)
    assert words in found and bool(found) == bool(words)


def test_the_share_of_a_microbatch() -> None:
    """One that is missing, one that counts twice, and neither."""
    shares = {"part 0 of 2": OTHER, "part 1 of 2": RIGHT - OTHER}
    assert explain_by_parts(OTHER, RIGHT, shares) == "the share of part 1 of 2 is missing"
    assert (
        explain_by_parts(RIGHT + OTHER, RIGHT, shares)
        == "the share of part 0 of 2 is counted twice"
    )
    assert explain_by_parts(2 * RIGHT, RIGHT, shares) == ""


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
    assert explain_row(first, expected, actual, SIZES).text.startswith(words)
