"""Tensors and storages: `.data =` between unlike devices, backward, what is resized.

* Tensors: `.data =` between unlike devices, when backward comes to what made a tensor, and backward
  from roots that are known to fit.
* Storages of tensors that are made larger or smaller, heard of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import _len_torch_function_stack
from torch.autograd import Variable

from schedlang.runtime.device import on_host


def assignable(
    across: Callable[[Any, Any], bool], put: Callable[[torch.Tensor, torch.Tensor], None]
) -> None:
    """Let `a.data = b` be `put(a, b)` where `across(a, b)`, in this process, for good."""
    old: Any = torch._C.TensorBase.data
    compatible = torch._has_compatible_shallow_copy_type

    def assign(self: torch.Tensor, value: torch.Tensor) -> None:
        if across(self, value):
            put(self, value)
        else:
            old.__set__(self, value)

    def _has_compatible_shallow_copy_type(input: torch.Tensor, from_: torch.Tensor) -> bool:
        return across(input, from_) or bool(compatible(input, from_))  # dynamo reads these names

    tensor: Any = torch.Tensor
    tensor.data = property(lambda self: old.__get__(self), assign)
    torch._has_compatible_shallow_copy_type = _has_compatible_shallow_copy_type


def at_once_in_backward(made: torch.Tensor) -> torch.Tensor:
    """Let backward run what made this tensor as soon as its gradient is there; the tensor again.

    Backward goes by age, the youngest node first.  What many microbatches use is older than all of
    the later ones, so gradients would pile up in front of it, until all else of a backward is done.
    """
    node: Any = made.grad_fn
    if node is not None:
        node._set_sequence_nr(2**63 - 1)  # as nodes that add to a leaf's gradient have it
    return made


def backward(roots: Sequence[Any], grads: Sequence[torch.Tensor]) -> None:
    """Add up the gradients of leaves, from gradients that are shaped as their roots are.

    `torch.autograd.backward` looks whether they are, in Python, before its engine does; it goes
    where a mode or a class of its own is to hear of it, or threads of a device need more.
    """
    plain = not _len_torch_function_stack()
    if plain and all([type(grad) is torch.Tensor and on_host(grad) for grad in grads]):
        engine: Any = Variable._execution_engine
        both = tuple(roots), tuple(grads)
        engine.run_backward(*both, False, False, (), allow_unreachable=True, accumulate_grad=True)
        return
    torch.autograd.backward(roots, grads)


Heard = Callable[[torch.UntypedStorage, int], None]


@contextmanager
def resizes(heard: Heard) -> Iterator[None]:
    """Tell, for the time of a block, of each storage that is resized, and to how many bytes.

    No dispatch mode sees that: fully_shard frees and fills what it gathers by it.
    """
    plain = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        out = plain(storage, size)
        heard(storage, size)
        return out

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = plain  # type: ignore[method-assign]
