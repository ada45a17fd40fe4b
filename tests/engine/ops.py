"""Translate the arguments of each c10d operator into the Post of this rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.engine.arithmetic import Post


class Call(NamedTuple):
    """An operator's process group, its post, and its result besides the work handle."""

    group: Any
    post: Post
    returned: Any = None


def tensor_signature(tensors: Sequence[Tensor]) -> tuple[tuple[torch.dtype, tuple[int, ...]], ...]:
    """Return dtype and shape of each tensor, compared between ranks."""
    return tuple((t.dtype, tuple(t.shape)) for t in tensors)


def _all_reduce(tensors: Any, group: Any, op: Any, sparse: Any = None, *_: Any) -> Call:
    assert sparse is None, "sparse tensors are not supported on threads"
    return Call(group, _reduction_post("all_reduce", tensors, tensors, op), tensors)


def _all_reduce_coalesced(tensors: Any, group: Any, op: Any, *_: Any) -> Call:
    return Call(group, _reduction_post("all_reduce", tensors, tensors, op))


def _reduction_post(kind: str, inputs: Any, outputs: Any, op: Any) -> Post:
    return Post(kind, inputs, outputs, (op.name, tensor_signature(inputs)), op)


def _reduce(tensors: Any, group: Any, op: Any, root: int, _tensor: int, *_: Any) -> Call:
    outputs = tensors if group.rank() == root else []
    alike = (op.name, f"to {root}", tensor_signature(tensors))
    return Call(group, Post("reduce", tensors, outputs, alike, op, root))


def _broadcast(tensors: Any, group: Any, root: int, _tensor: int, *_: Any) -> Call:
    inputs, outputs = (tensors, []) if group.rank() == root else ([], tensors)
    alike = (f"from {root}", tensor_signature(tensors))
    return Call(group, Post("broadcast", inputs, outputs, alike, root=root), tensors)


def _all_gather(outputs: Any, inputs: Any, group: Any, *_: Any) -> Call:
    post = Post("all_gather", inputs, [t for ts in outputs for t in ts], tensor_signature(inputs))
    return Call(group, post, outputs)


def _all_gather_coalesced(outputs: Any, inputs: Any, group: Any, *_: Any) -> Call:
    return _all_gather(outputs, inputs, group)._replace(returned=None)


def _all_gather_single(output: Any, input_tensor: Any, group: Any, *_: Any) -> Call:
    post = Post("all_gather_single", [input_tensor], [output], tensor_signature([input_tensor]))
    return Call(group, post, output)


def _all_gather_single_coalesced(outputs: Any, inputs: Any, group: Any, *_: Any) -> Call:
    return Call(group, Post("all_gather_single", inputs, outputs, tensor_signature(inputs)))


def _reduce_scatter(outputs: Any, inputs: Any, group: Any, op: Any, *_: Any) -> Call:
    return Call(group, _reduction_post("reduce_scatter", inputs[0], outputs, op), outputs)


def _reduce_scatter_single(output: Any, input_tensor: Any, group: Any, op: Any, *_: Any) -> Call:
    return Call(
        group, _reduction_post("reduce_scatter_single", [input_tensor], [output], op), output
    )


def _reduce_scatter_single_coalesced(
    outputs: Any, inputs: Any, group: Any, op: Any, *_: Any
) -> Call:
    return Call(group, _reduction_post("reduce_scatter_single", inputs, outputs, op))


def _all_to_all(outputs: Any, inputs: Any, group: Any, *_: Any) -> Call:
    return Call(group, Post("all_to_all", inputs, outputs, (inputs[0].dtype,)), outputs)


def _all_to_all_single(
    output: Any, input_tensor: Any, group: Any, out_splits: Any, in_splits: Any, *_: Any
) -> Call:
    alike = (input_tensor.dtype, tuple(input_tensor.shape[1:]))
    splits = (list(out_splits), list(in_splits))
    return Call(group, Post("all_to_all_single", [input_tensor], [output], alike, splits=splits))


def _gather(outputs: Any, inputs: Any, group: Any, root: int, *_: Any) -> Call:
    alike = (f"to {root}", tensor_signature(inputs))
    return Call(group, Post("gather", inputs, [t for ts in outputs for t in ts], alike, root=root))


def _scatter(outputs: Any, inputs: Any, group: Any, root: int, *_: Any) -> Call:
    alike = (f"from {root}", tensor_signature(outputs))
    flat_inputs = [t for ts in inputs for t in ts]
    return Call(group, Post("scatter", flat_inputs, outputs, alike, root=root), outputs)


def _barrier(_tensor: Any, group: Any, *_: Any) -> Call:
    return Call(group, Post("barrier", [], []))


# other c10d operators are refused: see `private`
OPS: dict[str, Callable[..., Call]] = {
    "allreduce_": _all_reduce,
    "allreduce_coalesced_": _all_reduce_coalesced,
    "reduce_": _reduce,
    "broadcast_": _broadcast,
    "allgather_": _all_gather,
    "allgather_coalesced_": _all_gather_coalesced,
    "_allgather_base_": _all_gather_single,
    "allgather_into_tensor_coalesced_": _all_gather_single_coalesced,
    "reduce_scatter_": _reduce_scatter,
    "_reduce_scatter_base_": _reduce_scatter_single,
    "reduce_scatter_tensor_coalesced_": _reduce_scatter_single_coalesced,
    "alltoall_": _all_to_all,
    "alltoall_base_": _all_to_all_single,
    "gather_": _gather,
    "scatter_": _scatter,
    "barrier": _barrier,
}
