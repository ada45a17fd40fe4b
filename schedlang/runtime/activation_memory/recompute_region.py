"""Runs of modules recomputed as one, while the model's own loop calls them one by one.

A region keeps what enters it from outside, and drops what autograd saves within. When backward asks
for the first of that, its modules run again, in the order and with the arguments of their calls: a
tensor that one of them made comes from that one's second run, any other was kept. What the code
between two calls does is not run again: it need not be known, and what it makes is an input that is
kept. Regions may hold regions: then an inner one is an input of the outer one's second run (nested
checkpoints; Beaumont et al., Optimal checkpointing for heterogeneous chains, 2019).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.multiprocessing.reductions import StorageWeakRef

from schedlang.ir import nests as pytree
from schedlang.remat import Tree, paths
from schedlang.runtime.activation_memory.recompute import Draws, contexts, versions, written_twice
from schedlang.runtime.forward import wrap
from schedlang.runtime.pipeline.arguments import put, take
from schedlang.runtime.pipeline.stage import enter

Source = tuple[bool, int, int]  # made within, the region's call, and which of its tensors


def regions(modules: Sequence[nn.Module], tree: Tree, save: tuple[str, ...] = ()) -> None:
    """Recompute modules, which a model calls one after another, as the regions of a tree.

    `save` is that of `recompute.checkpoint`; where regions hold regions it is empty. A call out of
    turn begins a region of its own. Gradients stay the same bit by bit.
    """
    chain = Chain(tree, save)
    for place, module in enumerate(modules):
        if chain.paths[place]:
            wrap(module, "checkpoint", Link(chain, place, module))


class Link:
    """The layer around the forward of one module of a chain."""

    def __init__(self, chain: Chain, place: int, module: nn.Module) -> None:
        self.chain, self.place, self.module = chain, place, module

    @property
    def save(self) -> tuple[str, ...]:
        """The classes of operators whose results are kept."""
        return self.chain.save

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `inner` within its regions; plainly where no gradient is recorded."""
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        return self.chain.call(self.place, Call(self.module, inner, args, kwargs, self.save))


class Chain:
    """Modules that are called one after another, and which regions are open in this pass."""

    def __init__(self, tree: Tree, save: tuple[str, ...]) -> None:
        self.tree, self.save, self.paths = tree, tuple(sorted(save)), paths(tree)
        self.next = -1
        self.open: dict[int, Region] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Chain:
        """The chain of a copy of the modules, with nothing open."""
        return Chain(self.tree, self.save)

    def call(self, place: int, call: Call) -> Any:
        """One call of a module: it goes on with the open regions if its turn has come."""
        if place != self.next:
            self.open = {}
        path = self.paths[place]
        self.open = {number: self.open.get(number) or Region() for number in path}
        around = tuple(self.open.values())
        self.next = place + 1
        after = self.paths[place + 1] if place + 1 < len(self.paths) else ()
        try:
            return call.run(around)
        except BaseException:
            self.next = -1  # the pass ends here, and so do its regions
            raise
        finally:
            # a region that ends here lives on in what autograd saved, and nowhere else
            self.open = {n: r for n, r in self.open.items() if n in after and self.next >= 0}


class Call:
    """One call of a module: what its second run needs, but for the tensors."""

    def __init__(
        self,
        module: nn.Module,
        inner: Callable[..., Any],
        args: Any,
        kwargs: Any,
        save: tuple[str, ...],
    ) -> None:
        self.module, self.inner = module, inner
        self.first: tuple[tuple[Any, ...], dict[str, Any]] = (args, kwargs)
        self.tensors: list[Tensor] = []
        self.template = take((args, kwargs), self.tensors)
        self.needs_grad = tuple(t.requires_grad for t in self.tensors)
        self.forward, self.again = contexts(save)
        self.draws = Draws(module, self.tensors)
        self.inside: tuple[tuple[int, ...], ...] = ()  # for each region: which arguments it keeps

    def run(self, around: tuple[Region, ...]) -> Any:
        """The first run, within these regions, the outermost first."""
        (args, kwargs), self.first = self.first, ((), {})
        tensors, self.tensors = self.tensors, []
        before = versions(self.module)
        with ExitStack() as stack:
            kept: list[tuple[int, ...]] = []
            for region in around:  # what an inner region keeps is saved to the outer one
                kept.append(region.begin(self, tensors, len(kept)))
                stack.enter_context(saved_tensors_hooks(region.pack, region.unpack))
            self.inside = tuple(kept)
            stack.enter_context(self.forward)
            output = self.inner(*args, **kwargs)
        written_twice(self.module, before)
        for region in around:
            region.made(output)
        return output

    def repeat(self, depth: int, tensors: Sequence[Tensor]) -> Any:
        """The second run, of the region at this depth; regions inside of it drop and keep anew."""
        if isinstance(self.module, FSDPModule):
            self.module.unshard()  # it is freed after its backward, as ever
        given = [_entering(t, needs) for t, needs in zip(tensors, self.needs_grad, strict=True)]
        args, kwargs = put(self.template, given)
        with self.draws, self.again, ExitStack() as stack:
            for kept in self.inside[depth + 1 :]:
                _hold([tensors[k] for k in kept])
                stack.enter_context(saved_tensors_hooks(_forget, _forgotten))
            return self.inner(*args, **kwargs)


@dataclass(frozen=True)
class _Entry:
    """A call as one region sees it: where each of its tensors comes from."""

    call: Call
    depth: int
    sources: tuple[Source, ...]
    kept: Callable[[], Sequence[Tensor]]  # what came from outside and no call before had


