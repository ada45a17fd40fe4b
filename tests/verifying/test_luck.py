"""Tests of luck: how large an error may be by chance, told from several errors of its kind."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from schedlang.passes.verify.pooled_draws import LEAST, bound, quantile


@pytest.mark.parametrize(
    "n, m, chance, wanted",
    [
        (1, 10, 0.001, 21.04),
        (2, 4, 0.05, 6.944),
        (4, 8, 0.01, 7.006),
        (5, 10, 0.05, 3.326),
        (10, 120, 0.001, 3.237),
        (30, 30, 0.01, 2.386),
    ],
)
def test_the_law_is_that_of_tables(n: int, m: int, chance: float, wanted: float) -> None:
    """Upper quantiles of F, as printed in tables."""
    assert quantile(chance, n, m) == pytest.approx(wanted, rel=2e-4)


@pytest.mark.parametrize("chance", [1e-3, 1e-6, 1e-9])
def test_small_chances(chance: float) -> None:
    """F(2, m) has a closed form, P(F > f) = (1 + 2 f / m)^(-m/2), also far out in its tail."""
    for m in (3.0, 16.0, 250.0):
        assert quantile(chance, 2, m) == pytest.approx((chance ** (-2 / m) - 1) * m / 2, rel=1e-6)


Law = Callable[[], Tensor]


def _laws(n: int) -> dict[str, Law]:
    generator = torch.Generator().manual_seed(n)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    fading, shared = 0.5 ** torch.arange(n), normal(n)
    return {
        "each its own way": lambda: normal(n),
        "some more than others": lambda: normal(n) * fading,
        "together": lambda: shared * normal(1),
        "with one mean": lambda: shared + 0.3 * normal(n),
    }


@pytest.mark.parametrize("law", _laws(1))
def test_false_alarms_are_as_rare_as_said(law: str) -> None:
    """Whatever the covariance of errors, one more is above the bound as often as asked for."""
    for n in (1, 4, 64):
        draw = _laws(n)[law]
        above = {0.05: 0.0, 0.005: 0.0}
        trials, each = 100, 50
        for _ in range(trials):
            known = [draw() for _ in range(9)]
            more = [float(draw().norm()) for _ in range(each)]
            for chance in above:
                limit = bound(known, chance)
                above[chance] += sum(size > limit for size in more) / trials / each
        for chance, found in above.items():
            assert found <= 3 * chance + 0.003, (n, chance, found)


def test_a_bound_is_no_licence() -> None:
    """Of many elements that err each its own way none may be half as large again; of one number,
    of which nine draws tell little, up to some twenty times."""
    for n, most in ((1000, 1.5), (64, 2.0), (16, 3.0), (1, 30.0)):
        known = [_laws(n)["each its own way"]] * 9
        limit = bound([draw() for draw in known], 1e-9)
        assert math.sqrt(n) < limit < most * math.sqrt(n), (n, limit)


def test_what_cannot_be_told() -> None:
    """Too few errors, none at all, or such that are no numbers: no bound."""
    one = torch.ones(3)
    assert bound([one] * (LEAST - 1), 1e-6) == 0.0
    assert bound([0 * one] * 9, 1e-6) == 0.0
    assert bound([*[one] * 8, one * math.inf], 1e-6) == 0.0
    assert bound([one] * 9, 1e-6) == pytest.approx(math.sqrt(3), rel=0.01)
