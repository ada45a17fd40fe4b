"""One forward recorded as a graph of steps and values, with the ways to split each step over ranks.

Modules that a row shards as a unit (projections, tables, norms, convolutions, experts) are one step
each; outside of them every call of torch is one step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree

from schedlang.runtime.batch import named_tensors, run_forward
from schedlang.runtime.global_state import restore_global_state
from schedlang.runtime.mixed_precision import DTYPES
from schedlang.runtime.modes import LOSSES
from schedlang.runtime.propagation import call_rules
from schedlang.runtime.propagation.call_rules import (
    EXPANDS,
    LINEAR,
    SUMMING,
    SplitOperand,
    has_rule,
    mixed_dims,
    role_of_dim,
)
from schedlang.runtime.propagation.follower import RESHAPES
from schedlang.runtime.propagation.shard_trials import infer_shard_shapes
from schedlang.runtime.propagation.trace import Frame, Lattice, ModuleStack, RunningCall, Tag, Trace
from schedlang.runtime.rng.logical_functions import draws_logically
from schedlang.runtime.sharding.module_sizes import FILLS, PARTS, dims_of_call
from schedlang.runtime.tracing.meta_runs import tensors_in, without_values

PRODUCTS = {*SUMMING, "conv_transpose2d"}


@dataclass(frozen=True)
class Value:
    """A tensor between steps: an edge of the graph.

    name    the name of the parameter or the input; "" for a step's result
    varies  whether it is computed from the batch or from parameters, and may be split with them
    """

    shape: tuple[int, ...]
    width: int  # bytes per element
    grad: bool
    kind: str = "step"  # "parameter", "input", "constant"
    name: str = ""
    varies: bool = True

    @property
    def bytes(self) -> float:
        """Bytes of the full tensor."""
        return float(math.prod(self.shape) * self.width)


@dataclass(frozen=True)
class Step:
    """A node of the graph: a module that is split as a unit, or a call of torch.

    site, turn  the module, or the module that makes the call, and the number of its call
    place       how many steps of equal name and shapes precede in this call of the module
    module      the kind of a module; "" for a call
    kind        "product", "attention" or "other"
    fills       whether it fills a tensor with a constant
    allocates   whether its results are new memory, and not views of its inputs
    kernels     how many operators a module runs; they move `inside` bytes within the module
    """

    site: str
    turn: int
    place: int
    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    splits: tuple[CallSplit, ...]
    module: str
    kind: str
    flops: float
    allocates: bool
    fills: bool = False
    kernels: int = 1
    inside: float = 0.0


@dataclass
class StepGraph:
    """The graph of a forward: its steps in order, and all values."""

    values: list[Value] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


class GraphRecorder(Lattice):
    """Lattice that maps tensors to values, and records the steps."""

    mark, nothing = "_schedlang_wired", None

    def __init__(self, stack: ModuleStack, names: Mapping[int, str]) -> None:
        self.stack, self.names = stack, names
        self.wired, self.muted = StepGraph(), 0
        self.inner: list[float] = []
        self.places: Counter[tuple[Frame, str, tuple[tuple[int, ...], ...]]] = Counter()

    def add_value(self, tensor: Tensor, kind: str, name: str = "", varies: bool = True) -> int:
        """Add a value for a tensor, and return its number."""
        grad = tensor.requires_grad and tensor.is_floating_point()
        value = Value(tuple(tensor.shape), tensor.element_size(), grad, kind, name, varies)
        self.wired.values.append(value)
        self.put(tensor, (self, len(self.wired.values) - 1))
        return len(self.wired.values) - 1

    def number_of(self, tensor: Tensor) -> int:
        """Return the number of a tensor's value; a new tensor is a parameter, or a constant."""
        entry = self.of(tensor)
        if entry is not None and entry[0] is self:  # buffers are shared by copies of a model
            return int(entry[1])
        name = self.names.get(id(tensor), "")
        return self.add_value(tensor, "parameter" if name else "constant", name, bool(name))

    def after_call(self, call: RunningCall) -> None:
        """Record a call outside of the modules that are one step."""
        if self.muted or not call.outputs:
            if call.outputs and call.name not in LINEAR:
                self.inner.append(_bytes((*call.inputs, *call.outputs)))
            return
        input_numbers = [self.number_of(item) for item in call.inputs]
        varies = any(self.wired.values[item].varies for item in input_numbers)
        splits = find_splits(call) if varies else ()
        attends = call.func is F.scaled_dot_product_attention
        kind = "attention" if attends else "product" if call.name in PRODUCTS else "other"
        allocates = call.name not in LINEAR
        self.add_step(call, input_numbers, splits, "", kind, varies, allocates)

    def add_step(
        self,
        call: RunningCall,
        input_numbers: list[int],
        splits: tuple[CallSplit, ...],
        module: str,
        kind: str,
        varies: bool,
        allocates: bool = True,
        inner: tuple[int, float] = (1, 0.0),
    ) -> None:
        """Record one step, with values for its results."""
        flops = _flops(call, module if module == "experts" else kind)
        outputs = [self.add_value(tensor, "step", varies=varies) for tensor in call.outputs]
        key = call.frame, call.name, tuple(tuple(tensor.shape) for tensor in call.inputs)
        occurrence = self.places[key]
        self.places[key] += 1
        self.wired.steps.append(
            Step(
                *call.frame,
                occurrence,
                call.name,
                tuple(input_numbers),
                tuple(outputs),
                splits,
                module,
                kind,
                flops,
                allocates,
                call.name in FILLS,
                *inner,
            )
        )

    def wrap_module(
        self, module: nn.Module, kind: str, inner: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Wrap the forward of a module that is one step."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if self.muted:
                return inner(*args, **kwargs)
            tensors = tensors_in((args, kwargs))
            input_numbers = [self.number_of(tensor) for tensor in tensors]
            parameters = list(module.parameters())
            input_numbers += [self.number_of(tensor) for tensor in parameters]
            self.muted += 1
            self.inner.clear()
            try:
                output = inner(*args, **kwargs)
            finally:
                self.muted -= 1
            frame = self.stack.frames[-1]
            results = tensors_in(output)
            call = RunningCall(
                frame, type(module).__name__, inner, args, kwargs, [*tensors, *parameters], output
            )
            call.outputs = results
            simple = len(results) == 1 and bool(tensors) and results[0] is not tensors[0]
            splits = _module_ways(module, kind, tensors, parameters) if simple else ()
            product = kind not in ("norm", "table")
            step_kind = "product" if product else "other"
            extra = max(0.0, sum(self.inner) - _bytes((*call.inputs, *results)))
            counts = (len(self.inner), extra) if kind == "norm" and self.inner else (1, 0.0)
            self.add_step(call, input_numbers, splits, kind, step_kind, True, inner=counts)
            return output

        return run


def _bytes(tensors: Sequence[Tensor]) -> float:
    return float(sum(tensor.numel() * tensor.element_size() for tensor in tensors))


def _module_ways(
    module: nn.Module, kind: str, tensors: Sequence[Tensor], parameters: Sequence[Tensor]
) -> tuple[CallSplit, ...]:
    x = tuple(tensors[0].shape)
    if kind == "experts":
        return expert_splits(len(parameters), len(tensors) - 1)
    if len(tensors) > 1:
        return ()
    if kind in ("linear", "conv1d"):
        return linear_splits(x, int(kind == "conv1d"), len(parameters) > 1)
    if kind == "table":
        return table_splits(x)
    if kind == "convolution":
        return convolution_splits(x, len(parameters) > 1, int(module.groups) > 1)  # type: ignore[arg-type]
    return norm_splits(x, len(parameters), parameters[0].dim())


def _flops(call: RunningCall, kind: str) -> float:
    """Return the operations of a forward: two for each product that is summed."""
    if kind == "experts":
        counts = [tensor.shape[-1] for tensor in call.inputs if not tensor.is_floating_point()]
        parameters = [tensor for tensor in call.inputs if isinstance(tensor, nn.Parameter)]
        rows = call.inputs[0].numel() / call.inputs[0].shape[-1]
        parameter_size = sum(tensor.numel() / tensor.shape[0] for tensor in parameters)
        return 2.0 * rows * max(counts, default=1) * parameter_size
    if kind == "other" or not call.inputs or not call.outputs:
        return 0.0
    output_size = max((tensor.numel() for tensor in call.outputs), default=0)
    if kind == "attention":
        query, key = call.inputs[:2]
        return 4.0 * query.numel() * key.shape[-2]
    weights = [tensor for tensor in call.inputs if tensor.dim() > 1][1:2]
    if not weights:
        return 2.0 * output_size
    rows = output_size / max(1, call.outputs[0].shape[-1])
    if call.name == "Conv1D" or isinstance(call.inputs[1], nn.Parameter):
        if weights[0].dim() > 2 and call.outputs[0].dim() == weights[0].dim():  # a convolution
            return 2.0 * output_size * math.prod(weights[0].shape[1:])
        return 2.0 * rows * weights[0].shape[-1] * weights[0].shape[-2]
    return 2.0 * output_size * call.inputs[0].shape[-1]


def record_graph(
    model: nn.Module,
    batch: Mapping[str, Any],
    kinds: Mapping[str, str],
    loss: Callable[..., Any] | None = None,
    dtype: str = "",
) -> StepGraph:
    """Record one forward of a throwaway model on the meta device, with its loss.

    kinds  modules that are one step -> linear, conv1d, table, norm, convolution or experts
    dtype  the dtype of all computation, `bf16` or `fp16`; "": the dtype of the parameters
    """
    if dtype:
        compute_dtype = DTYPES[dtype]
        model.to(compute_dtype)
        batch = _pytree.tree_map(
            lambda t: t.to(compute_dtype) if isinstance(t, Tensor) and t.is_floating_point() else t,
            dict(batch),
        )
    stack = ModuleStack()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    wiring = GraphRecorder(stack, names)
    for fqn, module in model.named_modules():
        if fqn in kinds:
            module.forward = wiring.wrap_module(module, kinds[fqn], module.forward)
    stack.watch(model)
    model.train()
    with restore_global_state(model, loss), without_values(batch) as (inputs, _):
        for name, tensor in named_tensors(inputs).items():
            wiring.add_value(tensor, "input", name)
        with torch.enable_grad(), Trace(stack, wiring, asked=True):
            run_forward(model, inputs, loss)
    return wiring.wired


# -- ways to split one call, or one module, over ranks ---------------------------------------------
# For a call they are found by trying: a dim of one tensor is made smaller, with the corresponding
# dims of the others, and the call runs on meta. Dims of results that shrink equally are split too.
# For modules that are split as a unit they are listed.

UNSPLIT, PARTIAL = -1, -2  # in place of a dim: the tensor is full; the result is a partial sum
SUMS = ("sum", "mean")
MAX_BLOCKS = 3  # the most blocks that are concatenated in a dim which a view splits
Shape = tuple[int, ...]


@dataclass(frozen=True)
class CallSplit:
    """One way to split a call: the split dim of each of its inputs and outputs.

    outputs  WHOLE where partial sums are reduced within the call, SUM where they remain partial
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def find_splits(call: RunningCall) -> tuple[CallSplit, ...]:
    """Return the ways to split a call; the way that splits nothing is left out."""
    arguments = call.args, call.kwargs
    ruled = (
        has_rule(call.name, *arguments)
        or call.func in LOSSES
        or draws_logically(call.func, *arguments)
    )
    ruled = ruled or call.name == "dropout"  # with p=0 it draws no mask
    if call.name in FILLS or not call.outputs or not ruled:
        return ()
    splits: dict[CallSplit, None] = {}
    for position, tensor in enumerate(call.inputs):
        for dim, size in enumerate(tensor.shape):
            if size > 1:
                splits.update(dict.fromkeys(_ways(call, position, dim)))
    return tuple(splits)


def _ways(call: RunningCall, position: int, dim: int) -> Iterator[CallSplit]:
    shapes = [tuple(tensor.shape) for tensor in call.inputs]
    if call.func in LOSSES:
        yield from _split_loss(shapes, position, dim)
        return
    split = _split_dims(call, shapes, position, dim)
    if split is None or _computes_along(call, shapes, split):
        return
    before, after = shapes[position], tuple(call.outputs[0].shape)
    input_dims = tuple(split)
    if call.name in RESHAPES and len(shapes) == 1:
        yield from (CallSplit(input_dims, (d,)) for d in _reshaped_dims(before, dim, after))
    elif call.name in EXPANDS and len(shapes) == 1 and call.name != "repeat":
        yield CallSplit(input_dims, (dim + len(after) - len(before),))
    elif call.name in PARTS and all(tensor.shape[dim] != before[dim] for tensor in call.outputs):
        yield CallSplit(input_dims, (dim,) * len(call.outputs))
    else:
        output_dims = _try_split(call, shapes, split)
        if output_dims is not None:
            yield CallSplit(input_dims, output_dims)


def _split_loss(shapes: Sequence[Shape], position: int, dim: int) -> Iterator[CallSplit]:
    """Yield the ways to split a loss over classes: by rows, or by classes."""
    if position == 0:
        labels = [UNSPLIT] * (len(shapes) - 1)
        if dim != min(1, len(shapes[0]) - 1) and labels:
            labels[0] = dim if dim == 0 else dim - 1
        yield CallSplit((dim, *labels), (UNSPLIT,))


def _split_dims(
    call: RunningCall, shapes: Sequence[Shape], position: int, dim: int
) -> list[int] | None:
    """Return the split dim of each tensor if tensor `position` is split along `dim`; None:
    unknown."""
    split = [UNSPLIT] * len(shapes)
    split[position] = dim
    if len(shapes) == 1:
        return split
    size, role = shapes[position][dim], _role(call, position, dim, shapes[position])
    if role is None:
        return None
    for other_position, shape in enumerate(shapes):
        if other_position == position:
            continue
        dims = [d for d in range(len(shape)) if _role(call, other_position, d, shape) == role]
        if len(dims) > 1:
            return None
        if dims and shape[dims[0]] == size:
            split[other_position] = dims[0]
        elif dims and shape[dims[0]] != 1:
            if call.func is not F.scaled_dot_product_attention:  # fewer heads of keys
                return None
            split[other_position] = dims[0]
    return split


def _role(call: RunningCall, position: int, dim: int, shape: Shape) -> object:
    if call_rules.is_elementwise(call.name):
        return dim - len(shape)
    return role_of_dim(call, SplitOperand(position, Tag(dim, (shape[dim],)), shape))


def _computes_along(call: RunningCall, shapes: Sequence[Shape], split: Sequence[int]) -> bool:
    """Return whether a call computes along one of the split dims."""
    after = tuple(call.outputs[0].shape)
    main = shapes[0]
    dims = dims_of_call(call.name, call.args, call.kwargs, len(main))
    dims |= mixed_dims(call.name, call.args, call.kwargs, main, after)
    if call.name == "scaled_dot_product_attention":
        dims = {len(main) - 1, len(main) - 2}
        return any(d >= len(shape) - 2 for d, shape in zip(split[:3], shapes))
    return split[0] in dims


def _reshaped_dims(before: Shape, dim: int, after: Shape) -> Iterator[int]:
    """Yield the dims of a view's result that hold the slowest shards of a dim, or of its blocks."""
    outer = math.prod(before[:dim])
    for d, size in enumerate(after):
        if math.prod(after[:d]) == outer and size > 1:
            yield d
            inner = math.prod(after[d:])
            packed = len(after) > len(before) + 1 and size <= MAX_BLOCKS
            splits_blocks = math.prod(before[dim:]) == inner and packed
            if splits_blocks and d + 1 < len(after) and after[d + 1] > 1:
                yield d + 1
            return


def _try_split(
    call: RunningCall, shapes: Sequence[Shape], split: Sequence[int]
) -> tuple[int, ...] | None:
    """Return the dim of each result that shrinks with the inputs; None: unknown, or no such dim."""
    size = next(shape[d] for shape, d in zip(shapes, split) if d >= 0)
    factor = next(k for k in range(2, size + 1) if size % k == 0)
    if any(d >= 0 and shape[d] % factor for shape, d in zip(shapes, split)):
        return None
    shard_shapes = infer_shard_shapes(call, shapes, [d if d >= 0 else None for d in split], factor)
    if shard_shapes is None or len(shard_shapes) != len(call.outputs):
        return None
    output_dims = []
    for shape, full_shape in zip(shard_shapes, (tuple(tensor.shape) for tensor in call.outputs)):
        if len(shape) != len(full_shape):
            return None
        differ = [d for d, (a, b) in enumerate(zip(shape, full_shape)) if a != b]
        if len(differ) == 1 and shape[differ[0]] * factor == full_shape[differ[0]]:
            output_dims.append(differ[0])
        elif not differ and call.name in SUMS:
            output_dims.append(UNSPLIT)
        else:
            return None
    return tuple(output_dims)


# -- modules that are split as a unit -------------------------------------------------------------


def linear_splits(x: Shape, output_dim: int, bias: bool) -> tuple[CallSplit, ...]:
    """Return the ways of a projection: by rows, by outputs, by inputs (the bias is added last).

    `x` is the input's shape, `output_dim` the dim of the weight that holds outputs.
    """
    last = len(x) - 1
    bias_dims = (UNSPLIT,) if bias else ()
    by_rows = (CallSplit((d, UNSPLIT, *bias_dims), (d,)) for d in range(last))
    by_outputs = CallSplit((UNSPLIT, output_dim, *((0,) if bias else ())), (last,))
    return (*by_rows, by_outputs, CallSplit((last, 1 - output_dim, *bias_dims), (PARTIAL,)))


def table_splits(x: Shape) -> tuple[CallSplit, ...]:
    """Return the ways of a table: by dims of the index (of shape `x`), by its rows or columns."""
    by_rows = (CallSplit((d, UNSPLIT), (d,)) for d in range(len(x)))
    return (*by_rows, CallSplit((UNSPLIT, 0), (PARTIAL,)), CallSplit((UNSPLIT, 1), (len(x),)))


def norm_splits(x: Shape, parameters: int, normed: int) -> tuple[CallSplit, ...]:
    """Return the ways of a norm over the last `normed` dims: by the other dims."""
    return tuple(CallSplit((d, *(UNSPLIT,) * parameters), (d,)) for d in range(len(x) - normed))


def convolution_splits(x: Shape, bias: bool, grouped: bool) -> tuple[CallSplit, ...]:
    """Return the ways of a convolution: by rows, by positions (halos are sent), by channels."""
    bias_dims = (UNSPLIT,) if bias else ()
    splits = [CallSplit((d, UNSPLIT, *bias_dims), (d,)) for d in (0, *range(2, len(x)))]
    if not grouped:
        splits.append(CallSplit((UNSPLIT, 0, *((0,) if bias else ())), (1,)))
        splits.append(CallSplit((1, 1, *bias_dims), (PARTIAL,)))
    return tuple(splits)


def expert_splits(parameters: int, row_inputs: int) -> tuple[CallSplit, ...]:
    """Return the ways of experts: by rows (with full or with split experts), by experts alone.

    With split experts each row is sent to the rank of its expert.  `parameters`: how many the
    experts have, `row_inputs`: how many tensors follow the rows among the arguments.
    """
    split, unsplit = (0,) * row_inputs, (UNSPLIT,) * row_inputs
    return (
        CallSplit((0, *split, *(UNSPLIT,) * parameters), (0,)),
        CallSplit((0, *split, *(0,) * parameters), (0,)),
        CallSplit((UNSPLIT, *unsplit, *(0,) * parameters), (PARTIAL,)),
    )
