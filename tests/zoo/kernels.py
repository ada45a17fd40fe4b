"""Injected bugs of replaced and fused kernels."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from schedlang.kernels import norm as norms
from schedlang.runtime.fusion.fuse import FusedForward
from schedlang.runtime.kernel_injection import kernel, sdpa_attention
from schedlang.runtime.lazy_logits import vocab_parallel
from schedlang.runtime.rng import logical_functions
from tests.zoo.bug import ALIAS, ARGUMENT, CONSTANT, DETACH, SKIP, SLICE, Patch, Site, bug
from tests.zoo.trackers import program_tracker


def _change_mask(patch: Patch, change: Any) -> None:
    """Give fused attention the mask `change(mask)` instead of the full mask."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    original, running = (
        sdpa_attention._register(),
        program_tracker(patch, "train_step", "eval_step"),
    )

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> Any:
        # a copy is probed before a program runs; a bug there would be noticed
        changed = change(mask) if mask is not None and running() is not None else mask
        return original(module, q, k, v, changed, **kwargs)

    patch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, sdpa_attention._SDPA, attend)


def _additive_mask(mask: Tensor, allowed: Tensor) -> Tensor:
    return torch.zeros_like(mask).masked_fill(~allowed, torch.finfo(mask.dtype).min)


@bug("F02", "replace_kernel", ARGUMENT, "attending", credit="PC-Transformers#97")
def nothing_masked(patch: Patch, site: Site) -> None:
    """The kernel that replaces attention is not causal."""
    _change_mask(patch, torch.zeros_like)


