"""Tell which RMSNorm with a gate a module computes: what the gate does and where it stands.

The parts of a row that are normalised together show when one number of it changes; every
activation, before the norm and after it, is then tried against the module, forward and backward, at
several scales of the input.  Casts to float32 inside read as float64; where low precision is
rounded is read off bit by bit, with parameters of the input's type and with wider ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from schedlang.kernels.check import Case as AnyCase
from schedlang.kernels.gated import ACTIVATIONS
from schedlang.kernels.gated_norm import Case, Form, parts_of, reference
from schedlang.kernels.norms import (
    SCALES,
    follows_type,
    named_eps,
    size_of,
    structure,
    vectors_of,
)
from schedlang.kernels.probe import (
    TOLERANCE,
    Mismatch,
    bare_copy,
    gradients_apart,
    inputs_of,
    relative,
    rows_of,
    run_rows,
)
from schedlang.runtime.float64 import Float64
from schedlang.runtime.modes import ambient


@dataclass(frozen=True)
class GatedNorm:
    """What a norm with a gate computes, of inputs that its forward names so.

    `weight` is the name of a parameter, None where it has none (a weight is then one).
    """

    size: int
    weight: str | None
    inputs: tuple[str, str]
    form: Form

    kind = "rms_norm"

    def cases(self) -> list[AnyCase]:
        """Runs of the kernel in the form that was found, for the trial of a schedule."""
        runs = [("float32", 7), ("bfloat16", 7), ("float32", 1)]
        return [Case((rows, self.size), dtype, self.form) for dtype, rows in runs]


def takes_gate(module: nn.Module) -> bool:
    """Whether the module's forward may be given one thing beside its input."""
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
            if isinstance(found, Form):
                found = _rounded(module, found, size)
        except Exception as raised:  # the module's own code: whatever it raises is a mismatch
            said = f"{type(raised).__name__}: {raised}".splitlines()[0]
            return Mismatch(f"{what}, but does not run on rows of {size} with such a gate: {said}")
    if isinstance(found, Mismatch):
        return Mismatch(f"{what}, and {found.reason}", found.error)
    (weight,) = vectors_of(copied, size)
    return GatedNorm(size, weight or None, (names[0], names[1]), found)


def _weight(module: nn.Module, size: int) -> Tensor:
    (weight,) = vectors_of(module, size).values()
    return weight


def _nearest(module: nn.Module, size: int) -> Form | Mismatch:
    """The form whose results and gradients are the module's."""
    groups = _groups(module, size)
    if groups is None:
        return Mismatch("normalises neither full rows nor groups of equal size")
    forms = list(_forms(module, size, groups))
    errors = [_distance(module, form, size) for form in forms]
    best = errors.index(min(errors))
    form, error = forms[best], errors[best]
    said = f"{form.act} {'before' if form.first else 'after'} it"
    if not error <= TOLERANCE:
        return Mismatch(f"differs from rms_norm with a gate (nearest: {said})", error)
    error = _gradient_distance(module, form, size)
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
def _forms(module: nn.Module, size: int, groups: int) -> Iterator[Form]:
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
            bare = Form(0.0, 0.0, "late", act, first, groups)
            normal = reference(large, ones, flat, bare)
            scale = (far * normal).sum((0, 1)) / normal.square().sum((0, 1)).clamp_min(1e-300)
            offset = float((scale - weight).mean())
            offset = round(offset) + 0.0 if abs(offset - round(offset)) < 1e-5 else offset
            yield replace(bare, offset=offset, eps=_eps(near, small, ones, scale, bare))


def _eps(near: Tensor, small: Tensor, gate: Tensor, scale: Tensor, form: Form) -> float:
    """What must have been added to the mean of the squares of rows close to zero."""
    lever = float(ACTIVATIONS[form.act](gate.flatten()[0]))
    inner = small * lever if form.first else small
    scaled = inner * scale * (1.0 if form.first else lever)
    parts = [parts_of(t, form.groups) for t in (near, scaled, inner)]
    inverse = (parts[0] * parts[1]).sum(-1) / parts[1].square().sum(-1).clamp_min(1e-300)
    eps = float((inverse**-2 - parts[2].square().mean(-1)).mean())
    return eps if eps == eps and eps > 0.0 else 0.0


@torch.no_grad()
def _distance(module: nn.Module, form: Form, size: int) -> float:
    """The largest relative difference over scales of the input, in training and evaluation."""
    worst = 0.0
    for number, scale in enumerate(SCALES):
        x, gate = rows_of(size, seed=10 + number) * scale, rows_of(size, seed=40 + number)
        expected = reference(x, gate, _weight(module, size), form)
        for training in (True, False):
            module.training = training
            error = relative(run_rows(module, x, gate), expected)
            worst = max(worst, error) if error == error else float("inf")
    return worst


def _gradient_distance(module: nn.Module, form: Form, size: int) -> float:
    x, gate = (rows_of(size, seed=seed).requires_grad_() for seed in (20, 22))
    expected = reference(x, gate, _weight(module, size), form)
    return gradients_apart(run_rows(module, x, gate), expected, [x, gate, *module.parameters()])


@torch.no_grad()
def _rounded(module: nn.Module, form: Form, size: int) -> Form | Mismatch:
    """The form with the order of rounding whose results are the module's, or why there is none.

    Bit by bit, for nearly all elements: sums may run in another order.
    """
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
            told = reference(x, gate, _weight(copied, size).to(kind), replace(form, rounding=order))
            if told.dtype != y.dtype:
                same[order] = 0.0
            same[order] = min(same[order], float((y == told).double().mean()))
    best = max(same, key=lambda order: same[order])
    if same[best] < 0.99:
        return Mismatch(f"rounds differently in bfloat16: at best {same[best]:.0%} of bits agree")
    return replace(form, rounding=best)
