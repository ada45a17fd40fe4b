"""decompose: a projection in two steps, so that others can be joined with the second."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from schedlang.ir.features import Lowered
from schedlang.ir.primitive import refuse

if TYPE_CHECKING:
    from schedlang.ir.features import Copy
    from schedlang.ir.model import Site
    from schedlang.ir.plan import Plan


class decompose(Lowered):  # noqa: N801
    """Add the bias of a linear layer in a separate call, so that a pattern can match this call.

    before   y = linear(x, w, b)
    after    y = linear(x, w) + b     the sum may be fused with what follows

    The layer keeps its parameters and their names.  Alone the row only changes rounding; with
    `fuse(name)` of a module around the layer, and `pattern name(x, b) { gelu(x + b) }`, the sum is
    part of the fused kernel.

    Slapo (Chen et al. 2024): `.decompose`.
    """

    what: Literal["bias"]

    example = "layers.*.mlp.up  decompose(bias)"
    reads = frozenset()
    writes = frozenset({"structure"})
    gives_up = frozenset({"rounding"})

    def check(self, site: Site, plan: Plan) -> None:
        """Refuse (S886) modules that are no linear layer with a bias, or that have hooks."""
        if linear_kind_of(site, plan) is None:
            refuse(
                "S886",
                f"`{site}` is not a linear layer",
                f"it is a {site.class_name}",
                helps=("name one: `layers.*.mlp.up  decompose(bias)`",),
            )
        if "bias" not in site.parameters:
            refuse("S886", f"`{site}` has no bias", helps=("drop the row",))
        module: Any = plan.model.model.get_submodule(site.fqn)
        if module._forward_hooks or module._backward_hooks:
            refuse(
                "S886",
                f"a forward hook reads the output of `{site}`",
                notes=("it would get the output without the bias",),
                helps=("drop the row, or remove the hook",),
            )

    def lower(self, site: Site, copy: Copy) -> None:
        """Change the module of the copy."""
        from schedlang.runtime.fusion import decomposed_bias

        decomposed_bias.decompose_bias(copy.at(site.fqn), linear_kind_of(site, copy.plan) or "")


def linear_kind_of(site: Site, plan: Plan) -> str | None:
    """Return the kind of linear layer of a module, or None."""
    kinds = ("Linear", "Conv1D")
    return next((k for k in kinds if plan.model.computes_as(site.fqn, k)), None)
