"""Gated MLPs with one kernel in the middle (`replace_kernel(gated)`): the probe and the layer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.kernels.gated import (
    ACTIVATIONS,
    Case,
    gated_product,
    packed_gated_product,
    reference,
)
from schedlang.kernels.probe import (
    TOLERANCE,
    Mismatch,
    bare_copy,
    distinct_gradient,
    one_input,
    relative_error,
)
from schedlang.runtime.device import generators_restored
from schedlang.runtime.float64 import Float64
from schedlang.runtime.forward import the_input
from schedlang.runtime.modes import enter_modes
from schedlang.runtime.submodules import remove_hooks_after

# -- the form and its layer: projections stay modules ----------------------------------------------


@dataclass(frozen=True)
class GatedForm:
    """The structure of a gated MLP: down(act(gate(x)) * up(x)).

    up          None: `gate` is one projection for both
    size        the width of the middle
    gate_first  the order in a packed projection
    between     a child that the product goes through before `down`: a dropout, or a norm
    """

    gate: str
    up: str | None
    down: str
    act: str
    size: int
    gate_first: bool = True
    between: str | None = None

    def cases(self) -> list[Case]:
        """Return test cases of the kernel for this structure."""
        pack = "" if self.up else "gate first" if self.gate_first else "up first"
        size = min(self.size, 4096)
        return [
            Case((rows, size), dtype, self.act, pack)
            for dtype, rows in (("float32", 5), ("bfloat16", 5), ("float32", 1))
        ]


def compute_gated_mlp(
    module: nn.Module, form: GatedForm, x: Tensor, kernel: bool = False
) -> Tensor:
    """Return down(act(gate) * up), by the module's own projections."""
    first = module.get_submodule(form.gate)(x)
    second = None if form.up is None else module.get_submodule(form.up)(x)
    product = compute_middle(first, second, form, kernel)
    if form.between is not None:
        product = module.get_submodule(form.between)(product)
    output: Tensor = module.get_submodule(form.down)(product)
    return output


def compute_middle(
    first: Tensor, second: Tensor | None, form: GatedForm, kernel: bool = False
) -> Tensor:
    """Return act(gate) * up; without `second`, `first` contains both."""
    if second is not None:
        return (gated_product if kernel else reference)(first, second, form.act)
    if kernel:
        return packed_gated_product(first, form.act, form.gate_first)
    half_1, half_2 = first.chunk(2, -1)
    gate, up = (half_1, half_2) if form.gate_first else (half_2, half_1)
    return reference(gate, up, form.act)


class GatedMlp:
    """A layer that computes a gated MLP by the module's own projections and one kernel."""

    kernel = "gated"

    def __init__(self, module: nn.Module, form: GatedForm) -> None:
        self.module, self.form = module, form

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
        """Compute the MLP of the only input; `inner` is not called."""
        return compute_gated_mlp(
            self.module, self.form, the_input(self.module, args, kwargs), kernel=True
        )


# -- the probe -------------------------------------------------------------------------------------
# Which child is gate, up or down, and which activation is between them, is found by running a bare
# float64 copy; so it works for modules of any class, and sharded or quantised projections keep
# their own forward.


_Calls = dict[str, list[tuple[Tensor, Tensor]]]  # child -> (input, output) of each call
# for larger weights, gradients of outputs are compared instead of weight gradients
_WIDE_WEIGHT = 2**22


def probe_gated(module: nn.Module) -> GatedForm | Mismatch:
    """Return the structure of a gated MLP, or the measured reason why the module is none."""
    linear = {n: m for n, m in module.named_children() if _projection_shape(m) is not None}
    refused = _why_not_gated(module, linear)
    if refused:
        return Mismatch(refused)
    mismatch = one_input(module)
    if mismatch:
        return mismatch
    # values around zero, where activations differ
    copied = bare_copy(module, torch.float64, spread=lambda shape: 3.0 / shape[-1] ** 0.5)
    with generators_restored(), enter_modes(Float64):
        try:
            forms = list(_forms(copied, list(linear)))
            return _best_form(
                copied,
                [
                    replace(form, between=name)
                    for name in _children_between(copied, linear)
                    for form in forms
                ],
            )
        except Exception as raised:  # the module's own code: whatever it raises is a mismatch
            return Mismatch.raised("does not run on rows alone", raised)