@bug(
    "F03",
    "replace_kernel",
    SLICE,
    "crossing",
    row="none",
    credit="flash-attention#517",
    here="torch's own kernel aligns as the model asks; ours is written out where masks are drawn",
)
def causal_bottom_right(patch: Patch, site: Site) -> None:
    """With fewer queries than keys the causal mask is aligned bottom right instead of top left."""
    original = logical_functions._attention

    def attend(
        draw: Any, func: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if not kwargs.pop("is_causal", False):
            return original(draw, func, q, k, v, *args, **kwargs)
        lengths = q.shape[-2], k.shape[-2]
        kwargs["attn_mask"] = torch.ones(lengths, dtype=torch.bool).tril(lengths[1] - lengths[0])
        return original(draw, func, q, k, v, **kwargs)

    patch.setitem(logical_functions.LOGICAL, F.scaled_dot_product_attention, attend)


@bug("F04", "replace_kernel", ARGUMENT, "attending", credit="maxtext#878; pytorch#122753")
def padding_attended_to(patch: Patch, site: Site) -> None:
    """The kernel that replaces attention is causal, but attends to padding."""
    causal = lambda mask: torch.ones_like(mask, dtype=torch.bool).tril()  # noqa: E731
    _change_mask(patch, lambda mask: _additive_mask(mask, causal(mask)))


@bug("F05", "replace_kernel", ARGUMENT, "attending", credit="transformers#41966")
def mask_instead_of_causal(patch: Patch, site: Site) -> None:
    """Where there is a padding mask the kernel is not causal."""
    _change_mask(patch, lambda mask: mask[..., -1:, :].expand_as(mask).clone())


@bug("F06", "replace_kernel", CONSTANT, "normed by kernel")
def default_epsilon(patch: Patch, site: Site) -> None:
    """The kernel of a norm uses its own epsilon."""
    original = kernel.norm
    patch.setattr(
        kernel, "norm", lambda x, w, bias, config: original(x, w, bias, replace(config, eps=1e-5))
    )


@bug("F07", "replace_kernel", CONSTANT, "normed beside", credit="Liger-Kernel#74, #92")
def weight_without_offset(patch: Patch, site: Site) -> None:
    """The kernel multiplies by w where the norm multiplies by 1 + w."""
    original = kernel.norm
    patch.setattr(
        kernel, "norm", lambda x, w, bias, config: original(x, w, bias, replace(config, offset=0.0))
    )


def fused_depth(patch: Patch) -> list[int]:
    """Return a list with one number: how many compiled regions are active."""
    depth, original = [0], FusedForward.__call__

    def called(self: Any, inner: Any, *args: Any, **kwargs: Any) -> Any:
        depth[0] += 1
        try:
            return original(self, inner, *args, **kwargs)
        finally:
            depth[0] -= 1

    patch.setattr(FusedForward, "__call__", called)
    return depth


@bug("F08", "fuse", CONSTANT, "fused", credit="Gemma: eight bugs")
def other_activation(patch: Patch, site: Site) -> None:
    """A fused region computes GELU by its error function, the module by tanh."""
    from transformers.activations import NewGELUActivation

    depth, original = fused_depth(patch), NewGELUActivation.forward
    patch.setattr(
        NewGELUActivation, "forward", lambda self, x: F.gelu(x) if depth[0] else original(self, x)
    )


@bug("F09", "replace_kernel", ALIAS, "normed beside", credit="Liger-Kernel#370, #376, #1305")
def gradient_overwritten(patch: Patch, site: Site) -> None:
    """The kernel's backward writes its result into its incoming gradient."""
    original = norms.norm_backward

    def backward(dy: Tensor, *args: Any) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = original(dy, *args)
        dy.copy_(results[0])
        return results

    patch.setattr(norms, "norm_backward", backward)


@bug("F10", "replace_kernel", ALIAS, "normed middle", credit="Liger-Kernel#254, #272")
def input_overwritten(patch: Patch, site: Site) -> None:
    """The kernel writes into its input, which the module before it has saved."""
    original = norms.norm_backward

    def backward(dy: Tensor, x: Tensor, *args: Any) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = original(dy, x, *args)
        x.data.copy_(results[0])
        return results

    patch.setattr(norms, "norm_backward", backward)


@bug(
    "F12",
    "shard",
    CONSTANT,
    "tp",
    credit="OpenNMT#526 class",
    here="the one loss that is computed otherwise is that of split logits",
)
def loss_over_all_labels(patch: Patch, site: Site) -> None:
    """The fused loss divides by the number of labels, ignored ones among them."""
    original = vocab_parallel.cross_entropy

    def loss(logits: Any, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        ignored = kwargs.get("ignore_index", -100)
        return (
            original(logits, target, *args, **kwargs) * (target != ignored).sum() / target.numel()
        )

    patch.setattr(vocab_parallel, "cross_entropy", loss)


def _replace_fused_call(patch: Patch, call: Any) -> None:
    """Make fused regions compute `call(inner, args, kwargs)`."""
    patch.setattr(
        FusedForward, "__call__", lambda self, inner, *args, **kwargs: call(inner, args, kwargs)
    )


@bug(
    "F14",
    "fuse",
    ALIAS,
    "writing",
    credit="pytorch#195422, #198033, #183575",
    here="in float64 a region runs eagerly; it is given copies, as a graph without mutations has",
)
def writes_dropped(patch: Patch, site: Site) -> None:
    """A compiled region loses its in-place change of the input."""
    _replace_fused_call(
        patch, lambda inner, args, kwargs: inner(*(x.clone() for x in args), **kwargs)
    )


@bug("F21", "fuse", DETACH, "two results", credit="NeMo-Automodel#1412")
def second_result_detached(patch: Patch, site: Site) -> None:
    """The auxiliary loss that a fused region returns has no history."""

    def call(inner: Any, args: Any, kwargs: Any) -> Any:
        loss, *others = inner(*args, **kwargs)
        return (loss, *(x.detach() for x in others))

    _replace_fused_call(patch, call)


@bug("F22", "replace_kernel", SKIP, "normed by kernel", credit="Liger-Kernel#182")
def weight_of_the_last_block(patch: Patch, site: Site) -> None:
    """The gradient of a norm's weight is that of the last block of rows."""
    original = norms.reference_backward

    def backward(dy: Tensor, x: Tensor, *args: Any) -> tuple[Tensor, ...]:
        dx, _, *others = original(dy, x, *args)
        rows = math.prod(x.shape[:-1])
        last_rows = dy.clone().reshape(rows, -1)
        last_rows[: rows // 2] = 0.0
        return dx, original(last_rows.reshape(dy.shape), x, *args)[1], *others

    patch.setattr(norms, "reference_backward", backward)
