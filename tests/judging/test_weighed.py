"""Parts of a batch that make a wrong gradient: found where they do, and not claimed elsewhere."""

from __future__ import annotations

import pytest
import torch

from schedlang.passes.judge.weighed import divisions, of_means, of_weights


def parts(count: int, elements: int = 24, seed: int = 0) -> list[torch.Tensor]:
    """Gradients of so many parts."""
    draw = torch.Generator().manual_seed(seed)
    return [
        torch.randn(elements, generator=draw, dtype=torch.float64).reshape(4, -1)
        for _ in range(count)
    ]


def total(weights: list[float], given: list[torch.Tensor]) -> torch.Tensor:
    """Their sum."""
    return sum((w * part for w, part in zip(weights, given)), torch.zeros_like(given[0]))


@pytest.mark.parametrize("seed", range(20))
def test_weights_are_those_by_which_parts_were_added(seed: int) -> None:
    """Whatever a program weighs parts by is said, next to what is right."""
    given = parts(4, seed=seed)
    wrong = torch.rand(4, generator=torch.Generator().manual_seed(seed)).tolist()
    said = of_weights(total([0.25] * 4, given), total(wrong, given), given)
    listed = ", ".join(f"{w:.3g}" for w in wrong)
    assert said == (
        f"what 4 parts of the batch give weighs {listed} instead of 0.25, 0.25, 0.25, 0.25"
    )


def test_parts_that_are_lost_are_named() -> None:
    """Only the last micro-batches of two ranks are there."""
    given = parts(4)
    said = of_weights(total([0.25] * 4, given), total([0, 0.25, 0, 0.25], given), given)
    assert said.startswith("parts 0, 2 of 4 parts of the batch do not count: ")


def test_nothing_is_claimed_where_weights_say_nothing() -> None:
    """A factor, another tensor, parts that are alike, few elements, a loss of all rows at once."""
    given = parts(4)
    right, wrong = total([0.25] * 4, given), total([0.25, 0.5, 0.25, 0.25], given)
    other = parts(1, seed=1)[0]
    assert of_weights(right, wrong, given)
    assert not of_weights(right, 2 * right, given)
    assert not of_weights(right, -right, given)
    assert not of_weights(right, other, given)
    assert not of_weights(right, wrong + 1e-5 * other, given)
    assert not of_weights(other, wrong, given)
    alike = [*given[:3], given[2]]
    assert not of_weights(total([0.25] * 4, alike), total([0.25, 0.5, 0.25, 0.25], alike), alike)
    few = [part * (torch.arange(6) == 0) for part in parts(4)]  # the rest is zero everywhere
    assert not of_weights(total([0.25] * 4, few), total([0.25, 0.5, 0.25, 0.25], few), few)


def test_a_plain_mean_says_how_parts_weigh() -> None:
    """The plain mean of means is named as such, and by which weights it would be right."""
    given = parts(2)
    said = of_means(total([0.7, 0.3], given), total([0.5, 0.5], given), given)
    assert said.startswith("it is the plain mean of what 2 parts") and "weigh 0.7, 0.3" in said
    assert not of_means(total([0.5, 0.5], given), total([0.5, 0.5], given), given)


def test_batches_are_cut_as_ranks_and_their_micro_batches_cut_them() -> None:
    """Divisors of the ranks, and micro-batches of ranks, if memory holds their gradients."""
    assert list(divisions(8, 2, 100)) == [2, 4, 8]
    assert list(divisions(8, 1, 100)) == [2, 4, 8]
    assert list(divisions(8, 4, 100)) == [2, 4, 8]
    assert list(divisions(6, 3, 100)) == [3, 6]
    assert list(divisions(8, 2, 1 << 27)) == [2]
    assert list(divisions(4, 8, 100)) == [2, 4]
