"""Rounding: the model as it stands, in its working dtype, against the original's own error.

With r the float64 result from the rounded weights, s the original's and x the program's in the
working dtype, two orders of the same sums: |x - r| <= k |s - r| + 4 u |r| per tensor, u the dtype's
unit roundoff. What a fixed tolerance cannot know, the condition of a sum, is in |s - r|.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from schedlang.passes.observe import Key, Observation
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


def within_rounding(
    exact: Observation, original: Observation, program: Observation, *, times: float = 1.0
) -> tuple[Row, ...]:
    """Rows for outputs, gradients and parameter updates; an error of 1 is the gate.

    `exact` is the original in float64 started from the weights of the other two. `times` widens all
    gates. Single numbers, whose error may vanish by luck, are not judged so.
    """
    return tuple(_rows(exact, original, program, times))


def _rows(
    exact: Observation, original: Observation, program: Observation, times: float
) -> Iterator[Row]:
    last = {key[:2]: key.step for key in exact.tensors}
    for key in exact.tensors:
        if key.kind not in _TIMES or (key.kind == "parameters" and key.step != last[key[:2]]):
            continue
        r, s, x = (_value(seen, key) for seen in (exact, original, program))
        if r is None or not r.is_floating_point() or r.dim() == 0:
            continue
        kind = f"{key.kind} in working dtype"
        if x is None or s is None or x.shape != r.shape:
            yield Row(key.condition, kind, key.name, float("inf"), 1.0, False, key.step, "missing")
            continue
        error = _error(x, s, r, _TIMES[key.kind] * times)
        yield Row(key.condition, kind, key.name, error, 1.0, error <= 1.0, key.step)


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
