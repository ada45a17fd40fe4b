"""A module, or what a pattern matched in it, as generated kernels: what stands around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from schedlang.diagnostic import Diagnostic, Refusal
from schedlang.runtime.float64 import Float64
from schedlang.runtime.rowwise import operator
from schedlang.runtime.rowwise.graphs import Sort, sorts_of
from schedlang.runtime.rowwise.roles import NotRowwise


@dataclass(eq=False)
class Generated:
    """A function of tensors that runs as one kernel forward and one backward.

    Numbers among the arguments are constants of one function each; what has no rows (a scalar, an
    empty tensor) is refused with the operator's name.
    """

    plain: Callable[..., Any]
    source: str
    rounding: str
    wide: bool = False  # casts to a lower float are casts to float64: for a proof
    names: dict[tuple[Any, ...], tuple[str, int]] = field(default_factory=dict)

    def __call__(self, *given: Any) -> Any:
        """The results: one tensor, or a tuple of them, as the function gives."""
        tensors = [t for t in given if isinstance(t, Tensor)]
        numbers = tuple((n, t) for n, t in enumerate(given) if not isinstance(t, Tensor))
        name, results = self._known(numbers, given)
        try:
            found = operator.apply(name, tensors, max(results, 1))
        except NotRowwise as error:
            raise refusal(str(error)) from error
        return tuple(found) if results else found[0]

    def _known(self, numbers: tuple[Any, ...], given: tuple[Any, ...]) -> tuple[str, int]:
        """The name of the function with these constants, and how many results it has; 0: one."""
        key = (numbers, len(given))
        if key not in self.names:
            fixed, count = dict(numbers), len(given)

            def function(*tensors: Tensor) -> Any:
                rest = iter(tensors)
                all_ = (fixed[n] if n in fixed else next(rest) for n in range(count))
                with Float64() if self.wide else nullcontext():
                    return self.plain(*all_)

            said = f"{self.source}\n{self.rounding}\n{self.wide}\n{key!r}"
            name = f"region_{sha256(said.encode()).hexdigest()[:12]}"
            operator.declare(name, function, self.rounding)
            with torch.no_grad():
                hollow = [t.detach().to("meta") if isinstance(t, Tensor) else t for t in given]
                made = self.plain(*hollow)
            self.names[key] = name, len(made) if isinstance(made, tuple) else 0
        return self.names[key]


def refusal(why: str) -> Refusal:
    """S887: no row-wise chain."""
    return Refusal(
        Diagnostic("S887", "this is not a chain of pointwise operators and row reductions",
                   notes=(why,), helps=("leave it to inductor: drop `backend=rowwise`",))
    )  # fmt: skip


def as_function(
    plain: Callable[..., Any], given: Sequence[Any]
) -> tuple[Callable[..., Any], tuple[Sort, ...]]:
    """A function of the tensors among what is given, and what these are; the rest is constant.

    Tensors of the meta device are taken for those of a CPU.
    """
    tensors = [t for t in given if isinstance(t, Tensor)]

    def function(*values: Tensor) -> Any:
        rest = iter(values)
        return plain(*(next(rest) if isinstance(t, Tensor) else t for t in given))

    sorts = sorts_of(tensors, [t.requires_grad for t in tensors])
    return function, tuple(replace(s, device="cpu") if s.device == "meta" else s for s in sorts)


def pair_for(plain: Callable[..., Any], given: Sequence[Any], rounding: str) -> operator.Pair:
    """The kernels of a function for what it is given, tensors and constants; S887."""
    function, sorts = as_function(plain, given)
    try:
        return operator.pair_of(function, sorts, rounding)
    except NotRowwise as error:
        raise refusal(str(error)) from error
