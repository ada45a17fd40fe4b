"""verify: compare with the original at this point; a marker that `verify` answers."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Any, Literal

from schedlang.kinds import Many
from schedlang.primitive import Primitive, refuse

if TYPE_CHECKING:
    from schedlang.model import Site
    from schedlang.plan import Plan

What = Literal["forward", "backward", "train", "loss", "exact"]


class verify(Primitive):
    """Ask for a comparison with the original; it changes nothing and runs under `verify` only.

    `forward` compares outputs and loss, `backward` all gradients, `train` parameters after `steps`
    optimizer steps, `loss` the loss curve within a share of the original's; `exact` asks for equal
    bits.  `rtol` is for the working dtype; the comparison in float64 has its own bound.
    """

    what: Many[What] = ()
    rtol: float | None = field(default=None, kw_only=True)
    steps: int | None = field(default=None, kw_only=True)
    within: float | None = field(default=None, kw_only=True)
    mode: Literal["train", "eval"] = field(default="train", kw_only=True)

    example = "verify(forward, backward)"
    takes = "model"

    def check(self, site: Site, plan: Plan) -> None:
        """Bounds and counts must be possible ones."""
        for name, value in (("rtol", self.rtol), ("within", self.within), ("steps", self.steps)):
            if value is not None and value <= 0:
                refuse("S304", f"`{name}` of `verify` is above zero", f"this is {value}")
        if self.within is not None and "loss" not in self.what:
            refuse("S305", "`within` bounds a loss", helps=["write `verify(loss, within=0.01)`"])

    def apply(self, site: Site, build: Any) -> None:
        """Nothing is built for it."""
