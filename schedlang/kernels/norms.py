"""Tell which norm a module computes: RMSNorm or LayerNorm, with what offset, eps and rounding.

Forward and gradients must agree with the formula at several scales of the input, casts to float32
inside read as float64; the rounding order is read off bit by bit in bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from schedlang.kernels import layer_norm, rms_norm
from schedlang.kernels.check import Case
from schedlang.kernels.probe import (
    TOLERANCE,
    Mismatch,
    bare_copy,
    gradients_apart,
    one_input,
    relative,
    rows_of,
    run_rows,
)
from schedlang.runtime.float64 import Float64
from schedlang.runtime.modes import ambient

SCALES = (1.0, 50.0, 1e-2, 1e-3, 1e-10)


@dataclass(frozen=True)
class Norm:
    """What a norm module computes: (x / sqrt(mean(x^2) + eps)) * (weight + offset) [+ bias].

    `kind` is "rms_norm", or "layer_norm" where x is centred first.  `weight` and `bias` are names
    of the module's parameters, None where it has none (a weight is then one); `eps` None follows
    the type computed in, as torch.nn.RMSNorm does.
    `rounding` is "early" or "late" (see kernels/rms_norm.py and kernels/layer_norm.py).
    """

    kind: str
    size: int
    weight: str | None
    bias: str | None
    offset: float
    eps: float | None
    rounding: str

    def cases(self) -> list[Case]:
        """Runs of the kernel in the form that was found, for the trial of a schedule."""
        eps = self.eps or 1e-6
        runs = [("float32", 7), ("bfloat16", 7), ("float32", 1)]
        if self.kind == "rms_norm":
            return [
                rms_norm.Case((rows, self.size), dtype, eps, self.offset, self.rounding)
                for dtype, rows in runs
            ]
        return [
            layer_norm.Case(
                (rows, self.size),
                dtype,
                eps,
                self.offset,
                self.rounding,
                bias=self.bias is not None,
            )
            for dtype, rows in runs
        ]


@dataclass(frozen=True)
class _Fit:
    center: bool
    bias: str | None
    offset: float
    eps: float


def probe_norm(module: nn.Module) -> Norm | Mismatch:
    """The norm that `module` computes, or the measured reason why it is none."""
    refused = structure(module) or one_input(module)
    if refused:
        return refused
    copied = bare_copy(module, torch.float64)
    size = size_of(module)
    params = vectors_of(copied, size)
    with torch.random.fork_rng(devices=[]), ambient(Float64):
        try:
            fits = [_fit(copied, params, size, center) for center in (False, True)]
        except Exception as raised:  # the module's own code: whatever it raises is a mismatch
            said = f"{type(raised).__name__}: {str(raised)}".splitlines()[0]
            return Mismatch(f"does not run on rows of {size} alone: {said}")
        errors = [_distance(copied, fit, params, size) for fit in fits]
        best = errors.index(min(errors))
        fit, error = fits[best], errors[best]
        kind = "layer_norm" if fit.center else "rms_norm"
        if not error <= TOLERANCE:
            return Mismatch(f"differs from {kind} (nearest: eps {fit.eps:.3g})", error)
        error = _gradient_distance(copied, fit, params, size)
    if not error <= TOLERANCE:
        return Mismatch(f"equals {kind}, but its gradients differ", error)
    with torch.random.fork_rng(devices=[]):
        return _finish(module, copied, fit, kind, size)


def _finish(
    module: nn.Module, copied: nn.Module, fit: _Fit, kind: str, size: int
) -> Norm | Mismatch:
    params = vectors_of(copied, size)
    weight = next(name for name in params if name != fit.bias)
    if len(params) - 1 != (fit.bias is not None):
        return Mismatch(f"has parameters that do not change its output: {', '.join(params)}")
    eps = _named_eps(module, fit, size)
    if kind == "rms_norm" and fit.bias is not None:
        return Mismatch("is an rms_norm with a bias: there is no kernel for it")
    rounding = _rounding(module, fit, eps, size)
    if rounding not in ("early", "late"):
        return Mismatch(rounding)
    return Norm(kind, size, weight or None, fit.bias, fit.offset, eps, rounding)


def size_of(module: nn.Module) -> int:
    """The size of a row; any will do where neither a parameter nor the module says one."""
    for parameter in module.parameters():
        return parameter.numel()
    shape = getattr(module, "normalized_shape", None)
    return shape[-1] if isinstance(shape, tuple) and shape else 24


def vectors_of(module: nn.Module, size: int) -> dict[str, Tensor]:
    """The parameters by name; of a norm that has none a weight of ones, named ""."""
    ones = torch.ones(size, dtype=torch.float64)
    return dict(module.named_parameters(recurse=False)) or {"": ones}


def structure(module: nn.Module) -> Mismatch | None:
    """Why a module cannot be a norm, by what it holds."""
    params = dict(module.named_parameters(recurse=False))
    if next(module.children(), None) is not None:
        return Mismatch("has submodules: a norm has none")
    if "forward" in vars(module):
        return Mismatch("has a replaced forward already")
    if any(p.dim() != 1 for p in params.values()) or len(params) > 2:
        shapes = ", ".join(f"{name} {tuple(p.shape)}" for name, p in params.items())
        return Mismatch(f"has the parameters {shapes}: a norm has one or two vectors")
    if len({p.numel() for p in params.values()}) > 1:
        return Mismatch("has two vectors of different sizes")
    if next(module.buffers(), None) is not None:
        return Mismatch("has buffers: a norm has none")
    return None


@torch.no_grad()
def _fit(module: nn.Module, params: dict[str, Tensor], size: int, center: bool) -> _Fit:
    """The parameters of the formula that fit best; whether they fit is judged afterwards."""
    shift = run_rows(module, torch.zeros(1, 1, size, dtype=torch.float64))[0, 0]
    near = (shift.norm() + 1.0) * TOLERANCE
    bias = next((name for name, p in params.items() if (shift - p).norm() <= near), None)
    weight = next((p for name, p in params.items() if name != bias), shift)
    # far from zero eps does not matter: what is left is the factor of each column
    large = rows_of(size) * 1e3
    normal = _normal(large, center, 0.0)
    moved = run_rows(module, large) - shift
    scale = (moved * normal).sum((0, 1)) / normal.square().sum((0, 1)).clamp_min(1e-300)
    offset = float((scale - weight).mean())
    offset = round(offset) + 0.0 if abs(offset - round(offset)) < 1e-5 else offset
    # close to zero eps is all that matters
    small = rows_of(size, seed=2) * 1e-10
    heart = small - small.mean(-1, keepdim=True) if center else small
    moved = run_rows(module, small) - shift
    scaled = heart * scale
    inverse = (moved * scaled).sum(-1) / scaled.square().sum(-1).clamp_min(1e-300)
    eps = float((inverse**-2 - heart.square().mean(-1)).mean())
    return _Fit(center, bias, offset, max(eps, 0.0) if eps == eps else 0.0)


def _normal(x: Tensor, center: bool, eps: float) -> Tensor:
    ones = torch.ones(x.shape[-1], dtype=x.dtype)
    return (
        F.layer_norm(x, ones.shape, None, None, eps) if center else rms_norm.reference(x, ones, eps)
    )


def _formula(x: Tensor, fit: _Fit, params: dict[str, Tensor], rounding: str = "late") -> Tensor:
    weight = next(p for name, p in params.items() if name != fit.bias or len(params) == 1)
    bias = params[fit.bias] if fit.bias is not None else None
    if fit.center:
        return layer_norm.reference(x, weight, bias, fit.eps, fit.offset, rounding)
    y = rms_norm.reference(x, weight, fit.eps, fit.offset, rounding)
    return y if bias is None else y + bias


@torch.no_grad()
def _distance(module: nn.Module, fit: _Fit, params: dict[str, Tensor], size: int) -> float:
    """The largest relative difference over scales of the input, in training and evaluation."""
    worst = 0.0
    for number, scale in enumerate(SCALES):
        x = rows_of(size, seed=10 + number) * scale
        expected = _formula(x, fit, params)
        for training in (True, False):
            module.training = training
            error = relative(run_rows(module, x), expected)
            worst = max(worst, error) if error == error else float("inf")
    return worst


def _gradient_distance(module: nn.Module, fit: _Fit, params: dict[str, Tensor], size: int) -> float:
    x = rows_of(size, seed=20).requires_grad_()
    leaves = [x, *(p for p in params.values() if p.requires_grad)]
    return gradients_apart(run_rows(module, x), _formula(x, fit, params), leaves)


def named_eps(module: nn.Module, eps: float) -> float | None:
    """A measured eps as the module writes it, where an attribute of its own is it."""
    own = [v for v in vars(module).values() if isinstance(v, float) and v > 0]
    named = min(own, key=lambda v: abs(v - eps), default=0.0)
    return named if abs(named - eps) <= 1e-6 * eps else None


def follows_type(eps: float) -> bool:
    """Whether an eps that was measured in float64 is the spacing of that type."""
    spacing = torch.finfo(torch.float64).eps
    return abs(eps - spacing) <= 1e-3 * spacing


def _named_eps(module: nn.Module, fit: _Fit, size: int) -> float | None:
    """The measured eps as the module writes it: its own attribute, or nine digits."""
    named = named_eps(module, fit.eps)
    if named is not None:
        return named
    if follows_type(fit.eps):
        single = bare_copy(module, torch.float32)
        x = (rows_of(size, seed=30) * 1e-3).float()
        follows = replace(fit, eps=torch.finfo(torch.float32).eps)
        exact = {name: p.double() for name, p in vectors_of(single, size).items()}
        with torch.no_grad():
            same = relative(run_rows(single, x), _formula(x.double(), follows, exact))
        if same <= 1e-6:
            return None
    return float(f"{fit.eps:.9g}")


def _rounding(module: nn.Module, fit: _Fit, eps: float | None, size: int) -> str:
    """Where a bfloat16 copy rounds: the order whose results equal the module's, or why none does.

    Bit by bit, for nearly all elements: sums may run in another order.
    """
    copied = bare_copy(module, torch.bfloat16, seed=3)
    params = {name: p.bfloat16() for name, p in vectors_of(copied, size).items()}
    x = rows_of(size, seed=4, rows=64).bfloat16()
    small = torch.finfo(torch.float32).eps if eps is None else eps
    same: dict[str, float] = {}
    with torch.no_grad():
        try:
            y = run_rows(copied, x)
        except Exception as raised:  # the module's own code
            return f"does not run in bfloat16: {type(raised).__name__}"
        for order in ("early", "late"):
            expected = _formula(x, replace(fit, eps=small), params, order)
            same[order] = float((y == expected).double().mean())
    best = max(same, key=lambda order: same[order])
    if same[best] < 0.99:
        return f"rounds differently in bfloat16: at best {same[best]:.0%} of bits agree"
    return best
