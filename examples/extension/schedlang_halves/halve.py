"""halve: compute a module on one part of the batch after the other."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from schedlang.ir.features import Rewrite
from schedlang.ir.model import Site
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import refuse


class halve(Rewrite):  # noqa: N801
    """Compute a module on parts of the batch, one after the other.

    before   y = f(x)
    after    y = cat(f(x[:n/2]), f(x[n/2:]))

    The module takes one tensor, gives one tensor, and treats every sample by itself.
    """

    parts: int = field(default=2, kw_only=True)

    example = "layers.*.mlp  halve()"
    gives_up = frozenset({"rounding"})

    def check(self, site: Site, plan: Plan) -> None:
        """Refuse a number of parts that changes nothing."""
        if self.parts < 2:
            refuse("S304", f"{self.parts} parts of a batch", helps=("use 2 or more",))

    def rewrite(self, module: Any) -> None:
        """Wrap the forward of the copy that is being built."""
        import torch

        forward = module.forward
        module.forward = lambda x: torch.cat([forward(part) for part in x.chunk(self.parts)])
