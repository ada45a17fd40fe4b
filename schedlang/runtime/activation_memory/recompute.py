"""Activation checkpointing: modules run again in backward, instead of saving their activations.

`checkpoint` wraps one module; `checkpoint_regions` wraps several modules that are recomputed
together.
"""

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
from schedlang.remat import RematTree, region_paths
from schedlang.remat.operators import Key
from schedlang.runtime.activation_memory.repeat_checks import DroppedTensors, save_tensors
from schedlang.runtime.activation_memory.selective import (
    OPERATOR_CLASSES,
    SelectiveModes,
    is_saved_call,
    numbering_of,
    operators_of,
)
from schedlang.runtime.adapters.torch_compile import run_side_effects_once
from schedlang.runtime.device import HOST, RestoredGenerators, default_generators, module_generators
from schedlang.runtime.forward import wrap
from schedlang.runtime.forward_attributes import AttributeSnapshot
from schedlang.runtime.modes import restore_forward_context
from schedlang.runtime.pipeline.argument_templates import fill_template, split_tensors
from schedlang.runtime.pipeline.stage import as_graph_input
from schedlang.runtime.scope import current_site
from schedlang.runtime.storage.saved_tensors_slot import SavedTensorPolicy, pack_hooks, policies
from schedlang.runtime.submodules import Modules, ModuleWalk, modules_in

# ---- A second run: its arguments, and the other state on which its numbers depend.
# A collective inside a module is issued again in backward. Every rank recomputes the same modules
# in the same order, because all ranks walk the same graph, so that the collectives match.


class RepeatableForward:
    """A forward that runs first with its arguments, later with arguments rebuilt from tensors."""

    def __init__(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.inner = inner
        self.first: tuple[Any, Any] | None = (args, kwargs)
        # of the arguments, until `release_tensors` is called
        self.tensors = [value for value in args if isinstance(value, Tensor)]
        # arguments that are tensors only, as in most blocks, need no template
        self.alone = not kwargs and len(self.tensors) == len(args)
        if not self.alone:
            self.tensors.clear()
            self.template = split_tensors((args, kwargs), self.tensors)

    def release_tensors(self) -> list[Tensor]:
        """Return the tensors of the arguments, and drop the reference to them."""
        tensors, self.tensors = self.tensors, []
        return tensors

    def __call__(self, *tensors: Tensor) -> Any:
        """Run the forward: the first time with the original arguments."""
        if self.first is not None:
            (args, kwargs), self.first = self.first, None  # let go of the tensors
        elif self.alone:
            args, kwargs = tensors, {}
        else:
            args, kwargs = fill_template(self.template, tensors)
        return self.inner(*args, **kwargs)


_ON_HOST = frozenset({HOST})


class ReplayedState(RestoredGenerators):
    """The state besides arguments on which the numbers of a call depend: generators and autocast.

    Stored on creation; entering restores it for a second run.
    """

    def __init__(self, inside: Modules, tensors: Sequence[Tensor]) -> None:
        devices = {t.device for t in tensors} - _ON_HOST
        super().__init__([*default_generators(devices), *module_generators(inside)])
        kinds = [
            HOST.type,
            *sorted({device.type for device in devices if is_autocast_available(device.type)}),
        ]
        self.casts = [(kind, *_autocast_state(kind)) for kind in kinds]
        self.entered: list[list[torch.amp.autocast]] = []

    def __enter__(self) -> None:
        contexts = [
            _autocast_context(*cast) for cast in self.casts if _autocast_state(cast[0]) != cast[1:]
        ]
        for context in contexts:
            context.__enter__()  # type: ignore[no-untyped-call]
        self.entered.append(contexts)
        super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for context in reversed(self.entered.pop()):
            context.__exit__(*error)


def _autocast_state(kind: str) -> tuple[bool, torch.dtype, bool]:
    enabled = torch.is_autocast_enabled(kind)
    return enabled, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()


def _autocast_context(
    kind: str, enabled: bool, dtype: torch.dtype, cached: bool
) -> torch.amp.autocast:
    return torch.amp.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cached)


