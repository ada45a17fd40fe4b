"""Sums over the rows of a batch from which a loss is made: followed through a recorded forward.

One forward on the meta device, with a number of rows that divides no other size: a dim of rows is a
multiple of it. A call with such a dim in its inputs and none in its outputs has summed over the
batch. Which of these sums reach the loss, and whether by linear calls alone, is followed call by
call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from schedlang.runtime.modes import LOSSES
from schedlang.runtime.propagation.call_rules import ADDS, LINEAR, SUMMING, TIMES
from schedlang.runtime.propagation.label_flow import LabelFlow
from schedlang.runtime.propagation.trace import Lattice, ModuleStack, RunningCall
from schedlang.runtime.tracing.model_lines import model_line

SUMS = {
    *("sum", "nansum", "histc", "bincount", "scatter_add", "scatter_add_", "index_add"),
    *("index_add_", *(SUMMING - {"linear", "conv1d", "conv2d", "conv3d"})),
}
MEANS = {"mean"}
DIVISIONS = {"div", "__truediv__", "div_", "__itruediv__", "true_divide", "__rtruediv__"}
# reductions whose result for all rows is no mean of those for parts
EXTREMES_AND_NORMS = {
    *("norm", "linalg_norm", "linalg_vector_norm", "linalg_matrix_norm", "frobenius_norm", "dist"),
    *("std", "var", "std_mean", "var_mean", "logsumexp", "max", "min", "amax", "amin", "aminmax"),
    *("median", "nanmedian", "nanmean", "quantile", "nanquantile", "prod", "kthvalue", "mode"),
}
# calls whose result has the shape of their first tensor, whatever a mask selects of the second
_WRITES = ("__setitem__", "masked_scatter", "masked_scatter_", "index_put", "index_put_")
# in these calls integers are numbers, not indices
COUNTING = {
    *("clamp", "clamp_", "clamp_min", "clamp_min_", "clip", "clip_", "max", "maximum", "min"),
    *("minimum", "where", "pow", "__pow__", "sqrt", "rsqrt", "reciprocal", "__rtruediv__", "log"),
    *("log1p", "exp", "square", "abs", "true_divide", "__floordiv__", "floor_divide", "__rpow__"),
    *("masked_fill", "masked_fill_", "amax", "amin", "type_as", "prod", "cumsum", "nan_to_num"),
}


@dataclass(frozen=True)
class BatchSum:
    """A sum, or a mean, over all rows: the module whose forward makes it, and the number of the
    call.

    turn   number of the call of that name by the module
    given  index of the input tensor that has the rows
    shape  of the result, independent of the rows
    line   file and line of the model's own code that makes it
    """

    fqn: str
    name: str
    turn: int
    given: int
    shape: tuple[int, ...]
    line: str = field(default="", compare=False)

    @property
    def mean(self) -> bool:
        """Whether the sum is divided by the rows."""
        return self.name in MEANS


@dataclass(frozen=True)
class PairedRows:
    """A float tensor with two dims of rows, made from tensors with one; `line` of the model."""

    line: str


@dataclass(frozen=True)
class Selected:
    """Elements of rows that a mask selects: in another batch, or a part, it is another number."""

    size: int


@dataclass(frozen=True)
class RowReduction:
    """A reduction over rows by which a loss is no mean over them; `line` of the model.

    certain  a sum that nothing divides; else an extreme, a norm, or a mean of selected elements
    """

    name: str
    line: str
    certain: bool


@dataclass(frozen=True)
class LossSums:
    """The sums over rows in a loss, each with whether only linear calls follow it.

    means       the means over labels in the loss, likewise
    paired      the model's line of a tensor with two dims of rows in the loss; "": there is none
    reductions  what makes the loss other than a mean over rows
    """

    sums: Mapping[BatchSum, bool]
    means: Mapping[LabelMean, bool]
    paired: str = ""
    reductions: tuple[RowReduction, ...] = ()

    @property
    def weighs_by_labels(self) -> bool:
        """Whether parts are weighted by labels: not if there are several means, weighted each."""
        return bool(self.means) and not (self.can_weigh_means and len(self.means) > 1)

    @property
    def can_weigh_means(self) -> bool:
        """Whether each mean may be weighted by its own labels: the loss is linear in all."""
        return all(mean.call is not None and linear for mean, linear in self.means.items())


@dataclass(frozen=True)
class LabelMean:
    """A mean over labels: the module and the number of its call of the loss; None: unknown."""

    call: tuple[str, int] | None


Mix = Mapping[Any, bool]  # sums in a tensor -> whether by linear calls alone


class BatchSumLattice(Lattice):
    """The sums over all rows from which each tensor is made, in a forward with `rows` rows.

    `labels`: the labels of the same forward, which are followed first.
    """

    mark: str = "_schedlang_sums"
    nothing: Mix = MappingProxyType({})

    def __init__(self, stack: ModuleStack, rows: int, labels: LabelFlow) -> None:
        self.stack, self.rows, self.labels = stack, rows, labels
        self.turns: dict[tuple[str, str], int] = {}
        self.inside = True  # in the model, not in a separate loss
        self._mixes: list[Mix] = []  # of the inputs of the running call

    def wrap_loss(self, loss: Callable[..., Any] | None) -> Callable[..., Any] | None:
        """Wrap the loss: its own sums are not part of the model's forward."""

        def outside(output: Any, batch: Mapping[str, Any]) -> Any:
            self.inside = False
            assert loss is not None
            return loss(output, batch)

        return outside if loss is not None else None

    def sums_of(self, loss: Tensor) -> LossSums:
        """Return the sums from which a loss is made."""
        mix: Mix = self.of(loss)
        sums = {source: linear for source, linear in mix.items() if isinstance(source, BatchSum)}
        paired = next((source.line for source in mix if isinstance(source, PairedRows)), "")
        means = {source: linear for source, linear in mix.items() if isinstance(source, LabelMean)}
        reductions = tuple(source for source in mix if isinstance(source, RowReduction))
        return LossSums(sums, means, paired, reductions)

    def _has_rows(self, tensor: Tensor, selected: Collection[int] = ()) -> bool:
        return any(size and (size % self.rows == 0 or size in selected) for size in tensor.shape)

    def _pairs_rows(self, tensor: Tensor) -> bool:
        sizes = [size for size in tensor.shape if size and size % self.rows == 0]
        return len(sizes) > 1 and tensor.is_floating_point()

    def before_call(self, call: RunningCall) -> None:
        """Note the sums in the inputs of a call, because it may write into them."""
        self._mixes = [self.of(tensor) for tensor in call.inputs]

    def after_call(self, call: RunningCall) -> None:
        """Follow the sums through a call; find a new one where rows go in and none come out."""
        if not call.outputs:
            return
        mix = _combine(call.name, call.inputs, self._mixes)
        if id(call.out) in self.labels.means:
            mix = {key: False for key in mix if isinstance(key, PairedRows)}
            mix = {**mix, self._label_mean(call.out): True}
        with torch._C.DisableTorchFunction():  # no mode sees these reads
            selected = self._selected(call)
            sizes = {key.size for key in (*mix, *selected) if isinstance(key, Selected)}
            with_rows = [i for i, x in enumerate(call.inputs) if self._has_rows(x, sizes)]
            sums_rows = with_rows and not any(self._has_rows(x, sizes) for x in call.outputs)
            pairs = any(map(self._pairs_rows, call.outputs))
            pairs = pairs and not any(map(self._pairs_rows, call.inputs))
        if mix:
            mix = self._divided(call, mix, sizes)
        if pairs:
            mix = {**mix, PairedRows(model_line()): False}
        if sums_rows:
            mix = {**mix, **self._summed(call, with_rows[0], bool(sizes))}
        else:
            self._count_call(call.name)
            mix = {**mix, **selected}
        for tensor in call.outputs:
            chooses = mix and (tensor.dtype == torch.bool or _is_counted(tensor, call.inputs))
            self.put(tensor, {} if chooses else mix)

    def _label_mean(self, out: Any) -> LabelMean:
        _, call = self.labels.call_of.get(id(out), (None, None))
        known = call is not None and self.labels.calls[call] is not None
        return LabelMean(call if known else None)

    def _count_call(self, name: str) -> int:
        key = self.stack.frames[-1][0], name
        self.turns[key] = self.turns.get(key, -1) + 1
        return self.turns[key]

    def _selected(self, call: RunningCall) -> Mix:
        """Return what a call selects of rows by a mask, if it does."""
        if call.name not in ("__getitem__", "masked_select") or len(call.inputs) < 2:
            return {}
        mask = call.inputs[1]
        selects = mask.dtype == torch.bool and self._has_rows(mask)
        return {Selected(call.outputs[0].shape[0]): True} if selects else {}

    def _divided(self, call: RunningCall, mix: Mix, selected: Collection[int]) -> Mix:
        """Return a mix after a call that may divide sums by how many elements they have."""
        if call.name in _WRITES:
            return {key: mix[key] for key in mix if not isinstance(key, Selected)}
        if call.name not in DIVISIONS | TIMES or not _is_quotient(call, (self.rows, *selected)):
            return mix
        kept = {key: mix[key] for key in mix if not _is_undivided(key)}
        if selected and len(call.inputs) == 1 and len(kept) < len(mix):
            # a number of elements, of this batch alone
            name = "sum over elements that a mask selects, divided by their number,"
            kept[RowReduction(name, model_line(), False)] = False
        return kept

    def _summed(self, call: RunningCall, input_index: int, selected: bool) -> Mix:
        """Return the sources that a call makes which sums over rows."""
        call_index = self._count_call(call.name)
        total = _reduction_of(call) == "sum"
        if call.func in LOSSES:
            mean = self._label_mean(call.out)
            return {mean: True, _undivided(call): True} if total else {mean: True}
        if not self.inside or not call.outputs[0].is_floating_point():
            counts = call.name in SUMS | MEANS and self.inside
            return {self._sum(call, call_index, input_index): True} if counts else {}
        other = call.name in EXTREMES_AND_NORMS
        if other or selected and not total and call.name not in SUMS | MEANS:
            name = call.name if other else f"{call.name} of elements that a mask selects"
            return {RowReduction(name, model_line(), False): False}
        if call.name not in SUMS | MEANS:
            return {_undivided(call): True} if total else {}
        # a mean of selected elements is shared: with that of the other ranks, and their number
        linear = not (selected and call.name in MEANS)
        mix: dict[Any, bool] = {self._sum(call, call_index, input_index): linear}
        return {**mix, _undivided(call): True} if total else mix

    def _sum(self, call: RunningCall, call_index: int, input_index: int) -> BatchSum:
        key = call.frame[0], call.name, call_index, input_index, tuple(call.outputs[0].shape)
        return BatchSum(*key, line=model_line())