class Region:
    """Some calls of modules, recomputed together."""

    def __init__(self) -> None:
        self.entries: list[_Entry] = []
        self.slots: list[weakref.ref[_Slot]] = []
        self._known: list[_Known] = []

    # -- forward -----------------------------------------------------------------------------

    def begin(self, call: Call, tensors: Sequence[Tensor], depth: int) -> tuple[int, ...]:
        """Take note of a call; keeps those of its tensors that are new here: their places."""
        sources: list[Source] = []
        kept: list[int] = []
        for place, tensor in enumerate(tensors):
            source = next((known.source for known in self._known if known.is_(tensor)), None)
            if source is None:
                source = (False, len(self.entries), len(kept))
                kept.append(place)
                self._know(source, tensor)
            sources.append(source)
        held = _hold([tensors[place] for place in kept])
        self.entries.append(_Entry(call, depth, tuple(sources), held))
        return tuple(kept)

    def made(self, output: Any) -> None:
        """Know the tensors that the last call gave, should a later one take them."""
        number = len(self.entries) - 1
        for k, leaf in enumerate(_leaves(output)):
            self._know((True, number, k), leaf)

    def _know(self, source: Source, value: Any) -> None:
        if type(value) is Tensor:  # of others the storage does not say what they are
            self._known.append(_Known(source, value))

    def pack(self, tensor: Tensor) -> _Slot:
        """Drop a tensor that autograd saves."""
        slot = _Slot(tuple(tensor.shape), tensor.dtype)
        self.slots.append(weakref.ref(slot))
        return slot

    # -- backward ----------------------------------------------------------------------------

    def unpack(self, slot: _Slot) -> Tensor:
        """A tensor that autograd saved; the first that is asked for brings back all."""
        if slot.value is None:
            self._again()
        value, slot.value = slot.value, None
        assert value is not None
        return value

    def _again(self) -> None:
        count = 0

        def fill(tensor: Tensor) -> Tensor:
            nonlocal count
            slot = self.slots[count]() if count < len(self.slots) else None
            count += 1
            value = tensor.detach()
            if slot is not None:
                self._check(slot, value)
                slot.value = value
            if count >= len(self.slots):
                raise _Enough
            return value

        made: list[Sequence[Any]] = []
        kept: list[Sequence[Any]] = []
        try:
            with torch.enable_grad(), saved_tensors_hooks(fill, lambda value: value):
                for entry in self.entries:
                    kept.append(entry.kept())
                    tensors = [(made if own else kept)[c][k] for own, c, k in entry.sources]
                    output = entry.call.repeat(entry.depth, tensors)
                    made.append([_alone(leaf) for leaf in _leaves(output)])
        except _Enough:
            return
        self._fail(f"saved {count} tensors the second time, {len(self.slots)} the first")

    def _check(self, slot: _Slot, value: Tensor) -> None:
        if (tuple(value.shape), value.dtype) != (slot.shape, slot.dtype):
            self._fail(
                f"saved {value.dtype}{list(value.shape)} the second time where it saved "
                f"{slot.dtype}{list(slot.shape)} the first"
            )

    def _fail(self, what: str) -> None:
        names = ", ".join(dict.fromkeys(type(e.call.module).__name__ for e in self.entries))
        raise RuntimeError(f"recomputation of {names} took another way: it {what}")


@dataclass(eq=False)
class _Slot:
    """What autograd holds in place of a saved tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    value: Tensor | None = field(default=None)


class _Known:
    """A tensor that is known again without being held: by its storage, view and version."""

    def __init__(self, source: Source, tensor: Tensor) -> None:
        self.source = source
        self.storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self.facts = _facts(tensor)

    def is_(self, tensor: Tensor) -> bool:
        """Whether this is that tensor, or the same view of it, not written into since."""
        if type(tensor) is not Tensor or self.storage.expired():  # type: ignore[no-untyped-call]
            return False
        return bool(
            tensor.untyped_storage()._cdata == self.storage.cdata and _facts(tensor) == self.facts
        )


class _Enough(BaseException):
    """All that was saved is back; not an Exception, so that no model catches it."""


class _Hold(torch.autograd.Function):
    """Saves tensors, through whatever hooks are on, and hands out nothing."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty_like(anchor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("nothing depends on what is held")


def _hold(tensors: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
    """Keep tensors as autograd keeps them; the result gives them back, again and again."""
    if not tensors:
        return tuple
    anchor = torch.empty(0, device="cpu", requires_grad=True)
    held: Any = _Hold.apply(anchor, *[t.detach() for t in tensors])  # type: ignore[no-untyped-call]
    return lambda: held.grad_fn.saved_tensors


def _entering(tensor: Tensor, needs_grad: bool) -> Tensor:
    """An argument of a second run: it may be written into, and its history is not asked for."""
    return enter(tensor.detach().requires_grad_()) if needs_grad else tensor.detach()


def _leaves(output: Any) -> list[Any]:
    return [output] if isinstance(output, Tensor) else pytree.tree_leaves(output)


def _alone(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _facts(tensor: Tensor) -> tuple[Any, ...]:
    view = (tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype)
    return (*view, tensor.is_conj(), tensor.is_neg(), tensor._version)


def _forget(tensor: Tensor) -> None:
    return None


def _forgotten(nothing: Any) -> Tensor:
    raise AssertionError("the graph of a second run is never walked")
