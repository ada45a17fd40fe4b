"""Dynamic tensor rematerialisation: drop saved tensors above a budget, and make them again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.activation_memory.recompute import versions, written_twice
from schedlang.runtime.activation_memory.selective import draws, fresh
from schedlang.runtime.device import Replayed, default_generators
from schedlang.runtime.forward import layer_of, wrap
from schedlang.runtime.inside import Inside
from schedlang.runtime.storage.saved import Policy, alias, as_it_is, slot
from schedlang.runtime.tracing.record import key_of, operations

# ---- What can be dropped and made again: storages with the operators that make them, within a
# budget.
# Kirisame et al., Dynamic tensor rematerialization (2021). Whenever more bytes are kept than the
# budget, what is dropped is what is cheapest to make again for its size and for how long nobody
# used it: least work / (bytes * staleness), where work is its own and that of all dropped around
# it that would have to run with it. Time is counted in work, so that every run drops the same.


class Pool:
    """The bytes that some modules keep for their backwards, at most `budget` where that can be.

    kept, peak  bytes now, and at most so far
    again       the work of everything that was made a second time
    dropped     how many storages were
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.kept = self.peak = self.dropped = 0
        self.again = self.clock = 0.0
        self._held: weakref.WeakValueDictionary[int, Block] = weakref.WeakValueDictionary()
        self._next = 0
        self._path: list[Block] = []  # what is being made

    def __deepcopy__(self, memo: dict[int, Any]) -> Pool:
        """Copies of modules that share a budget share one of their own."""
        return Pool(self.budget)

    def hold(self, block: Block, tensor: Tensor) -> None:
        """Keep the values of a block; others are dropped until all fit."""
        assert block.tensor is None
        block.tensor, block.version, block.used = tensor, tensor._version, self.clock
        self._next += 1
        block.number = self._next
        self._held[block.number] = block
        self._changed(block, block.size)
        self.fit()
        self.peak = max(self.peak, self.kept)

    def fit(self, room: int = 0) -> None:
        """Drop what is worth least until all fits with so much room, or nothing can be dropped."""
        if self.kept + room > self.budget:
            busy: set[int] = set()
            for block in self._path:
                busy |= {id(block), *map(id, block.parents)}
            loose = (one for one in self._held.values() if not one.pinned)
            free = {id(one): one for one in loose if id(one) not in busy}
            while self.kept + room > self.budget and free:
                worst = min(free.values(), key=self._worth)
                del free[id(worst)]
                self._drop(worst)

    def bring(self, block: Block) -> Tensor:
        """The values of a block, made again if they were dropped, with whatever they need."""
        if block.tensor is None:
            before, self._path = self._path, [*self._path, block]
            while block.tensor is None:
                top = self._path[-1]
                missing = next((one for one in top.parents if one.tensor is None), None)
                if missing is not None:
                    self._path.append(missing)
                    continue
                self._run(top)
                self._path.pop()
            self._path = before
        found = block.tensor
        if found._version != block.version:
            raise _written_into("a tensor that its backward needs")
        block.used = self.clock
        return found

    def _run(self, block: Block) -> None:
        assert block.node is not None
        node = block.node
        for parent in block.parents:
            parent.used = self.clock
        outputs = [ref() for ref in node.outputs]
        self.fit(sum(one.size for one in outputs if one is not None and one.tensor is None))
        made = node.run()
        self.clock += node.work
        self.again += node.work
        for output, one in zip(outputs, made, strict=True):
            if output is not None and output.tensor is None:
                assert one is not None and one.untyped_storage().nbytes() == output.size
                self.hold(output, one)

    def _drop(self, block: Block) -> None:
        del self._held[block.number]
        block.tensor = None
        self.dropped += 1
        self._changed(block, -block.size)

    def _changed(self, block: Block, size: int) -> None:
        self.kept += size
        block.changes[0] += 1

    def _worth(self, block: Block) -> float:
        if block.known[0] != block.changes[0]:  # something around it came or went
            block.known = (block.changes[0], sum(node.work for node in _around(block)))
        return block.known[1] / (max(1, block.size) * (self.clock - block.used + 1.0))


