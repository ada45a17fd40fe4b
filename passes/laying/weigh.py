"""What a part of a batch weighs in the mean loss of the whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from schedlang.diagnostic import Diagnostic, Refusal
from schedlang.passes.laying.propagate import Traced, propagate
from schedlang.plan import Plan

if TYPE_CHECKING:
    from torch import Tensor

    from schedlang.runtime.following.trace import LabelRule

Loss = Callable[..., Any]
Weight = Callable[[Mapping[str, Any]], float]


def part_weight(
    plan: Plan, sample: Mapping[str, Any], loss: Loss | None, weight: Weight | None, parts: int
) -> Weight:
    """What a part of a batch weighs, as `build` decides it from a sample part."""
    if weight is not None:
        return weight
    return weight_of(propagate(Plan(plan.model), sample, loss), parts)


@dataclass(frozen=True)
class ByLabels:
    """By the labels that count; of a batch without any, which can be evaluated only, by rows."""

    rule: LabelRule

    def __call__(self, batch: Mapping[str, Any]) -> float:
        """What a part weighs."""
        return self.rule.count(batch)

    def counted(self, batch: Mapping[str, Any]) -> Tensor | float:
        """The same where the labels lie."""
        return self.rule.counted(batch)


def weight_of(traced: Traced, parts: int) -> Weight:
    """What a part of a batch weighs: its labels that count, else its rows."""
    from schedlang.runtime.parts import rows_of

    if len(traced.labels) == 1:
        return ByLabels(traced.labels[0])
    if len(traced.labels) > 1 and parts > 1:
        raise Refusal(
            Diagnostic(
                "S621", f"the model has {len(traced.labels)} losses, each with its own labels",
                notes=("a part of the batch would need a different weight in each",),
                helps=("define `weight(batch)` in the model file: the weight of a part of the"
                       " batch",),
            )
        )  # fmt: skip
    return lambda batch: float(rows_of(batch))
