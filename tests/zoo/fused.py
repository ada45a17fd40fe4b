"""Bugs of regions, of generated kernels, and of modules that take the place of others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from schedlang.runtime.regions.decomposed import COMPUTES, Decomposed
from schedlang.runtime.regions.rewrite import Region
from schedlang.runtime.replacing import replaced
from schedlang.runtime.rowwise import evaluate
from tests.zoo.bug import Operator, Patch, Site, bug


@bug("F50", "decompose", Operator.DETACH, "decomposed")
def bias_without_history(patch: Patch, site: Site) -> None:
    """The bias that is added apart gets no gradient."""

    def called(self: Any, inner: Any, x: Tensor) -> Tensor:
        return COMPUTES[self.kind](self.module, x, False) + self.module.bias.detach()

    patch.setattr(Decomposed, "__call__", called)


@bug("F51", "decompose", Operator.REDUCTION, "decomposed")
def bias_twice(patch: Patch, site: Site) -> None:
    """The product adds its bias, too."""

    def called(self: Any, inner: Any, x: Tensor) -> Tensor:
        return COMPUTES[self.kind](self.module, x, True) + self.module.bias

    patch.setattr(Decomposed, "__call__", called)


@bug("F52", "fuse", Operator.ARGUMENT, "patterned")
def arguments_in_another_order(patch: Patch, site: Site) -> None:
    """A region is given its arguments in another order than it was made for."""
    patch.setattr(Region, "__call__", lambda self, *given: self.plain(*given[::-1]))


@bug("F53", "fuse", Operator.FREEZE, "patterned")
def masks_of_the_first_call(patch: Patch, site: Site) -> None:
    """The mask of dropout in a region is that of its first call."""
    kept: dict[Any, Tensor] = {}

    def called(self: Any, *given: Any) -> Any:
        *rest, mask = given
        return self.plain(*rest, kept.setdefault((self, mask.shape), mask))

    patch.setattr(Region, "__call__", called)


@bug("F54", "fuse", Operator.SLICE, "rowwise")
def last_column_left_out(patch: Patch, site: Site) -> None:
    """A generated kernel's sums along rows leave out the last column."""
    plain = evaluate._Run._made

    def made(self: Any, value: Any, *given: Any) -> Tensor:
        if value.how == "row":
            return self.of(value.operands[0])[:, :-1].sum(1, keepdim=True)
        return plain(self, value, *given)

    patch.setattr(evaluate._Run, "_made", made)


@bug("F55", "fuse", Operator.REDUCTION, "rowwise")
def last_program_left_out(patch: Patch, site: Site) -> None:
    """The gradient of a weight leaves out what the last program has summed."""
    plain = evaluate._Run.summed

    def summed(self: Any, one: Any, *given: Any) -> Tensor:
        (value,) = one.value.operands
        last = self.of(value)[-1:].sum(0).to(one.dtype).reshape(one.shape)
        return plain(self, one, *given) - last

    patch.setattr(evaluate._Run, "summed", summed)


@bug("F56", "replace", Operator.SLICE, "replaced")
def parts_joined_in_another_order(patch: Patch, site: Site) -> None:
    """A parameter that is made of two has them the other way round."""
    patch.setattr(replaced, "_joined", lambda parts: torch.cat(parts[::-1]))


@bug("F57", "replace", Operator.DETACH, "replaced")
def part_without_gradient(patch: Patch, site: Site) -> None:
    """Of a parameter that is made of two the second gets no gradient."""
    patch.setattr(
        replaced, "_joined", lambda parts: torch.cat([parts[0], *(p.detach() for p in parts[1:])])
    )
