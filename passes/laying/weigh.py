"""What a part of a batch weighs in the mean loss of the whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from schedlang.diagnostic import Diagnostic, Refusal
from schedlang.passes.laying.propagate import Traced, propagate
from schedlang.plan import Plan

Loss = Callable[..., Any]
Weight = Callable[[Mapping[str, Any]], float]


def part_weight(
    plan: Plan, sample: Mapping[str, Any], loss: Loss | None, weight: Weight | None, parts: int
) -> Weight:
    """What a part of a batch weighs, as `build` decides it from a sample part."""
    if weight is not None:
        return weight
    return weight_of(propagate(Plan(plan.model), sample, loss), parts)


def weight_of(traced: Traced, parts: int) -> Weight:
    """What a part of a batch weighs: its labels that count, else its rows."""
    from schedlang.runtime.parts import named_tensors, rows_of

    if len(traced.labels) == 1:
        rule = traced.labels[0]
        # a batch without labels can be evaluated, not trained on: only its rows count
        return lambda batch: float(
            rule.count(batch) if rule.source in named_tensors(batch) else rows_of(batch)
        )
    if len(traced.labels) > 1 and parts > 1:
        raise Refusal(
            Diagnostic(
                "S621", f"the model has {len(traced.labels)} losses with labels of their own",
                notes=("a part of the batch would need another weight in each",),
                helps=("say what a part weighs: `weight(batch)` in the model file",),
            )
        )  # fmt: skip
    return lambda batch: float(rows_of(batch))
