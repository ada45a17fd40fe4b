"""Casts of a plan, put into models that only show shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from schedlang.ir.annotations import Cast
from schedlang.ir.model import inside
from schedlang.ir.plan import Plan

if TYPE_CHECKING:
    from torch import nn

    from schedlang.pipeline.timeline.table import Timeline
    from schedlang.runtime.mixed_precision import Region
    from schedlang.runtime.optim.loss_scale import LossScale

Loss = Callable[..., Any]


def cast_modules(plan: Plan, model: nn.Module, keeps: bool = False) -> Region | None:
    """Put the casts of all rows around the modules of a copy; None where there are none.

    keeps: casts of parameters serve a whole step; see `steady`.
    """
    from schedlang.runtime.mixed_precision import cast

    if not plan.casts:
        return None
    return cast(model, ((one.fqn, one.dtype, one.params) for one in plan.casts), keeps)


def steady(plan: Plan, timeline: Timeline) -> bool:
    """Whether whole parameters lie on the device, with the same values, all step long.

    Not where they are gathered or fetched for each use: a cast that stays would be a copy of what
    was freed.  Nor where updates are made inside a step.
    """
    gathered = any(one.stage == 3 for one in plan.replicas)
    fetched = any(one.what == "parameters" for one in plan.stores)
    return not (gathered or fetched or timeline.stale)


def cast_loss(plan: Plan, loss: Loss | None) -> Loss | None:
    """The loss beside the model, under the autocast of the whole model if there is one."""
    row = root_cast(plan)
    if row is None or row.params or loss is None:
        return loss
    from schedlang.runtime.mixed_precision import DTYPES, AutoLoss

    return AutoLoss(loss, DTYPES[row.dtype])


def root_cast(plan: Plan) -> Cast | None:
    """The row for the model as a whole."""
    return next((one for one in plan.casts if not one.fqn), None)


def gathered_in(plan: Plan, names: Iterable[str]) -> str | None:
    """The dtype in which slices of these parameters can be gathered; None: as they are stored.

    Only where everything that holds one of them casts it: an island needs the stored values.
    """
    ties = {name: tie for tie in plan.model.ties for name in tie}
    found = {_used_in(plan, name) for first in names for name in ties.get(first, (first,))}
    return found.pop() if len(found) == 1 else None


def _used_in(plan: Plan, name: str) -> str | None:
    """Return the dtype to which the innermost row around a parameter casts it; None: it stays."""
    rows = [one for one in plan.casts if inside(name, one.fqn)]
    row = max(rows, key=lambda one: len(one.fqn), default=None)
    stored = plan.model.parameters[name].dtype
    return row.dtype if row is not None and row.params and stored == "float32" else None


def lowest(plan: Plan) -> float:
    """The spacing at 1 of the coarsest dtype that a module computes in; 0: none is cast."""
    import torch

    from schedlang.runtime.mixed_precision import DTYPES

    low = [torch.finfo(DTYPES[one.dtype]).eps for one in plan.casts if one.dtype != "fp32"]
    return max(low, default=0.0)


def loss_scale(plan: Plan) -> LossScale | None:
    """The scale that a program begins with, where one of its rows computes in float16."""
    from schedlang.runtime.optim.loss_scale import LossScale

    row = plan.scaled
    return None if row is None else LossScale(float(row.scale), row.growth)
