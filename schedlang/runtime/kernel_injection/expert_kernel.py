"""Experts of an MoE layer by grouped matrix products: tokens sorted by expert, one product for all.

The role and layout of each parameter, and the activation between the products, are found by trying
a small float64 copy, so that this works for experts of any class. Nothing is padded and no token is
dropped (Gale et al., "MegaBlocks", 2022). Under `expert_parallel` these are the experts of one
rank.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.kernels import gated
from schedlang.kernels.grouped import Case, grouped_product
from schedlang.kernels.kernel_device import autocast_dtype
from schedlang.kernels.probe import TOLERANCE, Mismatch, gradients_distance, relative_error
from schedlang.runtime.float64 import Float64
from schedlang.runtime.modes import enter_modes
from schedlang.runtime.moe.probe import (
    ExpertTrial,
    NoExperts,
    probe_experts,
    small_copy,
    trial_scales,
)

# activations without a gate, in addition to those of gated MLPs
UNGATED_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu2": lambda x: torch.relu(x).square(),
}


@dataclass(frozen=True)
class ExpertMatrix:
    """One product of every expert: names of weight and bias; `across`: weights as in nn.Linear,
    [out, in]."""

    weight: str
    bias: str | None
    across: bool


@dataclass(frozen=True)
class ExpertActivation:
    """The activation between the products: `act` of ACTIVATIONS or PLAIN, or the module's own.

    `layout` is the layout of gate and up: "gate first", "up first" or "in turn" in one tensor,
    "apart" in two tensors; "" without a gate.
    """

    act: str
    layout: str
    own: bool = False


@dataclass(frozen=True)
class GroupedForm:
    """down(middle(first(x))) of each token's experts; `first` is one product, or gate and up."""

    first: tuple[ExpertMatrix, ...]
    middle: ExpertActivation
    down: ExpertMatrix
    # number of experts, width of a token, width after the first product
    sizes: tuple[int, int, int]

    def cases(self) -> list[Case]:
        """Return test cases of both products, with aligned widths of at most 256 and at most 8
        experts."""
        width, inner = (min(-(-size // 8) * 8, 256) for size in self.sizes[1:])
        experts = min(self.sizes[0], 8)
        return [
            Case((29, width), "bfloat16", experts, inner, self.first[0].across),
            Case((29, inner), "bfloat16", experts, width, self.down.across, seed=1),
        ]


# -- what a module computes ----------------------------------------------------------------------


def probe_grouped(module: nn.Module) -> GroupedForm | Mismatch:
    """Return the form of the experts that a module computes, or the measured reason why none
    fits."""
    if "forward" in vars(module):
        return Mismatch("has a replaced forward already")
    split = probe_experts(module)
    if isinstance(split, NoExperts):
        return Mismatch(split.reason, split.error)
    shapes = [tuple(module.get_parameter(name).shape) for name in split.split]
    nearest = Mismatch("has parameters whose shapes are not those of two or three matrix products")
    with torch.random.fork_rng(devices=[]), enter_modes(Float64):
        for scale in trial_scales(shapes):
            small = small_copy(module, split.split, scale)
            if small is None:
                continue
            try:
                form = _best_form(small, ExpertTrial(small, split.count, split.split))
            except Exception as raised:  # the module's own code: whatever it raises is a mismatch
                form = Mismatch.raised("does not run on a small copy", raised)
            if isinstance(form, GroupedForm):
                return _with_module_sizes(form, module)
            nearest = form
    return nearest


def _with_module_sizes(form: GroupedForm, module: nn.Module) -> GroupedForm:
    """Return the form with the sizes of the module itself."""
    count, *dims = module.get_parameter(form.first[0].weight).shape
    inner, width = dims if form.first[0].across else reversed(dims)
    return GroupedForm(form.first, form.middle, form.down, (count, width, inner))


def _best_form(module: nn.Module, trial: ExpertTrial) -> GroupedForm | Mismatch:
    errors: dict[GroupedForm, float] = {}
    with torch.no_grad():
        for form in _forms(module, trial.x.shape[1]):
            try:
                y = compute_experts(module, form, trial.x, trial.index, trial.weights)
            except (RuntimeError, ValueError):  # shapes that do not match
                continue
            errors[form] = relative_error(y, trial.whole) if y.shape == trial.whole.shape else 1e300
            if errors[form] <= TOLERANCE:
                break
    if not errors:
        return Mismatch("has parameters whose shapes are not those of two or three matrix products")
    best = min(errors, key=lambda form: errors[form])
    if not errors[best] <= TOLERANCE:
        return Mismatch(f"differs from experts by {best.middle.act}", errors[best])
    error = _gradient_distance(module, best, trial)
    if not error <= TOLERANCE:
        return Mismatch("equals experts by grouped products, but its gradients differ", error)
    return best


def _gradient_distance(module: nn.Module, form: GroupedForm, trial: ExpertTrial) -> float:
    x, weights = (t.detach().clone().requires_grad_() for t in (trial.x, trial.weights))
    leaves = [x, weights, *module.parameters()]
    exact = module(x, trial.index, weights)
    return gradients_distance(compute_experts(module, form, x, trial.index, weights), exact, leaves)


def _forms(module: nn.Module, width: int) -> Iterator[GroupedForm]:
    """Yield every form that the shapes of these parameters allow."""
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    cubes = [name for name, shape in shapes.items() if len(shape) == 3]
    flat = [name for name, shape in shapes.items() if len(shape) == 2]
    if len(cubes) not in (2, 3) or len(cubes) + len(flat) != len(shapes):
        return
    for names in itertools.permutations(cubes):
        for transposed in itertools.product((True, False), repeat=2):
            for biases in _biases(len(names), flat):
                layouts = [transposed[0]] * (len(names) - 1) + [transposed[1]]
                *first, down = map(ExpertMatrix, names, biases, layouts)
                if all(
                    _fits(matrix, shapes, in_width)
                    for matrix, in_width in [*((m, width) for m in first)]
                ):
                    inner = shapes[first[0].weight][1 if transposed[0] else 2]
                    for middle in _middles(module, len(first)):
                        sizes = (shapes[names[0]][0], width, inner)
                        yield GroupedForm(tuple(first), middle, down, sizes)


def _biases(count: int, names: Sequence[str]) -> Iterator[tuple[str | None, ...]]:
    """Yield every assignment of all vectors of a module to its products as biases."""
    slots = [*names, *[None] * (count - len(names))]
    yield from dict.fromkeys(itertools.permutations(slots, count))


def _fits(matrix: ExpertMatrix, shapes: Mapping[str, tuple[int, ...]], width: int) -> bool:
    _, dim_1, dim_2 = shapes[matrix.weight]
    in_width, out_width = (dim_2, dim_1) if matrix.across else (dim_1, dim_2)
    return in_width == width and (matrix.bias is None or shapes[matrix.bias][1] == out_width)


def _middles(module: nn.Module, products: int) -> Iterator[ExpertActivation]:
    """Yield every possible middle; the module's own gate and activation come last."""
    orders = ("apart",) if products == 2 else ("gate first", "up first", "in turn", "")
    child_names = [name for name, child in module.named_children() if not list(child.parameters())]
    acts = [*((act, False) for act in gated.ACTIVATIONS), *((name, True) for name in child_names)]
    yield from (ExpertActivation(act, order, own_act) for order in orders for act, own_act in acts)
    yield from (ExpertActivation(act, "") for act in UNGATED_ACTIVATIONS if products == 1)
    if products == 1 and callable(getattr(module, "_apply_gate", None)):
        yield ExpertActivation("_apply_gate", "", True)  # the name used by experts of transformers


# -- computing it --------------------------------------------------------------------------------


def compute_experts(
    module: nn.Module, form: GroupedForm, x: Tensor, index: Tensor, weights: Tensor
) -> Tensor:
    """Compute the experts: sort rows by expert, two or three products, sort back and sum."""
    choices = index.shape[1]
    choice = index.flatten()
    order = choice.argsort(stable=True)
    experts = choice[order]
    rows = x[order // choices]
    count = getattr(module, form.down.weight).shape[0]
    sizes = torch.zeros(count, dtype=torch.int64, device=x.device)
    ends = sizes.index_add(0, choice, torch.ones_like(choice)).cumsum(0).int()
    ys = [_grouped_product(module, matrix, rows, experts, ends) for matrix in form.first]
    middle = _activate(module, form.middle, ys)
    y = _grouped_product(module, form.down, middle, experts, ends) * weights.flatten()[order, None]
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    return y[inverse].view(x.shape[0], choices, -1).sum(1).to(x.dtype)


def _grouped_product(
    module: nn.Module, matrix: ExpertMatrix, rows: Tensor, experts: Tensor, ends: Tensor
) -> Tensor:
    weight: Tensor = getattr(module, matrix.weight)
    dtype = autocast_dtype(rows)  # as F.linear would
    if dtype is not None:
        rows, weight = rows.to(dtype), weight.to(dtype)
    y = grouped_product(rows, weight, ends, matrix.across)
    return y if matrix.bias is None else y + getattr(module, matrix.bias)[experts].to(y.dtype)


def _activate(module: nn.Module, middle: ExpertActivation, ys: Sequence[Tensor]) -> Tensor:
    """Apply the activation to one tensor, or multiply the activated gate by the other."""
    activation: Callable[[Tensor], Tensor] = (
        getattr(module, middle.act)
        if middle.own
        else gated.ACTIVATIONS.get(middle.act) or UNGATED_ACTIVATIONS[middle.act]
    )
    if not middle.layout:
        return activation(ys[0])
    if middle.layout == "in turn":
        ys = (ys[0][..., ::2], ys[0][..., 1::2])
    elif middle.layout != "apart":
        if not middle.own:
            return gated.packed_gated_product(ys[0], middle.act, middle.layout == "gate first")
        halves = ys[0].chunk(2, -1)
        ys = halves if middle.layout == "gate first" else halves[::-1]
    return (
        activation(ys[0]) * ys[1] if middle.own else gated.gated_product(ys[0], ys[1], middle.act)
    )


class GroupedExperts:
    """The layer that computes experts by grouped products, with the module's own parameters."""

    kernel = "grouped"

    def __init__(self, module: nn.Module, form: GroupedForm) -> None:
        self.module, self.form = module, form
        self.names = [*inspect.signature(type(module).forward).parameters][1:4]

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
        """Compute for tokens, the experts of each, and their weights; `inner` is not called."""
        arguments = dict(zip(self.names, args, strict=False)) | kwargs
        if len(args) > len(self.names) or sorted(arguments) != sorted(self.names):
            raise Refusal.of(
                "S821",
                f"`{type(self.module).__name__}` was called with {len(args) + len(kwargs)}"
                " arguments, but experts take tokens, expert indices and routing weights",
                helps=("leave this module as it is",),
            )
        return compute_experts(self.module, self.form, *(arguments[name] for name in self.names))