def _projection_shape(module: nn.Module) -> tuple[int, int] | None:
    """(in, out) of a projection; None for anything else."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    weight = module._parameters.get("weight")
    if type(module).__name__ == "Conv1D" and weight is not None and weight.ndim == 2:
        return weight.shape[0], weight.shape[1]
    return None


def _why_not_gated(module: nn.Module, linear: dict[str, nn.Module]) -> str | None:
    names = {name for name, _ in module.named_parameters()}
    expected = {f"{n}.{p}" for n, m in linear.items() for p, _ in m.named_parameters(recurse=False)}
    for name in _children_between(module, linear):
        expected |= {n for n in names if name is not None and n.startswith(f"{name}.")}
    if len(linear) not in (2, 3):
        return f"has {len(linear)} projections: a gated MLP has 3, or 2 (gate and up packed)"
    if names - expected:
        return f"has other parameters than those of its projections: {min(names - expected)}"
    if next(module.buffers(), None) is not None:
        return "has buffers: a gated MLP has none"
    if "forward" in vars(module):
        return "has a replaced forward already"
    return None


def _children_between(module: nn.Module, linear: dict[str, nn.Module]) -> list[str | None]:
    """Return children that the product may go through before the last projection.

    This is the only child with parameters that is no projection; without one, any dropout, or None.
    """
    others = {n: m for n, m in module.named_children() if n not in linear}
    with_params = [n for n, m in others.items() if next(m.parameters(), None) is not None]
    drops = [n for n, m in others.items() if isinstance(m, nn.Dropout)]
    return [*with_params] if len(with_params) == 1 else [*drops, None]


def _forms(module: nn.Module, names: list[str]) -> Iterator[GatedForm]:
    """Yield every gated MLP that the shapes of these projections allow."""
    shapes = {name: _projection_shape(module.get_submodule(name)) or (0, 0) for name in names}
    for gate, *rest, down in itertools.permutations(names):
        size = shapes[down][0]
        for act in ACTIVATIONS:
            if rest and shapes[gate] == shapes[rest[0]] == (shapes[gate][0], size):
                yield GatedForm(gate, rest[0], down, act, size)
            if not rest and shapes[gate][1] == 2 * size:
                yield GatedForm(gate, None, down, act, size)
                yield GatedForm(gate, None, down, act, size, gate_first=False)


def _best_form(module: nn.Module, forms: list[GatedForm]) -> GatedForm | Mismatch:
    if not forms:
        return Mismatch("has projections whose shapes are not those of a gated MLP")
    width = _projection_shape(module.get_submodule(forms[0].gate)) or (0, 0)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 4, width[0], generator=generator, dtype=torch.float64, device="cpu")
    with torch.no_grad():
        evaluated, trained = (_seeded(module.train(mode), x) for mode in (False, True))
    module_run = _run_recorded(module, module, x)
    results = {False: [evaluated], True: [trained, module_run.made]}
    if not all(isinstance(y, Tensor) for outputs in results.values() for y in outputs):
        return Mismatch(f"returns {type(trained).__name__}, not a tensor")
    best = _guess_form(module, forms, module_run.calls)
    form_run = _run_recorded(module, partial(compute_gated_mlp, module, best), x)
    computed = {True: form_run.made, False: _evaluated(module, best, x, form_run.made)}
    if not _largest_error(results, computed) <= TOLERANCE:  # another structure, or how far is it?
        errors = _errors(module, forms, x, results)
        best = min(forms, key=lambda form: errors[form])
        if not errors[best] <= TOLERANCE:
            return Mismatch(f"differs from a gated MLP (nearest: {best.act})", errors[best])
        form_run = _run_recorded(module, partial(compute_gated_mlp, module, best), x)
    error = _gradient_distance(module, best, module_run, form_run)
    if not error <= TOLERANCE:
        return Mismatch(f"equals a gated MLP by {best.act}, but its gradients differ", error)
    return best


# results of a module, in training (True) and in evaluation (False)
_Results = Mapping[bool, Sequence[Tensor]]


def _seeded(call: Callable[[Tensor], Any], x: Tensor) -> Any:
    """Call with x, with the same random numbers each time."""
    torch.manual_seed(0)
    return call(x)


def _largest_error(results: _Results, exact: Mapping[bool, Tensor]) -> float:
    return max(
        relative_error(y.detach(), exact[mode].detach()) for mode in results for y in results[mode]
    )


def _evaluated(module: nn.Module, form: GatedForm, x: Tensor, trained: Tensor) -> Tensor:
    """Return the result in evaluation mode; projections alone give the same in both modes."""
    if form.between is None:
        return trained
    with torch.no_grad():
        output: Tensor = compute_gated_mlp(module.eval(), form, x)
    module.train()
    return output


def _errors(
    module: nn.Module, forms: list[GatedForm], x: Tensor, results: _Results
) -> dict[GatedForm, float]:
    """Return the distance of each structure from the module's results, in training and
    evaluation."""
    ys: dict[bool, dict[GatedForm, Tensor]] = {}
    with torch.no_grad():
        for mode in (False, True):
            same_in_eval = ys and not any(form.between for form in forms)
            ys[mode] = ys[False] if same_in_eval else _compute_all(module.train(mode), forms, x)
    return {form: _largest_error(results, {mode: ys[mode][form] for mode in ys}) for form in forms}


def _guess_form(module: nn.Module, forms: list[GatedForm], calls: _Calls) -> GatedForm:
    """Return the structure whose middle is nearest to the input of the last projection, if it was
    called.

    This avoids computing the last projection for each structure; the guess is compared in full
    later.
    """

    def distance(form: GatedForm) -> float:
        names = [name for name in (form.gate, form.up, form.down) if name is not None]
        if any(len(calls.get(name, ())) != 1 for name in names):
            return math.inf
        up = None if form.up is None else calls[form.up][0][1]
        exact = calls[form.down][0][0]
        product = _through_child(module, compute_middle(calls[form.gate][0][1], up, form), form)
        return relative_error(exact, product) if exact.shape == product.shape else math.inf

    with torch.no_grad():
        return min(forms, key=distance)


def _compute_all(module: nn.Module, forms: list[GatedForm], x: Tensor) -> dict[GatedForm, Tensor]:
    """Compute several structures; each projection runs once, because wide ones take seconds."""
    computed: dict[GatedForm, Tensor] = {}
    for down in {form.down: None for form in forms}:
        same_down = [form for form in forms if form.down == down]
        rows = {name: module.get_submodule(name)(x) for name in _first_projections(same_down)}
        middles = [
            _through_child(module, compute_middle(rows[f.gate], rows.get(f.up or ""), f), f)
            for f in same_down
        ]
        computed.update(zip(same_down, module.get_submodule(down)(torch.stack(middles))))
    return computed


def _first_projections(forms: list[GatedForm]) -> set[str]:
    return {name for form in forms for name in (form.gate, form.up) if name is not None}


def _through_child(module: nn.Module, product: Tensor, form: GatedForm) -> Tensor:
    """Pass the product through the child between, with the same random numbers each time."""
    between = form.between
    return product if between is None else _seeded(module.get_submodule(between), product)


@dataclass(frozen=True)
class _Run:
    """A run with gradients: its input and result, and the calls of the module's projections."""

    leaf: Tensor
    made: Tensor
    calls: _Calls


