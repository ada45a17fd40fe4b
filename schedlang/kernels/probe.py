"""Tell what a norm module computes, by running a copy of it: never by its name.

The copy has the module's own forward and fresh random float64 parameters on the CPU, so that a
module on the meta device, or one whose parameters lie on many ranks, is judged like any other.
Hooks are left behind.  Forward and gradients must agree with the formula at several scales of the
input, casts to float32 inside read as float64; the rounding order is read off bit by bit in
bfloat16.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from schedlang.kernels.rms_norm import reference
from schedlang.runtime.float64 import Float64
from schedlang.runtime.modes import ambient

TOLERANCE = 1e-9
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_SCALES = (1.0, 50.0, 1e-2, 1e-3, 1e-10)


@dataclass(frozen=True)
class Norm:
    """What a norm module computes: (x / sqrt(mean(x^2) + eps)) * (weight + offset) [+ bias].

    `kind` is "rms_norm", or "layer_norm" where x is centred first.  `weight` and `bias` are names
    of the module's parameters; `eps` None follows the type computed in, as torch.nn.RMSNorm does.
    `rounding` is "early" or "late" (see kernels/rms_norm.py), None for a layer norm.
    """

    kind: str
    size: int
    weight: str
    bias: str | None
    offset: float
    eps: float | None
    rounding: str | None


@dataclass(frozen=True)
class Mismatch:
    """Why a module is no norm that we know, and by how much it differs (relative) if it ran."""

    reason: str
    error: float | None = None


@dataclass(frozen=True)
class _Fit:
    center: bool
    bias: str | None
    offset: float
    eps: float


def probe_norm(module: nn.Module) -> Norm | Mismatch:
    """The norm that `module` computes, or the measured reason why it is none."""
    refused = _structure(module)
    if refused:
        return refused
    copied = bare_copy(module, torch.float64)
    params = dict(copied.named_parameters(recurse=False))
    size = next(iter(params.values())).numel()
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
    params = dict(copied.named_parameters(recurse=False))
    weight = next(name for name in params if name != fit.bias)
    if len(params) - 1 != (fit.bias is not None):
        return Mismatch(f"has parameters that do not matter to its result: {', '.join(params)}")
    eps = _named_eps(module, fit, size)
    rounding: str | None = None
    if kind == "rms_norm":
        if fit.bias is not None:
            return Mismatch("is an rms_norm with a bias, for which there is no kernel")
        found = _rounding(module, fit, eps, size)
        if isinstance(found, Mismatch):
            return found
        rounding = found
    return Norm(kind, size, weight, fit.bias, fit.offset, eps, rounding)


def _structure(module: nn.Module) -> Mismatch | None:
    params = dict(module.named_parameters(recurse=False))
    if next(module.children(), None) is not None:
        return Mismatch("has submodules, and a norm has none")
    if "forward" in vars(module):
        return Mismatch("had its forward replaced already")
    if not params:
        return Mismatch("has no parameters, and a norm has a weight")
    if any(p.dim() != 1 for p in params.values()) or len(params) > 2:
        shapes = ", ".join(f"{name} {tuple(p.shape)}" for name, p in params.items())
        return Mismatch(f"has the parameters {shapes}, and a norm has a vector or two")
    if len({p.numel() for p in params.values()}) != 1:
        return Mismatch("has two vectors of different sizes")
    if next(module.buffers(), None) is not None:
        return Mismatch("keeps buffers, and a norm keeps none")
    return None


def bare_copy(module: nn.Module, dtype: torch.dtype, seed: int = 0) -> nn.Module:
    """A copy without hooks, with random parameters in [0.5, 1.5) of `dtype` on the CPU.

    Submodules are copied alike, shared parameters stay shared; other attributes are the module's
    own.  Buffers keep their values, floating ones in `dtype`; none may lie on the meta device.
    """
    generator = torch.Generator().manual_seed(seed)
    done: dict[int, Any] = {}

    def fresh(p: nn.Parameter | None) -> nn.Parameter | None:
        if p is not None and id(p) not in done:
            drawn = torch.rand(p.shape, generator=generator, device="cpu") + 0.5
            done[id(p)] = nn.Parameter(drawn.to(dtype))
        return None if p is None else done[id(p)]

    def moved(buffer: Tensor | None) -> Tensor | None:
        if buffer is None:
            return None
        kind = dtype if buffer.is_floating_point() else buffer.dtype
        return buffer.detach().to("cpu", kind, copy=True)

    def copied(part: nn.Module) -> nn.Module:
        if id(part) not in done:
            twin = done[id(part)] = copy.copy(part)
            state = twin.__dict__
            state.update({name: type(state[name])() for name in _HOOKS if name in state})
            state["_parameters"] = {name: fresh(p) for name, p in part._parameters.items()}
            state["_buffers"] = {name: moved(b) for name, b in part._buffers.items()}
            children = part._modules.items()
            state["_modules"] = {n: copied(c) if c is not None else None for n, c in children}
        twin_: nn.Module = done[id(part)]
        return twin_

    return copied(module)


def _rows(size: int, seed: int = 1, rows: int = 16) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (2, rows // 2, size)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")


def _run(module: nn.Module, x: Tensor) -> Tensor:
    y = module(x)
    if not isinstance(y, Tensor) or y.shape != x.shape:
        shape = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
        raise ValueError(f"it gives {shape} for {tuple(x.shape)}")
    return y


@torch.no_grad()
def _fit(module: nn.Module, params: dict[str, nn.Parameter], size: int, center: bool) -> _Fit:
    """The parameters of the formula that fit best; whether they fit is judged afterwards."""
    shift = _run(module, torch.zeros(1, 1, size, dtype=torch.float64))[0, 0]
    near = (shift.norm() + 1.0) * TOLERANCE
    bias = next((name for name, p in params.items() if (shift - p).norm() <= near), None)
    weight = next((p for name, p in params.items() if name != bias), shift)
    # far from zero eps does not matter: what is left is the factor of each column
    large = _rows(size) * 1e3
    normal = _normal(large, center, 0.0)
    moved = _run(module, large) - shift
    scale = (moved * normal).sum((0, 1)) / normal.square().sum((0, 1)).clamp_min(1e-300)
    offset = float((scale - weight).mean())
    offset = round(offset) + 0.0 if abs(offset - round(offset)) < 1e-5 else offset
    # close to zero eps is all that matters
    small = _rows(size, seed=2) * 1e-10
    heart = small - small.mean(-1, keepdim=True) if center else small
    moved = _run(module, small) - shift
    scaled = heart * scale
    inverse = (moved * scaled).sum(-1) / scaled.square().sum(-1).clamp_min(1e-300)
    eps = float((inverse**-2 - heart.square().mean(-1)).mean())
    return _Fit(center, bias, offset, max(eps, 0.0) if eps == eps else 0.0)


def _normal(x: Tensor, center: bool, eps: float) -> Tensor:
    ones = torch.ones(x.shape[-1], dtype=x.dtype)
    return F.layer_norm(x, ones.shape, None, None, eps) if center else reference(x, ones, eps)


def _formula(x: Tensor, fit: _Fit, params: dict[str, nn.Parameter]) -> Tensor:
    weight = next(p for name, p in params.items() if name != fit.bias or len(params) == 1)
    bias = params[fit.bias] if fit.bias is not None else None
    if fit.center:
        return F.layer_norm(x, weight.shape, weight + fit.offset, bias, fit.eps)
    y = reference(x, weight, fit.eps, fit.offset)
    return y if bias is None else y + bias


def _relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b).norm() / b.norm().clamp_min(1e-300))


@torch.no_grad()
def _distance(module: nn.Module, fit: _Fit, params: dict[str, nn.Parameter], size: int) -> float:
    """The largest relative difference over scales of the input, in training and evaluation."""
    worst = 0.0
    for number, scale in enumerate(_SCALES):
        x = _rows(size, seed=10 + number) * scale
        expected = _formula(x, fit, params)
        for training in (True, False):
            module.training = training
            error = _relative(_run(module, x), expected)
            worst = max(worst, error) if error == error else float("inf")
    return worst


def _gradient_distance(
    module: nn.Module, fit: _Fit, params: dict[str, nn.Parameter], size: int
) -> float:
    x = _rows(size, seed=20).requires_grad_()
    grad = _rows(size, seed=21)
    leaves = [x, *params.values()]
    y = _run(module, x)
    if not y.requires_grad:
        return float("inf")
    found = torch.autograd.grad(y, leaves, grad.to(y.dtype), allow_unused=True)
    exact = torch.autograd.grad(_formula(x, fit, params), leaves, grad)
    return max(
        float("inf") if a is None else _relative(a, b) for a, b in zip(found, exact, strict=True)
    )


def _named_eps(module: nn.Module, fit: _Fit, size: int) -> float | None:
    """The measured eps as the module writes it: its own attribute, or nine digits."""
    own = [v for v in vars(module).values() if isinstance(v, float) and v > 0]
    named = min(own, key=lambda v: abs(v - fit.eps), default=0.0)
    if abs(named - fit.eps) <= 1e-6 * fit.eps:
        return named
    spacing = torch.finfo(torch.float64).eps
    if abs(fit.eps - spacing) <= 1e-3 * spacing:
        single = bare_copy(module, torch.float32)
        x = (_rows(size, seed=30) * 1e-3).float()
        follows = replace(fit, eps=torch.finfo(torch.float32).eps)
        exact = {name: nn.Parameter(p.double()) for name, p in single.named_parameters()}
        with torch.no_grad():
            same = _relative(_run(single, x), _formula(x.double(), follows, exact))
        if same <= 1e-6:
            return None
    return float(f"{fit.eps:.9g}")


def _rounding(module: nn.Module, fit: _Fit, eps: float | None, size: int) -> str | Mismatch:
    """Where a bfloat16 copy rounds: the order whose results equal the module's, bit by bit."""
    copied = bare_copy(module, torch.bfloat16, seed=3)
    weight = next(iter(copied.parameters()))
    x = _rows(size, seed=4, rows=64).bfloat16()
    small = torch.finfo(torch.float32).eps if eps is None else eps
    same: dict[str, float] = {}
    with torch.no_grad():
        try:
            y = _run(copied, x)
        except Exception as raised:  # the module's own code
            return Mismatch(f"does not run in bfloat16: {type(raised).__name__}")
        for order in ("early", "late"):
            expected = reference(x, weight, small, fit.offset, order)
            same[order] = float((y == expected).double().mean())
    best = max(same, key=lambda order: same[order])
    if same[best] < 0.99:
        return Mismatch(f"rounds otherwise in bfloat16: at best {same[best]:.0%} of bits agree")
    return best
