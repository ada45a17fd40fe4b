"""Recompute a module's activations in backward instead of keeping them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal
from schedlang.remat.operators import Key
from schedlang.runtime.activation_memory.selective import (
    Chosen,
    KeepCollectives,
    Kinds,
    Numbers,
    Turns,
    draws,
    fresh,
    name_of,
)
from schedlang.runtime.adapters.torch_compile import once
from schedlang.runtime.device import Replayed, default_generators, own_generators
from schedlang.runtime.forward import wrap
from schedlang.runtime.inside import modules_in
from schedlang.runtime.modes import reentry
from schedlang.runtime.pipeline.arguments import put, take
from schedlang.runtime.scope import site
from schedlang.runtime.storage.fewer import keeper

# ---- All that a call's numbers hang on besides its arguments, as it was before the call.


class Draws(AbstractContextManager[None]):
    """All that a call's numbers hang on besides its arguments: torch's generators, and autocast."""

    def __init__(self, module: nn.Module, tensors: Sequence[Tensor]) -> None:
        kinds = sorted({t.device.type for t in tensors} | {"cpu"} - {"meta"})
        self.casts = [_autocast(kind) for kind in kinds if kind != "meta"]
        default = default_generators(t.device for t in tensors)
        self.replayed = Replayed([*default, *own_generators(module)])
        self.stacks: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self.replayed)
            for kind, options in self.casts:
                stack.enter_context(torch.amp.autocast(kind, **options))
            self.stacks.append(stack.pop_all())

    def __exit__(self, *error: Any) -> None:
        self.stacks.pop().__exit__(*error)


def _autocast(kind: str) -> tuple[str, dict[str, Any]]:
    options = dict(
        dtype=torch.get_autocast_dtype(kind),
        enabled=torch.is_autocast_enabled(kind),
        cache_enabled=torch.is_autocast_cache_enabled(),
    )
    return kind, options


# ---- Recompute a module's activations in backward instead of keeping them.
# Activation checkpointing (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016) by
# torch's non-reentrant `checkpoint`, put around the forward of one module instance: names, hooks
# and state_dict stay.  The module's own hooks lie outside, in `__call__`, and so run once; hooks
# of its submodules run again in recomputation, as FSDP's must.
#
# A collective inside the module is issued again in backward.  Every rank recomputes the same
# modules in the same order, because backward order is that of the same graph, so that they meet.


_OPERATORS = {
    "linear": (
        "aten::mm aten::addmm aten::bmm aten::baddbmm aten::linear aten::_grouped_mm "
        "aten::_scaled_mm mkldnn::_linear_pointwise"
    ),
    "attention": (
        "aten::_scaled_dot_product_flash_attention "
        "aten::_scaled_dot_product_flash_attention_for_cpu "
        "aten::_scaled_dot_product_efficient_attention "
        "aten::_scaled_dot_product_cudnn_attention "
        "aten::_scaled_dot_product_fused_attention_overrideable "
        "aten::_flash_attention_forward aten::_efficient_attention_forward "
        "aten::_cudnn_attention_forward flex_attention"
    ),
    "collective": (
        "_c10d_functional::all_gather_into_tensor _c10d_functional::all_reduce "
        "_c10d_functional::all_to_all_single _c10d_functional::reduce_scatter_tensor "
        "_c10d_functional::broadcast _c10d_functional::wait_tensor"
    ),
}
CLASSES = tuple(_OPERATORS)
Versions = dict[str, tuple[int, int]]  # of buffers: identity and count of changes in place


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


def updates_buffers(model: nn.Module, run: Callable[[], object]) -> dict[str, tuple[str, ...]]:
    """The buffers that each module changes itself during `run()`: {module path: buffer names}.

    `run` calls the model once, on the meta device or a real one; in-place changes and replaced
    tensors both count.  Modules whose forward changes nothing are left out.
    """
    before = {path: versions(module, False) for path, module in model.named_modules()}
    with _Statistics() as statistics:
        run()
    changed: dict[str, tuple[str, ...]] = {}
    for path, module in model.named_modules():
        after = versions(module, False)
        names = tuple(
            name
            for name, state in after.items()
            if state != before[path].get(name) or state[0] in statistics.written
        )
        if names:
            changed[path] = names
    return changed


def versions(module: nn.Module, recurse: bool = True) -> Versions:
    """What changes when a buffer of a module is written into or replaced, by its name."""
    found: Versions = {}
    for path, one in modules_in(module) if recurse else [("", module)]:
        for name, buffer in one._buffers.items():
            if buffer is not None:
                version = 0 if buffer.is_inference() else buffer._version
                found[f"{path}.{name}" if path else name] = (id(buffer), version)
    return found


class _Statistics(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds running statistics written by batch norms, which say nowhere that they write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = dict(zip((a.name for a in func._schema.arguments), args)) | (kwargs or {})
        # without a flag `training` in its schema, a variant of the operator always trains
        if "batch_norm" in func._schema.name and named.get("training", True):
            self.written |= {id(named.get("running_mean")), id(named.get("running_var"))}
        return func(*args, **(kwargs or {}))


class Checkpoint:
    """The layer around a module's forward: torch's checkpoint, with all tensors as its inputs.

    Tensors among keyword arguments and inside containers become positional inputs, so that hooks
    around the checkpoint (offloading) see them.
    """

    def __init__(self, module: nn.Module, save: tuple[str, ...]) -> None:
        self.module = module
        self.save = save
        self.chosen: frozenset[Key] = frozenset()

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `inner` under checkpoint; plainly where no gradient is recorded."""
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        if torch.compiler.is_compiling():
            return self._in_graph(inner, args, kwargs)
        before = versions(self.module)
        tensors: list[Tensor] = []
        template = take((args, kwargs), tensors)
        region = _Region(inner, args, kwargs, template)
        out = torch_checkpoint(
            region,
            *tensors,
            use_reentrant=False,
            context_fn=partial(contexts, self.save, own_generators(self.module), self.chosen),
        )
        written_twice(self.module, before)
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


