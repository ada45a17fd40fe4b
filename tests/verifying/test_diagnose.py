"""Diagnosis of a wrong tensor: each kind of mistake gets its own description."""

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
EXPECTED = torch.randn(12, 12, generator=GEN, dtype=torch.float64)
EYE = torch.eye(12, dtype=torch.float64)
CHECKERBOARD = (torch.arange(12)[:, None] + torch.arange(12)) % 2
OTHER = torch.randn(12, 12, generator=GEN, dtype=torch.float64)


def _one_block(value: float) -> torch.Tensor:
    changed = EXPECTED.clone()
    changed[6:] *= value
    return changed


@pytest.mark.parametrize(
    ("actual", "words"),
    [
        (EXPECTED * 2, "tp = 2 times"),
        (EXPECTED / 3, "1/dp = 1/3 times"),
        (EXPECTED * 6, "tp · dp = 6 times"),
        (EXPECTED * 2 / 3, "tp/dp = 2/3 times"),
        (EXPECTED * 5, "5 times"),
        (-EXPECTED, "-1 times"),
        (EXPECTED * 1.37, "1.37 times"),
        (EXPECTED * 0, "it is zero"),
        (EXPECTED * float("nan"), "144 of 144 elements are not finite"),
        (_one_block(0.0), "only block 1 of 2 blocks along dim 0 (tp = 2) is zero"),
        (_one_block(0.3), "only block 1 of 2 blocks along dim 0 (tp = 2) is wrong"),
        (
            torch.cat(EXPECTED.chunk(3, 1)[::-1], 1),
            "out of order: [2, 1, 0] of 3 blocks along dim 1",
        ),
        (EXPECTED[torch.randperm(12, generator=GEN)], "dim 0, in another order"),
        (EXPECTED.T, "transposed"),
        (EXPECTED + 0.5, "0.5 is added everywhere"),
        (EXPECTED + 0.5 * CHECKERBOARD + 1e-15, "a constant is added: 0.5 to 72 elements"),
        (EXPECTED + 0.5 * EYE + 0.25 * (1 - EYE), "is added: 0.25 to 132 and 0.5 to 12 elements"),
        (OTHER.clone(), "the value of other"),
        (EXPECTED + OTHER, "the value of other has been added"),
        (EXPECTED + 2 * OTHER, "tp = 2 times the value of other has been added"),
        (EXPECTED + 1.37 * OTHER, "no simple pattern"),
        (EXPECTED.float().double(), "float32 rounding"),
        (EXPECTED.bfloat16().double(), "bfloat16"),
        (EXPECTED[:6], "shape (6, 12) instead of (12, 12)"),
        (None, "detached"),
        (EXPECTED + EXPECTED.roll(1, 0) * OTHER, "no simple pattern"),
    ],
)
def test_the_pattern_is_named(actual, words: str) -> None:
    """The description names the factor, block, order or tensor that explains the difference."""
    assert words in diagnose(actual, EXPECTED, SIZES, {"other": OTHER}).text


def test_few_wrong_rows_are_no_rounding() -> None:
    """A rounding-sized error in a few rows is described by its places, not as rounding."""
    actual = EXPECTED.clone()
    actual[[1, 4, 5, 9]] *= 1 + 0.01 * torch.randn(4, 12, generator=GEN, dtype=torch.float64)
    assert 1e-3 < float((actual - EXPECTED).norm() / EXPECTED.norm()) < 1e-2
    text = diagnose(actual, EXPECTED, {}, {}).text
    assert text == "right, but for places [1, 4, 5, 9] of dim 0, which are wrong"


def test_many_wrong_places_are_counted() -> None:
    """Only the first wrong places are listed, with a count of the others."""
    expected = torch.randn(5000, generator=GEN, dtype=torch.float64)
    actual = expected.clone()
    actual[::3] = 7.0
    text = diagnose(actual, expected, {}, {}).text
    assert " and 1651 more of dim 0, which are wrong" in text and len(text) < 200, text


