"""Explain wrong tensors in a low dtype: find a correction that brings them within their bounds.

In a low dtype no pattern fits to the last digit. So a wrong tensor is corrected (divided by a
factor, or assembled otherwise from ranks' copies), and compared with its bound once more.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from schedlang.diagnostics.diagnostic import quote_names
from schedlang.passes.judge.batch_parts import BatchParts, PartGradients
from schedlang.passes.judge.explanations import MOST_GROUPS, FirstModule, explain_initial_weights
from schedlang.passes.judge.gradient_errors import describe_part_counts, describe_part_mean
from schedlang.passes.judge.optimizer_steps import MOST_NAMES
from schedlang.passes.judge.record import RunRecord
from schedlang.passes.localize.diagnosis import named_factors
from schedlang.passes.verify.conditioning import IN_DTYPE, ErrorBounds, RunOriginal
from schedlang.passes.verify.observe import Key, Observation
from schedlang.report import Row

_KINDS = ("gradients", "loss", "gradient norm")
FACTOR_RTOL = 0.02  # relative tolerance between a factor and a named number
LEAST_FACTOR_GAP = 0.05  # factors nearer to 1 are not reported
_REPLICA_PREFIX = "gradient of "  # begins names of rows about replicas
Correction = Callable[[Key, Tensor], tuple[str, Tensor] | None]


@dataclass(frozen=True)
class CachedRuns:
    """Runs of the original, with a cache of their first steps."""

    run: RunOriginal
    steps: dict[int, Observation] = field(default_factory=dict)

    def __call__(self, draw: int) -> Observation:
        """Run all steps."""
        seen = self.run(draw)
        self.steps[draw] = _first_step(seen)
        return seen

    def first_step(self, draw: int) -> Observation:
        """Return the first step of a run; run it only if it is not cached."""
        if draw not in self.steps:
            self(draw)
        return self.steps[draw]


def explain_low_dtype(
    rows: Sequence[Row],
    bounds: ErrorBounds,
    seen: Observation,
    record: RunRecord,
    ranks: int,
    parts: BatchParts,
    where: FirstModule,
) -> tuple[tuple[str, str], ...]:
    """Explain wrong gradients of the first step, or else its wrong loss or gradient norm.

    Only runs without clipping are explained. A sentence is given only if the corrected values are
    within the bounds of all tensors that it names. `where` is the first wrong module; `parts` give
    float64 gradients of parts of the batch.
    """
    if other := explain_initial_weights([row for row in rows if not row.ok]):
        return other
    first = (("first module", where.text),) if where.text else ()
    run = bounds.run if isinstance(bounds.run, CachedRuns) else CachedRuns(bounds.run)
    bounds = replace(bounds, run=run.first_step)
    sizes = {**(record.holdings.axes if record.holdings is not None else {}), "ranks": ranks}
    for kind in _KINDS:
        left = dict.fromkeys(_failing_keys(rows, bounds, kind))
        if not left:
            continue
        said: dict[str, list[str]] = {}
        factors = _fit_factors(bounds, seen, [*left])
        common = dict.fromkeys(factors, statistics.median(factors.values()) if factors else 0.0)
        corrections = [_copy_correction(record, mean) for mean in (True, False)]
        corrections += [
            _factor_correction(sizes, each) for each in (common, _cluster_factors(factors), factors)
        ]
        corrections += (
            _part_corrections(bounds, seen, [*left], parts) if kind == "gradients" else ()
        )
        for correction in corrections:
            for key, words in _find_corrected(bounds, seen, list(left), correction).items():
                said.setdefault(words, []).append(key.name)
                del left[key]
        for key in left:
            said.setdefault(_describe_other(seen.tensors.get(key)), []).append(key.name)
        of = sum(k.kind == kind and k.step == 0 for k in bounds.exact.tensors) // 2 or 1
        lines = [
            (k, f"{len(n)} of {of} ({quote_names(n, MOST_NAMES)}): {k}") for k, n in said.items()
        ]
        return (*first, *((kind, text) for words, text in lines if words))[:MOST_GROUPS]
    return first


def _first_step(seen: Observation) -> Observation:
    """Keep the values that can be corrected: of the first step, in runs without clipping."""
    first = {k: v for k, v in seen.tensors.items() if not k.step and "clipped" not in k.condition}
    return Observation({k: v for k, v in first.items() if k.kind in _KINDS})


def _failing_keys(rows: Sequence[Row], bounds: ErrorBounds, kind: str) -> Iterator[Key]:
    """Yield the tensors of a kind that fail in the first step of a run without clipping."""
    for row in rows:
        name = row.name
        if row.kind == "replicas" and name.startswith(_REPLICA_PREFIX) and kind == "gradients":
            name = name.removeprefix(_REPLICA_PREFIX)
        elif row.kind != kind + IN_DTYPE:
            continue
        key = Key(row.condition, kind, 0, name)
        clipped = "clipped" in row.condition
        if not row.ok and row.step == 0 and not clipped and key in bounds.exact.tensors:
            yield key


def _find_corrected(
    bounds: ErrorBounds, seen: Observation, keys: Sequence[Key], mended: Correction
) -> dict[Key, str]:
    """Return the sentence for each tensor that is within its bound after a correction."""
    found = {k: mended(k, v) for k in keys if (v := seen.tensors.get(k)) is not None}
    known = {key: one for key, one in found.items() if one is not None}
    if not known:
        return {}
    steps = (k for k in bounds.exact.tensors if k[:2] in {one[:2] for one in known})
    exact = {k: bounds.exact.tensors[k] for k in steps if k in known or k.kind != "gradients"}
    alone = replace(bounds, exact=replace(bounds.exact, tensors=exact))
    other = replace(seen, tensors={k: value for k, (_, value) in known.items()})
    right = {Key(r.condition, k.kind, 0, r.name) for r in alone.rows(other) for k in known if r.ok}
    return {key: words for key, (words, _) in known.items() if key in right}


def _copy_correction(record: RunRecord, mean: bool) -> Correction:
    """Make a correction: the mean, or the sum, of ranks' differing copies of the same elements."""

    def mended(key: Key, value: Tensor) -> tuple[str, Tensor] | None:
        copies = [
            c for c in record.gradient_copies(key.condition, key.name) if c.stored is not None
        ]
        if key.kind != "gradients" or len(copies) < 2:
            return None
        groups: dict[bytes, tuple[Tensor, list[Tensor]]] = {}  # places, and values by rank
        for one in copies:
            assert one.values is not None
            places, order = one.places.sort()
            group = groups.setdefault(places.numpy().tobytes(), (places, []))
            group[1].append(one.values.double()[order])
        if sum(len(places) for places, _ in groups.values()) != value.numel():
            return None
        if all(torch.equal(one, each[0]) for _, each in groups.values() for one in each):
            return None
        made = torch.zeros(value.numel(), dtype=torch.float64)
        for places, each in groups.values():
            total = torch.stack(each)
            made[places] = total.mean(0) if mean else total.sum(0)
        if mean:
            said = "ranks differ and their mean is right: they are not averaged"
        else:
            said = "ranks differ and their sum is right: a sum over ranks is missing"
        return said, made.reshape(value.shape)

    return mended


