"""Run modules again in backward instead of keeping what they save: one alone, or several as one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import is_autocast_available
from torch.distributed.fsdp import FSDPModule
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir import pytree
from schedlang.remat import Tree, paths
from schedlang.remat.operators import Key
from schedlang.runtime.activation_memory.dropped import Dropped, hold
from schedlang.runtime.activation_memory.selective import CLASSES, Chosen, keeps, numbers, operators
from schedlang.runtime.adapters.torch_compile import once
from schedlang.runtime.before_forward import Before
from schedlang.runtime.device import HOST, Replayed, default_generators, own_generators
from schedlang.runtime.forward import wrap
from schedlang.runtime.inside import Inside, Modules, modules_in
from schedlang.runtime.modes import reentry
from schedlang.runtime.pipeline.arguments import put, take
from schedlang.runtime.pipeline.stage import enter
from schedlang.runtime.scope import site
from schedlang.runtime.storage.saved import Policy, policies, slot

# ---- A second run: its arguments, and all that its numbers hang on besides.
# A collective inside a module is issued again in backward.  Every rank recomputes the same modules
# in the same order, because backward order is that of the same graph, so that they meet.


class Rerun:
    """A forward: first with the arguments as they came, later with these rebuilt of tensors."""

    def __init__(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.inner = inner
        self.first: tuple[Any, Any] | None = (args, kwargs)
        # of the arguments, until somebody takes them
        self.tensors = [value for value in args if isinstance(value, Tensor)]
        # tensors alone, as most blocks are given, need no template
        self.alone = not kwargs and len(self.tensors) == len(args)
        if not self.alone:
            self.tensors.clear()
            self.template = take((args, kwargs), self.tensors)

    def taken(self) -> list[Tensor]:
        """The tensors of the arguments, of which this lets go."""
        tensors, self.tensors = self.tensors, []
        return tensors

    def __call__(self, *tensors: Tensor) -> Any:
        """Run it."""
        if self.first is not None:
            (args, kwargs), self.first = self.first, None  # let go of the tensors
        elif self.alone:
            args, kwargs = tensors, {}
        else:
            args, kwargs = put(self.template, tensors)
        return self.inner(*args, **kwargs)


_ON_HOST = frozenset({HOST})


class Draws(Replayed):
    """All that a call's numbers hang on besides its arguments: torch's generators, and autocast.

    As they are now; to be entered for a second run.
    """

    def __init__(self, inside: Modules, tensors: Sequence[Tensor]) -> None:
        apart = {t.device for t in tensors} - _ON_HOST
        super().__init__([*default_generators(apart), *own_generators(inside)])
        kinds = [HOST.type, *sorted({one.type for one in apart if is_autocast_available(one.type)})]
        self.casts = [(kind, *_autocast(kind)) for kind in kinds]
        self.entered: list[list[torch.amp.autocast]] = []

    def __enter__(self) -> None:
        made = [_casting(*cast) for cast in self.casts if _autocast(cast[0]) != cast[1:]]
        for one in made:
            one.__enter__()  # type: ignore[no-untyped-call]
        self.entered.append(made)
        super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for one in reversed(self.entered.pop()):
            one.__exit__(*error)


def _autocast(kind: str) -> tuple[bool, torch.dtype, bool]:
    on = torch.is_autocast_enabled(kind)
    return on, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()


def _casting(kind: str, on: bool, dtype: torch.dtype, cached: bool) -> torch.amp.autocast:
    return torch.amp.autocast(kind, dtype=dtype, enabled=on, cache_enabled=cached)


Context = AbstractContextManager[Any]
_NOTHING: Context = nullcontext()


def keeping(save: tuple[str, ...], chosen: frozenset[Key] = frozenset()) -> tuple[Context, Context]:
    """The contexts of a forward and of its second run in which some results are kept."""
    if not (chosen or save):
        return _NOTHING, _NOTHING
    keep = policies.code
    some = Chosen(*numbers(save, chosen, keep is not None), keep, "collective" in save)
    return some.forward, some.again


# ---- Buffers that a forward changes, which a second one would change once more.


Versions = dict[str, tuple[int, int]]  # of buffers: identity and count of changes in place


def versions(inside: Modules) -> Versions:
    """Facts of each buffer, by name, that change when it is written into or replaced."""
    found: Versions = {}
    for path, one in inside:
        for name, buffer in one._buffers.items() if one._buffers else ():
            if buffer is not None:
                version = 0 if buffer.is_inference() else buffer._version
                found[f"{path}.{name}" if path else name] = (id(buffer), version)
    return found


def written_twice(module: nn.Module, before: Versions, inside: Modules) -> None:
    """Refuse (S813) a module whose buffers are not what `versions` said before its forward."""
    after = versions(inside)
    if after == before:
        return
    listed = ", ".join(f"`{name}`" for name, now in after.items() if now != before.get(name))
    raise Refusal.of(
        "S813",
        f"`{site() or _own_class(module)}` changes its buffers, and is checkpointed",
        notes=(f"its forward updated {listed}; recomputation would update it again",),
        helps=("checkpoint other modules, or put it into eval mode",),
    )


def counts(tensors: Sequence[Tensor]) -> list[int]:
    """Return how often each was written into."""
    return [0 if one.is_inference() else one._version for one in tensors]


def overwritten(module: nn.Module, before: list[int], tensors: Sequence[Tensor]) -> None:
    """Refuse (S813) a module that has written into its arguments since `counts` was asked: a
    second run would begin with what they have become."""
    if not torch.is_grad_enabled() or counts(tensors) == before:
        return
    raise Refusal.of(
        "S813",
        f"`{site() or _own_class(module)}` writes into what it is given, and is checkpointed",
        notes=("recomputation would begin with the values that its forward has left there",),
        helps=("write `x = x + y` in it, not `x += y`", "or checkpoint other modules"),
    )


def _own_class(module: nn.Module) -> str:
    """The class of a module as its model has it: sharded storage puts one before it."""
    names = [kind.__name__ for kind in type(module).__mro__]
    return names[names.index("FSDPModule") + 1 if "FSDPModule" in names else 0]


class Call:
    """One call of a module: what its second run needs, but for the tensors.

    inside  for each region around: which of the tensors it keeps
    """

    def __init__(
        self,
        module: nn.Module,
        rerun: Rerun,
        within: Modules,
        save: tuple[str, ...] = (),
        chosen: frozenset[Key] = frozenset(),
    ) -> None:
        self.module, self.rerun = module, rerun
        tensors = rerun.tensors
        self.needs_grad = [t.requires_grad for t in tensors]
        places = {id(t): k for k, t in reversed([*enumerate(tensors)])}
        self.first = [places[id(t)] for t in tensors]  # where each stands for the first time
        self.draws, self.place = Draws(within, rerun.tensors), reentry()
        self.before = Before(within)
        self.forward, self.second = keeping(save, chosen)
        self.inside: tuple[tuple[int, ...], ...] = ()

    def alone(self, tensors: Sequence[Tensor]) -> Any:
        """The second run of this call by itself; the history of tensors is not asked for."""
        given = self._given(tensors, lambda t, needs: t.detach().requires_grad_(needs))
        with self.draws, self.before.again(), self.place, self.second:
            return self.rerun(*given)

    def _given(
        self, tensors: Sequence[Tensor], enters: Callable[[Tensor, bool], Tensor]
    ) -> list[Tensor]:
        """The arguments of a second run: what was one tensor (a query that is its key) is one."""
        made: list[Tensor] = []
        for k, (first, tensor, needs) in enumerate(
            zip(self.first, tensors, self.needs_grad, strict=True)
        ):
            made.append(enters(tensor, needs) if first == k else made[first])
        return made

    def run(self, around: tuple[Region, ...]) -> Any:
        """The first run, within these regions, the outermost first."""
        tensors, before = self.rerun.taken(), versions(modules_in(self.module))
        entered = counts(tensors)
        with ExitStack() as stack:
            kept: list[tuple[int, ...]] = []
            for region in around:  # what an inner region keeps is saved to the outer one
                kept.append(region.begin(self, tensors, len(kept)))
                stack.enter_context(region.dropping())
            self.inside = tuple(kept)
            stack.enter_context(self.forward)
            output = self.rerun(*tensors)
        written_twice(self.module, before, modules_in(self.module))
        self.before.settle(site() or _own_class(self.module))
        overwritten(self.module, entered, tensors)
        for region in around:
            region.made(output)
        return output

    def repeat(self, depth: int, tensors: Sequence[Tensor]) -> Any:
        """The second run, of the region at this depth; regions inside of it drop and keep anew."""
        if isinstance(self.module, FSDPModule):
            self.module.unshard()  # it is freed after its backward, as ever
        given = self._given(tensors, _entering)
        with self.draws, self.before.again(), self.place, self.second, ExitStack() as stack:
            for kept in self.inside[depth + 1 :]:
                hold([tensors[k] for k in kept])
                stack.enter_context(slot(_forget))
            return self.rerun(*given)


# ---- One module: dropped and made again around the forward of one instance.
# Activation checkpointing (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016).
# Names, hooks and state_dict stay.  The module's own hooks lie outside, in `__call__`, and so run
# once; hooks of its submodules run again in recomputation, as FSDP's must.


def checkpoint(module: nn.Module, save: Collection[str] = (), chosen: Collection[Key] = ()) -> None:
    """Recompute `module` in backward, in place; gradients stay the same bit by bit.

    `save` names classes of operators (of CLASSES) whose results are kept: `linear` matrix products,
    `attention` the fused attention kernels, those of packages among them (see attends),
    `collective` communication, which then is not repeated.
    `chosen`, without `save`, are single operators instead (see selective.py).
    Inside of a coded module the results that are kept are coded, too (see quantized.py).
    A kernel that draws random numbers is recomputed all the same: were it skipped, the draws after
    it would differ.  The random state is restored for the recomputation, and the ambient modes are
    entered again.  Raises Refusal when a forward changes a buffer, which would change it twice.
    """
    assert set(save) <= set(CLASSES), save
    layer = Checkpoint(module, tuple(sorted(save)))
    layer.chosen = frozenset(chosen)
    wrap(module, "checkpoint", layer)


class Checkpoint(Policy):
    """Dropped, and made again by a second run of one module.

    Tensors among keyword arguments and inside containers are its inputs too, so that hooks around
    the checkpoint (offloading) see them.
    """

    def __init__(self, module: nn.Module, save: tuple[str, ...]) -> None:
        self.module, self.inside = module, Inside(module)
        self.save = save
        self.chosen: frozenset[Key] = frozenset()

    def saving(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run `inner` under checkpoint."""
        if torch.compiler.is_compiling():
            return self._in_graph(inner, args, kwargs)
        inside = self.inside.now()
        before = versions(inside)
        call = Call(self.module, Rerun(inner, args, kwargs), inside, self.save, self.chosen)
        tensors = call.rerun.taken()
        entered = counts(tensors)
        with Again(call, hold(tensors)).dropping(), call.forward:
            out = call.rerun(*tensors)
        written_twice(self.module, before, self.inside.now())
        call.before.settle(site() or _own_class(self.module))
        overwritten(self.module, entered, tensors)
        return out

    def _in_graph(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Mark what `inner` computes as recomputed, in a graph of torch.compile.

        The modes that hold are traced into it, and what it draws and writes happens once.
        """
        if self.chosen:
            torch._dynamo.graph_break("what a checkpoint keeps is counted call by call, eagerly")
        run = partial(torch_checkpoint, partial(once, inner), use_reentrant=False)
        if not self.save:
            return run(*args, **kwargs)
        policy = partial(_policy, operators(self.save))
        kept = partial(create_selective_checkpoint_contexts, policy)
        return run(*args, context_fn=kept, **kwargs)


class Again(Dropped):
    """One call, run again by itself."""

    def __init__(self, call: Call, kept: Callable[[], Sequence[Tensor]]) -> None:
        super().__init__()
        self.call, self.kept = call, kept

    def rerun(self) -> None:
        """Run it once more, of what was kept."""
        self.call.alone(self.kept())

    def names(self) -> str:
        """The class of its module."""
        return _own_class(self.call.module)


def _policy(
    kept: frozenset[str], context: Any, operator: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """Return torch's policy for the result of an operator: save those of these names, recompute
    others."""
    keep = keeps(kept, operator, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


# ---- Several modules as one region, while the model's own loop calls them one by one.
# A region keeps what enters it from outside, and drops what autograd saves within. When backward
# asks for the first of that, its modules run again, in the order and with the arguments of their
# calls: a tensor that one of them made comes from that one's second run, any other was kept. What
# the code between two calls does is not run again: it need not be known, and what it makes is an
# input that is kept. Regions may hold regions: then an inner one is an input of the outer one's
# second run (nested checkpoints; Beaumont et al., Optimal checkpointing for heterogeneous chains,
# 2019).


Source = tuple[bool, int, int]  # made within, the region's call, and which of its tensors


def regions(modules: Sequence[nn.Module], tree: Tree, save: tuple[str, ...] = ()) -> None:
    """Recompute modules, which a model calls one after another, as the regions of a tree.

    `save` is that of `checkpoint`; where regions hold regions it is empty. A call out of
    turn begins a region of its own. Gradients stay the same bit by bit.
    """
    chain = Chain(tree, save)
    for place, module in enumerate(modules):
        if chain.paths[place]:
            wrap(module, "checkpoint", Link(chain, place, module))


class Link(Policy):
    """Dropped with what other modules of a chain save, and made again with it."""

    def __init__(self, chain: Chain, place: int, module: nn.Module) -> None:
        self.chain, self.place, self.module = chain, place, module

    @property
    def save(self) -> tuple[str, ...]:
        """The classes of operators whose results are kept."""
        return self.chain.save

    def saving(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run `inner` within its regions."""
        call = Call(self.module, Rerun(inner, args, kwargs), modules_in(self.module), self.save)
        return self.chain.call(self.place, call)


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


@dataclass(frozen=True)
class _Entry:
    """A call as one region sees it: where each of its tensors comes from."""

    call: Call
    depth: int
    sources: tuple[Source, ...]
    kept: Callable[[], Sequence[Tensor]]  # what came from outside and no call before had


class Region(Dropped):
    """Some calls of modules, recomputed together."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[_Entry] = []
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
        held = hold([tensors[place] for place in kept])
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

    # -- backward ----------------------------------------------------------------------------

    def rerun(self) -> None:
        """Run all calls once more."""
        made: list[Sequence[Any]] = []
        kept: list[Sequence[Any]] = []
        for entry in self.entries:
            kept.append(entry.kept())
            tensors = [(made if own else kept)[c][k] for own, c, k in entry.sources]
            output = entry.call.repeat(entry.depth, tensors)
            made.append([_alone(leaf) for leaf in _leaves(output)])

    def names(self) -> str:
        """The classes of its modules."""
        return ", ".join(dict.fromkeys(_own_class(e.call.module) for e in self.entries))


class _Known:
    """A tensor that is known again without being held: by its storage, view and version."""

    def __init__(self, source: Source, tensor: Tensor) -> None:
        self.source = source
        self.storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self.facts = _facts(tensor)

    def is_(self, tensor: Tensor) -> bool:
        """Return whether this is that tensor, or the same view of it, not written into since."""
        if type(tensor) is not Tensor or self.storage.expired():  # type: ignore[no-untyped-call]
            return False
        return bool(
            tensor.untyped_storage()._cdata == self.storage.cdata and _facts(tensor) == self.facts
        )


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
    return None  # nobody asks for it: the graph of a second run is never walked
