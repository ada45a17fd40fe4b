"""Find which norm a module computes by running it: RMSNorm or LayerNorm, with or without a gate.

Forward and gradients must agree with the formula at several scales of the input, with casts to
float32 treated as float64; the order of rounding is determined bit by bit in bfloat16. With a gate,
a change of one input number shows which numbers of a row are normalised together; then every
activation, before and after the norm, is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from schedlang.kernels import liger
from schedlang.kernels.gated import ACTIVATIONS
from schedlang.kernels.norm import Case, Form, reference, split_groups
from schedlang.kernels.probe import (
    TOLERANCE,
    Mismatch,
    bare_copy,
    gradients_distance,
    inputs_of,
    one_input,
    random_rows,
    relative_error,
    run_rows,
)
from schedlang.runtime.float64 import Float64
from schedlang.runtime.modes import enter_modes

INPUT_SCALES = (1.0, 50.0, 1e-2, 1e-3, 1e-10)
CASE_KINDS = (
    ("float32", 7),
    ("bfloat16", 7),
    ("float32", 1),
)  # dtypes and rows of a kernel's test cases
LIBRARY_KERNELS = ("liger.rms_norm", "liger.layer_norm")  # kernels of an installed library
_GATE = "rms_norm with a gate"


@dataclass(frozen=True)
class NormForm:
    """The norm that a module computes, in the form of its kernel, and names in the module.

    weight   name of a parameter; None: a weight of ones
    bias     name of a parameter; None: no bias
    inputs   names of the two arguments, if it has a gate
    library  the kernel in LIBRARY that computes it; "": our own kernel
    """

    size: int
    weight: str | None
    bias: str | None
    form: Form
    inputs: tuple[str, ...] = ()
    library: str = ""

    @property
    def kind(self) -> str:
        """The name of our kernel for it."""
        return "layer_norm" if self.form.centred else "rms_norm"

    def vectors(self, module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the module's weight and bias for rows `x`; without a weight, ones."""
        weight = x.new_ones(x.shape[-1]) if self.weight is None else getattr(module, self.weight)
        return weight, None if self.bias is None else getattr(module, self.bias)

    def cases(self) -> list[Case]:
        """Return test cases of the kernel in this form, for the trial of a schedule."""
        case_type = liger.Case if self.library else Case
        bias = self.bias is not None
        return [case_type((rows, self.size), dtype, self.form, bias) for dtype, rows in CASE_KINDS]


def probe_library_norm(module: nn.Module, kernel: str) -> NormForm | Mismatch:
    """Match a kernel of LIBRARY against `module`; return why if it differs."""
    probed = probe_norm(module)
    kind = kernel.rpartition(".")[2]
    if isinstance(probed, Mismatch):
        return probed
    if probed.kind != kind:
        return Mismatch(f"is a {probed.kind}, which `{kernel}` is not")
    if probed.weight is None:
        return Mismatch(f"has no weight, and `{kernel}` needs one")
    form = probed.form
    is_plain = form.offset == 0.0 and form.rounding == "late" and probed.bias is not None
    if kind == "layer_norm" and not is_plain:
        reason = "no bias" if probed.bias is None else "an offset, or rounds before its weight"
        return Mismatch(f"has {reason}, which `{kernel}` does not compute")
    return replace(probed, library=kernel)


# -- the parameters, and quantities for the fit
# -----------------------------------------------------


def row_size(module: nn.Module) -> int:
    """Return the size of a row; 24 if neither a parameter nor the module gives one."""
    for parameter in module.parameters():
        return parameter.numel()
    shape = getattr(module, "normalized_shape", None)
    return shape[-1] if isinstance(shape, tuple) and shape else 24


def vectors_of(module: nn.Module, size: int) -> dict[str, Tensor]:
    """Return the parameters by name; for a norm without parameters a weight of ones, named ""."""
    ones = torch.ones(size, dtype=torch.float64)
    return dict(module.named_parameters(recurse=False)) or {"": ones}