Context = AbstractContextManager[Any]
_NOTHING: Context = nullcontext()


def selective_contexts(
    save: tuple[str, ...], keys: frozenset[Key] = frozenset()
) -> tuple[Context, Context]:
    """Return the contexts of a forward and of its second run, in which some results are saved."""
    if not (keys or save):
        return _NOTHING, _NOTHING
    keep = policies.code
    modes = SelectiveModes(*numbering_of(save, keys, keep is not None), keep, "collective" in save)
    return modes.forward, modes.second


# ---- Buffers that a forward changes: a second forward would change them again.


BufferVersions = dict[str, tuple[int, int]]  # of buffers: identity and version counter


def buffer_versions(inside: Modules) -> BufferVersions:
    """Return facts of each buffer, by name, that change when it is written into or replaced."""
    versions: BufferVersions = {}
    for path, module in inside:
        for name, buffer in module._buffers.items() if module._buffers else ():
            if buffer is not None:
                version = 0 if buffer.is_inference() else buffer._version
                versions[f"{path}.{name}" if path else name] = (id(buffer), version)
    return versions


def check_buffers(module: nn.Module, before: BufferVersions, inside: Modules) -> None:
    """Refuse (S813) a module whose forward has changed its buffers since `buffer_versions` was
    called."""
    after = buffer_versions(inside)
    if after == before:
        return
    listed = ", ".join(f"`{name}`" for name, count in after.items() if count != before.get(name))
    raise Refusal.of(
        "S813",
        f"`{current_site() or _class_name(module)}` changes its buffers, and is checkpointed",
        notes=(f"its forward updated {listed}; recomputation would update it again",),
        helps=("checkpoint other modules, or put it into eval mode",),
    )


