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

import torch
from torch import Tensor, nn

from schedlang.ir.model import ModelFacts
from schedlang.ir.module_copies import copy_module
from schedlang.passes.verify.observe import flatten_output
from schedlang.passes.verify.original import Sequential, count_rows
from schedlang.passes.verify.proof_case import Case, proof_modes
from schedlang.report import Row
from schedlang.runtime.modes import enter_modes
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
        (separate, values, merged), own_model = _separate_names(facts), facts.without_random_draws()
        separate_grads = _loss_and_gradients(case, separate)
        shared_grads = _loss_and_gradients(case, own_model)
        expected, outputs = _evaluate(case, separate), _evaluate(case, own_model)
    size = max((float(value.double().norm()) for value in expected.values()), default=0.0)
    for name, output in outputs.items():
        yield _row(f"in evaluation: {name}", expected[name], output, size)
    separate_loss, shared_loss = separate_grads.pop(""), shared_grads.pop("")
    yield _row("loss", separate_loss, shared_loss, abs(float(separate_loss.double().norm())))
    scale = max((float(g.double().norm()) for g in separate_grads.values()), default=0.0)
    separate_grads = _through_merge(values, merged, separate_grads)
    for name, grad in shared_grads.items():
        aliases = [n for n in facts.parameters[name].names if n in separate_grads]
        yield _row(
            name,
            sum(separate_grads[n] for n in aliases[1:]) + separate_grads[aliases[0]],
            grad,
            scale,
        )


NamedTensors = dict[str, Tensor]


def _values(facts: ModelFacts) -> Row:
    """Compare all values with the untouched model's; none may differ.

    A quantised value is compared with the nearest representable value.
    """
    worst, location = 0.0, "all values"
    for name, value in facts.model.named_parameters(remove_duplicate=False):
        if name not in facts.base.parameters:
            continue  # added by a row
        base_parameter = facts.base.model.get_parameter(facts.parameters[name].names[0])
        coding = facts.coding_of(facts.parameters[name].name)
        expected = base_parameter.detach().double()
        if coding is not None:
            expected = _nearest(expected, coding, value.detach().double())
        error = float((value.detach().double() - expected).norm())
        if error > worst:
            worst, location = error, f"value of {name}"
    return Row("untouched", KIND, location, worst, 0.0, worst == 0.0, 0)


def _nearest(weight: Tensor, coding: WeightQuantization, actual: Tensor) -> Tensor:
    """Return the nearest representable values; of two equally near ones the one in `actual`."""
    levels = torch.tensor(sorted(coding.book.levels), dtype=weight.dtype, device=weight.device)
    nearest_blocks, dim = [], coding.input_dim
    blocks = (torch.split(tensor, coding.book.block, dim) for tensor in (weight, actual))
    for block, actual_block in zip(*blocks):
        scale = block.abs().amax(dim, keepdim=True)
        ratio = block / torch.where(scale > 0, scale, 1.0)
        upper_index = torch.searchsorted(levels, ratio.contiguous()).clamp_max(len(levels) - 1)
        bounds = [levels[upper_index] * scale, levels[(upper_index - 1).clamp_min(0)] * scale]
        distances = [(bound - block).abs() for bound in bounds]
        is_tie = torch.isclose(distances[0], distances[1], rtol=1e-9, atol=0.0)
        nearest = torch.where(distances[0] <= distances[1], bounds[0], bounds[1])
        keeps_actual = is_tie & ((actual_block == bounds[0]) | (actual_block == bounds[1]))
        nearest_blocks.append(torch.where(keeps_actual, actual_block, nearest))
    return torch.cat(nearest_blocks, dim)


def _separate_names(facts: ModelFacts) -> tuple[nn.Module, NamedTensors, NamedTensors]:
    """Copy the untouched model with a parameter for each name, at the changed model's values.

    Also return these values by name, and the copy's values, which are computed from them.
    """
    twin = copy_module(facts.base.model)
    params = facts.model.named_parameters(remove_duplicate=False)
    values = {n: p.detach().clone().requires_grad_(p.is_floating_point()) for n, p in params}
    merged = facts.merge_values(values)
    for fqn, module in twin.named_modules():  # a shared module appears once
        for local, parameter in list(module._parameters.items()):
            if parameter is not None:
                value = merged[f"{fqn}.{local}".lstrip(".")].detach().clone()
                setattr(module, local, nn.Parameter(value, value.is_floating_point()))
    return twin, values, merged


def _through_merge(
    values: NamedTensors, merged: NamedTensors, grads_by_name: NamedTensors
) -> NamedTensors:
    """Return the gradients of the changed model's values, by the chain rule through the merge."""
    names = [
        name
        for name, value in merged.items()
        if name in grads_by_name and value.grad_fn is not None
    ]
    if not names:
        return grads_by_name
    leaves = {name: value for name, value in values.items() if value.requires_grad}
    grads = [grads_by_name[name].to(merged[name]) for name in names]
    leaf_grads = torch.autograd.grad(
        [merged[name] for name in names], list(leaves.values()), grads, allow_unused=True
    )
    return grads_by_name | {
        name: grad for name, grad in zip(leaves, leaf_grads) if grad is not None
    }


def _loss_and_gradients(case: Case, module: nn.Module) -> dict[str, Tensor]:
    """Return loss (under "") and gradients of the first batch in training mode; zeros for None."""
    subject, batch = Sequential(module, loss=case.loss), case.batches[0]
    loss = {"": subject.forward_backward(batch, range(count_rows(batch)))}
    parameters = dict(module.named_parameters())
    grads = subject.gradients().items()
    return loss | {n: torch.zeros_like(parameters[n]) if g is None else g for n, g in grads}


def _evaluate(case: Case, module: nn.Module) -> NamedTensors:
    """Return the outputs of the first batch in eval mode, by path."""
    takes = case.prepared is not None and case.prepared.traced.takes_gradient
    subject = Sequential(module, loss=case.loss, takes_gradient=takes)
    output = subject.eval_step(case.batches[0])
    return {n: v for n, v in flatten_output(output, set()) if isinstance(v, Tensor)}


def _row(name: str, expected: Tensor, actual: Tensor, scale: float) -> Row:
    error = float((actual.double() - expected.double()).norm())
    allowed = RTOL * float(expected.double().norm()) + ATOL * scale
    relative = error / (float(expected.double().norm()) or 1.0)
    return Row(
        "untouched", KIND, name, relative, RTOL, error <= allowed, 0, "", tuple(expected.shape)
    )
