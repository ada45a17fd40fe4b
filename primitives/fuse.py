"""fuse: compile a region, so that chains of small operators become few kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from schedlang.plan import Plan
from schedlang.primitive import Primitive, Trial, refuse

if TYPE_CHECKING:
    from schedlang.model import Site


class fuse(Primitive):  # noqa: N801
    """Compile the forward and backward of a module by torch's inductor, as one region.

    before   y = f(x)               one kernel for each operator of f
    after    y = compiled(f)(x)     as few kernels as inductor finds

    A region must compile to one graph: a graph break, or more shapes and numbers than the limit of
    recompilations, is an error and not a silent return to eager.  Under `verify` in float64 the
    region runs eagerly, and the compiled one is checked in its working dtype.
    """

    example = "layers.*.mlp  fuse()"
    reads = frozenset()
    writes = frozenset({"structure"})
    gives_up = frozenset({"rounding"})

    def check(self, site: Site, plan: Plan) -> None:
        """Refuse the whole model: a region is a part of it."""
        if not site.fqn:
            refuse(
                "S408",
                "a region is a part of the model",
                helps=("name a module: `layers.*  fuse()`",),
            )

    def apply(self, site: Site, build: Any) -> None:
        """Compile the module of the copy."""
        from schedlang.runtime.fuse import fuse as compiled

        compiled(build.at(site.fqn))

    def trial(self, site: Site, plan: Plan, call: tuple[Any, Any]) -> list[Trial]:
        """Run the compiled region in the working dtype, on the arguments of a real call."""
        import copy

        from schedlang.runtime.fuse import check_fused
        from schedlang.runtime.fuse import fuse as compiled

        module = copy.deepcopy(plan.model.model.get_submodule(site.fqn))
        compiled(module)
        found = check_fused(module, *call)
        return [Trial(f"{c.name} by inductor", c.error, c.allowed, c.ok) for c in found]