def version_counts(tensors: Sequence[Tensor]) -> list[int]:
    """Return how often each tensor was written into."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def check_arguments(module: nn.Module, before: list[int], tensors: Sequence[Tensor]) -> None:
    """Refuse (S813) a module that has written into its arguments since `version_counts` was called.

    A second run would begin with the changed values.
    """
    if not torch.is_grad_enabled() or version_counts(tensors) == before:
        return
    raise Refusal.of(
        "S813",
        f"`{current_site() or _class_name(module)}` changes its inputs in place,"
        " and is checkpointed",
        notes=("recomputation would start from the values that its forward has written",),
        helps=("write `x = x + y` in it, not `x += y`", "or checkpoint other modules"),
    )


def _class_name(module: nn.Module) -> str:
    """Return the class of a module in its model; FSDPModule puts its own class before it."""
    names = [kind.__name__ for kind in type(module).__mro__]
    return names[names.index("FSDPModule") + 1 if "FSDPModule" in names else 0]


class ModuleCall:
    """One call of a module: all that its second run needs, except the tensors.

    inside  for each region around the call: the indices of the tensors that the region saves
    """

    def __init__(
        self,
        module: nn.Module,
        rerun: RepeatableForward,
        within: Modules,
        save: tuple[str, ...] = (),
        chosen: frozenset[Key] = frozenset(),
    ) -> None:
        self.module, self.rerun = module, rerun
        tensors = rerun.tensors
        self.needs_grad = [t.requires_grad for t in tensors]
        first_index = {id(t): k for k, t in reversed([*enumerate(tensors)])}
        self.first = [first_index[id(t)] for t in tensors]  # index of the first occurrence of each
        self.draws, self.place = ReplayedState(within, rerun.tensors), restore_forward_context()
        self.before = AttributeSnapshot(within)
        self.forward, self.second = selective_contexts(save, chosen)
        self.inside: tuple[tuple[int, ...], ...] = ()

    def rerun_alone(self, tensors: Sequence[Tensor]) -> Any:
        """Run this call again by itself, with detached tensors."""
        arguments = self._arguments_of(tensors, lambda t, grad: t.detach().requires_grad_(grad))
        with self.draws, self.before.restored(), self.place, self.second:
            return self.rerun(*arguments)

    def _arguments_of(
        self, tensors: Sequence[Tensor], enters: Callable[[Tensor, bool], Tensor]
    ) -> list[Tensor]:
        """Return the arguments of a second run: equal tensors (query and key, say) stay one
        tensor."""
        arguments: list[Tensor] = []
        for k, (source, tensor, grad) in enumerate(
            zip(self.first, tensors, self.needs_grad, strict=True)
        ):
            arguments.append(enters(tensor, grad) if source == k else arguments[source])
        return arguments

    def run(self, around: tuple[Region, ...]) -> Any:
        """Run the call the first time, within these regions, the outermost first."""
        tensors, before = self.rerun.release_tensors(), buffer_versions(modules_in(self.module))
        versions = version_counts(tensors)
        with ExitStack() as stack:
            saved: list[tuple[int, ...]] = []
            for region in around:  # tensors saved by an inner region go to the outer one
                saved.append(region.add_call(self, tensors, len(saved)))
                stack.enter_context(region.drop_saved())
            self.inside = tuple(saved)
            stack.enter_context(self.forward)
            output = self.rerun(*tensors)
        check_buffers(self.module, before, modules_in(self.module))
        self.before.store_changes(current_site() or _class_name(self.module))
        check_arguments(self.module, versions, tensors)
        for region in around:
            region.add_outputs(output)
        return output

    def rerun_in_region(self, depth: int, tensors: Sequence[Tensor]) -> Any:
        """Run the call again for the region at this depth; inner regions drop and save anew."""
        if isinstance(self.module, FSDPModule):
            self.module.unshard()  # its backward frees it, as usual
        arguments = self._arguments_of(tensors, _as_input)
        with self.draws, self.before.restored(), self.place, self.second, ExitStack() as stack:
            for saved in self.inside[depth + 1 :]:
                save_tensors([tensors[k] for k in saved])
                stack.enter_context(pack_hooks(_discard))
            return self.rerun(*arguments)


# ---- Checkpointing of one module, around the forward of one instance.
# Activation checkpointing (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016).
# Names, hooks and state_dict stay. The hooks of the module itself run in `__call__`, outside of the
# checkpoint, so once; hooks of its submodules run again in recomputation, as FSDP's must.


def checkpoint(module: nn.Module, save: Collection[str] = (), chosen: Collection[Key] = ()) -> None:
    """Recompute `module` in backward, in place; gradients are equal bit for bit.

    `save` names classes of operators (of CLASSES) whose results are saved: `linear` matrix
    products, `attention` fused attention kernels, also of packages (see `attends`), `collective`
    communication, which is then not repeated. `chosen`, without `save`, are single operators (see
    selective.py). Inside a module with quantized activations the saved results are quantized too
    (see quantized.py). A kernel that draws random numbers is always recomputed: without it, later
    draws would differ. The recomputation restores the random state and enters the ambient modes
    again. Raises Refusal when a forward changes a buffer, because the recomputation would change it
    again.
    """
    assert set(save) <= set(OPERATOR_CLASSES), save
    layer = Checkpoint(module, tuple(sorted(save)))
    layer.chosen = frozenset(chosen)
    wrap(module, "checkpoint", layer)


class Checkpoint(SavedTensorPolicy):
    """The policy that drops saved tensors, and makes them again by a second run of one module.

    Tensors in keyword arguments and containers are inputs too, so that hooks around the checkpoint
    (offloading) see them.
    """

    def __init__(self, module: nn.Module, save: tuple[str, ...]) -> None:
        self.module, self.inside = module, ModuleWalk(module)
        self.save = save
        self.chosen: frozenset[Key] = frozenset()

    def run_recorded(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run `inner` under the checkpoint."""
        if torch.compiler.is_compiling():
            return self._in_graph(inner, args, kwargs)
        inside = self.inside.current()
        before = buffer_versions(inside)
        call = ModuleCall(
            self.module, RepeatableForward(inner, args, kwargs), inside, self.save, self.chosen
        )
        tensors = call.rerun.release_tensors()
        versions = version_counts(tensors)
        with RecomputedCall(call, save_tensors(tensors)).drop_saved(), call.forward:
            output = call.rerun(*tensors)
        check_buffers(self.module, before, self.inside.current())
        call.before.store_changes(current_site() or _class_name(self.module))
        check_arguments(self.module, versions, tensors)
        return output

    def _in_graph(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Mark the computations of `inner` as recomputed, in a graph of torch.compile.

        The active modes are traced into the graph, and random draws and writes of `inner` happen
        once.
        """
        if self.chosen:
            torch._dynamo.graph_break("what a checkpoint keeps is counted call by call, eagerly")
        rerun = partial(
            torch_checkpoint, partial(run_side_effects_once, inner), use_reentrant=False
        )
        if not self.save:
            return rerun(*args, **kwargs)
        policy = partial(_policy, operators_of(self.save))
        saved = partial(create_selective_checkpoint_contexts, policy)
        return rerun(*args, context_fn=saved, **kwargs)


class RecomputedCall(DroppedTensors):
    """One call that is run again by itself."""

    def __init__(self, call: ModuleCall, saved: Callable[[], Sequence[Tensor]]) -> None:
        super().__init__()
        self.call, self.saved = call, saved

    def rerun(self) -> None:
        """Run the call again from its saved tensors."""
        self.call.rerun_alone(self.saved())

    def describe_modules(self) -> str:
        """Return the class of the module."""
        return _class_name(self.call.module)


def _policy(
    saved: frozenset[str], context: Any, operator: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """Return torch's policy for the result of an operator: save these names, recompute others."""
    keep = is_saved_call(saved, operator, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


# ---- Several modules as one region, while the model's own loop calls them one by one.
# A region saves the tensors that enter it from outside, and drops the tensors that autograd saves
# within. When backward needs the first dropped tensor, the modules of the region run again, in the
# order and with the arguments of their calls: a tensor that a module of the region made comes from
# the second run of that module, any other was saved. The code between two calls does not run again
# and need not be known: the tensors that it makes are saved as inputs. Regions may be nested: then
# the inputs of an inner region are made by the second run of the outer one (nested checkpoints;
# Beaumont et al., Optimal checkpointing for heterogeneous chains, 2019).


Source = tuple[bool, int, int]  # made in the region?, index of the call, of the tensor


def checkpoint_regions(
    modules: Sequence[nn.Module], tree: RematTree, save: tuple[str, ...] = ()
) -> None:
    """Recompute modules, which a model calls one after another, as the regions of a tree.

    `save` is that of `checkpoint`; it must be empty if regions are nested. A call out of order
    begins a region of its own. Gradients are equal bit for bit.
    """
    chain = RegionChain(tree, save)
    for index, module in enumerate(modules):
        if chain.paths[index]:
            wrap(module, "checkpoint", RegionMember(chain, index, module))


class RegionMember(SavedTensorPolicy):
    """The policy of one module of a chain: its saved tensors are restored with those of its
    region."""

    def __init__(self, chain: RegionChain, index: int, module: nn.Module) -> None:
        self.chain, self.place, self.module = chain, index, module

    @property
    def save(self) -> tuple[str, ...]:
        """The classes of operators whose results are saved."""
        return self.chain.save

    def run_recorded(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run `inner` within its regions."""
        call = ModuleCall(
            self.module, RepeatableForward(inner, args, kwargs), modules_in(self.module), self.save
        )
        return self.chain.call(self.place, call)


class RegionChain:
    """Modules that are called one after another, and the regions that are open in this pass."""

    def __init__(self, tree: RematTree, save: tuple[str, ...]) -> None:
        self.tree, self.save, self.paths = tree, tuple(sorted(save)), region_paths(tree)
        self.next = -1
        self.open: dict[int, Region] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> RegionChain:
        """Return the chain of a copy of the modules, without open regions."""
        return RegionChain(self.tree, self.save)

    def call(self, index: int, call: ModuleCall) -> Any:
        """Run one call of a module: in the open regions if the call is in order, else in new
        ones."""
        if index != self.next:
            self.open = {}
        path = self.paths[index]
        self.open = {number: self.open.get(number) or Region() for number in path}
        around = tuple(self.open.values())
        self.next = index + 1
        after = self.paths[index + 1] if index + 1 < len(self.paths) else ()
        try:
            return call.run(around)
        except BaseException:
            self.next = -1  # the pass and its regions end here
            raise
        finally:
            # only the graph of autograd still refers to a region that ends here
            self.open = {n: r for n, r in self.open.items() if n in after and self.next >= 0}


@dataclass(frozen=True)
class _Entry:
    """A call in one region: the source of each of its tensors."""

    call: ModuleCall
    depth: int
    sources: tuple[Source, ...]
    saved: Callable[[], Sequence[Tensor]]  # tensors from outside that no earlier call has saved


class Region(DroppedTensors):
    """Calls of modules that are recomputed together."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[_Entry] = []
        self._seen: list[_SeenTensor] = []

    # -- forward -----------------------------------------------------------------------------

    def add_call(self, call: ModuleCall, tensors: Sequence[Tensor], depth: int) -> tuple[int, ...]:
        """Add a call; save its tensors that are new in the region, and return their indices."""
        sources: list[Source] = []
        saved: list[int] = []
        for index, tensor in enumerate(tensors):
            source = next((other.source for other in self._seen if other.is_(tensor)), None)
            if source is None:
                source = (False, len(self.entries), len(saved))
                saved.append(index)
                self._remember(source, tensor)
            sources.append(source)
        saved_values = save_tensors([tensors[index] for index in saved])
        self.entries.append(_Entry(call, depth, tuple(sources), saved_values))
        return tuple(saved)

    def add_outputs(self, output: Any) -> None:
        """Remember the output tensors of the last call, because a later call may use them."""
        number = len(self.entries) - 1
        for k, leaf in enumerate(_leaves(output)):
            self._remember((True, number, k), leaf)

    def _remember(self, source: Source, value: Any) -> None:
        if type(value) is Tensor:  # a subclass is more than its storage
            self._seen.append(_SeenTensor(source, value))

    # -- backward ----------------------------------------------------------------------------

    def rerun(self) -> None:
        """Run all calls again."""
        outputs: list[Sequence[Any]] = []
        saved: list[Sequence[Any]] = []
        for entry in self.entries:
            saved.append(entry.saved())
            tensors = [(outputs if inside else saved)[c][k] for inside, c, k in entry.sources]
            output = entry.call.rerun_in_region(entry.depth, tensors)
            outputs.append([_detach(leaf) for leaf in _leaves(output)])

    def describe_modules(self) -> str:
        """Return the classes of the modules."""
        return ", ".join(dict.fromkeys(_class_name(e.call.module) for e in self.entries))


class _SeenTensor:
    """A tensor that is recognised without a reference: by its storage, view and version."""

    def __init__(self, source: Source, tensor: Tensor) -> None:
        self.source = source
        self.storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self.facts = _view_facts(tensor)

    def is_(self, tensor: Tensor) -> bool:
        """Return whether this is the same view of the same storage, not written into since."""
        if type(tensor) is not Tensor or self.storage.expired():  # type: ignore[no-untyped-call]
            return False
        return bool(
            tensor.untyped_storage()._cdata == self.storage.cdata
            and _view_facts(tensor) == self.facts
        )


def _as_input(tensor: Tensor, needs_grad: bool) -> Tensor:
    """Return an argument of a second run: detached, and it may be written into."""
    return as_graph_input(tensor.detach().requires_grad_()) if needs_grad else tensor.detach()


def _leaves(output: Any) -> list[Any]:
    return [output] if isinstance(output, Tensor) else pytree.tree_leaves(output)


def _detach(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _view_facts(tensor: Tensor) -> tuple[Any, ...]:
    view = (tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype)
    return (*view, tensor.is_conj(), tensor.is_neg(), tensor._version)


def _discard(tensor: Tensor) -> None:
    return None  # never unpacked: no backward walks the graph of a second run
