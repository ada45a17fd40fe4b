"""compress: sum gradients over replicas in fewer bytes."""

from __future__ import annotations

from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, Literal

from schedlang.kinds import Axes
from schedlang.plan import Compression, Plan
from schedlang.primitive import Primitive, refuse

if TYPE_CHECKING:
    from schedlang.model import Site


class compress(Primitive):  # noqa: N801
    """Let the sum of gradients over some data axes run compressed, once a step.

    powersgd   a matrix of n x m as a product of rank `rank`: rank (n + m) numbers are summed
               instead of n m; the power iteration starts where the last step's ended
    int8       whole numbers with a scale for each `block` elements, stochastically rounded
    onebit     a bit for each element, and for each `block` the means above and below zero

    With `error_feedback` what a rank's code leaves out is added to its gradient of the next step,
    so that the sum over all steps is followed. Vectors, and matrices that would not get smaller,
    are summed as they are. The other data axes are summed over first, exactly.

    Errors, and the starts of iterations, are part of a checkpoint: the same layout goes on as if
    nothing had been saved. Where another number of ranks sums, these share the errors of all alike,
    and an iteration starts anew where a matrix is cut in other parts. A program without this row
    leaves them out. Orders with stale weights, which sum several times a step, are refused.

    Results are those of one process that codes the same parts in the same way: `relax(lossy)`; the
    original's own where the rank is full.

    PowerSGD (Vogels et al. 2019), QSGD (Alistarh et al. 2017), 1-bit SGD (Seide et al. 2014).
    """

    what: Literal["gradients"]
    how: Literal["powersgd", "int8", "onebit"]
    over: Axes = field(kw_only=True)
    rank: int = field(default=4, kw_only=True)
    block: int = field(default=256, kw_only=True)
    error_feedback: bool = field(default=True, kw_only=True)

    example = "compress(gradients, powersgd, over=dp)"
    reads = frozenset({"state"})
    writes = frozenset({"order"})
    takes = "model"
    gives_up = frozenset({"rounding", "lossy"})

    def check(self, site: Site, plan: Plan) -> None:
        """Refuse axes over which no whole gradients are summed, and sizes without meaning."""
        if site.fqn:
            refuse("S408", "gradients are compressed for the whole model",
                   f"this stands inside `{site}`",
                   helps=("move the row out of its `at`",))  # fmt: skip
        if self.rank < 1 or self.block < 8 or self.block % 8:
            refuse("S304", "a rank is 1 or more, a block a multiple of 8 elements",
                   helps=("leave them out: `rank=4`, `block=256`",))  # fmt: skip
        if plan.compression is not None:
            refuse("S509", "gradients are compressed already", helps=("drop one of the two rows",))
        if plan.scaled is not None:
            refuse("S894", "gradients of a scaled loss are not compressed",
                   notes=("an error that is kept for the next step would be of another scale then,"
                          " and one infinite gradient would stay in it",),
                   helps=("compute in `cast(bf16)`, which needs no scale", "or drop this row"),
                   )  # fmt: skip
        whole = {a for r in plan.replicas if r.stage == 0 for a in plan.mesh.fold(r.axes)}
        for axis in plan.mesh.fold(self.over):
            if axis not in whole:
                refuse("S417", f"over `{axis}` no whole gradients are summed",
                       notes=("what `zero` slices is reduced slice by slice inside of backward",),
                       helps=(f"copy over it, above: `zero(stage=0, over={axis})`",))  # fmt: skip

    def effect(self, site: Site, plan: Plan) -> Plan:
        """Note it."""
        axes = tuple(map(str, self.over))
        made = Compression(axes, self.how, self.rank, self.block, self.error_feedback)
        return replace(plan, compression=made)

    def apply(self, site: Site, build: Any) -> None:
        """Nothing of its own: `build` makes the sums of the plan."""
