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
    return cast_model(model, ((cast.fqn, cast.dtype, cast.params) for cast in plan.casts), keeps)


def has_stable_parameters(plan: Plan, timeline: Timeline) -> bool:
    """Return whether full parameters stay on the device, with the same values, for a full step.

    Returns False where parameters are gathered or fetched for each use: a cached cast would be a
    copy of a freed parameter. Returns False also where updates are made inside a step.
    """
    is_gathered = any(row.stage == 3 for row in plan.replicas)
    is_fetched = any(row.what == "parameters" for row in plan.stores)
    return not (is_gathered or is_fetched or timeline.stale)


def cast_loss(plan: Plan, loss: Loss | None) -> Loss | None:
    """Return the user's loss, under the autocast of the root module if there is one."""
    row = root_cast(plan)
    if row is None or row.params or loss is None:
        return loss
    from schedlang.runtime.mixed_precision import DTYPES, AutocastLoss

    return AutocastLoss(loss, DTYPES[row.dtype])


def root_cast(plan: Plan) -> Cast | None:
    """Return the cast of the root module, or None."""
    return next((cast for cast in plan.casts if not cast.fqn), None)


def gather_dtype(plan: Plan, names: Iterable[str]) -> str | None:
    """Return the dtype in which shards of these parameters can be gathered; None: the stored dtype.

    The dtype is returned only if all modules that hold one of the parameters cast it to the same
    dtype: a module that computes in the stored dtype needs the stored values.
    """
    ties = {name: tie for tie in plan.model.ties for name in tie}
    dtypes = {_cast_dtype(plan, name) for untied in names for name in ties.get(untied, (untied,))}
    return dtypes.pop() if len(dtypes) == 1 else None


def _cast_dtype(plan: Plan, name: str) -> str | None:
    """Return the dtype to which the innermost row casts a parameter; None: it is not cast."""
    casts = [cast for cast in plan.casts if is_inside(name, cast.fqn)]
    cast_row = max(casts, key=lambda cast: len(cast.fqn), default=None)
    stored = plan.model.parameters[name].dtype
    return (
        cast_row.dtype if cast_row is not None and cast_row.params and stored == "float32" else None
    )


def coarsest_epsilon(plan: Plan) -> float:
    """Return the largest epsilon among the dtypes to which modules are cast; 0 without casts."""
    import torch

    from schedlang.runtime.mixed_precision import DTYPES

    epsilons = [torch.finfo(DTYPES[cast.dtype]).eps for cast in plan.casts if cast.dtype != "fp32"]
    return max(epsilons, default=0.0)


def initial_loss_scale(plan: Plan) -> LossScale | None:
    """Return the initial loss scale, where a row computes in float16; else None."""
    from schedlang.runtime.optim.loss_scale import LossScale

    row = plan.loss_scaling
    return None if row is None else LossScale(float(row.scale), row.growth)
