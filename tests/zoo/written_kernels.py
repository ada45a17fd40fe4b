"""Bugs of the kernels that compute gates, norms, sums, rotations and losses."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from schedlang.kernels import gated, linear_cross_entropy, norm, rope
from schedlang.kernels.linear_cross_entropy import GradientSums
from schedlang.runtime.lazy_logits import lazy
from tests.zoo.bug import ADJOINT, CONSTANT, DETACH, SKIP, Patch, Site, bug


@bug("F23", "replace_kernel", ADJOINT, "by kernels")
def gradient_of_up_without_activation(patch: Patch, site: Site) -> None:
    """In a gated MLP the gradient of up is that of a product with the gate itself."""
    plain = gated.gated_backward

    def backward(dy: Tensor, gate: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        return plain(dy, gate, *given)[0], dy * gate

    patch.setattr(gated, "gated_backward", backward)


@bug("F24", "replace_kernel", SKIP, "by other kernels")
def bias_of_the_last_row(patch: Patch, site: Site) -> None:
    """The gradient of a LayerNorm's bias is that of the last row."""
    plain = norm.norm_backward

    def backward(dy: Tensor, *given: Any) -> tuple[Tensor, ...]:
        dx, dweight, _, dgate = plain(dy, *given)
        return dx, dweight, dy.reshape(-1, dy.shape[-1])[-1].clone(), dgate

    patch.setattr(norm, "norm_backward", backward)


@bug("F25", "replace_kernel", CONSTANT, "by kernels", credit="Liger-Kernel#802 class")
def fused_mean_over_all_tokens(patch: Patch, site: Site) -> None:
    """The loss in chunks divides by all tokens, ignored ones among them."""
    plain = lazy.weighted_loss

    def weighed(x: Tensor, weight: Any, bias: Any, target: Tensor, by: Tensor, *given: Any) -> Any:
        share = (target >= 0).sum() / target.numel()
        return plain(x, weight, bias, target, by * share, *given)

    patch.setattr(lazy, "weighted_loss", weighed)


@bug("F26", "replace_kernel", SKIP, "by kernels", credit="Liger-Kernel#512 class")
def last_chunk_dropped(patch: Patch, site: Site) -> None:
    """The gradient of the head lacks the last chunk of tokens."""
    plain = GradientSums.add

    def add(self: Any, part: slice, grad: Tensor) -> None:
        plain(self, part, grad * (part.stop != len(self.x)))

    patch.setattr(GradientSums, "add", add)


@bug("F27", "replace_kernel", ADJOINT, "by kernels", credit="Liger-Kernel#1298 class")
def turned_on_instead_of_back(patch: Patch, site: Site) -> None:
    """The gradients of queries and keys are turned by the angles, not against them."""
    plain = rope.rope_turn
    patch.setattr(rope, "rope_turn", lambda *given: plain(*given[:-1], False))


@bug("F28", "replace_kernel", DETACH, "by kernels", credit="Liger-Kernel#370 class")
def residual_without_gradient(patch: Patch, site: Site) -> None:
    """Of a sum and its norm only the norm gives a gradient."""
    plain = norm.norm_backward

    def backward(dy: Tensor, x: Tensor, dtotal: Tensor | None, *given: Any) -> Any:
        return plain(dy, x, None if dtotal is None else dtotal * 0, *given)

    patch.setattr(norm, "norm_backward", backward)


@bug("F29", "replace_kernel", SKIP, "by other kernels")
def target_left_out(patch: Patch, site: Site) -> None:
    """The gradient that is written over the logits lacks the target's part."""
    plain = linear_cross_entropy.gradient_

    def gradient(z: Tensor, target: Tensor, lse: Tensor, by: Any, *given: Any) -> Tensor:
        return plain(z, target, lse, (by[0], by[1] * 0, by[2]), *given)

    patch.setattr(linear_cross_entropy, "gradient_", gradient)
