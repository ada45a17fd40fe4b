"""A projection in two steps, the product and the addition of its bias (`decompose(bias)`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.forward import layer_of, wrap
from schedlang.runtime.sharding.edges import PRODUCTS_BY_KIND, projection
from schedlang.runtime.sharding.sharded_layer import ShardedLayer


def decompose_bias(module: nn.Module, kind: str) -> None:
    """Let a built projection add its bias in a call of its own, in place."""
    wrap(module, "kernel", DecomposedBias(module, kind))


class DecomposedBias:
    """The layer that multiplies, then adds the bias."""

    def __init__(self, module: nn.Module, kind: str) -> None:
        self.module, self.kind = module, kind

    def __call__(self, inner: Callable[..., Any], *args: Tensor, **kwargs: Tensor) -> Tensor:
        """Run both steps; `inner` is not called."""
        bias = self.module._parameters["bias"]
        assert bias is not None
        (x,) = *args, *kwargs.values()  # torch's own layer also accepts it as `input=`
        return PRODUCTS_BY_KIND[self.kind](self.module, x, False) + bias


def product_without_bias(module: nn.Module, x: Tensor) -> Tensor:
    """Return the product without the bias, sharded as in the module's row of the schedule.

    Raises Refusal S886 if the bias cannot be added separately.
    """
    if hasattr(module, "_get_fsdp_state"):
        raise _refused(
            "its parameters are gathered only for its own call",
            "let `zero` gather a larger module: the layer",
        )
    layer: ShardedLayer | None = layer_of(module, "sharded")
    if layer is None:
        kind = next(c.__name__ for c in type(module).__mro__ if c.__name__ in PRODUCTS_BY_KIND)
        return PRODUCTS_BY_KIND[kind](module, x, False)
    ends = [edge for edge in layer.edges if edge.is_head or edge.output_before != edge.output_after]
    late = [edge for edge in ends if edge.is_head or not _is_partial(edge)]
    if layer.kind not in PRODUCTS_BY_KIND or late:
        raise _refused(
            "its result is gathered after its bias is added",
            "keep the output sharded: drop `output=R`",
        )
    product: Tensor = projection(module, layer.kind, layer.edges, biased=False)(x)
    return product


def _is_partial(edge: Any) -> bool:
    from schedlang.ir.placement import P

    return isinstance(edge.output_before, P)


def _refused(reason: str, help_: str) -> Refusal:
    message = "the bias of this projection cannot be added separately"
    return Refusal.of("S886", message, notes=(reason,), helps=(help_,))
