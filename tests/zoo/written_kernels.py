"""Injected bugs of written kernels: gated MLPs, norms, residual sums, rotary positions, losses."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from schedlang.kernels import gated, linear_cross_entropy, norm, rope
from schedlang.kernels.linear_cross_entropy import GradientSums
from schedlang.runtime.lazy_logits import lazy
from tests.zoo.bug import ADJOINT, CONSTANT, DETACH, SKIP, Patch, Site, bug


@bug("F23", "replace_kernel", ADJOINT, "by kernels")
def gradient_of_up_without_activation(patch: Patch, site: Site) -> None:
    """In a gated MLP the gradient of `up` ignores the activation of the gate."""
    original = gated.gated_backward

    def backward(dy: Tensor, gate: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        return original(dy, gate, *args)[0], dy * gate

    patch.setattr(gated, "gated_backward", backward)


@bug("F24", "replace_kernel", SKIP, "by other kernels")
def bias_of_the_last_row(patch: Patch, site: Site) -> None:
    """The gradient of a LayerNorm's bias contains only the last row."""
    original = norm.norm_backward

    def backward(dy: Tensor, *args: Any) -> tuple[Tensor, ...]:
        dx, dweight, _, dgate = original(dy, *args)
        return dx, dweight, dy.reshape(-1, dy.shape[-1])[-1].clone(), dgate

    patch.setattr(norm, "norm_backward", backward)


@bug("F25", "replace_kernel", CONSTANT, "by kernels", credit="Liger-Kernel#802 class")
def fused_mean_over_all_tokens(patch: Patch, site: Site) -> None:
    """The chunked loss divides by all tokens, including ignored ones."""
    original = lazy.weighted_loss

    def weighed(
        x: Tensor, weight: Any, bias: Any, target: Tensor, weights: Tensor, *args: Any
    ) -> Any:
        counted_share = (target >= 0).sum() / target.numel()
        return original(x, weight, bias, target, weights * counted_share, *args)

    patch.setattr(lazy, "weighted_loss", weighed)


@bug("F26", "replace_kernel", SKIP, "by kernels", credit="Liger-Kernel#512 class")
def last_chunk_dropped(patch: Patch, site: Site) -> None:
    """The gradient of the head lacks the last chunk of tokens."""
    original = GradientSums.add

    def add(self: Any, part: slice, grad: Tensor) -> None:
        original(self, part, grad * (part.stop != len(self.x)))

    patch.setattr(GradientSums, "add", add)


@bug("F27", "replace_kernel", ADJOINT, "by kernels", credit="Liger-Kernel#1298 class")
def rotated_forward(patch: Patch, site: Site) -> None:
    """The gradients of queries and keys are rotated forward instead of backward."""
    original = rope.rope_turn
    patch.setattr(rope, "rope_turn", lambda *args: original(*args[:-1], False))


@bug("F28", "replace_kernel", DETACH, "by kernels", credit="Liger-Kernel#370 class")
def residual_without_gradient(patch: Patch, site: Site) -> None:
    """In a fused residual sum and norm, the sum gets no gradient."""
    original = norm.norm_backward

    def backward(dy: Tensor, x: Tensor, dtotal: Tensor | None, *args: Any) -> Any:
        return original(dy, x, None if dtotal is None else dtotal * 0, *args)

    patch.setattr(norm, "norm_backward", backward)


@bug("F29", "replace_kernel", SKIP, "by other kernels")
def target_left_out(patch: Patch, site: Site) -> None:
    """The gradient of the logits, computed in place, lacks the target's term."""
    original = linear_cross_entropy.gradient_

    def gradient(z: Tensor, target: Tensor, lse: Tensor, scales: Any, *args: Any) -> Tensor:
        return original(z, target, lse, (scales[0], scales[1] * 0, scales[2]), *args)

    patch.setattr(linear_cross_entropy, "gradient_", gradient)