def _policy(
    kept: frozenset[str], context: Any, operator: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """What torch is to do with the result of an operator of these names, and of all others."""
    keep = keeps(kept, operator, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def written_twice(module: nn.Module, before: Versions) -> None:
    """Refuse (S813) a module whose buffers are not what `versions` said before its forward."""
    after = versions(module)
    if after == before:
        return
    listed = ", ".join(f"`{name}`" for name, now in after.items() if now != before.get(name))
    raise Refusal(
        Diagnostic(
            "S813",
            f"`{site() or _own_class(module)}` changes its buffers, and is checkpointed",
            notes=(f"its forward updated {listed}; recomputation would update it again",),
            helps=("checkpoint other modules, or put it into eval mode",),
        )
    )


def _own_class(module: nn.Module) -> str:
    """The class of a module as its model has it: sharded storage puts one before it."""
    names = [kind.__name__ for kind in type(module).__mro__]
    return names[names.index("FSDPModule") + 1 if "FSDPModule" in names else 0]


class _Region:
    """The function that checkpoint calls: first with the arguments as they came, later rebuilt."""

    def __init__(self, inner: Callable[..., Any], args: Any, kwargs: Any, template: Any) -> None:
        self.inner = inner
        self.first: tuple[Any, Any] | None = (args, kwargs)
        self.template = template

    def __call__(self, *tensors: Tensor) -> Any:
        if self.first is not None:
            (args, kwargs), self.first = self.first, None  # let go of the tensors
        else:
            args, kwargs = put(self.template, tensors)
        return self.inner(*args, **kwargs)


def contexts(
    save: tuple[str, ...],
    generators: Sequence[torch.Generator] = (),
    chosen: frozenset[Key] = frozenset(),
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of the forward and of the recomputation, in which `generators` draw alike."""
    forward: list[AbstractContextManager[Any]] = []
    again: list[AbstractContextManager[Any]] = [reentry()]
    if generators:
        again.append(Replayed(generators))
    if "collective" in save:
        sent = KeepCollectives()
        forward.append(sent.forward)
        again.append(sent.again)
    if chosen or save:
        keep = keeper()
        some = Chosen(*numbers(save, chosen, keep is not None), keep)
        forward.append(some.forward)
        again.append(some.again)
    return _together(forward), _together(again)


def _together(parts: list[AbstractContextManager[Any]]) -> AbstractContextManager[Any]:
    return parts[0] if len(parts) == 1 else _Together(parts) if parts else nullcontext()


class _Together(AbstractContextManager[None]):
    """Several contexts, the last innermost; it may be entered again."""

    def __init__(self, parts: list[AbstractContextManager[Any]]) -> None:
        self.parts = parts
        self.stacks: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(part)
            self.stacks.append(stack.pop_all())

    def __exit__(self, *error: Any) -> None:
        self.stacks.pop().__exit__(*error)


def numbers(
    save: tuple[str, ...], chosen: frozenset[Key], coded: bool
) -> tuple[Callable[[], Numbers], Collection[Hashable] | None]:
    """How the calls are named whose results are kept, and the names that are (None: all).

    Results that are `coded` are rounded by draws that follow from their numbers: only what every
    layout records may have one.
    """
    if chosen:
        return Turns, chosen
    return partial(Kinds, partial(keeps, operators(save)), coded), None


def operators(save: tuple[str, ...]) -> frozenset[str]:
    """The names of the operators of some classes."""
    return frozenset(save) | {name for each in save for name in _OPERATORS[each].split()}


def keeps(kept: frozenset[str], operator: Any, args: Any, kwargs: Any) -> bool:
    """Whether the result of a call is kept: of these operators, new, and the same again."""
    wanted = name_of(operator) in kept or ("attention" in kept and attends(operator))
    return wanted and fresh(operator) and not draws(operator, args, kwargs)


def attends(operator: Any) -> bool:
    """Whether an operator that is not torch's own says by its name that it is an attention's
    forward, as `flash_attn::_flash_attn_forward`, and writes into nothing."""
    space, _, _ = name_of(operator).partition("::")
    said = name_of(operator).lower()
    back = any(word in said for word in ("backward", "bwd", "grad"))
    named = "attn" in said or "attention" in said
    return space not in ("aten", "prims") and named and not back and fresh(operator)