def _undivided(call: RunningCall) -> RowReduction:
    return RowReduction(call.name, model_line(), True)


def _is_undivided(key: object) -> bool:
    return isinstance(key, RowReduction) and key.certain


def _reduction_of(call: RunningCall) -> str:
    """Return whether a call sums over rows, as far as it says so; "" for others.

    Losses of torch have the number of their reduction (0 none, 1 mean, 2 sum) as their last whole
    argument; those over labels its name.
    """
    if call.name in ("sum", "nansum"):
        return "sum"
    if call.func in LOSSES:
        return str(call.argument(6, "reduction", "mean"))
    if call.name.endswith("_loss") or call.name.startswith(("binary_cross_entropy", "kl_div")):
        named = [x for x in (*call.args, *call.kwargs.values()) if isinstance(x, str)]
        numbers = [value for value in call.args if type(value) is int]
        is_sum = "sum" in named if named else bool(numbers) and numbers[-1] == 2
        return "sum" if is_sum else ""
    return ""


def _is_quotient(call: RunningCall, sizes: Sequence[int]) -> bool:
    """Return whether a call divides by a tensor, or by a multiple of one of these sizes."""
    if len(call.inputs) > 1:  # a product: one may be the inverse of a count
        return call.name in DIVISIONS or any(tensor.dim() == 0 for tensor in call.inputs)
    numbers = [x for x in (*call.args, *call.kwargs.values()) if type(x) in (int, float) and x]
    counts = [1 / x if call.name in TIMES else x for x in numbers]
    times = [count / size for count in counts for size in sizes]
    return any(abs(x - round(x)) < 1e-6 and round(x) for x in times)


def _combine(name: str, inputs: list[Tensor], mixes: list[Mix]) -> Mix:
    """Return the sums in the result of a call.

    Integer tensors count only in arithmetic: elsewhere they are indices.
    """
    is_linear = name in LINEAR or name in ADDS or name in TIMES
    used_mixes = [
        (index, mix)
        for index, (tensor, mix) in enumerate(zip(inputs, mixes))
        if mix and (is_linear or name in COUNTING or tensor.is_floating_point())
    ]
    linear = is_linear
    if name in TIMES or name in ("div", "__truediv__", "div_", "true_divide"):
        linear = len(used_mixes) == 1 and (name in TIMES or used_mixes[0][0] == 0)
    combined: dict[Any, bool] = {}
    for _, mix in used_mixes:
        for source, so_far in mix.items():
            combined[source] = combined.get(source, True) and so_far and linear
    return combined


def _is_counted(output: Tensor, inputs: list[Tensor]) -> bool:
    """Return whether a tensor holds integers made from floats: bounds of groups, an index."""
    is_integer = not output.is_floating_point()
    return is_integer and any(tensor.is_floating_point() for tensor in inputs)
