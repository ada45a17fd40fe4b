"""What can be dropped and made again: storages with the operators that make them, within a budget.

Kirisame et al., Dynamic tensor rematerialization (2021). Whenever more bytes are kept than the
budget, what is dropped is what is cheapest to make again for its size and for how long nobody used
it: least work / (bytes * staleness), where work is its own and that of all dropped around it that
would have to run with it. Time is counted in work, so that every run drops the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from schedlang.diagnostic import Diagnostic, Refusal
from schedlang.runtime.device import Replayed


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
        """What it is made of."""
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
            self.shape, self.stride, self.offset,
        ):  # fmt: skip
            return base
        return base.as_strided(self.shape, self.stride, self.offset)


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
        self, operator: Any, given: Any, work: float, drawn: Replayed | None,
        filled: Callable[[Sequence[Tensor]], None],
    ) -> None:  # fmt: skip
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
        """What it gives, as it gave it."""
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
    return Refusal(
        Diagnostic(
            "S846", "a module with a memory budget reads a tensor that was changed in place",
            notes=(f"the model changed {what} in place, after the module read it",),
            helps=("leave this module out of the row", "or select the module that changes it, too"),
        )
    )  # fmt: skip


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
