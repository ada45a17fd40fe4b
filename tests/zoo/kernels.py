"""Bugs of replaced and fused kernels."""

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
from tests.zoo.place import running_program


def _mask(patch: Patch, change: Any) -> None:
    """The fused attention gets the mask that `change(mask)` makes of the complete one."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    plain, at_work = sdpa_attention._register(), running_program(patch, "train_step", "eval_step")

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **more: Any) -> Any:
        # before a program runs a copy is probed, and would be found out
        changed = change(mask) if mask is not None and at_work() is not None else mask
        return plain(module, q, k, v, changed, **more)

    patch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, sdpa_attention._SDPA, attend)


def _lowest(mask: Tensor, allowed: Tensor) -> Tensor:
    return torch.zeros_like(mask).masked_fill(~allowed, torch.finfo(mask.dtype).min)


@bug("F02", "replace_kernel", ARGUMENT, "attending", credit="PC-Transformers#97")
def nothing_masked(patch: Patch, site: Site) -> None:
    """The kernel that replaces attention is not causal."""
    _mask(patch, torch.zeros_like)


@bug(
    "F03",
    "replace_kernel",
    SLICE,
    "crossing",
    row="none",
    credit="flash-attention#517",
    here="torch's own kernel aligns as the model asks; ours is written out where masks are drawn",
)
def causal_from_the_other_corner(patch: Patch, site: Site) -> None:
    """With fewer queries than keys the causal mask is aligned bottom right instead of top left."""
    plain = logical_functions._attention

    def attend(
        draw: Any, func: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **more: Any
    ) -> Any:
        if not more.pop("is_causal", False):
            return plain(draw, func, q, k, v, *args, **more)
        lengths = q.shape[-2], k.shape[-2]
        more["attn_mask"] = torch.ones(lengths, dtype=torch.bool).tril(lengths[1] - lengths[0])
        return plain(draw, func, q, k, v, **more)

    patch.setitem(logical_functions.LOGICAL, F.scaled_dot_product_attention, attend)


@bug("F04", "replace_kernel", ARGUMENT, "attending", credit="maxtext#878; pytorch#122753")
def padding_attended_to(patch: Patch, site: Site) -> None:
    """The kernel that replaces attention is causal and sees padding."""
    causal = lambda mask: torch.ones_like(mask, dtype=torch.bool).tril()  # noqa: E731
    _mask(patch, lambda mask: _lowest(mask, causal(mask)))


@bug("F05", "replace_kernel", ARGUMENT, "attending", credit="transformers#41966")
def mask_instead_of_causal(patch: Patch, site: Site) -> None:
    """Where there is a padding mask the kernel is not causal."""
    _mask(patch, lambda mask: mask[..., -1:, :].expand_as(mask).clone())


@bug("F06", "replace_kernel", CONSTANT, "normed by kernel")
def default_epsilon(patch: Patch, site: Site) -> None:
    """The kernel of a norm uses its own epsilon."""
    plain = kernel.norm
    patch.setattr(
        kernel, "norm", lambda x, w, bias, form: plain(x, w, bias, replace(form, eps=1e-5))
    )


@bug("F07", "replace_kernel", CONSTANT, "normed beside", credit="Liger-Kernel#74, #92")
def weight_instead_of_one_more(patch: Patch, site: Site) -> None:
    """The kernel multiplies by w where the norm multiplies by 1 + w."""
    plain = kernel.norm
    patch.setattr(
        kernel, "norm", lambda x, w, bias, form: plain(x, w, bias, replace(form, offset=0.0))
    )


def inside_fused(patch: Patch) -> list[int]:
    """A list of one number: how many compiled regions the program is in."""
    inside, plain = [0], FusedForward.__call__

    def called(self: Any, inner: Any, *args: Any, **kwargs: Any) -> Any:
        inside[0] += 1
        try:
            return plain(self, inner, *args, **kwargs)
        finally:
            inside[0] -= 1

    patch.setattr(FusedForward, "__call__", called)
    return inside


@bug("F08", "fuse", CONSTANT, "fused", credit="Gemma: eight bugs")
def other_activation(patch: Patch, site: Site) -> None:
    """A fused region computes GELU by its error function, the module by tanh."""
    from transformers.activations import NewGELUActivation

    inside, plain = inside_fused(patch), NewGELUActivation.forward
    patch.setattr(
        NewGELUActivation, "forward", lambda self, x: F.gelu(x) if inside[0] else plain(self, x)
    )


@bug("F09", "replace_kernel", ALIAS, "normed beside", credit="Liger-Kernel#370, #376, #1305")
def gradient_written_over(patch: Patch, site: Site) -> None:
    """The kernel's backward writes its result into the gradient that it was given."""
    plain = norms.norm_backward

    def backward(dy: Tensor, *args: Any) -> tuple[Tensor, ...]:
        made: tuple[Tensor, ...] = plain(dy, *args)
        dy.copy_(made[0])
        return made

    patch.setattr(norms, "norm_backward", backward)


@bug("F10", "replace_kernel", ALIAS, "normed middle", credit="Liger-Kernel#254, #272")
def input_written_over(patch: Patch, site: Site) -> None:
    """The kernel writes into its input, which the module before it has saved."""
    plain = norms.norm_backward

    def backward(dy: Tensor, x: Tensor, *args: Any) -> tuple[Tensor, ...]:
        made: tuple[Tensor, ...] = plain(dy, x, *args)
        x.data.copy_(made[0])
        return made

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
    plain = vocab_parallel.cross_entropy

    def loss(logits: Any, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        ignored = kwargs.get("ignore_index", -100)
        return plain(logits, target, *args, **kwargs) * (target != ignored).sum() / target.numel()

    patch.setattr(vocab_parallel, "cross_entropy", loss)


def _fused(patch: Patch, call: Any) -> None:
    """A fused region computes `call(inner, args, kwargs)`."""
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
    """A compiled region loses that it writes into its input."""
    _fused(patch, lambda inner, args, kwargs: inner(*(x.clone() for x in args), **kwargs))


@bug("F21", "fuse", DETACH, "two results", credit="NeMo-Automodel#1412")
def second_result_detached(patch: Patch, site: Site) -> None:
    """Of a fused region's results the auxiliary loss has no history."""

    def call(inner: Any, args: Any, kwargs: Any) -> Any:
        first, *rest = inner(*args, **kwargs)
        return (first, *(x.detach() for x in rest))

    _fused(patch, call)


@bug("F22", "replace_kernel", SKIP, "normed by kernel", credit="Liger-Kernel#182")
def weight_of_the_last_block(patch: Patch, site: Site) -> None:
    """The gradient of a norm's weight is that of the last block of rows."""
    plain = norms.reference_backward

    def backward(dy: Tensor, x: Tensor, *args: Any) -> tuple[Tensor, ...]:
        dx, _, *more = plain(dy, x, *args)
        rows = math.prod(x.shape[:-1])
        last = dy.clone().reshape(rows, -1)
        last[: rows // 2] = 0.0
        return dx, plain(last.reshape(dy.shape), x, *args)[1], *more

    patch.setattr(norms, "reference_backward", backward)
