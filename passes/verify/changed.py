"""Hold what rows change in the model itself (frozen, tied, untied) against the untouched model.

The oracle of such a schedule is the changed model.  That this one is what the rows say is shown
here: a parameter has the untouched model's value of the first of its names; and where the untouched
model's own forward is given a value for each name, and so has a gradient for each, a parameter has
the sum of those of its names, or none if frozen.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from schedlang.ir.model import ModelFacts
from schedlang.passes.verify.original import Sequential, rows
from schedlang.passes.verify.sides import Case, modes_of
from schedlang.report import Row
from schedlang.runtime.modes import ambient

KIND = "changed model"
RTOL, ATOL = 1e-9, 1e-12


def changed_rows(case: Case) -> Iterator[Row]:
    """Loss and gradients of the changed model on one batch; the case is in float64."""
    facts = case.plan.model
    if not facts.changes:
        return
    yield _values(facts)
    modes, _ = modes_of(case)
    with ambient(*modes):
        named, grads = (_derived(case, one) for one in (_apart(facts), copy.deepcopy(facts.model)))
    loss, own = named.pop(""), grads.pop("")
    yield _row("loss", loss, own, abs(float(loss.double().norm())))
    scale = max((float(g.double().norm()) for g in named.values()), default=0.0)
    for name, grad in grads.items():
        same = [n for n in facts.parameters[name].names if n in named]
        yield _row(name, sum(named[n] for n in same[1:]) + named[same[0]], grad, scale)


def _values(facts: ModelFacts) -> Row:
    """The greatest difference of a value from that of the untouched model, which must be none."""
    worst, place = 0.0, "all values"
    for name, value in facts.model.named_parameters(remove_duplicate=False):
        first = facts.base.model.get_parameter(facts.parameters[name].names[0])
        error = float((value.detach().double() - first.detach().double()).norm())
        if error > worst:
            worst, place = error, f"value of {name}"
    return Row("untouched", KIND, place, worst, 0.0, worst == 0.0, 0)


def _apart(facts: ModelFacts) -> nn.Module:
    """A copy of the untouched model with a parameter for each name, at the changed one's values."""
    twin = copy.deepcopy(facts.base.model)
    values = dict(facts.model.named_parameters(remove_duplicate=False))
    for fqn, module in twin.named_modules():  # one that stands twice has its names once
        for local, parameter in list(module._parameters.items()):
            if parameter is not None:
                value = values[f"{fqn}.{local}".lstrip(".")].detach().clone()
                setattr(module, local, nn.Parameter(value, value.is_floating_point()))
    return twin


def _derived(case: Case, module: nn.Module) -> dict[str, Tensor]:
    """The loss of the first batch in training mode, under "", and its gradients; none is zero."""
    subject, batch = Sequential(module, loss=case.loss), case.batches[0]
    found = {"": subject.derive(batch, range(rows(batch)))}
    held = dict(module.named_parameters())
    grads = subject.gradients().items()
    return found | {n: torch.zeros_like(held[n]) if g is None else g for n, g in grads}


def _row(name: str, want: Tensor, got: Tensor, scale: float) -> Row:
    error = float((got.double() - want.double()).norm())
    allowed = RTOL * float(want.double().norm()) + ATOL * scale
    shown = error / (float(want.double().norm()) or 1.0)
    return Row("untouched", KIND, name, shown, RTOL, error <= allowed, 0, "", tuple(want.shape))
