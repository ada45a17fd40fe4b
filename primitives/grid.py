"""grid: split weights and activations over a grid of ranks, in 2, 2.5 or 3 dims."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Any, Literal

from schedlang.kinds import Axes
from schedlang.placement import Replicate, S
from schedlang.plan import Boundary, Plan
from schedlang.primitive import Primitive

if TYPE_CHECKING:
    from schedlang.model import Site

KINDS = ("Linear", "Conv1D", "Embedding")


class grid(Primitive):  # noqa: N801
    """Split a module over a grid of ranks.

    summa   over=(r, c): weights and activations both lie on r x c ranks
    """

    style: Literal["summa"]
    over: Axes = field(kw_only=True)
    blocks: int | tuple[int, ...] = field(default=1, kw_only=True)
    output: S | Replicate | None = field(default=None, kw_only=True)

    example = "mlp.up  grid(summa, over=(r, c))"
    reads = frozenset({"structure", "shape", "dtype"})
    writes = frozenset({"placement"})
    gives_up = frozenset({"rounding"})

    def check(self, site: Site, plan: Plan) -> None:
        """Refuse what the grid does not divide."""

    def effect(self, site: Site, plan: Plan) -> Plan:
        """Split weight and bias, and note the boundaries."""
        r, c = map(str, self.over)
        kind = next((k for k in KINDS if site.is_a(k)), None)
        if kind is None:
            for fact in site.parameters.values():
                plan = plan.with_layout(fact.name, plan.layout(fact.name).split(c, 0))
            plan = plan.with_kind(site.fqn, "norm")
            return plan.with_boundary(site.fqn, Boundary(c, S(-1), self.output or S(-1)))
        names = site.dims["weight"]
        outer, inner = ("vocab", "hidden") if kind == "Embedding" else ("out", "in")
        weight = plan.layout(site.parameters["weight"].name)
        if not weight.axes:
            size = weight.padded[names.index(outer)]
            weight = weight.split(r, names.index(inner))
            weight = weight.split(c, names.index(outer), self._blocks(size))
            plan = plan.with_spread(site.parameters["weight"].name, weight)
        if "bias" in site.parameters:
            bias = plan.layout(site.parameters["bias"].name)
            if not bias.axes:
                bias = bias.split(c, 0, self._blocks(bias.padded[0]))
                plan = plan.with_layout(site.parameters["bias"].name, bias)
        plan = plan.with_kind(site.fqn, f"summa {kind}")
        plan = plan.with_boundary(site.fqn, Boundary(r, None, None))
        return plan.with_boundary(site.fqn, Boundary(c, S(-1), self.output or S(-1)))

    def apply(self, site: Site, build: Any) -> None:
        """Nothing of its own: `build` puts the products in place once the whole plan is traced."""

    def _blocks(self, size: int) -> tuple[int, ...]:
        if isinstance(self.blocks, int):
            return (size // self.blocks,) * self.blocks
        return tuple(self.blocks)
