"""Ways to split one call of torch, or one module, over ranks: which dims are split together.

* For a call they are found by trying: a dim of one tensor is made smaller, with the corresponding
  dims of the others, and the call runs on meta.  Dims of results that shrink equally are split too.
* For modules that are split as a unit (projections, tables, norms, convolutions, experts) they are
  listed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch.nn import functional as F

from schedlang.runtime.modes import LOSSES
from schedlang.runtime.propagation import call_rules
from schedlang.runtime.propagation.call_rules import (
    EXPANDS,
    SplitOperand,
    has_rule,
    mixed_dims,
    role_of_dim,
)
from schedlang.runtime.propagation.follower import RESHAPES
from schedlang.runtime.propagation.shard_trials import infer_shard_shapes
from schedlang.runtime.propagation.trace import RunningCall, Tag
from schedlang.runtime.rng.logical_functions import draws_logically
from schedlang.runtime.sharding.module_sizes import FILLS, PARTS, dims_of_call

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
