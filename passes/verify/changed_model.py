"""Compare a model that rows changed (frozen, tied, adapted) with the untouched model.

The changed model is the oracle of such a schedule. This file shows that it is what the rows say:

* A parameter has the value of the untouched model under the first of its names.
* The untouched model runs with a separate parameter for each name, so it has a gradient for each. A
  parameter's gradient is the sum over its names, or none if it is frozen.
* A quantised parameter has, block by block, the representable value nearest to the untouched one.
* Parameters that a row adds are merged into the untouched model's; their gradients follow by the
  chain rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from schedlang.ir.model import ModelFacts
from schedlang.ir.module_copies import copy_module
from schedlang.passes.verify.observe import flatten_output
from schedlang.passes.verify.original import Sequential, count_rows
from schedlang.passes.verify.proof_case import Case, proof_modes
from schedlang.report import Row
from schedlang.runtime.modes import enter_modes

if TYPE_CHECKING:
    from schedlang.runtime.storage.codebook import WeightQuantization

KIND = "changed model"
RTOL, ATOL = 1e-9, 1e-12


def compare_changed_model(case: Case) -> Iterator[Row]:
    """Yield rows for values, loss, outputs and gradients on one batch; the case is in float64."""
    facts = case.plan.model
    if not facts.changes:
        return
    yield _values(facts)
    modes, _ = proof_modes(case)
    with enter_modes(*modes):
        (apart, values, merged), own_model = _separate_names(facts), facts.without_random_draws()
        named, grads = _loss_and_gradients(case, apart), _loss_and_gradients(case, own_model)
        wanted, outputs = _evaluate(case, apart), _evaluate(case, own_model)
    size = max((float(value.double().norm()) for value in wanted.values()), default=0.0)
    for name, output in outputs.items():
        yield _row(f"in evaluation: {name}", wanted[name], output, size)
    loss, own = named.pop(""), grads.pop("")
    yield _row("loss", loss, own, abs(float(loss.double().norm())))
    scale = max((float(g.double().norm()) for g in named.values()), default=0.0)
    named = _through_merge(values, merged, named)
    for name, grad in grads.items():
        same = [n for n in facts.parameters[name].names if n in named]
        yield _row(name, sum(named[n] for n in same[1:]) + named[same[0]], grad, scale)


NamedTensors = dict[str, Tensor]


def _values(facts: ModelFacts) -> Row:
    """Compare all values with the untouched model's; none may differ.

    A quantised value is compared with the nearest representable value.
    """
    worst, place = 0.0, "all values"
    for name, value in facts.model.named_parameters(remove_duplicate=False):
        if name not in facts.base.parameters:
            continue  # added by a row
        first = facts.base.model.get_parameter(facts.parameters[name].names[0])
        coding = facts.coding_of(facts.parameters[name].name)
        wanted = first.detach().double()
        if coding is not None:
            wanted = _nearest(wanted, coding, value.detach().double())
        error = float((value.detach().double() - wanted).norm())
        if error > worst:
            worst, place = error, f"value of {name}"
    return Row("untouched", KIND, place, worst, 0.0, worst == 0.0, 0)


def _nearest(weight: Tensor, coding: WeightQuantization, found: Tensor) -> Tensor:
    """Return the nearest representable values; of two equally near ones the one in `found`."""
    levels = torch.tensor(sorted(coding.book.levels), dtype=weight.dtype, device=weight.device)
    made, dim = [], coding.input_dim
    blocks = (torch.split(each, coding.book.block, dim) for each in (weight, found))
    for block, own in zip(*blocks):
        scale = block.abs().amax(dim, keepdim=True)
        ratio = block / torch.where(scale > 0, scale, 1.0)
        above = torch.searchsorted(levels, ratio.contiguous()).clamp_max(len(levels) - 1)
        both = [levels[above] * scale, levels[(above - 1).clamp_min(0)] * scale]
        far = [(one - block).abs() for one in both]
        even = torch.isclose(far[0], far[1], rtol=1e-9, atol=0.0)
        nearest = torch.where(far[0] <= far[1], both[0], both[1])
        tie = even & ((own == both[0]) | (own == both[1]))
        made.append(torch.where(tie, own, nearest))
    return torch.cat(made, dim)


def _separate_names(facts: ModelFacts) -> tuple[nn.Module, NamedTensors, NamedTensors]:
    """Copy the untouched model with a parameter for each name, at the changed model's values.

    Also return these values by name, and the copy's values, which are computed from them.
    """
    twin = copy_module(facts.base.model)
    named = facts.model.named_parameters(remove_duplicate=False)
    values = {n: p.detach().clone().requires_grad_(p.is_floating_point()) for n, p in named}
    merged = facts.merge_values(values)
    for fqn, module in twin.named_modules():  # a shared module appears once
        for local, parameter in list(module._parameters.items()):
            if parameter is not None:
                value = merged[f"{fqn}.{local}".lstrip(".")].detach().clone()
                setattr(module, local, nn.Parameter(value, value.is_floating_point()))
    return twin, values, merged


def _through_merge(values: NamedTensors, merged: NamedTensors, named: NamedTensors) -> NamedTensors:
    """Return the gradients of the changed model's values, by the chain rule through the merge."""
    made = [name for name, value in merged.items() if name in named and value.grad_fn is not None]
    if not made:
        return named
    at = {name: value for name, value in values.items() if value.requires_grad}
    grads = [named[name].to(merged[name]) for name in made]
    more = torch.autograd.grad(
        [merged[name] for name in made], list(at.values()), grads, allow_unused=True
    )
    return named | {name: grad for name, grad in zip(at, more) if grad is not None}


def _loss_and_gradients(case: Case, module: nn.Module) -> dict[str, Tensor]:
    """Return loss (under "") and gradients of the first batch in training mode; zeros for None."""
    subject, batch = Sequential(module, loss=case.loss), case.batches[0]
    found = {"": subject.forward_backward(batch, range(count_rows(batch)))}
    held = dict(module.named_parameters())
    grads = subject.gradients().items()
    return found | {n: torch.zeros_like(held[n]) if g is None else g for n, g in grads}


def _evaluate(case: Case, module: nn.Module) -> NamedTensors:
    """Return the outputs of the first batch in eval mode, by path."""
    output = Sequential(module, loss=case.loss).eval_step(case.batches[0])
    return {n: v for n, v in flatten_output(output, set()) if isinstance(v, Tensor)}


def _row(name: str, want: Tensor, got: Tensor, scale: float) -> Row:
    error = float((got.double() - want.double()).norm())
    allowed = RTOL * float(want.double().norm()) + ATOL * scale
    shown = error / (float(want.double().norm()) or 1.0)
    return Row("untouched", KIND, name, shown, RTOL, error <= allowed, 0, "", tuple(want.shape))