def why_not_norm(module: nn.Module) -> Mismatch | None:
    """Return why a module cannot be a norm, by its parameters, children and buffers; else None."""
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


def _scale_and_offset(far_output: Tensor, normal: Tensor, weight: Tensor) -> tuple[Tensor, float]:
    """Return the factor of each column, fitted far from zero where eps does not matter, and its
    offset from the weight."""
    scale = (far_output * normal).sum((0, 1)) / normal.square().sum((0, 1)).clamp_min(1e-300)
    offset = float((scale - weight).mean())
    return scale, round(offset) + 0.0 if abs(offset - round(offset)) < 1e-5 else offset


def _fit_eps(near_output: Tensor, scaled: Tensor, inner: Tensor) -> float:
    """Return eps, from rows so close to zero that it dominates.

    `near_output` is the norm of `inner`; `scaled` is `inner` times the factors.
    """
    inverse = (near_output * scaled).sum(-1) / scaled.square().sum(-1).clamp_min(1e-300)
    eps = float((inverse**-2 - inner.square().mean(-1)).mean())
    return eps if eps == eps and eps > 0.0 else 0.0


def named_eps(module: nn.Module, eps: float) -> float | None:
    """Return the module's own float attribute that equals a measured eps; None if there is none."""
    values = [v for v in vars(module).values() if isinstance(v, float) and v > 0]
    closest = min(values, key=lambda v: abs(v - eps), default=0.0)
    return closest if abs(closest - eps) <= 1e-6 * eps else None


def is_dtype_spacing(eps: float) -> bool:
    """Return whether an eps that was measured in float64 is the spacing of float64."""
    spacing = torch.finfo(torch.float64).eps
    return abs(eps - spacing) <= 1e-3 * spacing


# -- the probe -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Fit:
    """A formula, and the name of the parameter that is its bias."""

    form: Form
    bias: str | None

    def __str__(self) -> str:
        if self.form.act:
            return _GATE
        return "layer_norm" if self.form.centred else "rms_norm"

    @property
    def nearest(self) -> str:
        """The property that distinguishes this form from others of its kind, as text."""
        form = self.form
        if form.act:
            return f"{form.act} {'before' if form.first else 'after'} it"
        return f"eps {form.eps:.3g}"

    def of(self, params: dict[str, Tensor]) -> Callable[..., Tensor]:
        """Return the formula with these parameters, a function of the input and, if any, the
        gate."""
        weight = next(p for name, p in params.items() if name != self.bias or len(params) == 1)
        bias = None if self.bias is None else params[self.bias]
        return lambda x, *gate: reference(x, weight, bias, self.form, *gate)


def probe_norm(module: nn.Module, gates: bool = False) -> NormForm | Mismatch:
    """Return the norm that `module` computes, or the measured reason why it is none.

    `gates`: also accept a norm with a gate, its second argument.
    """
    gate = gates and len(inputs_of(module)) == 2
    refused = why_not_norm(module) or (None if gate else one_input(module))
    if refused:
        return refused
    if not gate:
        return _Probe(module, ()).run()
    names = inputs_of(module)
    reason = f"takes `{names[1]}` beside its input"
    if len(list(module.parameters())) > 1:
        return Mismatch(f"{reason}, but has two vectors as parameters: a norm with a gate has one")
    result = _Probe(module, names).run()
    if not isinstance(result, Mismatch):
        return result
    and_ = "but" if result.reason.startswith("does not run") else "and"
    return Mismatch(f"{reason}, {and_} {result.reason}", result.error)


