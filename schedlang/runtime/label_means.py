"""Weigh each mean of a loss by the labels that it counts, where a model has several such means.

A part of a batch weighs as many rows as it has. Its mean over n of the batch's N labels is
multiplied by n / N divided by the share of its rows; so the weighted losses of the parts add up to
the loss of the batch, whatever each mean counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime import scope
from schedlang.runtime.batch import BatchPart, row_count
from schedlang.runtime.batch_weights import Number, if_positive, nonzero_weight, sum_numbers
from schedlang.runtime.modes import LOSSES, enter_modes
from schedlang.runtime.zero_weight_loss import bind_loss

if TYPE_CHECKING:
    from schedlang.runtime.propagation.label_flow import LabelRule, LossCall


@dataclass(frozen=True)
class LabelMeans:
    """The weight of a part by its rows, and the means of its loss that count labels.

    rules  how each mean reads its labels
    calls  each call of a loss in a forward -> the index of the rule of its mean; None: of no known
           mean
    """

    rules: tuple[LabelRule, ...]
    calls: Mapping[LossCall, int | None]

    def __call__(self, batch: Mapping[str, Any]) -> float:
        """Return the weight of a part: its rows."""
        return float(row_count(batch))

    def counts(self, batch: Mapping[str, Any]) -> list[Number]:
        """Return how many labels of a part each mean counts."""
        return [rule.count_on_device(batch) for rule in self.rules]

    def scale_parts(
        self,
        parts: Sequence[BatchPart],
        weights: Sequence[Number],
        counts: Sequence[Sequence[Number]],
        total: Number,
        count_sums: Sequence[Number],
    ) -> list[BatchPart]:
        """Return parts whose losses scale each mean; `total`: the weight of the batch.

        counts      numbers of labels that each part has of each mean
        count_sums  those of the batch
        """
        return [
            replace(part, means=self._part_means(part, n, _factors(n, count_sums, weight / total)))
            for part, weight, n in zip(parts, weights, counts, strict=True)
        ]

    def _part_means(
        self, part: BatchPart, counts: Sequence[Number], factors: tuple[Number, ...]
    ) -> PartMeans:
        missing = [r.source for r in self.rules if r.find(part.inputs) is None]
        return PartMeans(self, tuple(counts), factors, missing[0] if missing else "")


def _factors(
    counts: Sequence[Number], count_sums: Sequence[Number], share: Number
) -> tuple[Number, ...]:
    """Return the factor of each mean; 1 where the batch has no label: its mean is the model's."""
    return tuple(
        if_positive(n / nonzero_weight(total) / nonzero_weight(share), 1.0, total)
        for n, total in zip(counts, count_sums, strict=True)
    )


def with_means(weigh: Any, parts: Sequence[BatchPart]) -> list[BatchPart]:
    """Return all parts of a batch so that their losses scale each mean, if `weigh` needs this."""
    if not isinstance(weigh, LabelMeans) or len(parts) == 1:
        return list(parts)
    weights = [weigh(part.inputs) for part in parts]
    counts = [[float(n) for n in weigh.counts(part.inputs)] for part in parts]
    sums = [sum_numbers(column) for column in zip(*counts)]
    return weigh.scale_parts(parts, weights, counts, sum(weights), sums)


@dataclass(frozen=True)
class PartMeans:
    """The factors of the means in the loss of a part, and the labels that these count there.

    `missing`: an input with labels that the batch lacks, so that no mean is known; "": none.
    """

    means: LabelMeans
    counts: tuple[Number, ...]
    factors: tuple[Number, ...]
    missing: str = ""

    @contextmanager
    def scaled(self, complete: bool = False) -> Iterator[None]:
        """Scale the means within the block; `complete`: refuse (S669) if one was not computed."""
        mode = _ScaledMeans(self)
        with enter_modes(mode):
            yield
        if complete and (missing := mode.missing()):
            raise _changed(missing[0], "was not called")


def scaled_means(part: BatchPart) -> AbstractContextManager[Any]:
    """Return a context for computing the loss of a part: it scales means, if the part has any."""
    return nullcontext() if part.means is None else part.means.scaled()


class _ScaledMeans(TorchFunctionMode):
    """The mode of one forward, which counts the calls of losses in each module."""

    model_calls = True

    def __init__(self, part: PartMeans) -> None:
        super().__init__()
        self.part, self.turns = part, dict[str, int]()

    def missing(self) -> list[LossCall]:
        """Return the calls of means that were recorded and have not come."""
        calls = self.part.means.calls
        return [key for key, rule in calls.items() if rule is not None and not self._came(key)]

    def _came(self, key: LossCall) -> bool:
        return self.turns.get(key[0], 0) > key[1]

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func not in LOSSES:
            return func(*args, **kwargs)
        key = self._next_call()
        if key not in self.part.means.calls:
            raise _changed(key, "was not called when the model was recorded")
        index = self.part.means.calls[key]
        if index is None:
            return func(*args, **kwargs)
        return self._scaled(func, bind_loss(args, kwargs), key, index)

    def _next_call(self) -> LossCall:
        """Return the number of this call in its module; a recomputed call has its first number."""
        site, memo = scope.current_site(), scope.pass_memo()
        note = type(self), site, scope.count_call(f"{site}: loss")
        if scope.pass_number() is None and memo is not None and note in memo:
            first: LossCall = memo[note]
            return first
        key = site, self.turns.get(site, 0)
        self.turns[site] = key[1] + 1
        if memo is not None:
            memo[note] = key
        return key

    def _scaled(self, func: Any, arguments: dict[str, Any], key: LossCall, index: int) -> Tensor:
        """Return the mean, or the sum that is divided by the same count, times its factor."""
        if self.part.missing:
            raise _changed(key, f"is computed from a batch without `{self.part.missing}`")
        count, factor = self.part.counts[index], self.part.factors[index]
        counted = torch.ne(arguments["target"], arguments.get("ignore_index", -100))
        if not isinstance(count, Tensor):
            if int(counted.sum()) != count:
                raise _changed(key, f"counts {int(counted.sum())} labels, not {count:g}")
            if factor == 0.0:
                arguments = {**arguments, "reduction": "sum"}
        out: Tensor = func(**arguments)
        if isinstance(factor, Tensor):
            wide = torch.promote_types(out.dtype, torch.float32)
            scaled = (out * factor.to(wide)).to(out.dtype)
            return scaled.masked_fill(~counted.any() & (factor == 0), 0.0)
        return out * factor


def _changed(key: LossCall, what: str) -> Refusal:
    """Return S669: a loss is computed otherwise than when the model was recorded."""
    site = f" in `{key[0]}`" if key[0] else ""
    return Refusal.of(
        "S669",
        f"loss number {key[1] + 1}{site} {what}",
        notes=("each of several means is weighted by the labels that it was recorded to count",),
        helps=(
            "let the model compute the same losses for every batch",
            "or give a weight: `weight(batch)`, for example its rows",
        ),
    )
