"""Patches of torch's tensors and storages: `.data =` between devices, backward, resizing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch._C import _len_torch_function_stack
from torch.autograd import Variable, forward_ad

from schedlang.runtime.device import on_host


def patch_data_assignment(
    is_across: Callable[[Any, Any], bool],
    assign_across: Callable[[torch.Tensor, torch.Tensor], None],
) -> None:
    """Let `a.data = b` call `put(a, b)` where `across(a, b)`, in this process, permanently."""
    descriptor: Any = torch._C.TensorBase.data
    compatible = torch._has_compatible_shallow_copy_type

    def assign(self: torch.Tensor, value: torch.Tensor) -> None:
        if is_across(self, value):
            assign_across(self, value)
        else:
            descriptor.__set__(self, value)

    def _has_compatible_shallow_copy_type(input: torch.Tensor, from_: torch.Tensor) -> bool:
        return is_across(input, from_) or bool(compatible(input, from_))  # dynamo reads these names

    tensor: Any = torch.Tensor
    tensor.data = property(lambda self: descriptor.__get__(self), assign)
    torch._has_compatible_shallow_copy_type = _has_compatible_shallow_copy_type


def run_first_in_backward(tensor: torch.Tensor) -> torch.Tensor:
    """Give a tensor's node the highest priority in backward; return the tensor.

    Backward runs the youngest node first. A node that is used by many microbatches is older than
    all later nodes, so gradients would accumulate in front of it until the rest of the backward is
    done.
    """
    node: Any = tensor.grad_fn
    if node is not None:
        node._set_sequence_nr(2**63 - 1)  # like nodes that accumulate a leaf's gradient
    return tensor


# what stands in place of a function of torch is run eagerly in compiled loops, as torch's is
_eagerly: Any = torch.compiler.disable
_backward = torch.autograd.backward  # which `run_backward` calls without a check


def check_backwards(check: Callable[[Sequence[Any]], None]) -> None:
    """Let `check` see the roots of each backward that is called in Python, from now on.

    A root is a tensor or torch's `GradientEdge`.
    """

    @wraps(_backward)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        check((tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors))
        _backward(tensors, *args, **kwargs)

    torch.autograd.backward = _eagerly(backward)


Around = Callable[[Callable[[], Any], Sequence[Any], Sequence[Any], bool, bool], Any]
_engine: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]


def wrap_gradients(around: Around) -> None:
    """Let `around(run, roots, inputs, creates_graph, accumulates)` run each backward from now on.

    That is `torch.autograd.grad`, however it was imported, and `backward`, which accumulates.
    """

    def engine(
        roots: Any, grads: Any, retain: Any, creates: bool, inputs: Any, *args: Any, **more: Any
    ) -> Any:
        run = partial(_engine, roots, grads, retain, creates, inputs, *args, **more)
        return around(run, roots, inputs or (), creates, more.get("accumulate_grad", False))

    torch.autograd._engine_run_backward = _eagerly(engine)  # type: ignore[attr-defined]


def in_backward_pass() -> bool:
    """Return whether this thread runs a backward."""
    return bool(torch._C._current_graph_task_id() != -1)


def unchecked(func: Any) -> Any:
    """Return torch's own function of one that `check_backwards` has put in its place.

    Function modes are handed what stands in `torch.autograd`.
    """
    return _backward if func is torch.autograd.backward else func


def sequence_number() -> int:
    """Return the number of this thread's next node of autograd."""
    return int(torch._C._autograd._get_sequence_nr())


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written into; 0 for one of `torch.inference_mode()`."""
    return 0 if tensor.is_inference() else tensor._version


def storage_uses(tensor: torch.Tensor) -> int:
    """Return how many tensors share the storage of a tensor, itself included."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def in_transform() -> bool:
    """Return whether a transform of torch.func (`vmap`, `grad`, `jvp`) runs in this thread."""
    return bool(torch._C._are_functorch_transforms_active())


def has_tangent(value: object) -> bool:
    """Return whether a value is a tensor with a forward-mode gradient."""
    unpack: Any = forward_ad.unpack_dual
    return isinstance(value, torch.Tensor) and unpack(value).tangent is not None


def run_backward(roots: Sequence[Any], grads: Sequence[torch.Tensor]) -> None:
    """Accumulate gradients of leaves, from gradients that have the shapes of their roots.

    `torch.autograd.backward` checks the shapes in Python, before its engine does. It is called if a
    function mode or a tensor class must see the call, or if device threads need more setup.
    """
    no_modes = not _len_torch_function_stack()
    if no_modes and all([type(grad) is torch.Tensor and on_host(grad) for grad in grads]):
        engine: Any = Variable._execution_engine
        edges = tuple(roots), tuple(grads)
        engine.run_backward(*edges, False, False, (), allow_unreachable=True, accumulate_grad=True)
        return
    _backward(roots, grads)


ResizeListener = Callable[[torch.UntypedStorage, int], None]


@contextmanager
def listen_to_resizes(listener: ResizeListener) -> Iterator[None]:
    """Call `listener` within the block for each resized storage, with its new size in bytes.

    No dispatch mode sees this: fully_shard frees and fills gathered parameters by resizing.
    """
    original = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        out = original(storage, size)
        listener(storage, size)
        return out

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]
