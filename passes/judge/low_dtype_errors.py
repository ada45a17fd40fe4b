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
from schedlang.passes.judge.explanations import (
    MOST_GROUPS,
    FirstModule,
    explain_buffer,
    explain_initial_weights,
)
from schedlang.passes.judge.gradient_errors import (
    SPARE_EQUATIONS,
    describe_part_counts,
    describe_part_mean,
)
from schedlang.passes.judge.low_dtype_steps import OWN_STEP
from schedlang.passes.judge.optimizer_steps import MOST_NAMES, prefix_names
from schedlang.passes.judge.record import RunRecord
from schedlang.passes.localize.diagnosis import named_factors
from schedlang.passes.verify.conditioning import IN_DTYPE, ErrorBounds, RunOriginal
from schedlang.passes.verify.observe import Key, Observation
from schedlang.report import Row

_KINDS = ("gradients", "loss", "gradient norm")
FACTOR_RTOL = 0.02  # relative tolerance between a factor and a named number
LEAST_FACTOR_GAP = 0.05  # factors nearer to 1 are not reported
_OTHER_STEP = (
    "an optimizer's step is another, or is computed from shards; without `--dtype` the judge "
    "examines it in float64"
)
_REPLICA_PREFIX = "gradient of "  # begins names of rows about replicas
Correction = Callable[[Key, Tensor], tuple[str, Tensor] | None]


@dataclass(frozen=True)
class CachedRuns:
    """Runs of the original, with a cache of their first steps."""

    run: RunOriginal
    steps: dict[int, Observation] = field(default_factory=dict)

    def __call__(self, draw: int) -> Observation:
        """Run all steps."""
        observation = self.run(draw)
        self.steps[draw] = _first_step(observation)
        return observation

    def first_step(self, draw: int) -> Observation:
        """Return the first step of a run; run it only if it is not cached."""
        if draw not in self.steps:
            self(draw)
        return self.steps[draw]


def explain_low_dtype(
    rows: Sequence[Row],
    bounds: ErrorBounds,
    actual: Observation,
    record: RunRecord,
    ranks: int,
    parts: BatchParts,
    first_module: FirstModule,
) -> tuple[tuple[str, str], ...]:
    """Explain wrong gradients of the first step, or else its wrong loss or gradient norm.

    Only runs without clipping are explained. A sentence is given only if the corrected values are
    within the bounds of all tensors that it names. `where` is the first wrong module; `parts` give
    float64 gradients of parts of the batch.
    """
    if initial_lines := explain_initial_weights([row for row in rows if not row.ok]):
        return initial_lines
    if step_lines := _explain_own_steps(rows, len(bounds.exact.order)):
        return step_lines
    first_line = (("first module", first_module.text),) if first_module.text else ()
    cached = bounds.run if isinstance(bounds.run, CachedRuns) else CachedRuns(bounds.run)
    bounds = replace(bounds, run=cached.first_step)
    sizes = {**(record.holdings.axes if record.holdings is not None else {}), "ranks": ranks}
    for kind in _KINDS:
        rest = dict.fromkeys(_failing_keys(rows, bounds, kind))
        if not rest:
            continue
        texts: dict[str, list[str]] = {}
        factors = _fit_factors(bounds, actual, [*rest])
        common = dict.fromkeys(factors, statistics.median(factors.values()) if factors else 0.0)
        corrections = [_copy_correction(record, mean) for mean in (True, False)]
        corrections += [
            _factor_correction(sizes, fit) for fit in (common, _cluster_factors(factors), factors)
        ]
        corrections += (
            _part_corrections(bounds, actual, [*rest], parts) if kind == "gradients" else ()
        )
        for correction in corrections:
            for key, sentence in _find_corrected(bounds, actual, list(rest), correction).items():
                texts.setdefault(sentence, []).append(key.name)
                del rest[key]
        for key in rest:
            texts.setdefault(_describe_other(actual.tensors.get(key)), []).append(key.name)
        many = sum(k.kind == kind and k.step == 0 for k in bounds.exact.tensors) // 2 or 1
        lines = [
            (k, f"{len(n)} of {many} ({quote_names(n, MOST_NAMES)}): {k}") for k, n in texts.items()
        ]
        return (*first_line, *((kind, text) for sentence, text in lines if sentence))[:MOST_GROUPS]
    first = next((row for row in rows if not row.ok), None)
    if first_line or first is None:
        return first_line
    kind = first.kind.removesuffix(IN_DTYPE)
    if text := explain_buffer(first, [row for row in rows if not row.ok]):
        return ((kind, text),)
    if kind == "parameters":
        return ((kind, f"`{first.name}`: its gradients are within their bounds: {_OTHER_STEP}"),)
    text = f"step {first.step} is the first beyond its bounds: its batch shows it, or {_OTHER_STEP}"
    return ((kind, text),) if first.step else ()


