"""Tell which norm a module computes by running it: RMSNorm or LayerNorm, with or without a gate.

Forward and gradients must agree with the formula at several scales of the input, casts to float32
inside read as float64; the rounding order is read off bit by bit in bfloat16.  Of a gate, the parts
of a row that are normalised together show when one number of it changes; every activation, before
the norm and after it, is then tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from schedlang.kernels import gated_norm, norm
from schedlang.kernels.check import Case
from schedlang.kernels.gated import ACTIVATIONS
from schedlang.kernels.probe import (
    TOLERANCE,
    Mismatch,
    bare_copy,
    gradients_apart,
    inputs_of,
    one_input,
    relative,
    rows_of,
    run_rows,
)
from schedlang.runtime.float64 import Float64
from schedlang.runtime.modes import ambient

SCALES = (1.0, 50.0, 1e-2, 1e-3, 1e-10)
RUNS = (("float32", 7), ("bfloat16", 7), ("float32", 1))  # types and rows of a kernel's trial
Formula = Callable[..., Tensor]  # of the input, and of the gate where there is one


@dataclass(frozen=True)
class Norm:
    """The formula of a norm module: (x / sqrt(mean(x^2) + eps)) * (weight + offset) [+ bias].

    `kind` is "rms_norm", or "layer_norm" where x is centred first.  `weight` and `bias` are names
    of the module's parameters, None where it has none (a weight is then one); `eps` and `rounding`
    are those of kernels/norm.py.
    """

    kind: str
    size: int
    weight: str | None
    bias: str | None
    offset: float
    eps: float | None
    rounding: str

    @property
    def form(self) -> norm.Form:
        """The norm as its kernel knows it."""
        return norm.Form(self.kind == "layer_norm", self.eps, self.offset, self.rounding)

    def cases(self) -> list[Case]:
        """Runs of the kernel in the form that was found, for the trial of a schedule."""
        bias = self.bias is not None
        return [norm.Case((rows, self.size), dtype, self.form, bias) for dtype, rows in RUNS]


@dataclass(frozen=True)
class GatedNorm:
    """The formula of a norm with a gate; `inputs` are the names of its two arguments.

    `weight` is the name of a parameter, None where it has none (a weight is then one).
    """

    size: int
    weight: str | None
    inputs: tuple[str, str]
    form: gated_norm.Form

    kind = "rms_norm"

    def cases(self) -> list[Case]:
        """Runs of the kernel in the form that was found, for the trial of a schedule."""
        return [gated_norm.Case((rows, self.size), dtype, self.form) for dtype, rows in RUNS]


# -- what both kinds are judged by -----------------------------------------------------------------


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
    """Return the reason why a module cannot be a norm, by its parameters, children and buffers."""
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
def _distance(module: nn.Module, formula: Formula, size: int, inputs: int = 1) -> float:
    """The largest relative difference over scales of the input, in training and evaluation."""
    worst = 0.0
    for number, scale in enumerate(SCALES):
        given = [rows_of(size, seed=10 + number) * scale, rows_of(size, seed=40 + number)][:inputs]
        expected = formula(*given)
        for training in (True, False):
            module.training = training
            worst = max(worst, relative(run_rows(module, *given), expected))
    return worst


def _gradient_distance(
    module: nn.Module, formula: Formula, size: int, params: list[Tensor], inputs: int = 1
) -> float:
    """The largest relative difference of a gradient, of the inputs or of a parameter."""
    given = [rows_of(size, seed=seed).requires_grad_() for seed in (20, 22)[:inputs]]
    leaves = [*given, *(p for p in params if p.requires_grad)]
    return gradients_apart(run_rows(module, *given), formula(*given), leaves)


def _scale_and_offset(far: Tensor, normal: Tensor, weight: Tensor) -> tuple[Tensor, float]:
    """What each column is multiplied by, far from zero where eps does not matter; and by how much
    that is more than the weight."""
    scale = (far * normal).sum((0, 1)) / normal.square().sum((0, 1)).clamp_min(1e-300)
    offset = float((scale - weight).mean())
    return scale, round(offset) + 0.0 if abs(offset - round(offset)) < 1e-5 else offset


def _added(near: Tensor, scaled: Tensor, inner: Tensor) -> float:
    """The eps, of rows so close to zero that it is all that matters: `near` is the norm of `inner`,
    which `scaled` is times its factors."""
    inverse = (near * scaled).sum(-1) / scaled.square().sum(-1).clamp_min(1e-300)
    eps = float((inverse**-2 - inner.square().mean(-1)).mean())
    return eps if eps == eps and eps > 0.0 else 0.0


def named_eps(module: nn.Module, eps: float) -> float | None:
    """A measured eps as the module writes it, where an attribute of its own is it."""
    own = [v for v in vars(module).values() if isinstance(v, float) and v > 0]
    named = min(own, key=lambda v: abs(v - eps), default=0.0)
    return named if abs(named - eps) <= 1e-6 * eps else None


def follows_type(eps: float) -> bool:
    """Tell whether an eps that was measured in float64 is the spacing of that type."""
    spacing = torch.finfo(torch.float64).eps
    return abs(eps - spacing) <= 1e-3 * spacing


def _best_rounding(same: dict[str, float]) -> str | Mismatch:
    """The order of rounding that nearly all elements show; sums may run in another order."""
    best = max(same, key=lambda order: same[order])
    if same[best] < 0.99:
        return Mismatch(f"rounds differently in bfloat16: at best {same[best]:.0%} of bits agree")
    return best


# -- norms of one input ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Fit:
    """A formula: the norm in float64, and the name of the parameter that is its bias."""

    form: norm.Form
    bias: str | None

    @property
    def kind(self) -> str:
        return "layer_norm" if self.form.centred else "rms_norm"

    def of(self, params: dict[str, Tensor]) -> Formula:
        """The formula with these parameters."""
        weight = next(p for name, p in params.items() if name != self.bias or len(params) == 1)
        bias = None if self.bias is None else params[self.bias]
        return lambda x: norm.reference(x, weight, bias, self.form)


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
            fits = [_fit(copied, params, size, centred) for centred in (False, True)]
        except Exception as raised:  # the module's own code: whatever it raises is a mismatch
            return Mismatch.raised(f"does not run on rows of {size} alone", raised)
        errors = [_distance(copied, fit.of(params), size) for fit in fits]
        best = errors.index(min(errors))
        fit, error = fits[best], errors[best]
        if not error <= TOLERANCE:
            return Mismatch(f"differs from {fit.kind} (nearest: eps {fit.form.eps:.3g})", error)
        error = _gradient_distance(copied, fit.of(params), size, [*params.values()])
    if not error <= TOLERANCE:
        return Mismatch(f"equals {fit.kind}, but its gradients differ", error)
    with torch.random.fork_rng(devices=[]):
        return _finish(module, copied, fit, size)


def _finish(module: nn.Module, copied: nn.Module, fit: _Fit, size: int) -> Norm | Mismatch:
    params = vectors_of(copied, size)
    weight = next(name for name in params if name != fit.bias)
    if len(params) - 1 != (fit.bias is not None):
        return Mismatch(f"has parameters that do not change its output: {', '.join(params)}")
    eps = _named_eps(module, fit, size)
    if fit.kind == "rms_norm" and fit.bias is not None:
        return Mismatch("is an rms_norm with a bias: there is no kernel for it")
    rounding = _rounding(module, replace(fit, form=replace(fit.form, eps=eps)), size)
    if isinstance(rounding, Mismatch):
        return rounding
    return Norm(fit.kind, size, weight or None, fit.bias, fit.form.offset, eps, rounding)


@torch.no_grad()
def _fit(module: nn.Module, params: dict[str, Tensor], size: int, centred: bool) -> _Fit:
    """The parameters of the formula that fit best; whether they fit is judged afterwards."""
    shift = run_rows(module, torch.zeros(1, 1, size, dtype=torch.float64))[0, 0]
    near = (shift.norm() + 1.0) * TOLERANCE
    bias = next((name for name, p in params.items() if (shift - p).norm() <= near), None)
    weight = next((p for name, p in params.items() if name != bias), shift)
    large, small = rows_of(size) * 1e3, rows_of(size, seed=2) * 1e-10
    bare = norm.Form(centred, 0.0, 0.0, "late")
    normal = norm.reference(large, torch.ones_like(weight), None, bare)
    scale, offset = _scale_and_offset(run_rows(module, large) - shift, normal, weight)
    inner = small - small.mean(-1, keepdim=True) if centred else small
    eps = _added(run_rows(module, small) - shift, inner * scale, inner)
    return _Fit(replace(bare, offset=offset, eps=eps), bias)


def _named_eps(module: nn.Module, fit: _Fit, size: int) -> float | None:
    """The measured eps as the module writes it: its own attribute, or nine digits."""
    eps = fit.form.eps
    assert eps is not None
    named = named_eps(module, eps)
    if named is not None:
        return named
    if follows_type(eps):
        single = bare_copy(module, torch.float32)
        x = (rows_of(size, seed=30) * 1e-3).float()
        follows = replace(fit, form=replace(fit.form, eps=torch.finfo(torch.float32).eps))
        exact = {name: p.double() for name, p in vectors_of(single, size).items()}
        with torch.no_grad():
            same = relative(run_rows(single, x), follows.of(exact)(x.double()))
        if same <= 1e-6:
            return None
    return float(f"{eps:.9g}")


def _rounding(module: nn.Module, fit: _Fit, size: int) -> str | Mismatch:
    """Find the rounding order whose results equal a bfloat16 copy's bit by bit."""
    copied = bare_copy(module, torch.bfloat16, seed=3)
    params = {name: p.bfloat16() for name, p in vectors_of(copied, size).items()}
    x = rows_of(size, seed=4, rows=64).bfloat16()
    same: dict[str, float] = {}
    with torch.no_grad():
        try:
            y = run_rows(copied, x)
        except Exception as raised:  # the module's own code
            return Mismatch(f"does not run in bfloat16: {type(raised).__name__}")
        for order in ("early", "late"):
            expected = replace(fit, form=replace(fit.form, rounding=order)).of(params)(x)
            same[order] = float((y == expected).double().mean())
    return _best_rounding(same)


