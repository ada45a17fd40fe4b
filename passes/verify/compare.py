"""Compare two observations tensor by tensor, by name.

Two tensors are equal if |x - r| <= rtol |r| + 1e-12 s. Here s is the largest norm among the
original's tensors of the same kind, because a gradient that is zero but for roundings has no
relative error. The same test with the largest element instead of the norm is a hundred times wider:
one wrong element among millions does not change a norm. NaN equals nothing, except places of
outputs that are NaN on both sides, because a mask may hide them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import reduce
from types import MappingProxyType

import torch
from torch import Tensor, dtype

from schedlang.passes.verify.observe import HIDDEN_BUFFERS, Key, Observation
from schedlang.report import Row

RTOL = 1e-9
FLOOR = 1e-12  # of the largest norm among tensors of the kind
ELEMENT_MARGIN = 100.0  # factor of the gate of a single element
_NO_SIZES: Mapping[str, float] = MappingProxyType({})

OUTPUTS = ("outputs", "training outputs")
DRAWS = "dropout draws"

# the order in which a difference arises
_ORDER: tuple[str, ...] = (
    *("trainable set", "state_dict keys", "outputs", "training outputs", "loss", "gradients"),
    *("input gradients", "gradient norm", "parameters", "other state", HIDDEN_BUFFERS),
    DRAWS,
)


def compare(
    expected: Observation, actual: Observation, *, rtol: float = RTOL, exact: bool = False
) -> tuple[Row, ...]:
    """Return all comparisons, in the order in which differences arise: forward, backward, updates.

    With `exact` all bits must be equal. Kinds and places that the actual side does not offer
    (`actual.missing`, `actual.left_out`) are skipped, so report them. The draws of the expected
    side are checked by themselves.
    """
    sets = list(_sets(expected, actual))
    rows = [row for row in sets if row.kind != DRAWS]
    rows += compare_tensors(expected, actual, rtol, exact)
    rows += _ties(expected, actual)
    rows += [row for row in sets if row.kind == DRAWS]
    for key, (count, repeats) in expected.streams.items():
        note = "" if not repeats else f"{len(repeats)} repeat: {repeats[0]}"
        name = f"{count - len(repeats)} {'instead of' if repeats else '='} {count}"
        rows.append(Row(key.condition, key.kind, name, len(repeats), 0.0, not repeats, None, note))
    for key, (count, wrong_masks) in actual.streams.items():
        name = f"{count} masks in steps as training takes them"
        note = "; ".join(wrong_masks[:2])
        rows.append(
            Row(key.condition, key.kind, name, len(wrong_masks), 0.0, not wrong_masks, None, note)
        )
    for key, error in actual.replicas.items():
        gate = 0.0 if exact else rtol
        ok = error <= gate
        note = "" if ok else "copies on different ranks differ"
        rows.append(Row(key.condition, "replicas", key.name, error, gate, ok, key.step, note))
    return tuple(rows)


def _sets(expected: Observation, actual: Observation) -> Iterator[Row]:
    keys = dict.fromkeys((*expected.sets, *actual.sets))
    for key in sorted(keys, key=lambda k: _ORDER.index(k.kind)):
        if key.kind in actual.missing:
            continue
        expected_names = expected.sets.get(key, frozenset())
        actual_names = actual.sets.get(key, frozenset())
        lost, extra = sorted(expected_names - actual_names), sorted(actual_names - expected_names)
        note = "; ".join(
            f"{label}: {', '.join(names[:8])}"
            for label, names in (("lost", lost), ("extra", extra))
            if names
        )
        name = (
            f"{len(actual_names)} = {len(expected_names)}"
            if not note
            else f"{len(actual_names)} instead of {len(expected_names)}"
        )
        yield Row(
            key.condition, key.kind, name, float(len(lost) + len(extra)), 0.0, not note, None, note
        )


def compare_tensors(
    expected: Observation,
    actual: Observation,
    rtol: float,
    exact: bool,
    sizes: Mapping[str, float] = _NO_SIZES,
) -> Iterator[Row]:
    """Compare tensor by tensor, in the order in which differences arise.

    `sizes`: the least size of the tensors of a kind, if it is known from tensors of other kinds.
    """
    scales = _scales(expected, sizes)
    positions = {name: i for i, name in enumerate(expected.order)}

    def when(key: Key) -> tuple[int, int, int]:
        rank = _ORDER.index(key.kind) if key.kind in _ORDER else len(_ORDER)
        return key.step, rank, positions.get(key.name, -1)

    # dicts keep the order of observation, and sorting is stable: conditions stay together
    keys = {**dict.fromkeys(expected.tensors), **dict.fromkeys(actual.tensors)}
    conditions = {key.condition: i for i, key in enumerate(keys)}
    for key in sorted(keys, key=lambda k: (conditions[k.condition], when(k))):
        if key.kind in actual.missing or is_left_out(key, actual.left_out):
            continue
        error, ok, note = _difference(expected, actual, key, scales, rtol, exact)
        value = expected.tensors.get(key)
        shape = None if value is None else tuple(value.shape)
        gate = 0.0 if exact or value is None or not value.is_floating_point() else rtol
        yield Row(key.condition, key.kind, key.name, error, gate, ok, key.step, note, shape)


def is_left_out(key: Key, left_out: Mapping[str, str]) -> bool:
    """Return whether a tensor belongs to a part of the output that the program does not give."""
    return key.kind in OUTPUTS and any(
        key.name == name or key.name.startswith(f"{name}.") for name in left_out
    )


def _scales(
    expected: Observation, sizes: Mapping[str, float]
) -> dict[tuple[str, str, int], tuple[float, float]]:
    """Return the largest norm and element among finite tensors, by (condition, kind, step)."""
    scales: dict[tuple[str, str, int], tuple[float, float]] = {}
    for key, value in expected.tensors.items():
        if value is not None and value.numel() and (norm := _norm(value)) < math.inf:
            least = sizes.get(key.kind, 0.0)
            big = scales.get(key[:3], (least, least))
            scales[key[:3]] = (max(big[0], norm), max(big[1], _largest(value)))
    return scales


def _difference(
    expected: Observation,
    actual: Observation,
    key: Key,
    scales: Mapping[tuple[str, str, int], tuple[float, float]],
    rtol: float,
    exact: bool,
) -> tuple[float, bool, str]:
    """Return the relative error, the verdict and a note for one tensor."""
    # a missing key means no tensor: an unused parameter has no gradient on either side
    x, r = actual.tensors.get(key), expected.tensors.get(key)
    if r is None and x is not None and key.kind == "input gradients" and not x.any():
        return 0.0, True, "zero, as of an input that nothing reads"  # slicing passes all inputs on
    if x is None or r is None:
        note = "missing in the program" if x is None else "the original has none"
        return (0.0, True, "none on both sides") if x is r else (math.inf, False, note)
    # a tensor must not be compared with itself
    assert not x.numel() or x.untyped_storage().data_ptr() != r.untyped_storage().data_ptr(), key
    if x.shape != r.shape or x.dtype != r.dtype:
        note = f"{x.dtype} {tuple(x.shape)} instead of {r.dtype} {tuple(r.shape)}"
        return math.inf, False, note
    x, r = mask_common_nans(key, x, r)
    if exact or not (r.is_floating_point() or r.is_complex()):
        return (
            _changed_fraction(x, r),
            torch.equal(x, r),
            "" if torch.equal(x, r) else "not equal bit by bit",
        )
    return _close(x, r, *scales.get(key[:3], (0.0, 0.0)), rtol)


def mask_common_nans(key: Key, *values: Tensor) -> tuple[Tensor, ...]:
    """Return outputs with 0 wherever all of them are NaN, unless they are NaN everywhere."""
    if key.kind not in OUTPUTS or not all(v.is_floating_point() for v in values):
        return values
    common_nans = reduce(torch.logical_and, (v.isnan() for v in values))
    is_partial = bool(common_nans.any()) and not bool(common_nans.all())
    return tuple(torch.where(common_nans, 0, v) for v in values) if is_partial else values


def _changed_fraction(x: Tensor, r: Tensor) -> float:
    """Return the fraction of elements that differ."""
    return float((x != r).double().mean()) if x.numel() else 0.0


def _close(
    x: Tensor, r: Tensor, scale: float, largest: float, rtol: float
) -> tuple[float, bool, str]:
    equal_inf = (x == r) & r.isinf()  # masked scores are -inf on both sides
    x, r = (torch.where(equal_inf, 0, t) for t in (x, r))
    if not bool(r.isfinite().all()):
        return math.nan, False, "the original itself is not finite"
    floor = FLOOR / RTOL  # so that an error of rtol is the gate, whatever rtol is
    error = ratio(_norm(x - r), _norm(r) + floor * scale)
    element = ratio(_largest(x - r), _largest(r) + floor * largest)
    if not error <= rtol:
        return error, False, "not finite" if math.isnan(error) else ""
    if not element <= ELEMENT_MARGIN * rtol:
        return element, False, "a single element is off"
    return error, True, ""


def ratio(a: float, b: float) -> float:
    """Divide an error by its allowed size; 0 is no error, whatever the size."""
    if a == 0:
        return 0.0
    return a / b if b else math.inf


def _norm(x: Tensor) -> float:
    """Return the Frobenius norm in float64; NaN if any element is NaN."""
    return float(torch.linalg.vector_norm(x.to(_float64_type(x)).flatten())) if x.numel() else 0.0


def _largest(x: Tensor) -> float:
    return float(x.to(_float64_type(x)).abs().max()) if x.numel() else 0.0


def _float64_type(x: Tensor) -> dtype:
    return torch.complex128 if x.is_complex() else torch.float64


def _ties(expected: Observation, actual: Observation) -> Iterator[Row]:
    """Compare the values of tied names with each other."""
    states = {k[:3] for k in actual.tensors if k.kind == "parameters"}
    for condition, _, step in sorted(states):
        for group in expected.ties:
            tied_values = [_state(actual, condition, step, name) for name in group]
            values = [v for v in tied_values if v is not None]
            ok = all(torch.equal(v, values[0]) for v in values[1:])
            note = "" if ok else "tied names hold different values"
            name = " = ".join(group)
            error = max((_changed_fraction(v, values[0]) for v in values[1:]), default=0.0)
            yield Row(condition, "tied weights", name, error, 0.0, ok, step, note)


def _state(observation: Observation, condition: str, step: int, name: str) -> Tensor | None:
    for kind in ("parameters", "other state"):
        if (value := observation.tensors.get(Key(condition, kind, step, name))) is not None:
            return value
    return None
