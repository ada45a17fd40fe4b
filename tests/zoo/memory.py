"""Injected bugs of recomputation and offloading."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from schedlang.runtime.activation_memory import recompute
from schedlang.runtime.activation_memory.recompute import Checkpoint
from schedlang.runtime.comm import collectives
from schedlang.runtime.offload import offloaded_activations
from schedlang.runtime.rng import logical_dropout as drawing
from tests.zoo.bug import ALIAS, CONSTANT, DETACH, FREEZE, GROUP, REDUCTION, SKIP, Patch, Site, bug


def recompute_depth(patch: Patch) -> list[int]:
    """Return a list with one number, above zero while a region is recomputed."""
    depth = [0]

    class Reentry(recompute.restore_forward_context):
        def __enter__(self) -> None:
            depth[0] += 1
            super().__enter__()

        def __exit__(self, *error: object) -> None:
            super().__exit__(*error)
            depth[0] -= 1

    patch.setattr(recompute, "restore_forward_context", Reentry)
    return depth


@bug(
    "C01",
    "checkpoint",
    CONSTANT,
    "tp, recomputed",
    "recomputed",
    credit="OLMo-core#828; guided-diffusion#167; pytorch#190758",
)
def other_masks_in_recomputation(patch: Patch, site: Site) -> None:
    """The second forward of a checkpoint draws other masks than the first."""
    depth, original = recompute_depth(patch), drawing.stream_of
    patch.setattr(
        drawing,
        "stream_of",
        lambda *args: original(depth[0], *args) if depth[0] else original(*args),
    )


@bug(
    "C02",
    "checkpoint",
    SKIP,
    "counting",
    credit="pytorch#62471; YOLO-Master#262",
    here="a checkpoint refuses what writes into buffers; the bug is that it does not",
)
def buffers_updated_twice(patch: Patch, site: Site) -> None:
    """A recomputation updates buffers a second time."""
    patch.setattr(recompute, "buffer_versions", lambda module: {})


@bug(
    "C03",
    "checkpoint",
    ALIAS,
    "written after",
    here="torch would see that a saved input was written into; it is held in a closure instead",
)
def input_of_recomputation_aliased(patch: Patch, site: Site) -> None:
    """A saved input of a checkpoint is overwritten before the recomputation."""
    patch.setattr(recompute, "save_tensors", lambda tensors: lambda: tensors)


def _on_recompute(patch: Patch, site: Site, second: Any) -> None:
    """Replace the recomputation of checkpoints by `second(checkpoint, call)`."""
    original = Checkpoint.__call__

    def called(self: Any, inner: Any, *args: Any, **kwargs: Any) -> Any:
        calls = []

        def counted(*a: Any, **k: Any) -> Any:
            calls.append(1)
            if len(calls) == 1 or not torch.is_grad_enabled():
                return inner(*a, **k)
            return second(self, lambda: inner(*a, **k))

        return original(self, counted, *args, **kwargs)

    patch.setattr(Checkpoint, "__call__", called)


@bug("C04", "checkpoint", FREEZE, "recomputed")
def recomputed_with_first_weights(patch: Patch, site: Site) -> None:
    """A checkpoint recomputes with the weights of its first call."""
    first_weights: dict[int, list[Tensor]] = {}
    original = Checkpoint.__init__

    def init(self: Any, module: Any, save: Any) -> None:
        original(self, module, save)
        first_weights[id(module)] = [p.detach().clone() for p in module.parameters()]

    def recomputed(self: Any, call: Any) -> Any:
        parameters = list(self.module.parameters())
        current_values = [p.detach().clone() for p in parameters]
        for p, first_value in zip(parameters, first_weights[id(self.module)]):
            p.data.copy_(first_value)
        try:
            return call()
        finally:
            for p, current in zip(parameters, current_values):
                p.data.copy_(current)

    patch.setattr(Checkpoint, "__init__", init)
    _on_recompute(patch, site, recomputed)


@bug("C05", "checkpoint", DETACH, "recomputed front", credit="torch.utils.checkpoint, re-entrant")
def nothing_recomputed_without_history(patch: Patch, site: Site) -> None:
    """A region whose inputs need no gradient is left out of backward, with its weights."""
    original = Checkpoint.__call__

    def called(self: Any, inner: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(x.requires_grad for x in tensors):
            return original(self, inner, *args, **kwargs)
        with torch.no_grad():  # as the re-entrant form of `torch.utils.checkpoint`
            return inner(*args, **kwargs)

    patch.setattr(Checkpoint, "__call__", called)


@bug("C06", "offload", ALIAS, "offloaded, pp")
def shared_host_slot(patch: Patch, site: Site) -> None:
    """Microbatches share the host's memory: what one saved is overwritten by the next."""
    slots: dict[Any, Tensor] = {}
    original = offloaded_activations._Call.keep

    def keep(self: Any, tensor: Tensor) -> Any:
        copied = original(self, tensor)
        if copied.host is not None:
            key = (len(self.copies), copied.host.numel())
            slot = slots.setdefault(key, copied.host)
            if slot is not copied.host:
                slot.copy_(copied.host)
                copied.host = slot
        return copied

    patch.setattr(offloaded_activations._Call, "keep", keep)


@bug(
    "C07",
    "offload",
    REDUCTION,
    "offloaded",
    credit="trl#7195; torchtune#1867; diffusers#13502",
    here="on a CPU nothing runs beside: the copy back is done only when somebody waits for it",
)
def reloaded_before_the_copy(patch: Patch, site: Site) -> None:
    """An offloaded tensor is used before its copy back has completed."""

    def reload(self: Any) -> None:
        if self.host is not None:
            self.raw, self.host = torch.full_like(self.host, 255), None

    patch.setattr(offloaded_activations._Copy, "reload", reload)


@bug(
    "C10",
    "fuse",
    CONSTANT,
    "fused, recomputed",
    row="checkpoint()",
    credit="pytorch#190717, #190758",
    here="fused regions run eagerly where masks are logical; they draw others when recomputed",
)
def fused_region_draws_again(patch: Patch, site: Site) -> None:
    """A compiled region that is recomputed draws other masks than before."""
    from tests.zoo.kernels import fused_depth

    depth, fused, stream_of = recompute_depth(patch), fused_depth(patch), drawing.stream_of
    patch.setattr(
        drawing,
        "stream_of",
        lambda *args: stream_of(1, *args) if depth[0] and fused[0] else stream_of(*args),
    )


@bug(
    "C11", "checkpoint", SKIP, "recomputed", credit="lightning-thunder#725", dies="ran differently"
)
def recomputed_in_evaluation(patch: Patch, site: Site) -> None:
    """The training mode of the forward is not restored for the recomputation."""

    def recomputed(self: Any, call: Any) -> Any:
        self.module.eval()
        try:
            return call()
        finally:
            self.module.train()

    _on_recompute(patch, site, recomputed)


@bug("C12", "checkpoint", GROUP, "recomputed pairs", credit="Megatron-LM#7452")
def recomputed_over_another_group(patch: Patch, site: Site) -> None:
    """A collective in recomputation runs over a group in which this rank is alone."""
    depth, original = recompute_depth(patch), collectives.all_reduce

    def all_reduce(x: Tensor, group: Any) -> Tensor:
        return x.clone() if depth[0] else original(x, group)

    patch.setattr(collectives, "all_reduce", all_reduce)