# -- norms with a gate -----------------------------------------------------------------------------


def takes_gate(module: nn.Module) -> bool:
    """Tell whether the module's forward takes exactly one argument beside its input."""
    return len(inputs_of(module)) == 2


def probe_gated_norm(module: nn.Module) -> GatedNorm | Mismatch:
    """The norm with a gate that `module` computes, or the measured reason why it is none."""
    refused = structure(module)
    names = inputs_of(module)
    if refused:
        return refused
    what = f"takes `{names[1]}` beside its input"
    if len(list(module.parameters())) > 1:
        return Mismatch(f"{what}, but has two vectors as parameters: a norm with a gate has one")
    size = size_of(module)
    copied = bare_copy(module, torch.float64)
    with torch.random.fork_rng(devices=[]):
        try:
            with ambient(Float64):
                found = _nearest(copied, size)
            if isinstance(found, gated_norm.Form):
                found = _rounded(module, found, size)
        except Exception as raised:  # the module's own code: whatever it raises is a mismatch
            what += f", but does not run on rows of {size} with such a gate"
            return Mismatch.raised(what, raised)
    if isinstance(found, Mismatch):
        return Mismatch(f"{what}, and {found.reason}", found.error)
    (weight,) = vectors_of(copied, size)
    return GatedNorm(size, weight or None, (names[0], names[1]), found)