def _explain_own_steps(rows: Sequence[Row], many: int) -> tuple[tuple[str, str], ...]:
    """Describe wrong steps of the program's optimizer, grouped by what is wrong."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        if not row.ok and row.kind == OWN_STEP:
            groups.setdefault(row.note, []).append(row.name)
    return tuple((OWN_STEP, prefix_names(k, n, many)) for k, n in groups.items())[:MOST_GROUPS]


def _first_step(actual: Observation) -> Observation:
    """Keep the values that can be corrected: of the first step, in runs without clipping."""
    kept = {k: v for k, v in actual.tensors.items() if not k.step and "clipped" not in k.condition}
    return Observation({k: v for k, v in kept.items() if k.kind in _KINDS})


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
    bounds: ErrorBounds, actual: Observation, keys: Sequence[Key], correct: Correction
) -> dict[Key, str]:
    """Return the sentence for each tensor that is within its bound after a correction."""
    corrections = {k: correct(k, v) for k in keys if (v := actual.tensors.get(k)) is not None}
    fixes = {key: one for key, one in corrections.items() if one is not None}
    if not fixes:
        return {}
    steps = (k for k in bounds.exact.tensors if k[:2] in {one[:2] for one in fixes})
    gate = bounds.limited_to(k for k in steps if k in fixes or k.kind != "gradients")
    trial = replace(actual, tensors={k: value for k, (_, value) in fixes.items()})
    valid = {Key(r.condition, k.kind, 0, r.name) for r in gate.rows(trial) for k in fixes if r.ok}
    return {key: sentence for key, (sentence, _) in fixes.items() if key in valid}


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
        if all(torch.equal(one, tensors[0]) for _, tensors in groups.values() for one in tensors):
            return None
        corrected = torch.zeros(value.numel(), dtype=torch.float64)
        for places, tensors in groups.values():
            total = torch.stack(tensors)
            corrected[places] = total.mean(0) if mean else total.sum(0)
        if mean:
            text = "ranks differ and their mean is right: they are not averaged"
        else:
            text = "ranks differ and their sum is right: a sum over ranks is missing"
        return text, corrected.reshape(value.shape)

    return mended


def _factor_correction(sizes: Mapping[str, int], factors: Mapping[Key, float]) -> Correction:
    """Make a correction: the value divided by its factor, or by the named number nearest to it."""

    def mended(key: Key, value: Tensor) -> tuple[str, Tensor] | None:
        factor = factors.get(key, 0.0)
        if not factor or not math.isfinite(factor) or abs(factor - 1.0) <= LEAST_FACTOR_GAP:
            return None  # too near to 1 to explain a failure
        named = (p for p in named_factors(sizes) if math.isclose(factor, p[1], rel_tol=FACTOR_RTOL))
        name, number = next(named, (f"{factor:.2g}", factor))
        return f"{name} times the right value everywhere", value.double() / number

    return mended


def _part_corrections(
    bounds: ErrorBounds, actual: Observation, keys: Sequence[Key], parts: BatchParts
) -> Iterator[Correction]:
    """Yield corrections for each division of a batch: a plain mean of the parts, and weighted sums.

    In a low dtype the weights of a sum cannot be found from one tensor, only from all together.
    """
    divisions = {
        key: [
            *parts.split_by_rows(key.name, key.condition),
            *parts.split_by_tokens(key.name, key.condition),
        ]
        for key in keys
    }
    for index in range(max(map(len, divisions.values()), default=0)):
        cut = {key: cuts[index] for key, cuts in divisions.items() if index < len(cuts)}

        def mean(key: Key, value: Tensor, cut: Any = cut) -> tuple[str, Tensor] | None:
            expected = bounds.exact.tensors[key]
            if key not in cut or expected is None:
                return None
            part_mean = torch.stack([*cut[key].parts]).mean(0)
            return describe_part_mean(expected, cut[key]), value.double() - part_mean + expected

        yield mean
        times = _part_counts(bounds, actual, cut)
        if times is None:
            continue

        def weighted(
            key: Key, value: Tensor, cut: Any = cut, times: Any = times
        ) -> tuple[str, Tensor] | None:
            expected = bounds.exact.tensors[key]
            if key not in cut or expected is None:
                return None
            columns = torch.stack([part.reshape(-1) for part in cut[key].parts], 1)
            if len(columns) < len(times) + SPARE_EQUATIONS:
                return None  # a few numbers are explained by any weights
            weights = torch.linalg.lstsq(columns, expected.reshape(-1, 1)).solution[:, 0]
            combined = (columns @ (weights * torch.tensor(times, dtype=torch.float64))).reshape(
                expected.shape
            )
            return describe_part_counts(times, cut[key].unit), value.double() - combined + expected

        yield weighted


def _part_counts(
    bounds: ErrorBounds, actual: Observation, cut: Mapping[Key, PartGradients]
) -> list[float] | None:
    """Find how often each part of a batch counts in all gradients; None: they are no such sums."""
    columns, got, want = list[Tensor](), list[Tensor](), list[Tensor]()
    for key, one in cut.items():
        x, r = actual.tensors.get(key), bounds.exact.tensors[key]
        if x is None or r is None or not bool(r.any()) or not bool(x.isfinite().all()):
            continue
        size = float(r.norm())
        columns.append(torch.stack([part.reshape(-1) for part in one.parts], 1) / size)
        got.append(x.double().reshape(-1) / size)
        want.append(r.reshape(-1) / size)
    if not columns:
        return None
    targets = torch.stack([torch.cat(got), torch.cat(want)], 1)
    solution = torch.linalg.lstsq(torch.cat(columns), targets, driver="gelsd")
    if int(solution.rank) < targets.shape[1] or not bool((solution.solution[:, 1] != 0).all()):
        return None
    times: list[float] = (solution.solution[:, 0] / solution.solution[:, 1]).tolist()
    if not all(map(math.isfinite, times)):
        return None
    rounded = [
        next((n for n in _ROUND_COUNTS if abs(one - n) <= FACTOR_RTOL), round(one, 2))
        for one in times
    ]
    return rounded if max(rounded) - min(rounded) > FACTOR_RTOL * max(map(abs, rounded)) else None


_ROUND_COUNTS = (0.0, 0.25, 1 / 3, 0.5, 1.0, 2.0, 3.0, 4.0)


def _fit_factors(bounds: ErrorBounds, actual: Observation, keys: Sequence[Key]) -> dict[Key, float]:
    """Return the least-squares factor between each value and the original's."""
    factors = {}
    for key in keys:
        x, r = actual.tensors.get(key), bounds.exact.tensors[key]
        if x is not None and r is not None and x.shape == r.shape and bool(r.any()):
            x, r = x.double(), r.double()
            factors[key] = float((x * r).sum() / (r * r).sum())
    return factors


def _cluster_factors(factors: Mapping[Key, float]) -> dict[Key, float]:
    """Replace each factor by the median of the group of factors near it."""
    groups: list[list[Key]] = []
    for key in sorted(factors, key=lambda candidate: factors[candidate]):
        if groups and math.isclose(factors[groups[-1][0]], factors[key], rel_tol=FACTOR_RTOL):
            groups[-1].append(key)
        else:
            groups.append([key])
    return {key: factors[group[len(group) // 2]] for group in groups for key in group}


def _describe_other(value: Tensor | None) -> str:
    if value is None:
        return "no rank has one: detached, or never computed"
    return "" if value.any() else "it is zero: detached, or never received"