def _factor_correction(sizes: Mapping[str, int], factors: Mapping[Key, float]) -> Correction:
    """Make a correction: the value divided by its factor, or by the named number nearest to it."""

    def mended(key: Key, value: Tensor) -> tuple[str, Tensor] | None:
        found = factors.get(key, 0.0)
        if not found or not math.isfinite(found) or abs(found - 1.0) <= LEAST_FACTOR_GAP:
            return None  # too near to 1 to explain a failure
        near = (
            one for one in named_factors(sizes) if math.isclose(found, one[1], rel_tol=FACTOR_RTOL)
        )
        words, number = next(near, (f"{found:.2g}", found))
        return f"{words} times the right value everywhere", value.double() / number

    return mended


def _part_corrections(
    bounds: ErrorBounds, seen: Observation, keys: Sequence[Key], parts: BatchParts
) -> Iterator[Correction]:
    """Yield corrections for each division of a batch: a plain mean of the parts, and weighted sums.

    In a low dtype the weights of a sum cannot be found from one tensor, only from all together.
    """
    each = {
        key: [
            *parts.split_by_rows(key.name, key.condition),
            *parts.split_by_tokens(key.name, key.condition),
        ]
        for key in keys
    }
    for place in range(max(map(len, each.values()), default=0)):
        cut = {key: found[place] for key, found in each.items() if place < len(found)}

        def mean(key: Key, value: Tensor, cut: Any = cut) -> tuple[str, Tensor] | None:
            want = bounds.exact.tensors[key]
            if key not in cut or want is None:
                return None
            made = torch.stack([*cut[key].parts]).mean(0)
            return describe_part_mean(want, cut[key]), value.double() - made + want

        yield mean
        times = _part_counts(bounds, seen, cut)
        if times is None:
            continue

        def weighted(
            key: Key, value: Tensor, cut: Any = cut, times: Any = times
        ) -> tuple[str, Tensor] | None:
            want = bounds.exact.tensors[key]
            if key not in cut or want is None:
                return None
            columns = torch.stack([part.reshape(-1) for part in cut[key].parts], 1)
            weights = torch.linalg.lstsq(columns, want.reshape(-1, 1)).solution[:, 0]
            made = (columns @ (weights * torch.tensor(times, dtype=torch.float64))).reshape(
                want.shape
            )
            return describe_part_counts(times, cut[key].unit), value.double() - made + want

        yield weighted