def _weight(module: nn.Module, size: int) -> Tensor:
    (weight,) = vectors_of(module, size).values()
    return weight


def _formula(module: nn.Module, form: gated_norm.Form, size: int) -> Formula:
    weight = _weight(module, size)
    return lambda x, gate: gated_norm.reference(x, gate, weight, form)


def _nearest(module: nn.Module, size: int) -> gated_norm.Form | Mismatch:
    """The form whose results and gradients are the module's."""
    groups = _groups(module, size)
    if groups is None:
        return Mismatch("normalises neither full rows nor groups of equal size")
    forms = list(_forms(module, size, groups))
    formulas = [_formula(module, form, size) for form in forms]
    errors = [_distance(module, formula, size, 2) for formula in formulas]
    best = errors.index(min(errors))
    form, error = forms[best], errors[best]
    said = f"{form.act} {'before' if form.first else 'after'} it"
    if not error <= TOLERANCE:
        return Mismatch(f"differs from rms_norm with a gate (nearest: {said})", error)
    error = _gradient_distance(module, formulas[best], size, [*module.parameters()], 2)
    if not error <= TOLERANCE:
        return Mismatch(f"equals rms_norm with a gate, {said}, but its gradients differ", error)
    return form


@torch.no_grad()
def _groups(module: nn.Module, size: int) -> int | None:
    """Into how many parts a row falls: those that the first number of a row has a say in."""
    x, ones = rows_of(size), torch.ones(2, 8, size, dtype=torch.float64)
    other = x.clone()
    other[..., 0] += 1.0
    moved = (run_rows(module, x, ones) != run_rows(module, other, ones)).flatten(0, 1).any(0)
    width = int(moved.sum())
    whole = width > 0 and bool(moved[:width].all()) and size % width == 0
    return size // width if whole else None


