"""Modules that drop what they save whenever a budget is passed, and make it again operator by
operator.

Every operator in a forward is noted with what it was given. What autograd saves is kept in the
pool of the row (remat.py), which drops and makes again. Collectives never run twice, because ranks
would not agree when; what is written into is brought back, with all that was made of it, before it
is, and then stays.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from schedlang.runtime.device import Replayed, default_generators
from schedlang.runtime.forward import layers_of, wrap
from schedlang.runtime.keeping.chosen import draws, fresh
from schedlang.runtime.keeping.kept import alias
from schedlang.runtime.keeping.recompute import versions, written_twice
from schedlang.runtime.keeping.remat import Block, Node, Outside, Pool, Ref
from schedlang.runtime.recording.burden import key_of, operations

_SENDS = ("c10d", "_c10d_functional", "c10d_functional")


def dynamic(modules: Sequence[nn.Module], budget: int) -> Pool:
    """Let modules keep at most `budget` bytes together for their backwards, what enters them
    included; gradients stay the same bit by bit.

    Where an operator alone needs more, more is kept: the pool's `peak` says so.
    """
    pool = Pool(budget)
    for module in modules:
        wrap(module, "checkpoint", Dynamic(module, pool))
    return pool


def pools(model: nn.Module) -> list[Pool]:
    """The pools of a model whose modules `dynamic` was given."""
    found = [layers.kinds.get("checkpoint") for m in model.modules() if (layers := layers_of(m))]
    return list({id(one.pool): one.pool for one in found if isinstance(one, Dynamic)}.values())


class Dynamic:
    """The layer around the forward of one module."""

    def __init__(self, module: nn.Module, pool: Pool) -> None:
        self.module, self.pool = module, pool

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `inner`, and note its operators; plainly where no gradient is recorded."""
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        before = versions(self.module)
        noted = _Noted(self.module, self.pool)
        with saved_tensors_hooks(noted.pack, _unpack), noted:
            output = inner(*args, **kwargs)
        noted.known.clear()
        written_twice(self.module, before)
        return output


