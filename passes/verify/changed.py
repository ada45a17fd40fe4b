"""Hold what rows change in the model itself (frozen, tied, untied) against the untouched model.

The oracle of such a schedule is the changed model.  That this one is what the rows say is shown
here: a parameter has the untouched model's value of the first of its names; and where the untouched
model's own forward is given a value for each name, and so has a gradient for each, a parameter has
the sum of those of its names, or none if frozen.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from schedlang.ir.model import ModelFacts
from schedlang.passes.verify.original import loss_of, rows
from schedlang.passes.verify.sides import Case, modes_of
from schedlang.report import Row
from schedlang.runtime.batch import called, taken
from schedlang.runtime.modes import ambient
from schedlang.runtime.scope import Scope, entered, named_sites
from schedlang.runtime.training import Training

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
        loss, named = _of_names(case, facts.base.model, facts.model)
        own, grads = _of_parameters(case, facts.model)
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


def _of_parameters(case: Case, module: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of the changed model, and the gradients of what it trains."""
    twin = copy.deepcopy(module)
    held = {name: p for name, p in twin.named_parameters() if p.requires_grad}
    loss = _loss(case, twin, lambda inputs: called(twin, inputs))
    grads = torch.autograd.grad(loss, list(held.values()), allow_unused=True)
    found = zip(held, grads)
    return loss.detach(), {n: torch.zeros_like(held[n]) if g is None else g for n, g in found}


def _of_names(
    case: Case, untouched: nn.Module, changed: nn.Module
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of the untouched model at the changed one's values, and a gradient per name."""
    twin = copy.deepcopy(untouched)
    values = dict(changed.named_parameters(remove_duplicate=False))
    places: dict[tuple[int, str], str] = {}  # a module that stands twice has its names once
    for fqn, module in twin.named_modules(remove_duplicate=False):
        for local, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault((id(module), local), f"{fqn}.{local}".lstrip("."))
    given = {
        n: values[n].detach().clone().requires_grad_()
        for n in places.values()
        if values[n].is_floating_point()
    }
    loss = _loss(
        case,
        twin,
        lambda inputs: functional_call(twin, given, (), taken(twin, inputs), tie_weights=False),
    )
    grads = torch.autograd.grad(loss, list(given.values()), allow_unused=True)
    found = zip(given, grads)
    return loss.detach(), {n: torch.zeros_like(given[n]) if g is None else g for n, g in found}


def _loss(case: Case, module: nn.Module, run: Any) -> Tensor:
    """The loss of the first batch in training mode, with logical dropout as everywhere."""
    batch: Mapping[str, Any] = case.batches[0]
    named_sites(module)
    Training(module).on()
    with entered(Scope(0, 0, tuple(range(rows(batch))))):
        found: Tensor = (case.loss or loss_of)(run(dict(batch)), batch)
    return found


def _row(name: str, want: Tensor, got: Tensor, scale: float) -> Row:
    error = float((got.double() - want.double()).norm())
    allowed = RTOL * float(want.double().norm()) + ATOL * scale
    shown = error / (float(want.double().norm()) or 1.0)
    return Row("untouched", KIND, name, shown, RTOL, error <= allowed, 0, "", tuple(want.shape))
