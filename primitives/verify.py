"""verify: a mark in the plan that asks for the step above to be proven."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Any, Literal

from schedlang.kinds import Many
from schedlang.plan import Plan
from schedlang.primitive import Primitive, refuse

if TYPE_CHECKING:
    from schedlang.model import Site


class verify(Primitive):  # noqa: N801
    """Ask that the schedule up to here be compared with the original.

    Recorded while planning, run by the verb `verify` and by `schedlang.verify`, which always check
    everything: a row may add checks and never takes one away.  `rtol` touches the check in the
    working dtype, never float64.
    """

    what: Many[Literal["forward", "backward", "train", "exact"]] = ()
    steps: int = field(default=3, kw_only=True)
    mode: Literal["train", "eval"] = field(default="train", kw_only=True)
    rtol: float | None = field(default=None, kw_only=True)

    example = "verify(forward, backward)"
    reads = frozenset()
    writes = frozenset()
    takes = "model"

    def check(self, site: Site, plan: Plan) -> None:
        """Refuse numbers that mean nothing."""
        if self.steps < 1:
            refuse("S304", f"{self.steps} steps check nothing", helps=("use 1 or more",))
        if self.rtol is not None and not 0 < self.rtol < 1:
            refuse("S304", f"a tolerance of {self.rtol} means nothing", helps=("use a small number, as 2e-2",))

    def apply(self, site: Site, build: Any) -> None:
        """Nothing: a mark changes no module."""