@torch.no_grad()
def _forms(module: nn.Module, size: int, groups: int) -> Iterator[gated_norm.Form]:
    """Each activation, before the norm and after it, with the offset and eps that fit best.

    A gate of ones is a factor.  Far from zero eps does not matter and what is left is the factor of
    each column; close to zero eps is all that matters.
    """
    ones = torch.ones(2, 8, size, dtype=torch.float64)
    weight, flat = _weight(module, size), torch.ones(size, dtype=torch.float64)
    large, small = rows_of(size) * 1e3, rows_of(size, seed=2) * 1e-10
    far, near = run_rows(module, large, ones), run_rows(module, small, ones)
    for act in ACTIVATIONS:
        for first in (True, False):
            bare = gated_norm.Form(0.0, 0.0, "late", act, first, groups)
            normal = gated_norm.reference(large, ones, flat, bare)
            scale, offset = _scale_and_offset(far, normal, weight)
            eps = _added(gated_norm.parts_of(near, groups), *_inner(small, ones, scale, bare))
            yield replace(bare, offset=offset, eps=eps)


def _inner(small: Tensor, gate: Tensor, scale: Tensor, form: gated_norm.Form) -> list[Tensor]:
    """Groups of what is normalised of rows close to zero: times its factors, and bare."""
    lever = float(ACTIVATIONS[form.act](gate.flatten()[0]))
    inner = small * lever if form.first else small
    scaled = inner * scale * (1.0 if form.first else lever)
    return [gated_norm.parts_of(t, form.groups) for t in (scaled, inner)]


@torch.no_grad()
def _rounded(module: nn.Module, form: gated_norm.Form, size: int) -> gated_norm.Form | Mismatch:
    """The form with the order of rounding whose results are the module's bit by bit."""
    if follows_type(form.eps):
        return Mismatch(
            "has an eps that depends on the dtype of the computation, which this kernel does"
            " not support"
        )
    form = replace(form, eps=named_eps(module, form.eps) or float(f"{form.eps:.9g}"))
    x, gate = (rows_of(size, seed=seed, rows=64).bfloat16() for seed in (4, 5))
    same = {"early": 1.0, "late": 1.0}
    for kind in (torch.bfloat16, torch.float32):
        copied = bare_copy(module, kind, seed=3)
        y = run_rows(copied, x, gate)
        for order in same:
            told = gated_norm.reference(
                x, gate, _weight(copied, size).to(kind), replace(form, rounding=order)
            )
            if told.dtype != y.dtype:
                same[order] = 0.0
            same[order] = min(same[order], float((y == told).double().mean()))
    best = _best_rounding(same)
    return best if isinstance(best, Mismatch) else replace(form, rounding=best)
