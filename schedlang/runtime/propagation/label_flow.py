"""Follow labels from the inputs of a batch to the losses that count them, in a recorded forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from schedlang.runtime.batch import named_tensors, row_count
from schedlang.runtime.modes import LOSSES
from schedlang.runtime.tracing.meta_runs import MetaMode, tensors_in

if TYPE_CHECKING:
    from schedlang.runtime.propagation.trace import RunningCall

LossCall = tuple[str, int]  # a module, and the number of its call of a loss, in all its forwards


@dataclass(frozen=True)
class LabelRule:
    """The rule by which a model's loss reads its labels: an input, and operations on the input.

    `class_weights`: the mean divides by the class weights of its labels, not by their number.
    `rewritten`: the forward has written or selected labels by a mask, so that other ones count.

    `count(batch)` is the number of labels that count in a chunk of the batch; the operations (a
    shift by one token, padding) are those that the model was observed to apply.
    """

    source: str
    steps: tuple[Callable[[Tensor], Tensor], ...]
    ignore_index: int
    class_weights: bool = False
    rewritten: bool = False

    def count(self, batch: Mapping[str, Any]) -> float:
        """Return how many labels of a chunk of a batch count; its rows if it has no labels."""
        return float(self.count_on_device(batch))

    def count_on_device(self, batch: Mapping[str, Any]) -> Tensor | float:
        """Return the same as a tensor on the labels' device: `numbers` reads many at once."""
        labels = self.find(batch)
        if labels is None:
            return float(row_count(batch))
        for step in self.steps:
            labels = step(labels)
        return (labels != self.ignore_index).sum()

    def find(self, batch: Mapping[str, Any]) -> Tensor | None:
        """Return the input that has the labels; None if a batch has none."""
        labels = batch.get(self.source)
        if not isinstance(labels, Tensor):  # nested in the batch, or absent
            labels = named_tensors(batch).get(self.source)
        return labels


@dataclass(frozen=True)
class LabelCount:
    """The number of labels of an input that differ from `ignore_index`; `bounded`: at least 1."""

    source: str
    ignore_index: int
    bounded: bool = False


CLAMPS = ("clamp", "clamp_min", "clip")
# calls of torch that select or add labels; moves and reshapes do not change how many count
_COUNT = frozenset({"__getitem__", "pad", "narrow"})
_MASKING = ("masked_fill", "where", "index_fill", "masked_scatter", "scatter", "index_put")
_WRITING = ("__setitem__", "copy_", "fill_", *(f"{name}_" for name in _MASKING))


