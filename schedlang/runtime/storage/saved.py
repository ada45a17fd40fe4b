"""The slot through which autograd keeps what it saves: its policies, and which tensors they take.

A policy is a layer around a module's forward. What autograd saves in there goes to the innermost
policy, in the order of `forward.ORDER`, from the inside out:

    stream      parameters that come and go: a note of which; anything else goes on outside
    checkpoint  dropped and made again by a second run, of one module or of several as one; under
                a budget evicted, and made again operator by operator
    code        whole numbers of few bits, which go on to the offload around
    offload     a copy on the host or on disk, or the forward's bag, which goes to a peer

Inputs of a second run are saved anew, to the policies around; results that one keeps go to the
`code` around.
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


Pack = Callable[[Tensor], Any]  # a tensor to what is kept: itself, or what has it as `tensor()`


class Policy(ABC):
    """The layer around a module's forward by which what it saves is kept in a way of its own."""

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `inner` under the policy; plainly where no gradient is recorded, or in a replay."""
        if policies.replayed or not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        return self.saving(inner, args, kwargs)

    @abstractmethod
    def saving(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run `inner`, whose gradient is recorded."""


def slot(pack: Pack) -> saved_tensors_hooks:
    """Let autograd keep `pack(tensor)` of what it saves inside."""
    return saved_tensors_hooks(pack, unpack)


def unpack(packed: Any) -> Tensor:
    """Give a saved tensor again, from what is kept in its place."""
    found: Tensor = packed if isinstance(packed, Tensor) else packed.tensor()
    return found


def as_it_is(tensor: Tensor) -> Any:
    """Keep a tensor itself, but not its history: a graph that holds itself is never let go.

    A backward frees what it walks; that of a stage in halves leaves the way to its inputs alone.
    """
    return Kept(tensor) if tensor.grad_fn is not None else tensor


def outside() -> Pack:
    """Return the way in which the hooks around keep a tensor; torch asks the innermost alone."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:
        return as_it_is
    pack, back = hooks
    return lambda tensor: _Outside(pack(tensor), back)


class _Outside(NamedTuple):
    """A tensor as other hooks keep it, and how they give it back."""

    packed: Any
    back: Callable[[Any], Tensor]

    def tensor(self) -> Tensor:
        return self.back(self.packed)


class View(NamedTuple):
    """The place of a tensor in its storage."""

    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> View:
        """The view that a tensor is."""
        return View(tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride())

    def on(self, raw: Tensor, start: int = 0) -> Tensor:
        """The tensor in the storage of `raw`, in which its own begins at byte `start`."""
        at = start // self.dtype.itemsize + self.offset
        with torch._C.DisableTorchFunction():
            empty = torch.empty(0, dtype=self.dtype, device=raw.device)
            return empty.set_(raw.untyped_storage(), at, self.size, self.stride)


class Viewed(NamedTuple):
    """A note in a tensor's place: how it lies in bytes that are asked for when it is wanted."""

    raw: Callable[[], Tensor]
    view: View

    def tensor(self) -> Tensor:
        """The tensor as it was saved, with its own strides."""
        return self.view.on(self.raw())


class Kept:
    """A tensor kept as it is, without its history, and with its count of writes."""

    def __init__(self, tensor: Tensor) -> None:
        self.saved = alias(tensor)
        self.version = tensor._version
        self._views: list[tuple[Tensor, int]] = []

    def watch(self, view: Tensor) -> None:
        """Count the writes into a view that has a count of its own, too."""
        self._views.append((alias(view), view._version))

    @property
    def stale(self) -> bool:
        """Whether somebody has written into it since."""
        counted = ((self.saved, self.version), *self._views)
        return any(one._version != version for one, version in counted)

    def tensor(self) -> Tensor:
        """Give it, if it is what it was; as autograd does for what it saves itself."""
        if self.stale:
            raise RuntimeError(
                "a value that backward needs has been modified by an inplace operation since"
            )
        return self.saved


def alias(tensor: Tensor) -> Tensor:
    """The same storage and count of writes, without history."""
    # within a dispatch mode a plain detach would not share the count
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


# ---- What is known of the modules around what runs in this thread.


class _Policies(threading.local):
    """The policies around that keep tensors, for who keeps some beside autograd's own.

    uncoded  what coded modules save is kept as it is, and not counted
    summed   results are parts of sums over ranks: a recomputation that spares them keeps them whole
    replayed  the units that are called next are those of an earlier stage, of which only the
             results are here: a second run could not call them
    """

    code: Pack | None = None
    offload: Pack | None = None
    park: Pack | None = None
    uncoded = False
    summed = False
    replayed = False


policies = _Policies()


@contextmanager
def within(**known: Any) -> Iterator[None]:
    """Set policies (names of `_Policies`) of the modules around, for the time of a block."""
    before = {name: getattr(policies, name) for name in known}
    vars(policies).update(known)
    try:
        yield
    finally:
        vars(policies).update(before)


