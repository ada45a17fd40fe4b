"""Dynamic tensor rematerialisation: saved tensors above a budget are dropped, and made again."""

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
from schedlang.runtime.activation_memory.recompute import buffer_versions, check_buffers
from schedlang.runtime.activation_memory.selective import draws_random, is_functional
from schedlang.runtime.device import RestoredGenerators, default_generators
from schedlang.runtime.forward import layer_of, wrap
from schedlang.runtime.storage.saved_tensors_slot import (
    SavedTensorPolicy,
    alias,
    pack_hooks,
    pack_unchanged,
)
from schedlang.runtime.submodules import ModuleWalk
from schedlang.runtime.tracing.recording import key_of, operations

# ---- Storages with the operators that make them: dropped and made again, within a budget.
# Kirisame et al., Dynamic tensor rematerialization (2021). When the held bytes exceed the budget,
# the block of least score is dropped: work / (bytes * staleness), where work is that of its
# operator and of all dropped neighbours that would have to run with it. Time is counted in work, so
# that every run drops the same blocks.


class BudgetPool:
    """The bytes that some modules save for their backwards: at most `budget`, where possible.

    held_bytes, peak  bytes now, and their maximum so far
    repeated_work     the work of all operators that ran again
    dropped           the number of storages that were dropped
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.held_bytes = self.peak = self.dropped = 0
        self.repeated_work = self.clock = 0.0
        self._held: weakref.WeakValueDictionary[int, StorageBlock] = weakref.WeakValueDictionary()
        self._next = 0
        self._path: list[StorageBlock] = []  # blocks that are being made

    def __deepcopy__(self, memo: dict[int, Any]) -> BudgetPool:
        """Return a new pool: copies of modules that share a budget share one of their own."""
        return BudgetPool(self.budget)

    def hold(self, block: StorageBlock, tensor: Tensor) -> None:
        """Store the values of a block; drop others until all fit."""
        assert block.tensor is None
        block.tensor, block.version, block.used = tensor, tensor._version, self.clock
        self._next += 1
        block.number = self._next
        self._held[block.number] = block
        self._changed(block, block.size)
        self.evict()
        self.peak = max(self.peak, self.held_bytes)

    def evict(self, needed_bytes: int = 0) -> None:
        """Drop the blocks of least score until all fit with `needed_bytes` more bytes, or none can
        be dropped."""
        if self.held_bytes + needed_bytes > self.budget:
            busy: set[int] = set()
            for block in self._path:
                busy |= {id(block), *map(id, block.parents)}
            unpinned = (candidate for candidate in self._held.values() if not candidate.pinned)
            evictable = {
                id(candidate): candidate for candidate in unpinned if id(candidate) not in busy
            }
            while self.held_bytes + needed_bytes > self.budget and evictable:
                worst = min(evictable.values(), key=self._score)
                del evictable[id(worst)]
                self._drop(worst)

    def materialize(self, block: StorageBlock) -> Tensor:
        """Return the values of a block; if dropped, make them again, with all that they need."""
        if block.tensor is None:
            before, self._path = self._path, [*self._path, block]
            while block.tensor is None:
                top = self._path[-1]
                missing = next((parent for parent in top.parents if parent.tensor is None), None)
                if missing is not None:
                    self._path.append(missing)
                    continue
                self._run(top)
                self._path.pop()
            self._path = before
        tensor = block.tensor
        if tensor._version != block.version:
            raise _mutation_refusal("a tensor that its backward needs")
        block.used = self.clock
        return tensor

    def _run(self, block: StorageBlock) -> None:
        assert block.node is not None
        node = block.node
        for parent in block.parents:
            parent.used = self.clock
        outputs = [ref() for ref in node.outputs]
        self.evict(sum(t.size for t in outputs if t is not None and t.tensor is None))
        results = node.run()
        self.clock += node.work
        self.repeated_work += node.work
        for output, t in zip(outputs, results, strict=True):
            if output is not None and output.tensor is None:
                assert t is not None and t.untyped_storage().nbytes() == output.size
                self.hold(output, t)

    def _drop(self, block: StorageBlock) -> None:
        del self._held[block.number]
        block.tensor = None
        self.dropped += 1
        self._changed(block, -block.size)

    def _changed(self, block: StorageBlock, size: int) -> None:
        self.held_bytes += size
        block.changes[0] += 1

    def _score(self, block: StorageBlock) -> float:
        if block.known[0] != block.changes[0]:  # a block of the same call came or went
            block.known = (block.changes[0], sum(node.work for node in _dropped_around(block)))
        return block.known[1] / (max(1, block.size) * (self.clock - block.used + 1.0))


class StorageBlock:
    """One storage: its values while they are held, and the operator that makes them again.

    Without such an operator (an input of the call, or written into), the values stay.
    """

    def __init__(
        self, pool: BudgetPool, tensor: Tensor, changes: list[int], node: OperatorNode | None = None
    ) -> None:
        self.pool, self.changes, self.node = (
            pool,
            changes,
            node,
        )  # changes: one counter for a full call
        self.size = tensor.untyped_storage().nbytes()
        self.dtype = tensor.dtype
        self.base = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
        self.tensor: Tensor | None = None
        self.version = self.number = 0
        self.pinned, self.used = node is None, 0.0
        self.known = (-1, 0.0)
        self.users: weakref.WeakSet[OperatorNode] = weakref.WeakSet()

    def ref(self, tensor: Tensor) -> TensorRef:
        """Return a reference to a tensor of this storage."""
        return TensorRef(self, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    @property
    def parents(self) -> Sequence[StorageBlock]:
        """The blocks from which this block is made."""
        return self.node.parents if self.node is not None else ()

    def __del__(self) -> None:
        if self.tensor is not None:
            self.pool._changed(self, -self.size)


@dataclass(frozen=True)
class TensorRef:
    """A tensor by its block and its view of that storage."""

    block: StorageBlock
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def view_of(self, base: Tensor) -> Tensor:
        """Return this view of the storage of `base`."""
        if (base.size(), base.stride(), base.storage_offset()) == (
            self.shape,
            self.stride,
            self.offset,
        ):
            return base
        return base.as_strided(self.shape, self.stride, self.offset)

    def tensor(self) -> Tensor:
        """Return this tensor, made again if it was dropped."""
        with torch.no_grad():
            return self.view_of(self.block.pool.materialize(self.block))


@dataclass(frozen=True)
class OuterTensor:
    """An argument that the pool does not manage: a parameter, or a tensor in another dtype."""

    tensor: Tensor
    version: int | None  # None: a parameter, which may be freed and filled again

    def get(self) -> Tensor:
        """Return the tensor; refuse if it was written into."""
        if self.version is not None and self.tensor._version != self.version:
            raise _mutation_refusal("what it makes again for its backward")
        return self.tensor


class OperatorNode:
    """One operator that ran, with its arguments, to run it again."""

    def __init__(
        self,
        operator: Any,
        arguments: Any,
        work: float,
        rng_state: RestoredGenerators | None,
        filled: Callable[[Sequence[Tensor]], None],
    ) -> None:
        self.operator = operator
        self.arguments = arguments
        self.work = work
        self.rng_state = rng_state
        self.refill = filled  # gathers parameters that were freed since
        leaves = tree_leaves(arguments)
        self.parents = tuple(
            {id(r.block): r.block for r in leaves if isinstance(r, TensorRef)}.values()
        )
        self._outside = tuple(leaf for leaf in leaves if isinstance(leaf, OuterTensor))
        self.into: StorageBlock | None = (
            None  # the operator writes into this block: a second run into a copy
        )
        self.outputs: list[Callable[[], StorageBlock | None]] = []
        for parent in self.parents:
            parent.users.add(self)

    def run(self) -> list[Tensor | None]:
        """Run the operator again; return its outputs."""
        self.refill([leaf.tensor for leaf in self._outside])
        with torch.no_grad(), torch._C.DisableTorchFunction(), torch._C._DisableAutocast():
            copied = None if self.into is None else _copy_values(self.into)

            def value(ref: TensorRef | OuterTensor) -> Tensor:
                if isinstance(ref, OuterTensor):
                    return ref.get()
                target = copied if ref.block is self.into else None
                return ref.view_of(
                    ref.block.pool.materialize(ref.block) if target is None else target
                )

            args, kwargs = tree_map_only((TensorRef, OuterTensor), value, self.arguments)
            with self.rng_state or nullcontext():
                output = self.operator(*args, **kwargs)
        if copied is not None:
            return [copied]
        return [leaf if isinstance(leaf, Tensor) else None for leaf in tree_leaves(output)]


def _mutation_refusal(target: str) -> Refusal:
    return Refusal.of(
        "S846",
        "a module with a memory budget reads a tensor that was changed in place",
        notes=(f"the model changed {target} in place, after the module read it",),
        helps=("leave this module out of the row", "or select the module that changes it, too"),
    )


def _copy_values(block: StorageBlock) -> Tensor:
    """Return a copy of the values of a block, to be written into."""
    shape, stride, offset = block.base
    assert not offset, "a storage is known by the tensor that it was made as"
    return torch.empty_strided(
        shape, stride, dtype=block.dtype, device=block.pool.materialize(block).device
    ).copy_(block.pool.materialize(block))


def _dropped_around(block: StorageBlock) -> Iterator[OperatorNode]:
    """Yield the operators that would run again with a block: its own, and of dropped neighbours."""
    seen: set[int] = set()
    for step in (_inputs_of, _outputs_of):
        waiting = [block]
        while waiting:
            current = waiting.pop()
            if current.node is not None and id(current.node) not in seen:
                seen.add(id(current.node))
                yield current.node
            waiting += [
                other
                for other in step(current)
                if other.tensor is None and id(other.node) not in seen
            ]


def _inputs_of(block: StorageBlock) -> Iterator[StorageBlock]:
    yield from block.parents


def _outputs_of(block: StorageBlock) -> Iterator[StorageBlock]:
    for node in list(block.users):
        yield from (output for ref in node.outputs if (output := ref()) is not None)


# ---- Modules that drop saved tensors above a budget, and make them again operator by operator.
#
# Every operator in a forward is recorded with its arguments. Tensors that autograd saves are held
# in the pool of the row (above), which drops them and makes them again. Collectives never run
# twice, because ranks would not agree when. Before a tensor is written into, all blocks made from
# it are made again, and then stay.


_SENDS = ("c10d", "_c10d_functional", "c10d_functional")


def limit_saved_bytes(modules: Sequence[nn.Module], budget: int) -> BudgetPool:
    """Let modules save at most `budget` bytes together for their backwards, inputs included.

    Gradients are equal bit for bit. If one operator alone needs more, more is held; the `peak` of
    the returned pool shows that.
    """
    pool = BudgetPool(budget)
    for module in modules:
        wrap(module, "checkpoint", BudgetPolicy(module, pool))
    return pool


def budget_pools(model: nn.Module) -> list[BudgetPool]:
    """Return the pools of a model, of modules to which `limit_saved_bytes` was applied."""
    policies = [layer_of(module, "checkpoint") for module in model.modules()]
    return list(
        {
            id(policy.pool): policy.pool for policy in policies if isinstance(policy, BudgetPolicy)
        }.values()
    )


class BudgetPolicy(SavedTensorPolicy):
    """The policy that holds saved tensors in a pool, which drops some and makes them again."""

    def __init__(self, module: nn.Module, pool: BudgetPool) -> None:
        self.module, self.pool = module, pool

    def run_recorded(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run `inner`, and record its operators."""
        walk = ModuleWalk(self.module)
        before = buffer_versions(walk.current())
        recorder = _OperatorRecorder(self.module, self.pool)
        with pack_hooks(recorder.pack), recorder:
            output = inner(*args, **kwargs)
        recorder.known.clear()
        check_buffers(self.module, before, walk.current())
        return output


