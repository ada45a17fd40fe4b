"""Bugs of regions, of generated kernels, and of modules that take the place of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from schedlang.runtime.fusion import fuse
from schedlang.runtime.fusion.decomposed_bias import PRODUCTS_BY_KIND, DecomposedBias
from schedlang.runtime.fusion.rewrite import FusedRegion
from schedlang.runtime.kernel_injection import replaced_module
from schedlang.runtime.rowwise_kernels import launch
from tests.zoo.bug import ARGUMENT, DETACH, FREEZE, REDUCTION, SLICE, Patch, Site, bug


@bug("F50", "decompose", DETACH, "decomposed")
def bias_without_history(patch: Patch, site: Site) -> None:
    """The bias that is added apart gets no gradient."""

    def called(self: Any, inner: Any, x: Tensor) -> Tensor:
        return PRODUCTS_BY_KIND[self.kind](self.module, x, False) + self.module.bias.detach()

    patch.setattr(DecomposedBias, "__call__", called)


@bug("F51", "decompose", REDUCTION, "decomposed")
def bias_twice(patch: Patch, site: Site) -> None:
    """The product adds its bias, too."""

    def called(self: Any, inner: Any, x: Tensor) -> Tensor:
        return PRODUCTS_BY_KIND[self.kind](self.module, x, True) + self.module.bias

    patch.setattr(DecomposedBias, "__call__", called)


@bug("F52", "fuse", ARGUMENT, "patterned")
def arguments_in_another_order(patch: Patch, site: Site) -> None:
    """A region is given its arguments in another order than it was made for."""
    patch.setattr(FusedRegion, "__call__", lambda self, *given: self.eager(*given[::-1]))


@bug("F53", "fuse", FREEZE, "patterned")
def masks_of_the_first_call(patch: Patch, site: Site) -> None:
    """The mask of dropout in a region is that of its first call."""
    kept: dict[Any, Tensor] = {}

    def called(self: Any, *given: Any) -> Any:
        *rest, mask = given
        return self.eager(*rest, kept.setdefault((self, mask.shape), mask))

    patch.setattr(FusedRegion, "__call__", called)


@bug("F54", "fuse", SLICE, "rowwise")
def last_column_left_out(patch: Patch, site: Site) -> None:
    """A generated kernel's sums along rows leave out the last column."""
    plain = launch._Run._made

    def made(self: Any, value: Any, *given: Any) -> Tensor:
        if value.kind == "row":
            return self.of(value.operands[0])[:, :-1].sum(1, keepdim=True)
        return plain(self, value, *given)

    patch.setattr(launch._Run, "_made", made)


@bug("F55", "fuse", REDUCTION, "rowwise")
def last_program_left_out(patch: Patch, site: Site) -> None:
    """The gradient of a weight leaves out what the last program has summed."""
    plain = launch._Run.summed

    def summed(self: Any, one: Any, *given: Any) -> Tensor:
        (value,) = one.value.operands
        last = self.of(value)[-1:].sum(0).to(one.dtype).reshape(one.shape)
        return plain(self, one, *given) - last

    patch.setattr(launch._Run, "summed", summed)


@bug("F56", "replace", SLICE, "replaced")
def parts_joined_in_another_order(patch: Patch, site: Site) -> None:
    """A parameter that is made of two has them the other way round."""
    patch.setattr(replaced_module, "_concatenate", lambda parts: torch.cat(parts[::-1]))


@bug("F57", "replace", DETACH, "replaced")
def part_without_gradient(patch: Patch, site: Site) -> None:
    """Of a parameter that is made of two the second gets no gradient."""
    patch.setattr(
        replaced_module,
        "_concatenate",
        lambda parts: torch.cat([parts[0], *(p.detach() for p in parts[1:])]),
    )


def _instead(patch: Patch, made: Callable[[Any], Any]) -> None:
    """What takes the place of a compiled region: `made(inner)` is called once for each."""
    patch.setattr(fuse, "_compile", lambda inner, *given: made(inner))


@bug(
    "F58",
    "fuse",
    FREEZE,
    "compiled",
    planning=True,
    here="in a proof regions run as they stand: it is in the compiled one",
)
def mask_baked_in(patch: Patch, site: Site) -> None:
    """A compiled region goes on with the mask of its first call."""

    def made(inner: Any) -> Any:
        kept: dict[Any, Tensor] = {}
        return lambda x, keep: inner(x, kept.setdefault(keep.shape, keep))

    _instead(patch, made)


@bug("F59", "fuse", FREEZE, "compiled", planning=True)
def rows_baked_in(patch: Patch, site: Site) -> None:
    """A compiled region takes every call for one of as many rows as the first had."""

    def made(inner: Any) -> Any:
        rows: list[int] = []

        def called(x: Tensor, keep: Tensor) -> Tensor:
            rows.append(len(x))
            return inner(x, keep) * (rows[0] / len(x))

        return called

    _instead(patch, made)


@bug("F60", "fuse", DETACH, "compiled", planning=True)
def input_of_region_detached(patch: Patch, site: Site) -> None:
    """A compiled region gives back no gradient of what it was given."""
    _instead(patch, lambda inner: lambda x, keep: inner(x.detach(), keep))


@bug("F61", "fuse", DETACH, "compiled", planning=True)
def region_without_history(patch: Patch, site: Site) -> None:
    """A compiled region gives back no gradient at all."""

    def made(inner: Any) -> Any:
        return torch.no_grad()(lambda *given: inner(*given))

    _instead(patch, made)
