"""verify: compare with the original at this point; a marker that `verify` answers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import field, replace
from typing import TYPE_CHECKING, Literal

from schedlang.ir.annotations import Check
from schedlang.ir.features import Checking
from schedlang.ir.primitive import refuse
from schedlang.language.kinds import Many

if TYPE_CHECKING:
    from schedlang.ir.model import Site
    from schedlang.ir.plan import Plan

What = Literal["forward", "backward", "train", "loss", "exact"]


class verify(Checking):
    """Ask `schedlang verify` for more than it always compares; the program does not change.

    `forward` (outputs, loss), `backward` (gradients) and `train` (parameters) are always compared;
    these words select what the other arguments apply to; by default they apply to all.

    rtol    the bound of relative errors in the working dtype, instead of the rule of rounding; the
            comparison in float64 has its own bound, which does not change
    steps   number of optimizer steps to compare, if more than three
    within  with `loss`: over `steps` steps of AdamW in the working dtype the loss must stay within
            this fraction of the original's loss
    exact   the rows of this step must be equal bit by bit; refused if they cannot be
    mode    `eval`: also train in eval mode, without dropout and with fixed statistics
    """

    what: Many[What] = ()
    rtol: float | None = field(default=None, kw_only=True)
    steps: int | None = field(default=None, kw_only=True)
    within: float | None = field(default=None, kw_only=True)
    mode: Literal["train", "eval"] = field(default="train", kw_only=True)

    example = "verify(forward, backward)"
    takes = "model"

    def check(self, site: Site, plan: Plan) -> None:
        """Refuse nothing: any plan may be verified."""

    def agree(self, axes: Collection[str]) -> None:
        """Refuse bounds and counts out of range, and arguments that conflict."""
        for name, value in (("rtol", self.rtol), ("within", self.within), ("steps", self.steps)):
            if value is not None and value <= 0:
                refuse("S304", f"`{name}` of `verify` must be above 0", f"this is {value}")
        if self.rtol is not None and self.rtol >= 1:
            refuse("S304", "`rtol` must be below 1", f"this is {self.rtol}")
        if self.rtol is not None and "exact" in self.what:
            refuse("S304", "`exact` asks for equal bits, and `rtol` allows a difference")
        if self.steps is not None and self.what and not {"train", "loss"} & set(self.what):
            refuse("S305", "`steps` needs `train`", helps=["write `verify(train, steps=5)`"])
        if self.within is not None and "loss" not in self.what:
            refuse("S305", "`within` needs `loss`", helps=["write `verify(loss, within=0.01)`"])

    def transform(self, site: Site, plan: Plan) -> Plan:
        """Add the check to the plan; a proof reads it."""
        new_check = Check(
            self.what, self.rtol, self.steps, self.within, self.mode == "eval", row=plan.next_row
        )
        return replace(plan, checks=(*plan.checks, new_check))
