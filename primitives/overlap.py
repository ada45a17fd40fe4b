"""overlap: let transfers between stages run beside the computation, further ahead."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import field, replace
from typing import Literal

from schedlang.ir.annotations import Overlap
from schedlang.ir.mesh import offer_row
from schedlang.ir.model import Site
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import Primitive, refuse, refuse_inside
from schedlang.language.kinds import Many


class overlap(Primitive):  # noqa: N801
    """Overlap communication with computation.

    transfers   receives between stages are posted `ahead` operations before they are needed
                (without a row: 1; 0: when they are needed); each needs memory for one more message
    gradients   all-reduces over replicas begin in a stage's last backward, bucket by bucket as
                gradients are computed, and overlap with this backward and those of other stages
                (DDP, Li et al. 2020); without a row they run after the last backward
    """

    what: Many[Literal["transfers", "gradients"]] = ()
    ahead: int = field(default=2, kw_only=True)

    example = "overlap(gradients)"
    reads = frozenset({"stage"})
    writes = frozenset({"order"})
    takes = "model"

    def agree(self, axes: Collection[str]) -> None:
        """Refuse a row without arguments, and a negative `ahead`."""
        if not self.what:
            refuse(
                "S304",
                "`overlap` needs what to overlap",
                helps=("for example `overlap(transfers)`, `overlap(gradients)`",),
            )
        if self.ahead < 0:
            refuse("S304", "`ahead` must be 0 or more", helps=("`ahead=0` or more",))

    def check(self, site: Site, plan: Plan) -> None:
        """Refuse overlap of transfers without stages, and a second row of the same kind."""
        refuse_inside("overlap", site.fqn)
        if "transfers" in self.what and not plan.cuts:
            row = offer_row("layers  pipeline_split(over={})", plan.mesh.names, "stages")
            refuse(
                "S412",
                "`overlap(transfers)` needs pipeline stages, and there are none",
                helps=(f"cut the model above: {row}",),
            )
        twice = [what for what in self.what if plan.find_overlap(what)]
        if twice:
            refuse(
                "S509",
                f"a row above overlaps `{min(twice)}` already",
                helps=("drop one of the two rows",),
            )

    def transform(self, site: Site, plan: Plan) -> Plan:
        """Add the overlap to the plan."""
        ahead = self.ahead if "transfers" in self.what else plan.receive_ahead
        overlaps = (Overlap(what, row=plan.next_row) for what in self.what)
        return replace(plan, overlaps=(*plan.overlaps, *overlaps), receive_ahead=ahead)
