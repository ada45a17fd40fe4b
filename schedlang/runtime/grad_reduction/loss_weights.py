"""What a part's loss counts for: labels that are counted, and a loss times a number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from schedlang.runtime.tracing.constants import OnMeta
from schedlang.runtime.tracing.record import loss_of

# ---- How many labels a loss counts, read where it is called: from the targets that it is given.


class Counting(TorchFunctionMode):
    """Runs beside a forward on the meta device, beside what `values` knows.

    `found` are the labels that count, of each mean of cross-entropies whose labels are known.
    """

    def __init__(self, values: OnMeta) -> None:
        super().__init__()
        self.values = values
        self.found: list[float] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the call; of a cross-entropy, count its labels."""
        kwargs = dict(kwargs or {})
        if func in (F.cross_entropy, F.nll_loss):
            given = {**dict(zip(("input", "target"), args)), **kwargs}
            target = self.values.constants.real(given["target"])
            if target is not None and given.get("reduction", "mean") == "mean":
                ignored = given.get("ignore_index", -100)
                self.found.append(float(torch.ne(target, ignored).sum()))
        return func(*args, **kwargs)


# ---- A loss times a number: to train as under a loss scale.


@dataclass(frozen=True)
class Scaled:
    """The model's loss, or `loss(output, batch)`, times `factor`; None where there is none."""

    loss: Callable[[Any, Mapping[str, Any]], Tensor] | None
    factor: float

    def __call__(self, output: Any, batch: Mapping[str, Any]) -> Tensor | None:
        found = loss_of(output, batch, self.loss)
        return None if found is None else found * self.factor
