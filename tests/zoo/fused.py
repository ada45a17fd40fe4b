"""Injected bugs: fused regions, generated kernels, and replaced modules."""

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
    """The separately added bias gets no gradient."""

    def called(self: Any, inner: Any, x: Tensor) -> Tensor:
        return PRODUCTS_BY_KIND[self.kind](self.module, x, False) + self.module.bias.detach()

    patch.setattr(DecomposedBias, "__call__", called)


@bug("F51", "decompose", REDUCTION, "decomposed")
def bias_twice(patch: Patch, site: Site) -> None:
    """The bias is added twice."""

    def called(self: Any, inner: Any, x: Tensor) -> Tensor:
        return PRODUCTS_BY_KIND[self.kind](self.module, x, True) + self.module.bias

    patch.setattr(DecomposedBias, "__call__", called)


@bug("F52", "fuse", ARGUMENT, "patterned")
def arguments_in_another_order(patch: Patch, site: Site) -> None:
    """A region gets its arguments in the wrong order."""
    patch.setattr(FusedRegion, "__call__", lambda self, *args: self.eager(*args[::-1]))


@bug("F53", "fuse", FREEZE, "patterned")
def masks_of_the_first_call(patch: Patch, site: Site) -> None:
    """A region reuses the dropout mask of its first call."""
    first_masks: dict[Any, Tensor] = {}

    def called(self: Any, *args: Any) -> Any:
        *inputs, mask = args
        return self.eager(*inputs, first_masks.setdefault((self, mask.shape), mask))

    patch.setattr(FusedRegion, "__call__", called)


@bug("F54", "fuse", SLICE, "rowwise")
def last_column_left_out(patch: Patch, site: Site) -> None:
    """A generated kernel's sums along rows leave out the last column."""
    original = launch._Run._made

    def made(self: Any, value: Any, *args: Any) -> Tensor:
        if value.kind == "row":
            return self.of(value.operands[0])[:, :-1].sum(1, keepdim=True)
        return original(self, value, *args)

    patch.setattr(launch._Run, "_made", made)


@bug("F55", "fuse", REDUCTION, "rowwise")
def last_program_left_out(patch: Patch, site: Site) -> None:
    """The gradient of a weight lacks the sum of the last kernel program."""
    original = launch._Run.summed

    def summed(self: Any, output: Any, *args: Any) -> Tensor:
        (value,) = output.value.operands
        last = self.of(value)[-1:].sum(0).to(output.dtype).reshape(output.shape)
        return original(self, output, *args) - last

    patch.setattr(launch._Run, "summed", summed)


@bug("F56", "replace", SLICE, "replaced")
def parts_joined_in_another_order(patch: Patch, site: Site) -> None:
    """The two halves of a concatenated parameter are swapped."""
    patch.setattr(replaced_module, "_concatenate", lambda parts: torch.cat(parts[::-1]))


@bug("F57", "replace", DETACH, "replaced")
def part_without_gradient(patch: Patch, site: Site) -> None:
    """The second half of a concatenated parameter gets no gradient."""
    patch.setattr(
        replaced_module,
        "_concatenate",
        lambda parts: torch.cat([parts[0], *(p.detach() for p in parts[1:])]),
    )


def _replace_compile(patch: Patch, make_region: Callable[[Any], Any]) -> None:
    """Replace compilation: `make_region(inner)` is called once for each region."""
    patch.setattr(fuse, "_compile", lambda inner, *args: make_region(inner))


@bug(
    "F58",
    "fuse",
    FREEZE,
    "compiled",
    planning=True,
    here="in a proof regions run as they stand: it is in the compiled one",
)
def mask_baked_in(patch: Patch, site: Site) -> None:
    """A compiled region keeps using the mask of its first call."""

    def made(inner: Any) -> Any:
        first_masks: dict[Any, Tensor] = {}
        return lambda x, keep: inner(x, first_masks.setdefault(keep.shape, keep))

    _replace_compile(patch, made)


@bug("F59", "fuse", FREEZE, "compiled", planning=True)
def rows_baked_in(patch: Patch, site: Site) -> None:
    """A compiled region assumes the number of rows of its first call."""

    def made(inner: Any) -> Any:
        rows: list[int] = []

        def called(x: Tensor, keep: Tensor) -> Tensor:
            rows.append(len(x))
            return inner(x, keep) * (rows[0] / len(x))

        return called

    _replace_compile(patch, made)


@bug("F60", "fuse", DETACH, "compiled", planning=True)
def input_of_region_detached(patch: Patch, site: Site) -> None:
    """A compiled region returns no gradient for its input."""
    _replace_compile(patch, lambda inner: lambda x, keep: inner(x.detach(), keep))


@bug("F61", "fuse", DETACH, "compiled", planning=True)
def region_without_history(patch: Patch, site: Site) -> None:
    """A compiled region returns no gradients at all."""

    def made(inner: Any) -> Any:
        return torch.no_grad()(lambda *args: inner(*args))

    _replace_compile(patch, made)
