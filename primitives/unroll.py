"""unroll: make each call of a module that is called in a loop a place where stages may meet."""

from __future__ import annotations

from dataclasses import replace

from schedlang.ir.model import Site
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import Primitive, refuse


class unroll(Primitive):  # noqa: N801
    """Count each call of a module as a separate unit, so that a stage can start between two calls.

    before   for k in range(times): x = f(x)      one module, called often: a cut is refused
    after    x = f(x); x = f(x); ...; x = f(x)    as many units, which share f's parameters

    A `pipeline_split` of the module, below this row, splits its calls into equal parts.  A
    `pipeline_split` of a list that contains the module splits calls and modules together, in the
    order of the model. Parameters keep their names.  Each stage that calls the module holds them,
    and their gradients are summed like those of tied weights.  The model must make exactly `times`
    calls in a forward.

    Alone it changes nothing.  ALBERT (Lan et al. 2020) and Universal Transformers (Dehghani et al.
    2019) call one block in a loop.
    """

    times: int

    example = "again  unroll(3)"
    reads = frozenset({"structure"})
    writes = frozenset({"stage"})
    gives_up = frozenset()

    def check(self, site: Site, plan: Plan) -> None:
        """Refuse a count below 1, the root module, a second row, and a row below the cut."""
        if self.times < 1:
            refuse("S304", "`unroll` needs 1 call or more", helps=("use 1 or more",))
        if not site.fqn:
            refuse(
                "S408",
                "the model itself is called only once",
                helps=("select a module inside its loop",),
            )
        if plan.cuts:
            refuse(
                "S503",
                "`unroll` must stand above `pipeline_split`",
                helps=("move this row above the `pipeline_split`",),
            )
        for fqn, times in plan.unrolled:
            if fqn == site.fqn:
                refuse(
                    "S501",
                    f"`{site}` is unrolled already, {times} times",
                    helps=("drop one of the two rows",),
                )
            inner, outer = sorted((fqn, site.fqn), key=len, reverse=True)
            if inner.startswith(f"{outer}."):
                refuse(
                    "S502",
                    "an unrolled module cannot contain another one",
                    notes=(f"`{inner}` lies inside `{outer}`",),
                    helps=("unroll one of the two",),
                )

    def transform(self, site: Site, plan: Plan) -> Plan:
        """Add the number of calls to the plan; a forward checks the number."""
        return replace(plan, unrolled=(*plan.unrolled, (site.fqn, self.times)))