class Block:
    """One storage: its values while they are kept, and what makes them again; if nothing does (what
    came from outside, or was written into), they stay."""

    def __init__(
        self, pool: Pool, like: Tensor, changes: list[int], node: Node | None = None
    ) -> None:
        self.pool, self.changes, self.node = pool, changes, node  # changes: one for a whole call
        self.size = like.untyped_storage().nbytes()
        self.dtype = like.dtype
        self.base = (tuple(like.shape), like.stride(), like.storage_offset())
        self.tensor: Tensor | None = None
        self.version = self.number = 0
        self.pinned, self.used = node is None, 0.0
        self.known = (-1, 0.0)
        self.users: weakref.WeakSet[Node] = weakref.WeakSet()

    def ref(self, tensor: Tensor) -> Ref:
        """A tensor of this storage."""
        return Ref(self, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    @property
    def parents(self) -> Sequence[Block]:
        """The blocks that it is made of."""
        return self.node.parents if self.node is not None else ()

    def __del__(self) -> None:
        if self.tensor is not None:
            self.pool._changed(self, -self.size)


@dataclass(frozen=True)
class Ref:
    """A tensor by its storage and its place in it."""

    block: Block
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, base: Tensor) -> Tensor:
        """This tensor, in the storage of another one."""
        if (base.size(), base.stride(), base.storage_offset()) == (
            self.shape,
            self.stride,
            self.offset,
        ):
            return base
        return base.as_strided(self.shape, self.stride, self.offset)

    def tensor(self) -> Tensor:
        """This tensor, made again if it was dropped."""
        with torch.no_grad():
            return self.of(self.block.pool.bring(self.block))


@dataclass(frozen=True)
class Outside:
    """A tensor that the call was given: a parameter, or what has no rule here."""

    tensor: Tensor
    version: int | None  # None: a parameter, which others write into and fill again

    def get(self) -> Tensor:
        """The tensor, unless it was written into."""
        if self.version is not None and self.tensor._version != self.version:
            raise _written_into("what it makes again for its backward")
        return self.tensor


class Node:
    """One operator that ran, with what it takes to run it again."""

    def __init__(
        self,
        operator: Any,
        given: Any,
        work: float,
        drawn: Replayed | None,
        filled: Callable[[Sequence[Tensor]], None],
    ) -> None:
        self.operator, self.given, self.work, self.drawn = operator, given, work, drawn
        self.filled = filled  # parameters that were freed since come back
        leaves = tree_leaves(given)
        self.parents = tuple({id(r.block): r.block for r in leaves if isinstance(r, Ref)}.values())
        self._outside = tuple(one for one in leaves if isinstance(one, Outside))
        self.into: Block | None = None  # it writes into this one: a second run into a copy
        self.outputs: list[Callable[[], Block | None]] = []
        for parent in self.parents:
            parent.users.add(self)

    def run(self) -> list[Tensor | None]:
        """Run again; the outputs, as they were."""
        self.filled([one.tensor for one in self._outside])
        with torch.no_grad(), torch._C.DisableTorchFunction(), torch._C._DisableAutocast():
            copied = None if self.into is None else _copy(self.into)

            def value(one: Ref | Outside) -> Tensor:
                if isinstance(one, Outside):
                    return one.get()
                own = copied if one.block is self.into else None
                return one.of(one.block.pool.bring(one.block) if own is None else own)

            args, kwargs = tree_map_only((Ref, Outside), value, self.given)
            with self.drawn or nullcontext():
                made = self.operator(*args, **kwargs)
        if copied is not None:
            return [copied]
        return [one if isinstance(one, Tensor) else None for one in tree_leaves(made)]