class _OperatorRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators of one call."""

    def __init__(self, module: nn.Module, pool: BudgetPool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pool, self.changes = pool, [0]
        self.known: dict[int, tuple[StorageWeakRef, StorageBlock]] = {}
        self._weights = {key_of(item) for item in (*module.parameters(), *module.buffers())}
        units = [item for item in module.modules() if isinstance(item, FSDPModule)]
        self._refill = lambda tensors: _unshard(units, tensors)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        arguments = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        written = list(_written_tensors(func, args, kwargs))
        if written:
            return self._write(func, args, kwargs, arguments, written)
        if not _is_repeatable(func) or not all(map(_is_plain, arguments)):
            return func(*args, **kwargs)
        node = self._node(func, args, kwargs, arguments)
        input_keys = {key_of(value) for value in arguments}
        output = func(*args, **kwargs)
        outputs = [value if isinstance(value, Tensor) else None for value in tree_leaves(output)]
        node.work = operations(func, args, kwargs, output)
        self.pool.clock += node.work
        for value in outputs:
            if value is not None and _is_plain(value) and key_of(value) not in input_keys:
                node.outputs.append(weakref.ref(self._register(value, node)))
            else:
                node.outputs.append(_no_block)
        return output

    def _node(self, func: Any, args: Any, kwargs: Any, arguments: Sequence[Tensor]) -> OperatorNode:
        rng_state = None
        if draws_random(func, args, kwargs):
            generators = [leaf for leaf in tree_leaves(kwargs) if isinstance(leaf, torch.Generator)]
            rng_state = RestoredGenerators(
                generators or default_generators(leaf.device for leaf in arguments)
            )
        refs = tree_map_only(Tensor, self._ref, (args, kwargs))
        return OperatorNode(func, refs, 0.0, rng_state, self._refill)

    def _register(self, tensor: Tensor, node: OperatorNode | None = None) -> StorageBlock:
        block = StorageBlock(self.pool, tensor, self.changes, node)
        storage = tensor.untyped_storage()
        weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self.known[storage._cdata] = (weak, block)
        return block

    def _block(self, tensor: Tensor) -> StorageBlock | None:
        entry = self.known.get(tensor.untyped_storage()._cdata)
        if entry is None or entry[0].expired():  # type: ignore[no-untyped-call]
            return None
        return entry[1]

    def _is_weight(self, tensor: Tensor) -> bool:
        base = tensor._base if tensor._is_view() else tensor
        return isinstance(base, nn.Parameter) or key_of(tensor) in self._weights

    def _ref(self, tensor: Tensor) -> TensorRef | OuterTensor:
        """Return a reference to an argument of an operator, by which it is found again."""
        if self._is_weight(tensor):
            return OuterTensor(alias(tensor), None)
        block = self._block(tensor) or self._hold_input(tensor)
        if tensor.dtype != block.dtype:
            block.pinned = True
            return OuterTensor(alias(tensor), tensor._version)
        return block.ref(tensor)

    def _hold_input(self, tensor: Tensor) -> StorageBlock:
        """Hold a tensor that this call did not make, without an operator to make it again."""
        block = self._register(tensor)
        self.pool.hold(block, alias(tensor))
        return block

    def _write(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        arguments: Sequence[Tensor],
        written: Sequence[Tensor],
    ) -> Any:
        """Run an operator that writes: the tensor becomes a new block, made from the old one."""
        block = self._block(written[0]) if _is_plain(written[0]) else None
        if (
            len(written) > 1
            or _is_collective(func)
            or not all(map(_is_plain, arguments))
            or block is None
            or block.node is None
            or block.tensor is not None
            or written[0].dtype != block.dtype
            or block.base[2]
        ):
            for tensor in written:
                self._before_write(tensor)
            return func(*args, **kwargs)
        node = self._node(func, args, kwargs, arguments)
        node.into = block
        output = func(*args, **kwargs)
        node.work = float(written[0].numel())
        target = self._register(written[0], node)
        target.base = block.base
        node.outputs.append(weakref.ref(target))
        return output

    def _before_write(self, tensor: Tensor) -> None:
        """Pin all blocks made from a tensor: after the write they cannot be made again."""
        if not _is_plain(tensor) or self._is_weight(tensor):
            return
        block = self._block(tensor)
        if block is None:
            return
        for node in list(block.users):
            for ref in node.outputs:
                output = ref()
                if output is not None:
                    self.pool.materialize(output)
                    output.pinned = True
        del self.known[tensor.untyped_storage()._cdata]

    # -- what autograd saves -----------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Any:
        """Hold a saved tensor in the pool; leave weights and special tensors to autograd."""
        if not _is_plain(tensor) or self._is_weight(tensor):
            return pack_unchanged(tensor)
        block = self._block(tensor) or self._hold_input(tensor)
        if tensor.dtype != block.dtype:
            block.pinned = True
            return pack_unchanged(tensor)
        if block.tensor is None:
            self.pool.hold(block, tensor.detach().as_strided(*block.base))
        return block.ref(tensor)


def _no_block() -> None:
    """Return None: the reference of an output that has no storage of its own."""


def _is_plain(tensor: Tensor) -> bool:
    """Return whether shape, strides and storage describe a tensor completely."""
    dense = type(tensor) in _KINDS and tensor.layout is torch.strided
    return dense and not tensor.is_conj() and not tensor.is_neg()


_KINDS = (Tensor, nn.Parameter, nn.Buffer)


def _is_repeatable(operator: Any) -> bool:
    """Return whether a second run of an operator returns the same, and changes nothing."""
    return not _is_collective(operator) and is_functional(operator)


def _is_collective(operator: Any) -> bool:
    return operator._schema.name.partition("::")[0] in _SENDS


def _written_tensors(operator: Any, args: tuple[Any, ...], kwargs: Any) -> Iterator[Tensor]:
    """Yield the tensors that an operator writes into; for a collective, all its arguments."""
    schema = operator._schema
    is_collective = _is_collective(operator)
    arguments = dict(zip((arg.name for arg in schema.arguments), args)) | kwargs
    for arg in schema.arguments:
        if is_collective or arg.alias_info is not None and arg.alias_info.is_write:
            yield from (t for t in tree_leaves(arguments.get(arg.name)) if isinstance(t, Tensor))


def _unshard(units: Sequence[FSDPModule], tensors: Sequence[Tensor]) -> None:
    """Gather parameters that were freed after their forward; the backward frees them, as usual."""
    if any(tensor.numel() and not tensor.untyped_storage().nbytes() for tensor in tensors):
        for unit in units:
            unit.unshard()
