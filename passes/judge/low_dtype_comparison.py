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

    def find_elements(self, at: OutputKey, value: Tensor) -> Tensor | None:
        """Find the places of an output; None if it is further off than its bound."""
        places = self._assume_places(at, value)
        right = places is not None and self.is_right(at, False, value, places)
        return places if right else None

    def _assume_places(self, at: OutputKey, value: Tensor) -> Tensor | None:
        want = self.right.tensor(at).double()
        found = find_elements(value, DirectionSearch(want))
        if found is None and value.shape == want.shape:
            return torch.arange(want.numel()).reshape(want.shape)
        return found

    def is_comparable(self, at: OutputKey, value: Tensor) -> bool:
        """Return whether an output has a place in the original's."""
        return self._assume_places(at, value) is not None

    def assumed_places(self, at: OutputKey, rank: int, value: Tensor) -> Tensor:
        """Return the place of a wrong output."""
        found = self._assume_places(at, value)
        return super().assumed_places(at, rank, value) if found is None else found

    def is_right(
        self, at: OutputKey, back: bool, value: Tensor, places: Tensor, factor: float = 1.0
    ) -> bool:
        """Return whether a value is within its bound of the right value times a factor."""
        return not self._bound_ratio(at, back, value, places, factor) > 1.0

    def is_right_sum(
        self, at: OutputKey, back: bool, value: Tensor, places: Tensor, factor: float = 1.0
    ) -> bool:
        """Return whether a sum over ranks is right; each of its terms is rounded."""
        return not self._bound_ratio(at, back, value, places, factor) > SUM_BOUNDS

    def _bound_ratio(
        self, at: OutputKey, back: bool, value: Tensor, places: Tensor, factor: float = 1.0
    ) -> float:
        """Return the ratio of the error to its bound."""
        key = Key("", "gradients" if back else "training outputs", 0, "value")

        def seen(run: RecordedStep) -> Observation:
            call = run.calls.get(at[0])
            there = call is not None and (not back or at[1] in call.gradients)
            return Observation({key: run.tensor(at, back).reshape(-1)[places] if there else None})

        bounds = ErrorBounds(seen(self.right), lambda draw: seen(self.run(draw)))
        rows = bounds.rows(Observation({key: value.double() / factor}))
        return rows[0].error if rows else 0.0

    def factor(self, got: Tensor, want: Tensor) -> float:
        """Return the factor of a gradient parallel to the right one, as a named number if near."""
        x, r = got.double(), want.double()
        along, size = float((x * r).sum()), float((r * r).sum())
        if not abs(along) > LEAST_COSINE * float(x.norm()) * math.sqrt(size):
            return 1.0
        found = along / size
        near = (
            n
            for n in (1.0, *(n for _, n in named_factors({})))
            if abs(found - n) <= FACTOR_RTOL * abs(n)
        )
        return next(near, found)

    def are_copies(self, a: Tensor, b: Tensor) -> bool:
        """Return whether two copies are equal but for roundings."""
        return float((a.double() - b.double()).norm()) <= COPY_ROUNDINGS * self.eps * float(
            b.norm()
        )

    def pattern(
        self,
        at: OutputKey,
        back: bool,
        value: Tensor,
        places: Tensor,
        factor: float,
        sizes: Mapping[str, int],
    ) -> Pattern:
        """Return the factor by which a value is wrong if it is right without, else its distance."""
        want = factor * self.right.tensor(at, back).reshape(-1)[places].double()
        if value.shape != want.shape or not bool(value.isfinite().all()) or not bool(value.any()):
            return diagnose(value, want, sizes)
        along, size = float((value.double() * want).sum()), float((want * want).sum())
        found = along / size if size else 0.0
        near = [
            (w, n) for w, n in named_factors(sizes) if math.isclose(found, n, rel_tol=FACTOR_RTOL)
        ]
        for words, number in (*near[:1], (f"{found:.3g}", found)):
            if number and self.is_right(at, back, value, places, factor * number):
                return Pattern(f"{words} times the right value everywhere")
        if torch.finfo(value.dtype).eps > self.eps:
            word = str(value.dtype).removeprefix("torch.")
            return Pattern(f"it is computed in {word}: judge the program by `--dtype {word}`")
        return _describe_distance([self._bound_ratio(at, back, value, places, factor)])

    def join_patterns(self, patterns: Mapping[Pattern, list[int]]) -> dict[Pattern, list[int]]:
        """Join the sentences of ranks; all that give only a distance become one."""
        far = {one: ranks for one, ranks in patterns.items() if isinstance(one, _DistancePattern)}
        found = {one: ranks for one, ranks in patterns.items() if one not in far}
        if far:
            ranks = sorted(rank for each in far.values() for rank in each)
            found[_describe_distance([one.share for one in far])] = ranks
        return found


def _describe_distance(shares: Sequence[float]) -> _DistancePattern:
    """Describe a distance, on one rank or on several."""
    least, most = f"{min(shares):.3g}", f"{max(shares):.3g}"
    times = most if least == most else f"{least} to {most}"
    return _DistancePattern(
        f"{times} times as far off as roundings may move it", explains=False, share=max(shares)
    )
