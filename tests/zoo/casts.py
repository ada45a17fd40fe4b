"""Injected bugs of casts: gradients left scaled, steps not skipped, rounded weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from schedlang.runtime.optim.loss_scale import LossScale
from schedlang.runtime.program import Program
from tests.zoo.bug import CONSTANT, REDUCTION, SKIP, Patch, Site, bug


@bug("C30", "cast", REDUCTION, "scaled", credit="PyTorch, AMP examples")
def clipped_before_unscaled(patch: Patch, site: Site) -> None:
    """Gradients are clipped before they are divided by the loss scale."""
    unscale, update = LossScale.unscale, LossScale.update
    parameters_by_scale: dict[int, Mapping[str, nn.Parameter]] = {}

    def later(self: LossScale, parameters: Mapping[str, nn.Parameter]) -> None:
        parameters_by_scale[id(self)] = parameters

    def after(self: LossScale) -> bool:
        unscale(self, parameters_by_scale[id(self)])
        return update(self)

    patch.setattr(LossScale, "unscale", later)
    patch.setattr(LossScale, "update", after)


@bug("C31", "cast", SKIP, "overflowing", credit="Micikevicius et al. 2018")
def stepped_on_infinite_gradients(patch: Patch, site: Site) -> None:
    """A step with overflowed gradients is not skipped."""
    update = LossScale.update

    def always(self: LossScale) -> bool:
        update(self)
        return True

    patch.setattr(LossScale, "update", always)


@bug("C32", "cast", CONSTANT, "scaled", credit="Micikevicius et al. 2018")
def master_weights_rounded(patch: Patch, site: Site) -> None:
    """After each step weights are rounded to the compute dtype."""
    step = Program._step_weights

    def rounding(self: Program, *args: Any) -> None:
        step(self, *args)
        for parameter in self.assembly.parameters.values():
            if self.loss_scale is not None and parameter.dtype == torch.float32:
                parameter.data.copy_(parameter.data.half().float())

    patch.setattr(Program, "_step_weights", rounding)
