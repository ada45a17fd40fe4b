"""Rounding: the model as it stands, in its working dtype, against the original's own error.

With r the float64 result from the rounded weights, s the original's and x the program's in the
working dtype, two orders of the same sums: |x - r| <= k |s - r| + 4 u |r| per tensor, u the dtype's
unit roundoff. What a fixed tolerance cannot know, the condition of a sum, is in |s - r|.

Of a tensor whose elements err together, a small bias, one |s - r| may be small by luck. Other runs
of the original are more draws of the same error: one by the parts that the program makes, whose
sums are rounded one by one before they cancel (the larger of both counts), and several from values
that differ by one rounding, which together tell how large an error may be by luck (`luck`). The
program's may be twice that: it rounds parts of sums before it adds them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from schedlang.passes.proving.compare import is_left_out, unhidden
from schedlang.passes.proving.luck import CHANCE, bound
from schedlang.passes.proving.observe import Key, Observation
from schedlang.report import Row

if TYPE_CHECKING:
    from torch import Tensor

# how much larger than the original's an error may be: above all that was measured on random models
_TIMES = {
    "outputs": 4.0,
    "training outputs": 4.0,
    "gradients": 8.0,
    "input gradients": 8.0,
    "parameters": 16.0,
}


# a single number: its error may vanish by luck, so it has a gate by its own size, in roundings
_SCALARS = {"loss": 16.0, "gradient norm": 16.0}
IN_DTYPE = " in working dtype"
OVERFLOWS = "the original itself is not finite"


def within_rounding(
    exact: Observation, original: Observation, program: Observation, *, times: float = 1.0,
    rtol: Mapping[str, float] | None = None, low: float = 0.0, parts: Observation | None = None,
    draws: Sequence[Observation] = (),
) -> tuple[Row, ...]:  # fmt: skip
    """Rows for outputs, loss, gradients, norm and parameter updates; an error of 1 is the gate.

    `exact` is the original in float64 started from the weights of the other two. `times` widens all
    gates. For kinds in `rtol` the schedule has given a bound of its own for the relative error.
    With `low`, the spacing of a low dtype at 1, that both computed in: an error is at most twice
    the original's own under the same casts, or `low` times its size. Of its errors the larger
    counts: of the run `original`, and of the one by `parts`. What is above all that is held against
    `draws`, runs of the original from values that differ by a rounding: in a right program some row
    is above twice their bound with a chance of at most `CHANCE`.
    """
    return tuple(_rows(exact, original, program, times, rtol or {}, low, parts, draws))


def _rows(
    exact: Observation, original: Observation, program: Observation, times: float,
    rtol: Mapping[str, float], low: float, parts: Observation | None,
    draws: Sequence[Observation],
) -> Iterator[Row]:  # fmt: skip
    unit = unit_of(original)
    chance = CHANCE / max(1, len(exact.tensors))
    last = {key[:2]: key.step for key in exact.tensors}
    for key in exact.tensors:
        if key.kind in _SCALARS:
            pass
        elif key.kind not in _TIMES or (key.kind == "parameters" and key.step != last[key[:2]]):
            continue
        r, s, x = (_value(seen, key) for seen in (exact, original, program))
        if r is None or not r.is_floating_point() or (r.dim() == 0 and key.kind not in _SCALARS):
            continue
        if key.kind in program.missing or is_left_out(key, program.left_out):
            continue
        kind, gate = key.kind + IN_DTYPE, rtol.get(key.kind, 1.0)
        if x is None or s is None or x.shape != r.shape:
            yield Row(key.condition, kind, key.name, float("inf"), gate, False, key.step, "missing")
            continue
        r, s, x = unhidden(key, r, s, x)
        if not low and bool((r.isfinite() & ~s.isfinite()).any()):
            yield Row(key.condition, kind, key.name, math.nan, gate, False, key.step, OVERFLOWS)
            continue
        if key.kind in rtol:
            error, note = _relative(x, r), "the bound of the schedule"
        elif low:
            own = _off([original, *([parts] if parts is not None else ())], key, r)
            error, note = _twice(x, s, r, low, own), ""
        elif key.kind in _SCALARS:
            error, note = _number(x, s, r, unit * _SCALARS[key.kind] * times), ""
        else:
            error, note = _error(x, s, r, _TIMES[key.kind] * times), ""
        if draws and not error <= gate and key.kind not in rtol:
            error = min(error, _beyond(exact, program, draws, key, chance) / times)
        yield Row(key.condition, kind, key.name, error, gate, error <= gate, key.step, note)


def unit_of(original: Observation) -> float:
    """The unit roundoff of the coarsest dtype that the original worked in."""
    import torch

    floats = {v.dtype for v in original.tensors.values() if v is not None and v.is_floating_point()}
    return max((torch.finfo(dtype).eps / 2 for dtype in floats), default=0.0)


def _relative(x: Tensor, r: Tensor) -> float:
    x, r = x.double(), r.double()
    size = float(r.norm())
    error = float((x - r).norm())
    return error / size if size else (0.0 if error == 0 else float("inf"))


def _off(runs: Sequence[Observation], key: Key, r: Tensor) -> float:
    """The largest finite error of a tensor in some runs of the original."""
    found = (_value(one, key) for one in runs)
    there = [v for v in found if v is not None and v.shape == r.shape]
    errors = [float((v.double() - r.double()).norm()) for v in there]
    return max((error for error in errors if math.isfinite(error)), default=0.0)


def _beyond(
    exact: Observation, program: Observation, draws: Sequence[Observation], key: Key, chance: float
) -> float:
    """How far an error is beyond what it may be by luck, told from draws of it."""
    error = _errors(exact, program, [key])
    every = [key]
    if key.kind in _SCALARS:  # one number tells little of its law, those of all steps tell more
        every = [k for k in exact.tensors if k._replace(step=0) == key._replace(step=0)]
    found = [_errors(exact, one, every) for one in draws]
    gate = 2.0 * bound([e for e in found if e is not None], chance)
    size = math.inf if error is None else float(error.norm())
    return size / gate if gate and math.isfinite(size) else math.inf


def _errors(exact: Observation, seen: Observation, keys: Sequence[Key]) -> Tensor | None:
    """The errors of a tensor, or of numbers each by its size; None if one is not there."""
    import torch

    found = []
    for key in keys:
        r, v = (_value(one, key) for one in (exact, seen))
        if r is None or v is None or v.shape != r.shape:
            return None
        r, v = unhidden(key, r.double(), v.double())
        same = (v == r) & r.isinf()
        v, r = (torch.where(same, 0, t) for t in (v, r))
        size = float(r.abs()) or 1.0 if key.kind in _SCALARS else 1.0
        found.append((v - r).flatten() / size)
    return torch.cat(found)


def _twice(x: Tensor, s: Tensor, r: Tensor, low: float, own: float) -> float:
    """The rule for casts, `own` being the original's own error; what overflows there must here."""
    x, s, r = x.double(), s.double(), r.double()
    if not bool(s.isfinite().all()):
        return float(bool(x.isfinite().all())) * float("inf") if bool(x.isfinite().all()) else 0.0
    gate = max(2.0 * own, low * float(r.norm()))
    error = float((x - r).norm())
    return error / gate if gate else (0.0 if error == 0 else float("inf"))


def _number(x: Tensor, s: Tensor, r: Tensor, share: float) -> float:
    """A mean or a norm is a sum of terms of one sign, so its own size is that of its terms."""
    gate = 4.0 * abs(float(s) - float(r)) + share * abs(float(r))
    error = abs(float(x) - float(r))
    return error / gate if gate else (0.0 if error == 0 else float("inf"))


def _value(seen: Observation, key: Key) -> Tensor | None:
    """A tensor; of parameters the change since the first step, which their size does not swamp."""
    value = seen.tensors.get(key)
    if key.kind != "parameters" or value is None:
        return value
    first = seen.tensors.get(key._replace(step=0))
    return value if first is None else value - first


def _error(x: Tensor, s: Tensor, r: Tensor, times: float) -> float:
    import torch

    unit = torch.finfo(s.dtype).eps / 2
    x, s, r = x.double(), s.double(), r.double()
    same = (x == s) & r.isinf()  # masked scores
    x, s, r = (torch.where(same, 0, t) for t in (x, s, r))
    gate = times * float((s - r).norm()) + 4 * unit * float(r.norm())
    error = float((x - r).norm())
    return error / gate if gate else (0.0 if error == 0 else float("inf"))
