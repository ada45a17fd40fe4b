"""checkpoint: trade memory for a second forward."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Any, Literal

from schedlang.plan import Plan
from schedlang.primitive import Primitive

if TYPE_CHECKING:
    from schedlang.model import Site


class checkpoint(Primitive):  # noqa: N801
    """Forget a module's activations in forward and recompute them in backward.

    before   y = f(x)                  backward finds every intermediate of f
    after    y = checkpoint(f)(x)      backward finds x and what `save` names, and runs f again

    `save` keeps the results of whole classes of operators: `linear` (matrix products), `attention`
    (fused attention), `collective` (communication, which is then not repeated).  Random numbers are
    replayed, so dropout gives the same masks.

    Chen et al., Training deep nets with sublinear memory cost (2016); selective recomputation:
    Korthikanti et al. (2022).
    """

    save: tuple[Literal["linear", "attention", "collective"], ...] = field(default=(), kw_only=True)

    example = "layers.*  checkpoint()"
    reads = frozenset({"structure", "placement"})
    writes = frozenset({"recompute"})

    def check(self, site: Site, plan: Plan) -> None:
        """Nothing at one module alone; nesting is refused between rows."""

    def apply(self, site: Site, build: Any) -> None:
        """Recompute the module of the copy."""
        from schedlang.runtime.recompute import checkpoint as recompute

        recompute(build.at(site.fqn), self.save)
