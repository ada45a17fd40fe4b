"""A loss times a number: to train as under a loss scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from schedlang.runtime.tracing.record import loss_of


@dataclass(frozen=True)
class Scaled:
    """The model's loss, or `loss(output, batch)`, times `factor`; None where there is none."""

    loss: Callable[[Any, Mapping[str, Any]], Tensor] | None
    factor: float

    def __call__(self, output: Any, batch: Mapping[str, Any]) -> Tensor | None:
        found = loss_of(output, batch, self.loss)
        return None if found is None else found * self.factor
