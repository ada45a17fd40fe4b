"""The scale of a loss whose gradients would vanish in float16, and the steps that it skips.

torch.amp.GradScaler's rule (Micikevicius et al., Mixed precision training, 2018), for parameters
that lie in parts on many ranks: where any rank finds a gradient that is not finite, none steps and
the scale is halved; after `growth` steps without one it is doubled.  All ranks hold the same scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.runtime.gradient import local_gradient

BACKOFF, GROWTH = 0.5, 2.0


@dataclass
class LossScale:
    """By what a loss is multiplied before backward; `good` steps have followed the last change."""

    scale: float
    growth: int
    good: int = 0
    overflow: bool = False  # the last step was skipped, on all ranks

    def unscale(self, parameters: Mapping[str, nn.Parameter]) -> bool:
        """Divide this rank's gradients; whether any of them was infinite or no number."""
        grads = [g for p in parameters.values() if (g := local_gradient(p)) is not None]
        grads = [g for g in grads if g.numel()]
        if not grads:
            return False
        with torch._C.DisableTorchFunction():  # a power of two: nothing is rounded here
            torch._foreach_mul_(grads, 1.0 / self.scale)
            return not all(bool(norm.isfinite()) for norm in _largest(grads))

    def update(self, overflow: bool) -> None:
        """What the next step is scaled by; `overflow` is what all ranks found together."""
        self.overflow = overflow
        if overflow:
            self.scale, self.good = self.scale * BACKOFF, 0
        elif self.good + 1 == self.growth:
            self.scale, self.good = self.scale * GROWTH, 0
        else:
            self.good += 1

    def described(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"scale": self.scale, "good": self.good}

    def put_back(self, told: Mapping[str, Any] | None) -> None:
        """Go on from a checkpoint; from where this began if it was saved without a scale."""
        if told is not None:
            self.scale, self.good = told["scale"], told["good"]


def _largest(grads: list[Tensor]) -> list[Tensor]:
    """The largest element of each, in size; infinite or no number where any is."""
    kinds = dict.fromkeys(g.device for g in grads)
    found: list[Tensor] = []
    for kind in kinds:
        found += torch._foreach_norm([g for g in grads if g.device == kind], float("inf"))
    return found
