"""pipeline: run a step as microbatches, in a named order over the stages."""

from __future__ import annotations

from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

from schedlang.plan import Order, Plan
from schedlang.primitive import Primitive, refuse

if TYPE_CHECKING:
    from schedlang.model import Site


class pipeline(Primitive):  # noqa: N801
    """Split each rank's rows into microbatches and say in which order stages run them.

    order    a name of the literature: "GPipe", "1F1B", "Interleaved1F1B" (case does not matter)
    micro    microbatches a step; the last may be smaller
    chunks   stages on each rank, for interleaved orders

    Without a cut it is plain gradient accumulation: `pipeline(order="GPipe", micro=4)`.
    """

    order: str = field(kw_only=True)
    micro: int = field(kw_only=True)
    chunks: int = field(default=1, kw_only=True)

    example = 'pipeline(order="1F1B", micro=4)'
    reads = frozenset({"stage"})
    writes = frozenset({"order"})
    takes = "model"
    gives_up = frozenset({"rounding"})

    def check(self, site: Site, plan: Plan) -> None:
        """Refuse unknown orders, sizes that an order does not run, and cuts that do not fit."""
        from schedlang.orders import OrderError, find

        if site.fqn:
            refuse("S408", "a pipeline runs the whole model", f"this stands inside `{site}`",
                   helps=("move the row out of its `at`",))  # fmt: skip
        if plan.order is not None:
            refuse("S509", "the pipeline already has an order", helps=("drop one of the two rows",))
        try:
            find(self.order)
        except OrderError as error:
            refuse("S303", error.reason, helps=(error.legal,))
        if self.micro < 1 or self.chunks < 1:
            refuse(
                "S304", "there is at least one microbatch and one chunk", helps=("use 1 or more",)
            )
        ranks = plan.mesh.size(plan.cuts[0].axis) if plan.cuts else 1
        if self.chunks * ranks > 1:
            self._check_order(ranks, plan)

    def _check_order(self, ranks: int, plan: Plan) -> None:
        from schedlang.orders import OrderError, order

        try:
            order(self.order, ranks, self.micro, self.chunks)
        except OrderError as error:
            refuse("S608", error.reason, helps=(error.legal,))
        starts = [fqn for cut in plan.cuts for fqn in cut.before]
        needed = ranks * self.chunks
        if starts and len(starts) + 1 != needed:
            refuse(
                "S609",
                f"{len(starts)} cuts make {len(starts) + 1} stages, and {needed} are needed",
                notes=(f"{ranks} ranks with {self.chunks} chunk{'s' * (self.chunks > 1)} each",),
                helps=(f"name {needed - 1} modules before which stages start",),
            )

    def effect(self, site: Site, plan: Plan) -> Plan:
        """Note the order."""
        axis = plan.cuts[0].axis if plan.cuts else None
        return replace(plan, order=Order(axis, self.order, self.micro, self.chunks))

    def apply(self, site: Site, build: Any) -> None:
        """Nothing of its own: `build` makes the executor."""
