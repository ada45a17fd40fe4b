"""The two halves of a backward: gradients of a stage's inputs now, of its weights later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class SplitBackward:
    """One backward in two parts (Qi et al., Zero Bubble, 2401.10241)."""

    def __init__(
        self, roots: Sequence[Any], grads: Sequence[Any], leaves: Sequence[torch.Tensor]
    ) -> None:
        self.roots, self.grads, self.leaves = list(roots), list(grads), list(leaves)

    def inputs(self) -> list[torch.Tensor | None]:
        """Gradients of the leaves."""
        if not self.leaves or not self.roots:
            return [None] * len(self.leaves)
        return list(
            torch.autograd.grad(
                self.roots, self.leaves, self.grads, retain_graph=True, allow_unused=True
            )
        )

    def weights(self) -> None:
        """Add the gradients of the weights."""
        if self.roots:
            torch.autograd.backward(self.roots, self.grads)
