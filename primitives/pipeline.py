"""pipeline: run a step as microbatches, in a named order over the stages."""

from __future__ import annotations

from copy import copy
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from schedlang.diagnostics.other_systems import ORDER_NAMES
from schedlang.diagnostics.source import read_utf8
from schedlang.ir.annotations import Order
from schedlang.ir.features import Located, Resolved
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import refuse, refuse_inside

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from schedlang.ir.model import Site
    from schedlang.language.patterns import Pattern

TABLES = (".csv",)

MAX_PARTS = 2**16  # product of microbatches, chunks and slices of a step
MAX_STAGES = 2**14
MAX_OPERATIONS = 2**22  # forwards of all stages, microbatches and slices: two seconds to lay out


class pipeline(Located, Resolved):  # noqa: N801
    """Split each rank's rows into microbatches and choose the order in which stages run them.

    order    a name from the literature, in upper or lower case: "1F1B", "ZB-H1", "Chimera", .. (all
             names with their papers: docs/pipelines.md); a table "orders/mine.csv" in the folder of
             the schedule; or `search`
    micro    microbatches per step; the last may be smaller
    chunks   stages on each rank, for orders that leave it open; otherwise it follows from the order
    slices   slices of the sequence of each microbatch, for "Seq1F1B" and "TeraPipe"
    memory   the most activations that a rank may hold, in microbatches of one rank's share of the
             model (1F1B on p ranks needs p), for `search` and the heuristics of Zero Bubble
    every    microbatches per update, for orders with stale weights; default: the paper's

    Without a cut it is plain gradient accumulation: `pipeline(order="GPipe", micro=4)`.  Orders
    with stale weights (such as PipeDream) need `relax(staleness)` on their step.
    """

    order: str = field(kw_only=True)
    micro: int = field(kw_only=True)
    chunks: int | None = field(default=None, kw_only=True)
    slices: int = field(default=1, kw_only=True)
    memory: float | None = field(default=None, kw_only=True)
    every: int | None = field(default=None, kw_only=True)
    table: str = field(default="", init=False)  # the text of the table that `order` names

    example = 'pipeline(order="1F1B", micro=4)'
    reads = frozenset({"stage"})
    writes = frozenset({"order"})
    takes = "model"

    @property
    def gives_up(self) -> frozenset[str]:
        """Return what the row relaxes: rounding, and what the order relaxes (stale weights)."""
        from schedlang.pipeline.schedules import OrderError, find_order

        try:
            relaxed = frozenset() if self.is_table else find_order(self.order).relaxed
        except OrderError:
            relaxed = frozenset()
        return frozenset({"rounding"}) | relaxed

    @property
    def is_table(self) -> bool:
        """Whether `order` names a file."""
        return self.order.lower().endswith(TABLES)

    def resolved(self, patterns: Mapping[str, Pattern]) -> pipeline:
        """Return the row; refuse (S303) an unknown order, also without a model."""
        if self.is_table or self.order.lower() in ORDER_NAMES:
            return self
        from schedlang.pipeline.schedules import OrderError, find_order

        try:
            find_order(self.order)
        except OrderError as error:
            refuse("S303", error.reason, helps=(error.legal,))
        return self

    def located(self, folder: Path) -> pipeline:
        """Return the row with the text of its table, read from the folder of the schedule."""
        if not self.is_table or self.table:
            return self
        path = folder / self.order
        try:
            text = read_utf8(path)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            refuse(
                "S303",
                f"cannot read the table `{self.order}`: {reason}",
                notes=(f"looked for {path}",),
                helps=(
                    "put a table next to the schedule that names it",
                    'or name an order: `order="1F1B"`',
                ),
            )
        row = copy(self)
        object.__setattr__(row, "table", text)
        return row

    def agree(self, axes: Collection[str]) -> None:
        """Refuse numbers of parts below 1 or above the limit."""
        if min(self.micro, self.chunks or 1, self.slices) < 1:
            refuse(
                "S304", "`micro`, `chunks` and `slices` must be 1 or more", helps=("use 1 or more",)
            )
        parts = self.micro * (self.chunks or 1) * self.slices
        if parts > MAX_PARTS:
            refuse(
                "S304",
                f"a step may have at most {MAX_PARTS} parts",
                f"these are {parts}",
                helps=("make `micro`, `chunks` or `slices` smaller",),
            )

    def check(self, site: Site, plan: Plan) -> None:
        """Refuse a second order, and sizes that the order does not support."""
        refuse_inside("pipeline", site.fqn)
        if plan.order is not None:
            refuse("S509", "the pipeline already has an order", helps=("drop one of the two rows",))
        self._check_order(plan)

    def _check_order(self, plan: Plan) -> None:
        self.resolved({})
        from schedlang.pipeline.schedules import OrderError

        ranks = plan.mesh.size(plan.cuts[0].axis) if plan.cuts else 1
        if ranks == 1 and (self.chunks or 1) == 1 and not plan.cuts:
            return  # no stages: a loop over microbatches
        order = self._order_of(plan)
        self._check_size(ranks * order.chunks)
        try:
            order.timeline(ranks)
        except OrderError as error:
            refuse("S608", error.reason, helps=(error.legal,))

    def _check_size(self, stages: int) -> None:
        """Refuse (S304) a step whose timeline would take too long or too much memory."""
        if stages > MAX_STAGES:
            refuse(
                "S304",
                f"a pipeline may have at most {MAX_STAGES} stages",
                f"these are {stages}",
                helps=("make the axis of the mesh smaller",),
            )
        if (operations := stages * self.micro * self.slices) > MAX_OPERATIONS:
            refuse(
                "S304",
                f"a step may have at most {MAX_OPERATIONS} forwards on all ranks together",
                f"these are {operations}",
                helps=("make `micro` or `slices`, or the axis of the mesh smaller",),
            )

    def transform(self, site: Site, plan: Plan) -> Plan:
        """Add the order to the plan."""
        return replace(plan, order=self._order_of(plan))

    def _order_of(self, plan: Plan) -> Order:
        from schedlang.pipeline.schedules import default_chunks

        axis = plan.cuts[0].axis if plan.cuts else None
        chunks = self.chunks or (1 if self.is_table else default_chunks(self.order))
        return Order(
            axis,
            self.order,
            self.micro,
            chunks,
            self.slices,
            self.memory,
            self.table,
            self.every,
            row=plan.next_row,
        )
