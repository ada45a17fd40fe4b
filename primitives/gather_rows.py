"""gather_rows: all-gather a module's output over the ranks that split the batch."""

from __future__ import annotations

from dataclasses import field, replace
from typing import Any

from schedlang.ir.annotations import RowGather
from schedlang.ir.features import Settled, check_called
from schedlang.ir.mesh import offer_row
from schedlang.ir.model import Site
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import refuse
from schedlang.language.kinds import Axes


class gather_rows(Settled):  # noqa: N801
    """All-gather the rows of a module's output over the ranks of `over`, which split the batch.

    before   y = f(x)                of this rank's rows
    after    y = all-gather(f(x))    of the rows of the full batch, equal on every rank

    For losses over pairs of rows, which no rank can compute from its own rows: contrastive losses
    of two towers, losses that search positives or negatives in the batch.  Every module after this
    one, and the loss, computes the full batch on every rank; backward reduce-scatters the gradient
    of the rows.  The output has one row for each row of the batch, in dim 0.  `over` names all axes
    that split the batch; there is one microbatch, and sequences are not split.

    OpenCLIP (Ilharco et al. 2021), which gathers the features of both towers with their gradients;
    SimCLR (Chen et al. 2020) and CLIP (Radford et al. 2021) for the losses.
    """

    over: Axes = field(kw_only=True)

    example = "projection  gather_rows(over=dp)"
    reads = frozenset({"structure"})
    writes = frozenset({"order"})
    gives_up = frozenset({"rounding"})

    def check(self, site: Site, plan: Plan) -> None:
        """Refuse modules that are never called, and rows that are gathered twice."""
        check_called(self, site, plan)
        for other in plan.row_gathers:
            if other.fqn == site.fqn:
                refuse(
                    "S501",
                    f"the rows of `{site}` are gathered already",
                    helps=("drop one of the two rows",),
                )

    def transform(self, site: Site, plan: Plan) -> Plan:
        """Add the gather to the plan."""
        row_gather = RowGather(site.fqn, row=plan.next_row)
        return replace(plan, row_gathers=(*plan.row_gathers, row_gather))

    def settled(self, site: Any, plan: Plan, traced: Any) -> None:
        """Refuse other axes than those of the batch, and batches and sequences that are split
        further."""
        axes = set(plan.mesh.fold(self.over))
        if axes != set(plan.row_axes):
            split_axes = ", ".join(plan.row_axes)
            over = split_axes if len(plan.row_axes) < 2 else f"({split_axes})"
            rows = offer_row("zero(stage=0, over={})", plan.mesh.names, "replicas")
            refuse(
                "S412",
                f"`gather_rows` needs the axes that split the batch: {split_axes or 'none does'}",
                f"names {', '.join(map(str, self.over))}",
                helps=(
                    f"write `gather_rows(over={over})`" if over else f"split the batch: {rows}",
                ),
            )
        if plan.micro > 1:
            refuse(
                "S668",
                f"`gather_rows` needs the full batch, not {plan.micro} microbatches",
                notes=(
                    "the backward of a microbatch starts before later microbatches are computed",
                ),
                helps=("use one microbatch: `micro=1`",),
            )
        if plan.contexts or plan.order is not None and plan.order.slices > 1:
            refuse(
                "S659",
                "`gather_rows` gathers rows of full sequences, and ranks or slices split these",
                helps=("leave out the rows that split sequences",),
            )