def _part_counts(
    bounds: ErrorBounds, seen: Observation, cut: Mapping[Key, PartGradients]
) -> list[float] | None:
    """Find how often each part of a batch counts in all gradients; None: they are no such sums."""
    columns, got, want = list[Tensor](), list[Tensor](), list[Tensor]()
    for key, one in cut.items():
        x, r = seen.tensors.get(key), bounds.exact.tensors[key]
        if x is None or r is None or not bool(r.any()) or not bool(x.isfinite().all()):
            continue
        size = float(r.norm())
        columns.append(torch.stack([part.reshape(-1) for part in one.parts], 1) / size)
        got.append(x.double().reshape(-1) / size)
        want.append(r.reshape(-1) / size)
    if not columns:
        return None
    both = torch.stack([torch.cat(got), torch.cat(want)], 1)
    made = torch.linalg.lstsq(torch.cat(columns), both, driver="gelsd")
    if int(made.rank) < both.shape[1] or not bool((made.solution[:, 1] != 0).all()):
        return None
    times: list[float] = (made.solution[:, 0] / made.solution[:, 1]).tolist()
    if not all(map(math.isfinite, times)):
        return None
    near = [
        next((n for n in _ROUND_COUNTS if abs(one - n) <= FACTOR_RTOL), round(one, 2))
        for one in times
    ]
    return near if max(near) - min(near) > FACTOR_RTOL * max(map(abs, near)) else None


_ROUND_COUNTS = (0.0, 0.25, 1 / 3, 0.5, 1.0, 2.0, 3.0, 4.0)


def _fit_factors(bounds: ErrorBounds, seen: Observation, keys: Sequence[Key]) -> dict[Key, float]:
    """Return the least-squares factor between each value and the original's."""
    found = {}
    for key in keys:
        x, r = seen.tensors.get(key), bounds.exact.tensors[key]
        if x is not None and r is not None and x.shape == r.shape and bool(r.any()):
            x, r = x.double(), r.double()
            found[key] = float((x * r).sum() / (r * r).sum())
    return found


def _cluster_factors(factors: Mapping[Key, float]) -> dict[Key, float]:
    """Replace each factor by the median of the group of factors near it."""
    groups: list[list[Key]] = []
    for key in sorted(factors, key=lambda one: factors[one]):
        if groups and math.isclose(factors[groups[-1][0]], factors[key], rel_tol=FACTOR_RTOL):
            groups[-1].append(key)
        else:
            groups.append([key])
    return {key: factors[group[len(group) // 2]] for group in groups for key in group}


def _describe_other(value: Tensor | None) -> str:
    if value is None:
        return "no rank has one: detached, or never computed"
    return "" if value.any() else "it is zero: detached, or never received"
