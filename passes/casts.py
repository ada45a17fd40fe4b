"""What computes in another dtype: the casts of a plan, put into models that only show shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from schedlang.plan import Cast, Plan

if TYPE_CHECKING:
    from torch import nn

    from schedlang.runtime.loss_scale import LossScale

Loss = Callable[..., Any]


def cast_modules(plan: Plan, model: nn.Module) -> None:
    """Put the casts of all rows around the modules of a copy."""
    from schedlang.runtime.cast import cast

    for one in plan.casts:
        cast(model, one.fqn, one.dtype, one.params)


def cast_loss(plan: Plan, loss: Loss | None) -> Loss | None:
    """The loss beside the model, under the autocast of the whole model if there is one."""
    row = root_cast(plan)
    if row is None or row.params or loss is None:
        return loss
    from schedlang.runtime.cast import DTYPES, AutoLoss

    return AutoLoss(loss, DTYPES[row.dtype])


def root_cast(plan: Plan) -> Cast | None:
    """The row for the model as a whole."""
    return next((one for one in plan.casts if not one.fqn), None)


def lowest(plan: Plan) -> float:
    """The spacing at 1 of the coarsest dtype that some module computes in; 0: there are no casts."""
    import torch

    from schedlang.runtime.cast import DTYPES

    low = [torch.finfo(DTYPES[one.dtype]).eps for one in plan.casts if one.dtype != "fp32"]
    return max(low, default=0.0)


def loss_scale(plan: Plan) -> LossScale | None:
    """The scale that a program begins with, where one of its rows computes in float16."""
    from schedlang.runtime.loss_scale import LossScale

    row = plan.scaled
    return None if row is None else LossScale(float(row.scale), row.growth)
