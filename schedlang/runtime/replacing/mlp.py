"""A gated MLP whose middle is one kernel: its projections stay modules and are called as ever."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from schedlang.kernels.gated import Case, gated, packed, reference
from schedlang.runtime.forward import the_input


@dataclass(frozen=True)
class Gated:
    """down(act(gate(x)) * up(x)); one projection for both is `gate`, and `up` then None.

    `size` is the width of the middle; `gate_first` the order in a packed one.  `between` is a child
    that the product goes through before down: a dropout, or a norm.
    """

    gate: str
    up: str | None
    down: str
    act: str
    size: int
    gate_first: bool = True
    between: str | None = None

    def cases(self) -> list[Case]:
        """Runs of the kernel in the form that was found."""
        pack = "" if self.up else "gate first" if self.gate_first else "up first"
        size = min(self.size, 4096)
        return [
            Case((rows, size), dtype, self.act, pack)
            for dtype, rows in (("float32", 5), ("bfloat16", 5), ("float32", 1))
        ]


def computed(module: nn.Module, form: Gated, x: Tensor, kernel: bool = False) -> Tensor:
    """down(act(gate) * up) by the module's own projections."""
    first = module.get_submodule(form.gate)(x)
    second = None if form.up is None else module.get_submodule(form.up)(x)
    product = middle(first, second, form, kernel)
    if form.between is not None:
        product = module.get_submodule(form.between)(product)
    made: Tensor = module.get_submodule(form.down)(product)
    return made


def middle(first: Tensor, second: Tensor | None, form: Gated, kernel: bool = False) -> Tensor:
    """act(gate) * up, of the two or of what holds both."""
    if second is not None:
        return (gated if kernel else reference)(first, second, form.act)
    if kernel:
        return packed(first, form.act, form.gate_first)
    left, right = first.chunk(2, -1)
    gate, up = (left, right) if form.gate_first else (right, left)
    return reference(gate, up, form.act)


class GatedMlp:
    """The layer that computes a gated MLP from the module's own projections and one kernel."""

    kernel = "gated"

    def __init__(self, module: nn.Module, form: Gated) -> None:
        self.module, self.form = module, form

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
        """Compute for the one input; `inner` is not called."""
        return computed(self.module, self.form, the_input(self.module, args, kwargs), kernel=True)
