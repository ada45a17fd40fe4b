"""The scale of a loss whose gradients would vanish in float16, and the steps that it skips.

torch.amp.GradScaler's rule (Micikevicius et al., Mixed precision training, 2018), for parameters
that lie in parts on many ranks: where any rank finds a gradient that is not finite, none steps and
the scale is halved; after `growth` steps without one it is doubled.  All ranks hold the same scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.runtime.grad_reduction.gradient import local_gradients

BACKOFF, GROWTH = 0.5, 2.0


@dataclass
class LossScale:
    """The factor of a loss before backward, doubled after `growth` steps that all could be made.

    good      steps that have followed the last change
    overflow  the last step was skipped, on all ranks
    last      what the loss of the last step was multiplied by
    noted     whether this rank found one, on each device where it looked: nobody waits for it
    """

    scale: float
    growth: int
    good: int = 0
    overflow: bool = False
    last: float = 1.0
    noted: list[Tensor] = field(default_factory=list)

    def unscale(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Divide this rank's gradients, and note whether any of them is infinite or no number."""
        grads = [g for g in local_gradients(parameters.values()) if g.numel()]
        self.last, self.overflow = self.scale, False
        with torch._C.DisableTorchFunction():  # a power of two: nothing is rounded here
            if grads:
                torch._foreach_mul_(grads, 1.0 / self.scale)
            real = [g for g in grads if not g.is_meta]  # a step that is only played has no values
            self.noted = [~torch.stack(norms).isfinite().all() for norms in _largest(real)]

    def told(self, like: Tensor) -> Tensor:
        """This rank's note, to be added up over all ranks."""
        found = like.new_zeros(1)
        for one in self.noted:
            found += one.to(like)
        return found

    def hear(self, total: Tensor) -> None:
        """Take over what all ranks together have noted."""
        self.overflow, self.noted = not total.is_meta and bool(total.any()), []

    def next(self) -> bool:
        """Change the scale for the next step; whether this step's update is to be made."""
        if self.noted:  # alone: nobody was told, and nobody else can have found any
            self.overflow, self.noted = any(map(bool, self.noted)), []
        if self.overflow:
            self.scale, self.good = self.scale * BACKOFF, 0
        elif self.good + 1 == self.growth:
            self.scale, self.good = self.scale * GROWTH, 0
        else:
            self.good += 1
        return not self.overflow

    def described(self) -> dict[str, Any]:
        """The state that a checkpoint keeps."""
        return {"scale": self.scale, "good": self.good}

    def put_back(self, told: Mapping[str, Any] | None) -> None:
        """Go on from a checkpoint; from where this began if it was saved without a scale."""
        if told is not None:
            self.scale, self.good = told["scale"], told["good"]


def _largest(grads: list[Tensor]) -> list[list[Tensor]]:
    """The largest element of each, in size, device by device; infinite or NaN where any is."""
    kinds = dict.fromkeys((g.device, g.dtype) for g in grads)
    return [
        list(torch._foreach_norm([g for g in grads if (g.device, g.dtype) == kind], float("inf")))
        for kind in kinds
    ]