class _Noted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operators of one call."""

    def __init__(self, module: nn.Module, pool: Pool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pool, self.changes = pool, [0]
        self.known: dict[int, tuple[StorageWeakRef, Block]] = {}
        self._weights = {key_of(one) for one in (*module.parameters(), *module.buffers())}
        units = [one for one in module.modules() if isinstance(one, FSDPModule)]
        self._filled = lambda tensors: _unshard(units, tensors)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        written = list(_written(func, args, kwargs))
        if written:
            return self._write(func, args, kwargs, given, written)
        if not _repeatable(func) or not all(map(_plain, given)):
            return func(*args, **kwargs)
        node = self._node(func, args, kwargs, given)
        old = {key_of(one) for one in given}
        output = func(*args, **kwargs)
        made = [one if isinstance(one, Tensor) else None for one in tree_leaves(output)]
        node.work = operations(func, args, kwargs, output)
        self.pool.clock += node.work
        for one in made:
            if one is not None and _plain(one) and key_of(one) not in old:
                node.outputs.append(weakref.ref(self._know(one, node)))
            else:
                node.outputs.append(_nothing)
        return output

    def _node(self, func: Any, args: Any, kwargs: Any, given: Sequence[Tensor]) -> Node:
        drawn = None
        if draws(func, args, kwargs):
            own = [one for one in tree_leaves(kwargs) if isinstance(one, torch.Generator)]
            drawn = Replayed(own or default_generators(one.device for one in given))
        refs = tree_map_only(Tensor, self._ref, (args, kwargs))
        return Node(func, refs, 0.0, drawn, self._filled)

    def _know(self, tensor: Tensor, node: Node | None = None) -> Block:
        block = Block(self.pool, tensor, self.changes, node)
        storage = tensor.untyped_storage()
        weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self.known[storage._cdata] = (weak, block)
        return block

    def _block(self, tensor: Tensor) -> Block | None:
        found = self.known.get(tensor.untyped_storage()._cdata)
        if found is None or found[0].expired():  # type: ignore[no-untyped-call]
            return None
        return found[1]

    def _weight(self, tensor: Tensor) -> bool:
        base = tensor._base if tensor._is_view() else tensor
        return isinstance(base, nn.Parameter) or key_of(tensor) in self._weights

    def _ref(self, tensor: Tensor) -> Ref | Outside:
        """A tensor that an operator is given, as it is found again."""
        if self._weight(tensor):
            return Outside(alias(tensor), None)
        block = self._block(tensor) or self._entered(tensor)
        if tensor.dtype != block.dtype:
            block.pinned = True
            return Outside(alias(tensor), tensor._version)
        return block.ref(tensor)

    def _entered(self, tensor: Tensor) -> Block:
        """What this call did not make: it is kept as it is."""
        block = self._know(tensor)
        self.pool.hold(block, alias(tensor))
        return block

    def _write(
        self, func: Any, args: Any, kwargs: Any, given: Sequence[Tensor], written: Sequence[Tensor]
    ) -> Any:
        """What a tensor becomes is another block, made of the one that it was."""
        block = self._block(written[0]) if _plain(written[0]) else None
        if (
            len(written) > 1 or _sends(func) or not all(map(_plain, given)) or block is None
            or block.node is None or block.tensor is not None or written[0].dtype != block.dtype
            or block.base[2]
        ):  # fmt: skip
            for tensor in written:
                self._before_write(tensor)
            return func(*args, **kwargs)
        node = self._node(func, args, kwargs, given)
        node.into = block
        output = func(*args, **kwargs)
        node.work = float(written[0].numel())
        new = self._know(written[0], node)
        new.base = block.base
        node.outputs.append(weakref.ref(new))
        return output

    def _before_write(self, tensor: Tensor) -> None:
        """What was made of a tensor can no longer be made once it is another one: it stays."""
        if not _plain(tensor) or self._weight(tensor):
            return
        block = self._block(tensor)
        if block is None:
            return
        for node in list(block.users):
            for ref in node.outputs:
                one = ref()
                if one is not None:
                    self.pool.bring(one)
                    one.pinned = True
        del self.known[tensor.untyped_storage()._cdata]

    # -- what autograd saves -----------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Any:
        """Keep a tensor in the pool; weights, and what is no plain tensor, as they are."""
        if not _plain(tensor) or self._weight(tensor):
            return tensor
        block = self._block(tensor) or self._entered(tensor)
        if tensor.dtype != block.dtype:
            block.pinned = True
            return tensor
        if block.tensor is None:
            self.pool.hold(block, tensor.detach().as_strided(*block.base))
        return block.ref(tensor)


def _unpack(saved: Any) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    with torch.no_grad():
        found: Tensor = saved.of(saved.block.pool.bring(saved.block))
    return found


def _nothing() -> None:
    """In place of a reference to what an operator did not make, or made without a storage."""


def _plain(tensor: Tensor) -> bool:
    """Whether shape, strides and storage say all that there is to know of it."""
    dense = type(tensor) in _KINDS and tensor.layout is torch.strided
    return dense and not tensor.is_conj() and not tensor.is_neg()


_KINDS = (Tensor, nn.Parameter, nn.Buffer)


def _repeatable(operator: Any) -> bool:
    """Whether a second run gives the same, and changes nothing."""
    return not _sends(operator) and fresh(operator)


def _sends(operator: Any) -> bool:
    return operator._schema.name.partition("::")[0] in _SENDS


def _written(operator: Any, args: tuple[Any, ...], kwargs: Any) -> Iterator[Tensor]:
    """The tensors that an operator writes into; a collective does not say which."""
    schema = operator._schema
    sends = _sends(operator)
    given = dict(zip((one.name for one in schema.arguments), args)) | kwargs
    for one in schema.arguments:
        if sends or one.alias_info is not None and one.alias_info.is_write:
            yield from (t for t in tree_leaves(given.get(one.name)) if isinstance(t, Tensor))


def _unshard(units: Sequence[FSDPModule], tensors: Sequence[Tensor]) -> None:
    """Gather parameters that were freed after their forward; after backward they are, as ever."""
    if any(one.numel() and not one.untyped_storage().nbytes() for one in tensors):
        for unit in units:
            unit.unshard()