def uncoded() -> AbstractContextManager[None]:
    """Keep what coded modules save as it is, uncounted, for the time of a block."""
    return within(uncoded=True)


def partial_sums() -> AbstractContextManager[None]:
    """Note, for the time of a block, that results are partial sums over ranks."""
    return within(summed=True)


def put_inside(
    context: Callable[[], AbstractContextManager[None]], model: nn.Module, modules: Iterable[str]
) -> None:
    """Let some modules of a throwaway copy run inside of `uncoded`, or of `partial_sums`."""
    for fqn in modules:
        module = model.get_submodule(fqn)
        module.forward = partial(_inside, context, module.forward)


def _inside(
    context: Callable[[], AbstractContextManager[None]],
    inner: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    with context():
        return inner(*args, **kwargs)


# ---- Which tensors are taken: not a module's own, nor what it is given as it is; told by the
# memory that they lie in.


def plain(tensor: Tensor) -> bool:
    """Return whether a tensor is bytes in memory and nothing else."""
    if type(tensor) is not Tensor or tensor.layout != torch.strided:
        return False
    return not (tensor.is_conj() or tensor.is_neg() or tensor.is_inference())


HALVES = (torch.bfloat16, torch.float16)
FLOATS = (torch.float64, torch.float32, *HALVES)


def place(tensor: Tensor) -> int:
    """Equal for tensors in the same memory, or in the same that is not there."""
    storage = tensor.untyped_storage()
    return int(storage._cdata) if tensor.is_meta else int(storage.data_ptr())


def elements(tensor: Tensor) -> tuple[object, ...]:
    """Equal for views of one storage that have the same elements in the same order."""
    dims: list[tuple[int, int]] = []  # sizes and strides, with dims that follow on as one
    for size, stride in zip(tensor.shape, tensor.stride()):
        if dims and dims[-1][1] == size * stride:
            dims[-1] = dims[-1][0] * size, stride
        elif size > 1:
            dims.append((size, stride))
    return tensor.storage_offset(), *dims


def is_copy(tensor: Tensor, weight: Tensor) -> bool:
    """Return whether a tensor of 16 bits is a weight of 32 bits, cast, perhaps transposed."""
    if tensor.dtype not in HALVES or weight.dtype != torch.float32:
        return False
    if tensor.is_meta != weight.is_meta:
        return False
    with torch._C.DisableTorchFunction(), torch.no_grad():
        for one in (weight, weight.t()) if weight.dim() == 2 else (weight,):
            if one.shape == tensor.shape and (
                tensor.is_meta or torch.equal(one.to(tensor.dtype), tensor)
            ):
                return True
    return False


def places(module: nn.Module) -> Iterator[int]:
    """The places of parameters and buffers now: FSDP gathers those of submodules during forward."""
    return map(place, own(module))


def own(module: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers as this rank has them."""
    for group in (module.parameters(), module.buffers()):
        for each in group:
            with torch.no_grad():
                yield each.to_local() if hasattr(each, "to_local") else each


class Addresses:
    """The places of a module's own tensors in one call, found anew only when some have moved.

    fully_shard gathers parameters, and offloading brings them, for a whole module at a time: so
    one parameter of each submodule tells. `address` is equal for tensors in the same memory, and
    `given` are others that count as its own.
    """

    def __init__(
        self,
        module: nn.Module,
        address: Callable[[Tensor], int] = place,
        given: Iterable[Tensor] = (),
    ) -> None:
        self._module, self._address = module, address
        self._given = frozenset(map(address, given))
        self._owners = [
            (owner, next(iter(names)))
            for owner in module.modules()
            if (names := [n for n, p in owner._parameters.items() if p is not None])
        ]
        self._seen: tuple[object, ...] | None = None
        self._found: frozenset[int] = frozenset()

    def __contains__(self, address: object) -> bool:
        now = tuple(_told(owner._parameters[name]) for owner, name in self._owners)
        if now != self._seen:
            self._seen = now
            self._found = self._given.union(map(self._address, own(self._module)))
        return address in self._found


def _told(parameter: Tensor | None) -> tuple[int, int]:
    """Another one whenever there is another parameter, or it has moved."""
    return id(parameter), parameter.data_ptr() if type(parameter) is nn.Parameter else 0


def given_whole(arguments: Any) -> frozenset[int]:
    """The places of tensors that a module is given as they are: without a gradient, or weights."""
    tensors = (t for t in pytree.tree_leaves(arguments) if isinstance(t, Tensor))
    return frozenset(
        place(t) for t in tensors if not t.requires_grad or isinstance(t, nn.Parameter)
    )


def is_candidate(tensor: Tensor, whole: Collection[int]) -> bool:
    """Return whether a saved tensor may be coded: a float in memory of its own."""
    plain = type(tensor) is Tensor and tensor.layout == torch.strided
    return plain and tensor.dtype in FLOATS and tensor.numel() > 0 and place(tensor) not in whole
