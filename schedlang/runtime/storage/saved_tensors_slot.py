"""The one slot of autograd for saved tensors: policies that use it, and which tensors they take.

A policy is a layer around the forward of a module. Tensors that autograd saves there go to the
innermost policy. In the order of `forward.ORDER`, from the inside out:

    stream      a reference for parameters that come and go; other tensors go to the next policy
    checkpoint  dropped, and made again by a second run of one module or of several as one; with a
                budget: evicted, and made again operator by operator
    code        integers of few bits, which go to the offload around
    offload     a copy on the host or on disk, or the bag of the forward, which goes to a peer

Inputs of a second run are saved anew, to the policies around; results that a recomputation saves go
to the `code` around.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

# ---- The slot, and what every policy does.


Pack = Callable[[Tensor], Any]  # tensor -> itself, or an object with a method `tensor()`


class SavedTensorPolicy(ABC):
    """A layer around the forward of a module that decides how its saved tensors are stored."""

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `inner` under the policy; without it if no gradient is recorded, or in a replay."""
        # a compiler cannot ask for inference mode, which ends where gradients are enabled
        ignores = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
        if policies.replayed or ignores or not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        return self.run_recorded(inner, args, kwargs)

    @abstractmethod
    def run_recorded(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run `inner`, whose gradient is recorded."""


def pack_hooks(pack: Pack) -> saved_tensors_hooks:
    """Return hooks under which autograd stores `pack(tensor)` for each saved tensor."""
    return saved_tensors_hooks(pack, unpack)


def unpack(packed: Any) -> Tensor:
    """Return a saved tensor from its packed form."""
    tensor: Tensor = packed if isinstance(packed, Tensor) else packed.tensor()
    return tensor


def pack_unchanged(tensor: Tensor) -> Any:
    """Pack a tensor as itself, but detached, because a graph that refers to itself is never freed.

    A backward frees the nodes that it walks; the split backward of a stage does not walk all.
    """
    return VersionedTensor(tensor) if tensor.grad_fn is not None else tensor


def outer_pack() -> Pack:
    """Return the pack function of the hooks around; torch calls only the innermost hooks."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:
        return pack_unchanged
    pack, outer_unpack = hooks
    return lambda tensor: _Outside(pack(tensor), outer_unpack)


class _Outside(NamedTuple):
    """A tensor packed by outer hooks, with their unpack function."""

    packed: Any
    back: Callable[[Any], Tensor]

    def tensor(self) -> Tensor:
        return self.back(self.packed)


class View(NamedTuple):
    """The view of a tensor on its storage."""

    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> View:
        """Return the view of a tensor."""
        return View(tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride())

    def restore_on(self, raw: Tensor, start: int = 0) -> Tensor:
        """Return the tensor on the storage of `raw`, where its own storage begins at byte
        `start`."""
        offset = start // self.dtype.itemsize + self.offset
        with torch._C.DisableTorchFunction():
            empty = torch.empty(0, dtype=self.dtype, device=raw.device)
            return empty.set_(raw.untyped_storage(), offset, self.size, self.stride)


class LazyView(NamedTuple):
    """A packed tensor: its view, and a function that returns its storage when it is needed."""

    raw: Callable[[], Tensor]
    view: View

    def tensor(self) -> Tensor:
        """Return the tensor as it was saved, with its own strides."""
        return self.view.restore_on(self.raw())


class VersionedTensor:
    """A tensor packed as itself, detached, with its version counter."""

    def __init__(self, tensor: Tensor) -> None:
        self.saved = alias(tensor)
        self.version = tensor._version
        self._views: list[tuple[Tensor, int]] = []

    def watch(self, view: Tensor) -> None:
        """Check also the version counter of a view that has its own."""
        self._views.append((alias(view), view._version))

    @property
    def is_stale(self) -> bool:
        """Whether the tensor was written into since."""
        counted = ((self.saved, self.version), *self._views)
        return any(tensor._version != version for tensor, version in counted)

    def tensor(self) -> Tensor:
        """Return the tensor; raises RuntimeError if it was written into, as autograd does."""
        if self.is_stale:
            raise RuntimeError(
                "a value that backward needs has been modified by an inplace operation since"
            )
        return self.saved


def alias(tensor: Tensor) -> Tensor:
    """Return a detached tensor with the same storage and version counter."""
    # within a dispatch mode a plain detach would not share the version counter
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


# ---- Policies of the modules around the code that runs in this thread.


class _Policies(threading.local):
    """The policies of the modules around, for code that saves tensors beside autograd.

    uncoded   quantized modules save their tensors unquantized, and do not count them
    summed    results are partial sums over ranks: a recomputation saves them unquantized
    replayed  the next units belong to an earlier stage, and only their results are on this rank: a
              second run could not call them
    """

    code: Pack | None = None
    offload: Pack | None = None
    park: Pack | None = None
    uncoded = False
    summed = False
    replayed = False


policies = _Policies()


@contextmanager
def set_policies(**values: Any) -> Iterator[None]:
    """Set policies (names of `_Policies`) within a block."""
    previous = {name: getattr(policies, name) for name in values}
    vars(policies).update(values)
    try:
        yield
    finally:
        vars(policies).update(previous)


def without_quantization() -> AbstractContextManager[None]:
    """Let quantized modules save tensors unquantized and uncounted, within a block."""
    return set_policies(uncoded=True)


def partial_sums() -> AbstractContextManager[None]:
    """Declare, within a block, that results are partial sums over ranks."""
    return set_policies(summed=True)


def wrap_modules(
    context: Callable[[], AbstractContextManager[None]], model: nn.Module, modules: Iterable[str]
) -> None:
    """Let some modules of a temporary copy run inside of `without_quantization`, or of
    `partial_sums`."""
    for fqn in modules:
        module = model.get_submodule(fqn)
        module.forward = partial(_run_inside, context, module.forward)


def _run_inside(
    context: Callable[[], AbstractContextManager[None]],
    inner: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    with context():
        return inner(*args, **kwargs)


# ---- Which tensors a policy takes: not a module's own, nor inputs without a gradient; recognised
# by their memory.


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is fully described by its bytes in memory."""
    if type(tensor) is not Tensor or tensor.layout != torch.strided:
        return False
    return not (tensor.is_conj() or tensor.is_neg() or tensor.is_inference())


HALVES = (torch.bfloat16, torch.float16)
FLOATS = (torch.float64, torch.float32, *HALVES)


def memory_key(tensor: Tensor) -> int:
    """Return a key that is equal for tensors in the same memory, or in the same meta storage."""
    storage = tensor.untyped_storage()
    return int(storage._cdata) if tensor.is_meta else int(storage.data_ptr())


def element_key(tensor: Tensor) -> tuple[object, ...]:
    """Return a key that is equal for views of one storage with the same elements in order."""
    dims: list[tuple[int, int]] = []  # sizes and strides, with contiguous dims merged
    for size, stride in zip(tensor.shape, tensor.stride()):
        if dims and dims[-1][1] == size * stride:
            dims[-1] = dims[-1][0] * size, stride
        elif size > 1:
            dims.append((size, stride))
    return tensor.storage_offset(), *dims


def is_cast_copy(tensor: Tensor, weight: Tensor) -> bool:
    """Return whether a tensor of 16 bits is a weight of 32 bits, cast, perhaps transposed."""
    if tensor.dtype not in HALVES or weight.dtype != torch.float32:
        return False
    if tensor.is_meta != weight.is_meta:
        return False
    with torch._C.DisableTorchFunction(), torch.no_grad():
        for candidate in (weight, weight.t()) if weight.dim() == 2 else (weight,):
            if candidate.shape == tensor.shape and (
                tensor.is_meta or torch.equal(candidate.to(tensor.dtype), tensor)
            ):
                return True
    return False


def memory_keys(module: nn.Module) -> Iterator[int]:
    """Yield the keys of parameters and buffers now: FSDP gathers parameters during a forward."""
    return map(memory_key, local_tensors_of(module))


def local_tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Yield the local tensors of parameters and buffers."""
    for group in (module.parameters(), module.buffers()):
        for tensor in group:
            with torch.no_grad():
                yield tensor.to_local() if hasattr(tensor, "to_local") else tensor


class ModuleAddresses:
    """The memory keys of a module's own tensors in one call, updated only when some have moved.

    fully_shard gathers parameters, and offloading loads them, for a full module at a time: so one
    parameter of each submodule shows a move. `address` returns the memory key of a tensor;
    `extra_tensors` are other tensors that count as the module's own.
    """

    def __init__(
        self,
        module: nn.Module,
        address: Callable[[Tensor], int] = memory_key,
        extra_tensors: Iterable[Tensor] = (),
    ) -> None:
        self._module, self._address = module, address
        self._given = frozenset(map(address, extra_tensors))
        self._owners = [
            (owner, next(iter(names)))
            for owner in module.modules()
            if (names := [n for n, p in owner._parameters.items() if p is not None])
        ]
        self._seen: tuple[object, ...] | None = None
        self._found: frozenset[int] = frozenset()

    def __contains__(self, address: object) -> bool:
        locations = tuple(_location(owner._parameters[name]) for owner, name in self._owners)
        if locations != self._seen:
            self._seen = locations
            self._found = self._given.union(map(self._address, local_tensors_of(self._module)))
        return address in self._found


def _location(parameter: Tensor | None) -> tuple[int, int]:
    """Return a key that changes if the parameter is replaced or moves."""
    return id(parameter), parameter.data_ptr() if type(parameter) is nn.Parameter else 0


def ungraded_inputs(arguments: Any) -> frozenset[int]:
    """Return the keys of arguments without a gradient, and of weights among the arguments."""
    tensors = (t for t in pytree.tree_leaves(arguments) if isinstance(t, Tensor))
    return frozenset(
        memory_key(t) for t in tensors if not t.requires_grad or isinstance(t, nn.Parameter)
    )


def is_candidate(tensor: Tensor, stored: Collection[int]) -> bool:
    """Return whether a saved tensor may be quantized: a float, not in the memory of `stored`."""
    dense = type(tensor) is Tensor and tensor.layout == torch.strided
    return (
        dense and tensor.dtype in FLOATS and tensor.numel() > 0 and memory_key(tensor) not in stored
    )
