"""split_backward: compute a module's weight gradients after the input gradients of its stage."""

from __future__ import annotations

from dataclasses import replace

from schedlang.ir.model import Site
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import Primitive, refuse


class split_backward(Primitive):  # noqa: N801
    """Compute weight gradients of these modules only after the input gradient has been sent.

    before   one backward for each microbatch: gradients of inputs and of weights together
    after    the gradient of the stage's input first, which the stage before waits for; then those
             of the modules' weights

    If the order splits backwards itself (ZB-H1, ZB-V, ..), only the weight gradients of these
    modules are delayed; without such a row those of all modules.  With other orders (1F1B, ..) the
    weight gradients follow at once, while the input gradient is sent (Oh et al., Out-of-order
    backprop, 2022; Qi et al., Zero Bubble, 2401.10241).
    """

    example = "layers.*  split_backward()"
    writes = frozenset({"order"})

    def check(self, site: Site, plan: Plan) -> None:
        """Refuse modules without parameters, and a second row."""
        if not _has_parameters(site, plan):
            refuse(
                "S411",
                "`split_backward` needs trainable parameters",
                f"`{site}` has no parameters",
                helps=("select modules with parameters, for example `**:Linear`",),
            )
        if site.fqn in (plan.deferred_weight_grads or ()):
            refuse("S509", "its backward is split already", helps=("drop one of the two rows",))

    def transform(self, site: Site, plan: Plan) -> Plan:
        """Add the module to the plan."""
        return replace(plan, deferred_weight_grads=(*(plan.deferred_weight_grads or ()), site.fqn))


def _has_parameters(site: Site, plan: Plan) -> bool:
    prefix = f"{site.fqn}." if site.fqn else ""
    return any(name.startswith(prefix) for name in plan.model.parameters)