@dataclass
class LabelFlow:
    """The labels of a forward, followed from an integer input to the means over those that count.

    lineage  tensors that hold labels, by id, with their input and the operations on it
    rules    of each mean, how its loss reads its labels
    counted  how many labels count in each mean cross-entropy whose labels `values` knows
    calls    each call of a loss -> the index of the rule of its mean; None: of no known mean
    means    sums of cross-entropies divided by the number of counted labels, by id
    """

    values: MetaMode | None = None
    lineage: dict[int, tuple[Tensor, str, tuple[Any, ...]]] = field(default_factory=dict)
    rules: list[LabelRule] = field(default_factory=list)
    counted: list[float] = field(default_factory=list)
    calls: dict[LossCall, int | None] = field(default_factory=dict)
    means: dict[int, Tensor] = field(default_factory=dict)
    # results of losses, and of means
    call_of: dict[int, tuple[Tensor, LossCall]] = field(default_factory=dict)
    _rewritten: dict[int, Tensor] = field(default_factory=dict)  # labels, by id
    _turns: dict[str, int] = field(default_factory=dict)  # calls of losses, by module
    _summed: dict[int, LabelRule] = field(default_factory=dict)
    _counts: dict[int, tuple[Tensor, LabelCount]] = field(default_factory=dict)

    def before_call(self, call: RunningCall) -> None:
        """Count the labels of a mean."""
        if self.values is not None:
            target = self.values.constants.values_of(call.argument(1, "target"))
            if target is not None and call.argument(6, "reduction", "mean") == "mean":
                counts = target != call.argument(4, "ignore_index", -100)
                self.counted.append(float(counts.sum()))

    def after_call(self, call: RunningCall) -> None:
        """Follow the labels through a call."""
        func, args, kwargs = call.func, call.args, call.kwargs
        if func in LOSSES:
            self._note_loss(call)
            return
        self._follow_count(call)
        if self._rewrites(call):
            return
        output, lineage = call.out, self.lineage.get(id(args[0])) if args else None
        if lineage is None or not isinstance(output, Tensor) or output.is_floating_point():
            return
        if tensors_in((args[1:], kwargs)) or output.dtype == torch.bool:
            return
        step = _replay(func, args[1:], kwargs)
        steps = (*lineage[2], step) if call.name in _COUNT else lineage[2]
        self.lineage[id(output)] = (output, lineage[1], steps)
        if id(args[0]) in self._rewritten:
            self._rewritten[id(output)] = output

    def _rewrites(self, call: RunningCall) -> bool:
        """Follow a call that writes into labels, or that writes or selects some by a mask."""
        name, args = call.name, call.args
        if name not in (*_WRITING, *_MASKING, "__getitem__"):
            return False
        tensors = tensors_in((args, call.kwargs))
        labels = next((value for value in tensors if id(value) in self.lineage), None)
        if labels is None:
            return False
        _, source, steps = self.lineage[id(labels)]
        if name in _WRITING:
            written = args[0]
            if written.is_floating_point() or written.dtype == torch.bool:
                return True
            self.lineage.setdefault(id(written), (written, source, steps))
            storage = written.untyped_storage()._cdata
            alike = [v for v, *_ in self.lineage.values() if v.untyped_storage()._cdata == storage]
            self._rewritten.update({id(value): value for value in alike})
            return True
        masked = name == "__getitem__" and any(value.dtype == torch.bool for value in tensors)
        output = call.out
        if name == "__getitem__" and not masked or not isinstance(output, Tensor):
            return False
        if not output.is_floating_point() and output.dtype != torch.bool:
            self.lineage[id(output)] = output, source, steps
            self._rewritten[id(output)] = output
        return True

    def _note_loss(self, call: RunningCall) -> None:
        """Note a call of a loss: how it reads its labels, if it is a mean or a sum over them."""
        fqn = call.frame[0]
        key = fqn, self._turns.get(fqn, 0)
        self._turns[fqn] = key[1] + 1
        self.calls[key] = None
        if isinstance(call.out, Tensor):
            self.call_of[id(call.out)] = call.out, key
        lineage = self.lineage.get(id(call.argument(1, "target")))
        reduction = call.argument(6, "reduction", "mean")
        if lineage is None or reduction not in ("mean", "sum"):
            return
        weighted = reduction == "mean" and call.argument(2, "weight") is not None
        ignored = int(call.argument(4, "ignore_index", -100))
        rewritten = id(call.argument(1, "target")) in self._rewritten
        rule = LabelRule(lineage[1], lineage[2], ignored, weighted, rewritten)
        if reduction == "sum":
            self._summed[id(call.out)] = rule
        else:
            self._add_mean(key, rule)

    def _add_mean(self, key: LossCall, rule: LabelRule) -> None:
        self.calls[key] = None if rule.class_weights or rule.rewritten else len(self.rules)
        self.rules.append(rule)

    def _follow_count(self, call: RunningCall) -> None:
        """Follow a count of labels to the division of a summed loss by it: the result is a mean."""
        args, output = call.args, call.out
        if not args or not isinstance(output, Tensor):
            return
        count = self._counts.get(id(args[0]))
        if call.name in ("ne", "__ne__") and len(args) == 2 and type(args[1]) is int:
            if lineage := self.lineage.get(id(args[0])):
                self._counts[id(output)] = output, LabelCount(lineage[1], args[1])
        elif count is not None and call.name in CLAMPS and output.dim() == 0:
            minimum = call.argument(1, "min")
            if isinstance(minimum, int | float) and 0 < minimum <= 1:
                self._counts[id(output)] = output, replace(count[1], bounded=True)
        elif count is not None and call.name in ("sum", "to", "float", "double", "long", "type"):
            self._counts[id(output)] = output, count[1]
        elif call.name in ("div", "__truediv__") and len(args) == 2 and id(args[0]) in self._summed:
            rule = self._summed[id(args[0])]
            divisor = self._counts.get(id(args[1]))
            label_count = LabelCount(rule.source, rule.ignore_index, bounded=True)
            if divisor is not None and divisor[1] == label_count and divisor[0].dim() == 0:
                _, key = self.call_of[id(args[0])]
                self._add_mean(key, rule)
                self.call_of[id(output)] = output, key
                self.means[id(output)] = output


def _replay(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    def step(labels: Tensor) -> Tensor:
        result = func(labels, *args, **kwargs)
        assert isinstance(result, Tensor)
        return result

    return step