def _run_recorded(module: nn.Module, function: Callable[[Tensor], Tensor], x: Tensor) -> _Run:
    """Run with gradients, and record the calls of a module's projections."""
    leaf, calls = x.clone().requires_grad_(), _Calls()
    with _record_calls(module, calls):
        return _Run(leaf, _seeded(function, leaf), calls)


def _gradient_distance(module: nn.Module, form: GatedForm, plain: _Run, other: _Run) -> float:
    """Return the largest relative difference of gradients of the input and the parameters.

    If both call each projection once, the gradient of a weight is the product of the output's
    gradient and the input: for wide MLPs, whose weights take seconds, these two are compared
    instead.
    """
    outputs, called = (plain.made, other.made), (plain.calls, other.calls)
    if not plain.made.requires_grad:
        return math.inf
    called_once = [len(run_leaves) == 1 for calls in called for run_leaves in calls.values()]
    alike = called[0].keys() == called[1].keys() == _first_projections([form]) | {form.down}
    is_wide = max(p.numel() for p in module.parameters()) > _WIDE_WEIGHT
    if is_wide and alike and all(called_once):
        order = sorted(called[0])
        inner = [] if form.between is None else [*module.get_submodule(form.between).parameters()]
        leaves = [
            [run.leaf, *inner, *(run.calls[n][0][1] for n in order)] for run in (plain, other)
        ]
        down_inputs = [[calls[n][0][0].detach() for n in order] for calls in called]
    else:
        leaves, down_inputs = [[run.leaf, *module.parameters()] for run in (plain, other)], [[], []]
    actual, exact = (
        torch.autograd.grad(y, run_leaves, distinct_gradient(plain.made), allow_unused=True)
        for y, run_leaves in zip(outputs, leaves)
    )
    return max(
        math.inf
        if a is None or b is None or a.numel() != b.numel()
        else relative_error(a.reshape(b.shape), b)  # rows may have been flattened
        for a, b in zip((*actual, *down_inputs[0]), (*exact, *down_inputs[1]), strict=True)
    )


def _record_calls(module: nn.Module, calls: _Calls) -> AbstractContextManager[None]:
    """Record the calls of a module's children."""

    def note(name: str, child: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        if _projection_shape(child) is not None:
            calls.setdefault(name, []).append((args[0], output))

    return remove_hooks_after(
        c.register_forward_hook(partial(note, n)) for n, c in module.named_children()
    )