class _Probe:
    """One module, and its copy in float64; `inputs` has two names if it has a gate."""

    def __init__(self, module: nn.Module, inputs: tuple[str, ...]) -> None:
        self.module, self.inputs, self.size = module, inputs, row_size(module)
        self.copied = bare_copy(module, torch.float64)
        self.params = vectors_of(self.copied, self.size)

    def run(self) -> NormForm | Mismatch:
        """Return the norm that the module computes, or a Mismatch."""
        with torch.random.fork_rng(devices=[]):
            try:
                with enter_modes(Float64):
                    fit = self.nearest()
            except Exception as raised:  # the module's own code: whatever it raises is a mismatch
                suffix = "with such a gate" if self.inputs else "alone"
                return Mismatch.raised(f"does not run on rows of {self.size} {suffix}", raised)
            return fit if isinstance(fit, Mismatch) else self.finished(fit)

    def nearest(self) -> _Fit | Mismatch:
        """Return the formula whose results and gradients are the module's."""
        fits = list(self.fits())
        if not fits:
            return Mismatch("normalises neither full rows nor groups of equal size")
        errors = [self.distance(fit) for fit in fits]
        best = errors.index(min(errors))
        fit, error = fits[best], errors[best]
        if not error <= TOLERANCE:
            return Mismatch(f"differs from {fit} (nearest: {fit.nearest})", error)
        error = self.gradient_distance(fit)
        if not error <= TOLERANCE:
            description = f", {fit.nearest}" if self.inputs else ""
            return Mismatch(f"equals {fit}{description}, but its gradients differ", error)
        return fit

    def given(self, *seeds: int, rows: int = 16) -> list[Tensor]:
        """Return random rows, and rows of a gate if there is one."""
        return [random_rows(self.size, seed, rows) for seed in seeds[: 1 + bool(self.inputs)]]

    @torch.no_grad()
    def distance(self, fit: _Fit) -> float:
        """Return the largest relative difference over scales of the input, in training and
        evaluation."""
        worst = 0.0
        for number, scale in enumerate(INPUT_SCALES):
            x, *gate = self.given(10 + number, 40 + number)
            expected = fit.of(self.params)(x * scale, *gate)
            for training in (True, False):
                self.copied.training = training
                actual = run_rows(self.copied, x * scale, *gate)
                worst = max(worst, relative_error(actual, expected))
        return worst

    def gradient_distance(self, fit: _Fit) -> float:
        """Return the largest relative difference of a gradient, of the inputs or of a parameter."""
        inputs = [t.requires_grad_() for t in self.given(20, 22)]
        leaves = [*inputs, *(p for p in self.params.values() if p.requires_grad)]
        return gradients_distance(
            run_rows(self.copied, *inputs), fit.of(self.params)(*inputs), leaves
        )

    # candidates

    @torch.no_grad()
    def fits(self) -> Iterator[_Fit]:
        """Yield every form, with the offset and eps that fit best; the fit itself is checked later.

        A gate of ones is a factor. Far from zero eps does not matter, which leaves the factor of
        each column; close to zero eps dominates.
        """
        ones = [torch.ones(2, 8, self.size, dtype=torch.float64)] if self.inputs else []
        zero = torch.zeros(2, 8, self.size, dtype=torch.float64)
        shift = run_rows(self.copied, zero, *ones)[0, 0]
        tolerance = (shift.norm() + 1.0) * TOLERANCE
        bias = next((n for n, p in self.params.items() if (shift - p).norm() <= tolerance), None)
        weight = next((p for name, p in self.params.items() if name != bias), shift)
        large, small = random_rows(self.size) * 1e3, random_rows(self.size, seed=2) * 1e-10
        far_output, near_output = (run_rows(self.copied, x, *ones) - shift for x in (large, small))
        for bare in self._bare(ones):
            normal = reference(large, torch.ones_like(weight), None, bare, *ones)
            scale, offset = _scale_and_offset(far_output, normal, weight)
            inner = small - small.mean(-1, keepdim=True) if bare.centred else small
            lever = float(ACTIVATIONS[bare.act](ones[0].flatten()[0])) if ones else 1.0
            inner = inner * lever if bare.first else inner
            scaled = inner * scale * (1.0 if bare.first else lever)
            eps = _fit_eps(*(split_groups(t, bare.groups) for t in (near_output, scaled, inner)))
            yield _Fit(replace(bare, offset=offset, eps=eps), bias)

    def _bare(self, ones: list[Tensor]) -> Iterator[Form]:
        if not ones:
            yield from (Form(centred, 0.0) for centred in (False, True))
        elif (groups := self._groups(ones[0])) is not None:
            for act in ACTIVATIONS:
                yield from (
                    Form(False, 0.0, 0.0, "late", act, first, groups) for first in (True, False)
                )

    def _groups(self, ones: Tensor) -> int | None:
        """Return the number of groups of a row, by the numbers that depend on the first."""
        x = random_rows(self.size)
        perturbed = x.clone()
        perturbed[..., 0] += 1.0
        results = [run_rows(self.copied, rows, ones) for rows in (x, perturbed)]
        changed = (results[0] != results[1]).flatten(0, 1).any(0)
        width = int(changed.sum())
        divides = width > 0 and bool(changed[:width].all()) and self.size % width == 0
        return self.size // width if divides else None

    # eps as it is written, and roundings

    def finished(self, fit: _Fit) -> NormForm | Mismatch:
        """Return the norm with its eps as the module writes it, and its order of rounding."""
        weight = next(name for name in self.params if name != fit.bias)
        if len(self.params) - 1 != (fit.bias is not None):
            unused = ", ".join(self.params)
            return Mismatch(f"has parameters that do not change its output: {unused}")
        eps = fit.form.eps
        assert eps is not None
        if self.inputs and is_dtype_spacing(eps):
            return Mismatch(
                "has an eps that depends on the dtype of the computation, which this kernel does"
                " not support"
            )
        fit = replace(fit, form=replace(fit.form, eps=self.written_eps(fit, eps)))
        if not fit.form.centred and fit.bias is not None:
            return Mismatch("is an rms_norm with a bias: there is no kernel for it")
        rounding = self.rounding(fit)
        if isinstance(rounding, Mismatch):
            return rounding
        form = replace(fit.form, rounding=rounding)
        return NormForm(self.size, weight or None, fit.bias, form, self.inputs)

    def written_eps(self, fit: _Fit, eps: float) -> float | None:
        """Return the eps as the module writes it: an attribute of its own, else rounded to nine
        digits."""
        attribute = named_eps(self.module, eps)
        if attribute is None and is_dtype_spacing(eps):
            single = bare_copy(self.module, torch.float32)
            x = (random_rows(self.size, seed=30) * 1e-3).float()
            form = replace(fit.form, eps=torch.finfo(torch.float32).eps)
            exact = {name: p.double() for name, p in vectors_of(single, self.size).items()}
            with torch.no_grad():
                expected = replace(fit, form=form).of(exact)(x.double())
                if relative_error(run_rows(single, x), expected) <= 1e-6:
                    return None
        return float(f"{eps:.9g}") if attribute is None else attribute

    @torch.no_grad()
    def rounding(self, fit: _Fit) -> str | Mismatch:
        """Return the order of rounding whose results equal the module's in nearly all elements.

        In bfloat16; with a gate, with a float32 weight too. Sums may have another order.
        """
        inputs = [t.bfloat16() for t in self.given(4, 5, rows=64)]
        shares = {"early": 1.0, "late": 1.0}
        for kind in (torch.bfloat16, torch.float32) if self.inputs else (torch.bfloat16,):
            copied = bare_copy(self.module, kind, seed=3)
            params = {name: p.to(kind) for name, p in vectors_of(copied, self.size).items()}
            try:
                y = run_rows(copied, *inputs)
            except Exception as raised:  # the module's own code
                return Mismatch(f"does not run in bfloat16: {type(raised).__name__}")
            for order in shares:
                expected = replace(fit, form=replace(fit.form, rounding=order)).of(params)(*inputs)
                share = float((y == expected).double().mean())
                same_dtype = expected.dtype == y.dtype or not self.inputs
                shares[order] = min(shares[order], share if same_dtype else 0.0)
        best = max(shares, key=lambda order: shares[order])
        if shares[best] < 0.99:
            return Mismatch(
                f"rounds differently in bfloat16: at best {shares[best]:.0%} of bits agree"
            )
        return best
