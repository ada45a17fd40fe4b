"""Compare module outputs and gradients in a low dtype, within the error bounds of the original."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from schedlang.passes.judge.low_dtype_errors import FACTOR_RTOL
from schedlang.passes.judge.module_calls import OutputKey, RecordedStep
from schedlang.passes.judge.module_comparison import ValueComparison
from schedlang.passes.judge.tensor_search import LEAST_COSINE, DirectionSearch, find_elements
from schedlang.passes.localize.diagnosis import Pattern, diagnose, named_factors
from schedlang.passes.verify.conditioning import ErrorBounds
from schedlang.passes.verify.observe import Key, Observation

COPY_ROUNDINGS = 16.0  # roundings by which copies may differ
SUM_BOUNDS = 4.0  # bounds that a sum of ranks' terms may be off, as each term is rounded


@dataclass(frozen=True)
class _DistancePattern(Pattern):
    """A sentence that gives only a distance, in bounds."""

    share: float = 0.0


class LowDtypeComparison(ValueComparison):
    """Comparison in a low dtype: with the original in float64, bounded by its runs in that dtype.

    run  its k-th run in the dtype: unperturbed for 0, each result off by a rounding for others
    eps  of the dtype
    """

    factor_rtol = FACTOR_RTOL

    def __init__(self, right: RecordedStep, run: Callable[[int], RecordedStep], eps: float) -> None:
        super().__init__(right)
        self.run, self.eps = cache(run), eps

    def find_elements(self, key: OutputKey, value: Tensor) -> Tensor | None:
        """Find the places of an output; None if it is further off than its bound."""
        places = self._assume_places(key, value)
        within_bound = places is not None and self.is_right(key, False, value, places)
        return places if within_bound else None

    def _assume_places(self, key: OutputKey, value: Tensor) -> Tensor | None:
        expected = self.right.tensor(key).double()
        places = find_elements(value, DirectionSearch(expected))
        if places is None and value.shape == expected.shape:
            return torch.arange(expected.numel()).reshape(expected.shape)
        return places

    def is_comparable(self, key: OutputKey, value: Tensor) -> bool:
        """Return whether an output has a place in the original's."""
        return self._assume_places(key, value) is not None

    def assumed_places(self, key: OutputKey, rank: int, value: Tensor) -> Tensor:
        """Return the place of a wrong output."""
        places = self._assume_places(key, value)
        return super().assumed_places(key, rank, value) if places is None else places

    def is_right(
        self, key: OutputKey, grad: bool, value: Tensor, places: Tensor, factor: float = 1.0
    ) -> bool:
        """Return whether a value is within its bound of the right value times a factor."""
        return not self._bound_ratio(key, grad, value, places, factor) > 1.0

    def is_right_sum(
        self, key: OutputKey, grad: bool, value: Tensor, places: Tensor, factor: float = 1.0
    ) -> bool:
        """Return whether a sum over ranks is right; each of its terms is rounded."""
        return not self._bound_ratio(key, grad, value, places, factor) > SUM_BOUNDS

    def _bound_ratio(
        self, output: OutputKey, grad: bool, value: Tensor, places: Tensor, factor: float = 1.0
    ) -> float:
        """Return the ratio of the error to its bound."""
        key = Key("", "gradients" if grad else "training outputs", 0, "value")

        def seen(run: RecordedStep) -> Observation:
            call = run.calls.get(output[0])
            exists = call is not None and (not grad or output[1] in call.gradients)
            return Observation(
                {key: run.tensor(output, grad).reshape(-1)[places] if exists else None}
            )

        bounds = ErrorBounds(seen(self.right), lambda draw: seen(self.run(draw)))
        rows = bounds.rows(Observation({key: value.double() / factor}))
        return rows[0].error if rows else 0.0

    def factor(self, actual: Tensor, expected: Tensor) -> float:
        """Return the factor of a gradient parallel to the right one, as a named number if near."""
        x, r = actual.double(), expected.double()
        dot, size = float((x * r).sum()), float((r * r).sum())
        if not abs(dot) > LEAST_COSINE * float(x.norm()) * math.sqrt(size):
            return 1.0
        ratio = dot / size
        named = (
            n
            for n in (1.0, *(n for _, n in named_factors({})))
            if abs(ratio - n) <= FACTOR_RTOL * abs(n)
        )
        return next(named, ratio)

    def are_copies(self, a: Tensor, b: Tensor) -> bool:
        """Return whether two copies are equal but for roundings."""
        return float((a.double() - b.double()).norm()) <= COPY_ROUNDINGS * self.eps * float(
            b.norm()
        )

    def pattern(
        self,
        key: OutputKey,
        grad: bool,
        value: Tensor,
        places: Tensor,
        factor: float,
        sizes: Mapping[str, int],
    ) -> Pattern:
        """Return the factor by which a value is wrong if it is right without, else its distance."""
        target = factor * self.right.tensor(key, grad).reshape(-1)[places].double()
        if value.shape != target.shape or not bool(value.isfinite().all()) or not bool(value.any()):
            return diagnose(value, target, sizes)
        dot, size = float((value.double() * target).sum()), float((target * target).sum())
        ratio = dot / size if size else 0.0
        named = [
            (w, n) for w, n in named_factors(sizes) if math.isclose(ratio, n, rel_tol=FACTOR_RTOL)
        ]
        for name, number in (*named[:1], (f"{ratio:.3g}", ratio)):
            if number and self.is_right(key, grad, value, places, factor * number):
                return Pattern(f"{name} times the right value everywhere")
        if torch.finfo(value.dtype).eps > self.eps:
            dtype = str(value.dtype).removeprefix("torch.")
            return Pattern(f"it is computed in {dtype}: judge the program by `--dtype {dtype}`")
        return _describe_distance([self._bound_ratio(key, grad, value, places, factor)])

    def join_patterns(self, patterns: Mapping[Pattern, list[int]]) -> dict[Pattern, list[int]]:
        """Join the sentences of ranks; all that give only a distance become one."""
        distances = {
            said: ranks for said, ranks in patterns.items() if isinstance(said, _DistancePattern)
        }
        joined = {said: ranks for said, ranks in patterns.items() if said not in distances}
        if distances:
            ranks = sorted(rank for rank_list in distances.values() for rank in rank_list)
            joined[_describe_distance([said.share for said in distances])] = ranks
        return joined


def _describe_distance(shares: Sequence[float]) -> _DistancePattern:
    """Describe a distance, on one rank or on several."""
    smallest, largest = f"{min(shares):.3g}", f"{max(shares):.3g}"
    times = largest if smallest == largest else f"{smallest} to {largest}"
    return _DistancePattern(
        f"{times} times as far off as roundings may move it", explains=False, share=max(shares)
    )