BIAS = torch.randn(12, generator=GEN, dtype=torch.float64)


@pytest.mark.parametrize(
    ("actual", "words"),
    [
        (EXPECTED + BIAS, "it holds its bias 1 times too often in every row: once per rank"),
        (EXPECTED + 3 * BIAS, "it holds its bias 3 times too often in every row: once per rank"),
        (EXPECTED - BIAS, "it holds its bias 1 times less in every row: once per rank"),
        (EXPECTED + 0.5 * BIAS, "no simple pattern fits"),
    ],
)
def test_a_vector_in_every_row(actual, words: str) -> None:
    """A bias added once per rank is distinguished from other multiples of it."""
    assert diagnose(actual, EXPECTED, SIZES, {"its bias": BIAS}).text == words


def test_few_wrong_elements_are_counted() -> None:
    """A lost tail is described as the last elements; scattered wrong elements are counted."""
    tail, holes = EXPECTED.clone(), EXPECTED.clone()
    tail[-1, -2:] = 0
    holes[3, 1] = holes[9, 5] = 7.0
    assert diagnose(tail, EXPECTED, {}).text == "only the last 2 of 144 elements are wrong and zero"
    assert diagnose(holes, EXPECTED, {}).text == "only 2 of 144 elements are wrong"


MESH = Mesh((("dp", 2), ("tp", 2)))


@pytest.mark.parametrize(
    ("held", "words"),
    [
        (
            [EXPECTED - OTHER, OTHER, EXPECTED - OTHER, OTHER],
            "sum over tp of the ranks' values is right",
        ),
        (
            [OTHER, OTHER, EXPECTED - OTHER, EXPECTED - OTHER],
            "sum over dp of the ranks' values is right",
        ),
        ([OTHER, 2 * EXPECTED - OTHER] * 2, "mean over tp of the ranks' values is right"),
        ([EXPECTED, None, EXPECTED, None], "only place 0 along tp has the right value"),
        ([OTHER] * 4, ""),
    ],
)
def test_the_ranks_own_values_tell_the_missing_reduction(held, words: str) -> None:
    """The explanation names the reduction and axis that would give the right value."""
    explanation = explain_by_ranks(held, [EXPECTED] * 4, MESH)
    assert words in explanation and bool(explanation) == bool(words)


def test_the_share_of_a_microbatch() -> None:
    """A missing microbatch, one counted twice, and neither."""
    shares = {"part 0 of 2": OTHER, "part 1 of 2": EXPECTED - OTHER}
    assert explain_by_parts(OTHER, EXPECTED, shares) == "the share of part 1 of 2 is missing"
    assert (
        explain_by_parts(EXPECTED + OTHER, EXPECTED, shares)
        == "the share of part 0 of 2 is counted twice"
    )
    assert explain_by_parts(2 * EXPECTED, EXPECTED, shares) == ""


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            EXPECTED * 2,
            "tp = 2 times the right value everywhere; equal just before it in backward: a",
        ),
        (OTHER * 1.0, "it is the value of w after step 1; equal"),
        (OTHER * 2.0, "it is the value of a; equal"),
    ],
)
def test_a_failing_row_is_explained(wrong: torch.Tensor, words: str) -> None:
    """The first difference is explained with its pattern and the last right gradient."""
    names = {("a", 0): OTHER * 2.0, ("w", 0): EXPECTED, ("w", 1): OTHER * 1.0}
    tensors = {Key("", "gradients", step, name): v for (name, step), v in names.items()}
    expected = Observation(tensors, order=("a", "w"))
    actual = Observation({k: v.clone() for k, v in tensors.items()})
    actual.tensors[Key("", "gradients", 0, "w")] = wrong.clone()
    first_failure = Report(compare(expected, actual)).first
    assert first_failure is not None
    assert explain_row(first_failure, expected, actual, SIZES).text.startswith(words)
