"""The dynamic loss scale for gradients that would underflow in float16.

The rule of torch.amp.GradScaler (Micikevicius et al., Mixed precision training, 2018) for sharded
parameters: if any rank finds a gradient that is not finite, no rank steps and the scale is halved;
after `growth` good steps it is doubled. All ranks hold the same scale.
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
    """The factor of the loss before backward, doubled after `growth` good steps.

    good      good steps since the last change
    overflow  the last step was skipped, on all ranks
    used      the factor of the loss in the last step
    flags     whether this rank found an overflow, by device, without a wait of the host
    """

    scale: float
    growth: int
    good: int = 0
    overflow: bool = False
    used: float = 1.0
    flags: list[Tensor] = field(default_factory=list)

    def unscale(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Divide this rank's gradients by the scale, and note whether any is infinite or NaN."""
        grads = [g for g in local_gradients(parameters.values()) if g.numel()]
        self.used, self.overflow = self.scale, False
        with torch._C.DisableTorchFunction():  # a power of two: nothing is rounded here
            if grads:
                torch._foreach_mul_(grads, 1.0 / self.scale)
            real = [g for g in grads if not g.is_meta]  # a dry run has no values
            self.flags = [~torch.stack(norms).isfinite().all() for norms in _largest(real)]

    def overflow_flag(self, reference: Tensor) -> Tensor:
        """Return this rank's note, to be all-reduced."""
        total = reference.new_zeros(1)
        for flag in self.flags:
            total += flag.to(reference)
        return total

    def set_overflow(self, total: Tensor) -> None:
        """Set the overflow from the sum of all notes."""
        self.overflow, self.flags = not total.is_meta and bool(total.any()), []

    def update(self) -> bool:
        """Update the scale for the next step; return whether the optimizer may step now."""
        if self.flags:  # a single rank: `set_overflow` was not called
            self.overflow, self.flags = any(map(bool, self.flags)), []
        if self.overflow:
            self.scale, self.good = self.scale * BACKOFF, 0
        elif self.good + 1 == self.growth:
            self.scale, self.good = self.scale * GROWTH, 0
        else:
            self.good += 1
        return not self.overflow

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"scale": self.scale, "good": self.good}

    def restore(self, saved: Mapping[str, Any] | None) -> None:
        """Restore the state of a checkpoint; unchanged if it was saved without a scale."""
        if saved is not None:
            self.scale, self.good = saved["scale"], saved["good"]


def _largest(grads: list[Tensor]) -> list[list[Tensor]]:
    """Return the max norm of each gradient, by device and dtype; infinite or NaN if any element
    is."""
    kinds = dict.fromkeys((g.device, g.dtype) for g in grads)
    return [
        list(torch._foreach_norm([g for g in grads if (g.device, g.dtype) == kind], float("inf")))
        for kind in kinds
    ]
