"""complete: shard the rest of what a few `shard` rows began, as far as there is one way to."""

from __future__ import annotations

from dataclasses import field, replace

from schedlang.ir.annotations import Completion
from schedlang.ir.model import Site
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import Primitive, refuse, refuse_inside
from schedlang.language.kinds import Axis


class complete(Primitive):  # noqa: N801
    """Add the missing `shard` rows to those above this row, along one axis.

    before   q_proj  shard(col)                    one row of a block
    after    {q,k,v}_proj  shard(col)              projections whose outputs are used together
             o_proj        shard(row)              the projection that reads these outputs

    The model's forward is traced once.  The search goes from each projection that a row above
    splits to the projections that read its output, and from these back to all their other inputs. A
    weight that is split under one name is split under its other names. Modules without a connection
    to a row above stay replicated. Added rows are traced like written rows, and `schedlang plan`
    shows them with their collectives, at this line. If rows can be completed in two equally good
    ways, the row is refused, and the message shows both.

    After GSPMD (Xu et al. 2021), which completes annotations through a full graph.
    """

    over: Axis = field(kw_only=True)

    example = "complete(over=tp)"
    reads = frozenset({"structure", "shape", "dtype"})
    writes = frozenset({"placement"})
    takes = "model"
    gives_up = frozenset({"rounding"})

    def check(self, site: Site, plan: Plan) -> None:
        """Refuse a second row for one axis, and a row inside a module."""
        refuse_inside("complete", site.fqn)
        if any(completion.axis == self.over for completion in plan.completions):
            refuse(
                "S501",
                f"a row above completes `{self.over}` already",
                helps=("drop one of the two rows",),
            )

    def transform(self, site: Site, plan: Plan) -> Plan:
        """Add the axis to the plan; rows are added later, when there is a batch for the trace."""
        completion = Completion(str(self.over), row=plan.next_row)
        return replace(plan, completions=(*plan.completions, completion))
