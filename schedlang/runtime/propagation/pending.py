"""Is a tensor a pending sum: is the whole the sum of what the ranks hold of it?

Asked backward from where it is summed, to where parts were multiplied: between the two only linear
operations may stand (P of spmd_types goes through linear operations only).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Varies = Callable[[Tensor], frozenset[str]]


@dataclass(frozen=True)
class Made:
    """How a tensor was made: the function, and the tensors that it was given."""

    name: str
    inputs: tuple[Tensor, ...]


# sums over a dim of both factors: where both are parts, each rank has its share of the sum
PRODUCTS = {
    "linear",
    "matmul",
    "mm",
    "bmm",
    "einsum",
    "addmm",
    "baddbmm",
    "__matmul__",
    "conv1d",
    "conv2d",
    "conv3d",
    "tensordot",
}
BIASED = {"linear": 2, "addmm": 0, "baddbmm": 0, "conv1d": 2, "conv2d": 2, "conv3d": 2}
ADDS = {
    "add",
    "sub",
    "__add__",
    "__radd__",
    "__sub__",
    "__rsub__",
    "__iadd__",
    "__isub__",
    "add_",
    "sub_",
    "stack",
    "cat",
    "concat",
}
TIMES = {"mul", "__mul__", "__rmul__", "__imul__", "mul_", "multiply"}
LINEAR = {
    "view",
    "reshape",
    "flatten",
    "unflatten",
    "transpose",
    "permute",
    "contiguous",
    "clone",
    "to",
    "type",
    "float",
    "double",
    "half",
    "bfloat16",
    "__getitem__",
    "squeeze",
    "unsqueeze",
    "expand",
    "expand_as",
    "view_as",
    "sum",
    "mean",
    "neg",
    "__neg__",
    "div",
    "__truediv__",
    "div_",
    "movedim",
    "swapaxes",
    "t",
    "T",
    "mT",
    "narrow",
    "select",
    "split",
    "chunk",
    "unbind",
    "moved",
}


def is_masked(tensor: Tensor) -> bool:
    """Whether a tensor is a product with a mask, as noted by `note_mask`."""
    return "_schedlang_masked" in tensor.__dict__


def note_mask(name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """Note on what a call makes that a factor of it is a mask."""
    if name in TIMES and any(t.dtype == torch.bool or is_masked(t) for t in inputs):
        for tensor in outputs:
            tensor.__dict__["_schedlang_masked"] = True


def trouble(tensor: Tensor, axis: str, varies: Varies) -> str | None:
    """Why a tensor that varies along an axis is no pending sum over it; None if it is one."""
    open_, seen = [tensor], set()
    while open_:
        one = open_.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        made: Made | None = one.__dict__.get("_schedlang_made")
        if made is None:
            return f"a shard is summed over `{axis}`, as if it were a partial sum"
        found = _step(made, axis, varies)
        if isinstance(found, str):
            return found
        open_ += found
    return None


def _step(made: Made, axis: str, varies: Varies) -> list[Tensor] | str:
    """The inputs that have to be pending sums for the result to be one, or why it is not."""
    parts = [t for t in made.inputs if axis in varies(t)]
    alike = [t for t in made.inputs if axis not in varies(t)]
    if made.name in PRODUCTS:
        place = BIASED.get(made.name)
        bias = made.inputs[place] if place is not None and len(made.inputs) == 3 else None
        if bias is not None and axis not in varies(bias):
            return f"`{made.name}` adds its bias on each rank of `{axis}`, before the sum"
        return parts if len(parts) < 2 else []
    if made.name in TIMES:
        masked = any(t.dtype == torch.bool for t in made.inputs)  # each rank keeps what it holds
        return parts if len(parts) == 1 and not masked else []
    if made.name in ADDS:
        if alike:
            return (
                f"`{made.name}` adds a replicated tensor on every rank of `{axis}` before the sum"
            )
        return parts
    if made.name == "index_add":  # onto zeros, wherever: each rank has places of its own
        return [t for t in parts if t is not made.inputs[0] and t.is_floating_point()]
    if made.name in LINEAR:
        return parts
    if made.name == "embedding_bag":  # entries of other ranks' rows must weigh nothing
        floats = [t for t in made.inputs if t.is_floating_point()]
        if len(floats) == 2 and is_masked(floats[1]):
            return []
        return f"each rank of `{axis}` adds up rows, even for ids that it does not hold"
    if made.name == "embedding":
        return f"each rank of `{axis}` looks up a row, even for ids that it does not hold"
    return f"`{made.name}` is not linear, and runs before the sum over `{axis}`"
