"""Casts of a plan: put around modules of a copy or a loss, and read from the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from schedlang.ir.annotations import Cast
from schedlang.ir.model import is_inside
from schedlang.ir.plan import Plan

if TYPE_CHECKING:
    from torch import nn

    from schedlang.pipeline.timeline.table import Timeline
    from schedlang.runtime.mixed_precision import CastRegion
    from schedlang.runtime.optim.loss_scale import LossScale

Loss = Callable[..., Any]


def cast_modules(plan: Plan, model: nn.Module, keeps: bool = False) -> CastRegion | None:
    """Put the casts of all rows around the modules of a copy; return None without casts.

    keeps: cast parameters are cached for a full step; see `has_stable_parameters`.
    """
    from schedlang.runtime.mixed_precision import cast_model

    if not plan.casts:
        return None
    return cast_model(model, ((one.fqn, one.dtype, one.params) for one in plan.casts), keeps)


def has_stable_parameters(plan: Plan, timeline: Timeline) -> bool:
    """Return whether full parameters stay on the device, with the same values, for a full step.

    Returns False where parameters are gathered or fetched for each use: a cached cast would be a
    copy of a freed parameter. Returns False also where updates are made inside a step.
    """
    gathered = any(one.stage == 3 for one in plan.replicas)
    fetched = any(one.what == "parameters" for one in plan.stores)
    return not (gathered or fetched or timeline.stale)


def cast_loss(plan: Plan, loss: Loss | None) -> Loss | None:
    """Return the user's loss, under the autocast of the root module if there is one."""
    row = root_cast(plan)
    if row is None or row.params or loss is None:
        return loss
    from schedlang.runtime.mixed_precision import DTYPES, AutocastLoss

    return AutocastLoss(loss, DTYPES[row.dtype])


def root_cast(plan: Plan) -> Cast | None:
    """Return the cast of the root module, or None."""
    return next((one for one in plan.casts if not one.fqn), None)


def gather_dtype(plan: Plan, names: Iterable[str]) -> str | None:
    """Return the dtype in which shards of these parameters can be gathered; None: the stored dtype.

    The dtype is returned only if all modules that hold one of the parameters cast it to the same
    dtype: a module that computes in the stored dtype needs the stored values.
    """
    ties = {name: tie for tie in plan.model.ties for name in tie}
    found = {_cast_dtype(plan, name) for first in names for name in ties.get(first, (first,))}
    return found.pop() if len(found) == 1 else None


def _cast_dtype(plan: Plan, name: str) -> str | None:
    """Return the dtype to which the innermost row casts a parameter; None: it is not cast."""
    rows = [one for one in plan.casts if is_inside(name, one.fqn)]
    row = max(rows, key=lambda one: len(one.fqn), default=None)
    stored = plan.model.parameters[name].dtype
    return row.dtype if row is not None and row.params and stored == "float32" else None


def coarsest_epsilon(plan: Plan) -> float:
    """Return the largest epsilon among the dtypes to which modules are cast; 0 without casts."""
    import torch

    from schedlang.runtime.mixed_precision import DTYPES

    low = [torch.finfo(DTYPES[one.dtype]).eps for one in plan.casts if one.dtype != "fp32"]
    return max(low, default=0.0)


def initial_loss_scale(plan: Plan) -> LossScale | None:
    """Return the initial loss scale, where a row computes in float16; else None."""
    from schedlang.runtime.optim.loss_scale import LossScale

    row = plan.loss_scaling
    return None if row is None else LossScale(float(row.scale), row.growth)