def _written_into(what: str) -> Refusal:
    return Refusal.of(
        "S846",
        "a module with a memory budget reads a tensor that was changed in place",
        notes=(f"the model changed {what} in place, after the module read it",),
        helps=("leave this module out of the row", "or select the module that changes it, too"),
    )


def _copy(block: Block) -> Tensor:
    """The values of a block, to be written into."""
    shape, stride, offset = block.base
    assert not offset, "a storage is known by the tensor that it was made as"
    return torch.empty_strided(
        shape, stride, dtype=block.dtype, device=block.pool.bring(block).device
    ).copy_(block.pool.bring(block))


def _around(block: Block) -> Iterator[Node]:
    """The operators that would run with it: its own, and those of all dropped before and behind."""
    seen: set[int] = set()
    for step in (_before, _behind):
        waiting = [block]
        while waiting:
            one = waiting.pop()
            if one.node is not None and id(one.node) not in seen:
                seen.add(id(one.node))
                yield one.node
            waiting += [o for o in step(one) if o.tensor is None and id(o.node) not in seen]


def _before(block: Block) -> Iterator[Block]:
    yield from block.parents


def _behind(block: Block) -> Iterator[Block]:
    for node in list(block.users):
        yield from (one for ref in node.outputs if (one := ref()) is not None)


# ---- Modules that drop what they save whenever a budget is passed, and make it again operator by
# operator.
#
# Every operator in a forward is noted with what it was given. What autograd saves is kept in the
# pool of the row (above), which drops and makes again. Collectives never run twice, because
# ranks would not agree when; what is written into is brought back, with all that was made of it,
# before it is, and then stays.


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
    found = [layer_of(module, "checkpoint") for module in model.modules()]
    return list({id(one.pool): one.pool for one in found if isinstance(one, Dynamic)}.values())


class Dynamic(Policy):
    """The policy of a pool of so many bytes, which drops what is worth least and makes it again."""

    def __init__(self, module: nn.Module, pool: Pool) -> None:
        self.module, self.pool = module, pool

    def saving(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run `inner`, and note its operators."""
        inside = Inside(self.module)
        before = versions(inside.now())
        noted = _Noted(self.module, self.pool)
        with slot(noted.pack), noted:
            output = inner(*args, **kwargs)
        noted.known.clear()
        written_twice(self.module, before, inside.now())
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
        """Keep a tensor that this call did not make as it is."""
        block = self._know(tensor)
        self.pool.hold(block, alias(tensor))
        return block

    def _write(
        self, func: Any, args: Any, kwargs: Any, given: Sequence[Tensor], written: Sequence[Tensor]
    ) -> Any:
        """Run an operator that writes: a tensor becomes another block, made of what it was."""
        block = self._block(written[0]) if _plain(written[0]) else None
        if (
            len(written) > 1
            or _sends(func)
            or not all(map(_plain, given))
            or block is None
            or block.node is None
            or block.tensor is not None
            or written[0].dtype != block.dtype
            or block.base[2]
        ):
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
        """Pin all that was made of a tensor: once that is another one, it cannot be made again."""
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
            return as_it_is(tensor)
        block = self._block(tensor) or self._entered(tensor)
        if tensor.dtype != block.dtype:
            block.pinned = True
            return as_it_is(tensor)
        if block.tensor is None:
            self.pool.hold(block, tensor.detach().as_strided(*block.base))
        return block.ref(tensor)


def _nothing() -> None:
    """Return None: the reference to what no operator made, or what was made without a storage."""


def _plain(tensor: Tensor) -> bool:
    """Return whether shape, strides and storage say all that there is to know of it."""
    dense = type(tensor) in _KINDS and tensor.layout is torch.strided
    return dense and not tensor.is_conj() and not tensor.is_neg()


_KINDS = (Tensor, nn.Parameter, nn.Buffer)


def _repeatable(operator: Any) -> bool:
    """Return whether a second run gives the same, and changes nothing."""
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
