"""Luck: how large an error of rounding may be by chance, told from several errors of its kind.

Errors of rounding of one tensor are taken for draws of one law: e ~ N(0, S), S unknown.  Their
squared norm is a sum of chi squares, weighed by the eigenvalues of S.  Matched in mean and variance
it is tr(S)/n times a chi square of n = tr(S)^2 / tr(S^2) degrees of freedom (Satterthwaite,
Biometrics Bulletin 2, 1946; Box, Annals of Mathematical Statistics 25, 1954): n is one where all
elements move together, and the number of elements where each goes its own way.  So of one more
error x beside K others

    |x|^2 / mean |e|^2  ~  F(n, K n),

and it lies above the quantile of 1 - p of that law with chance p.  A ratio to a single error is
F(n, n): above 4 in one case of ten where n is 4, which is no rare tensor.

n is told from the same errors, by whichever of two is less, as too low an n is safe: quantiles fall
with n.  Of errors with a mean m of their own (all runs cast one weight) n is 2 (E |e|^2)^2 over
var |e|^2 = 2 tr(S^2) + 4 m'Sm, and

    of pairs of errors, the variance of e . f is a half of that: many pairs, less noise;
    of their squared norms it is seen itself, also where their law has longer tails.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

from torch import Tensor

CHANCE = 1e-6  # of a false alarm, in all rows of a report together
LEAST = 4  # errors that a law is told from: fewer say too little of n
MOST = 1e6  # degrees of freedom, of errors that are all the same


def bound(errors: Sequence[Tensor], chance: float) -> float:
    """The norm above which one more error lies with this chance; 0: these are too few to say."""
    if len(errors) < LEAST:
        return 0.0
    flat = [error.double().flatten() for error in errors]
    norms = [float(e @ e) for e in flat]
    mean = math.fsum(norms) / len(norms)
    if not mean or not math.isfinite(mean):
        return 0.0
    unit = [e / math.sqrt(mean) for e in flat]
    n = freedom([norm / mean for norm in norms], [[float(e @ f) for f in unit] for e in unit])
    return math.sqrt(mean * quantile(chance, n, n * len(norms)))


def freedom(norms: Sequence[float], dots: Sequence[Sequence[float]]) -> float:
    """Degrees of freedom, of errors whose mean squared norm is 1, and their inner products."""
    pairs = {(i, j): dots[i][j] for i, j in combinations(range(len(norms)), 2)}
    squares = math.fsum(p * p for p in pairs.values()) / len(pairs)
    apart = [
        p * q for (i, p), (j, q) in combinations(pairs.items(), 2) if not {*i} & {*j}
    ]  # their mean is that of e . f, squared
    by_pairs = squares - max(0.0, math.fsum(apart) / len(apart))
    by_norms = math.fsum((norm - 1) ** 2 for norm in norms) / (len(norms) - 1) / 2
    return min(MOST, max(1.0, 1 / max(by_pairs, by_norms, 1 / MOST)))


# -- the law F -------------------------------------------------------------------------------------


def quantile(chance: float, n: float, m: float) -> float:
    """Return the number above which F(n, m) lies with this chance."""
    low, high = 0.0, 1.0
    while above(high, n, m) > chance:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if above(middle, n, m) > chance else (low, middle)
    return high


def above(value: float, n: float, m: float) -> float:
    """The chance that F(n, m) lies above a number: an incomplete beta function."""
    return _beta(m / 2, n / 2, m / (m + n * value)) if value > 0 else 1.0


def _beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function, by its continued fraction (DLMF 8.17.22)."""
    if x > (a + 1) / (a + b + 2):  # where the other end converges faster
        return 1.0 - _beta(b, a, 1.0 - x) if x < 1 else 1.0
    front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) - math.log(a)
    front += a * math.log(x) + b * math.log1p(-x)
    c, d = 1.0, 1.0 / (1.0 - (a + b) * x / (a + 1))
    found = d
    for k in range(1, 10_000):
        even = k * (b - k) * x / ((a + 2 * k - 1) * (a + 2 * k))
        odd = -(a + k) * (a + b + k) * x / ((a + 2 * k) * (a + 2 * k + 1))
        for term in (even, odd):
            d = 1.0 / (1.0 + term * d)
            c = 1.0 + term / c
            found *= c * d
        if abs(c * d - 1.0) < 1e-13:
            break
    return math.exp(front) * found
