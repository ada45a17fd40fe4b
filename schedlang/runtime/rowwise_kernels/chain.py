"""A chain of pointwise operators and row reductions: its operators, and which dims are rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, TypeAlias

import torch
from torch import fx

# -- roles of dims ---------------------------------------------------------------------------------
# All values of a chain lie in one grid, the shape of its largest tensor.  The role of a dim are
# the dims of the grid that it runs along, counted from the last (-1, the column): none where its
# size is 1, several where a view has joined them.  So a row of N numbers is never taken for N
# rows.


Roles: TypeAlias = tuple[tuple[int, ...], ...]


class NotRowwise(Exception):
    """Raised for a graph that cannot be computed row by row; the text says why."""


@dataclass(frozen=True)
class Grid:
    """The shape that all values are broadcast to."""

    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        """How many there are."""
        return prod(self.shape[:-1])

    @property
    def size(self) -> int:
        """Elements of a row."""
        return self.shape[-1]

    @property
    def leading(self) -> frozenset[int]:
        """The dims that count rows."""
        return frozenset(d for d in range(-len(self.shape), -1) if self.shape[d] > 1)

    def of(self, shape: Sequence[int], what: str) -> Roles:
        """The roles in a tensor that is given, as torch broadcasts it."""
        found = []
        for place, size in enumerate(shape):
            dim = place - len(shape)
            if size != 1 and (-dim > len(self.shape) or self.shape[dim] != size):
                raise NotRowwise(
                    f"{what} of shape {list(shape)} does not lie along rows of {list(self.shape)}"
                )
            found.append((dim,) if size != 1 else ())
        return tuple(found)

    def parts(self, roles: Roles, what: str) -> tuple[bool, bool]:
        """(whether a value differs from row to row, and from column to column)."""
        dims = {dim for role in roles for dim in role}
        leading = dims - {-1}
        if leading and leading != self.leading:
            raise NotRowwise(f"{what} is broadcast over some of the leading dims only")
        return bool(leading), -1 in dims

    def together(self, several: Sequence[Roles], what: str) -> Roles:
        """The roles of a pointwise operator's result."""
        length = max((len(roles) for roles in several), default=0)
        found: list[tuple[int, ...]] = []
        for place in range(-length, 0):
            said = {roles[place] for roles in several if -place <= len(roles)} - {()}
            if len(said) > 1:
                raise NotRowwise(f"{what} merges rows with columns")
            found.append(said.pop() if said else ())
        return tuple(found)

    def viewed(self, roles: Roles, shape: Sequence[int], what: str) -> Roles:
        """The roles after a view."""
        dims = [dim for role in roles for dim in role]
        found: list[tuple[int, ...]] = []
        for size in shape:
            taken: list[int] = []
            while prod(self.shape[d] for d in taken) < size and dims:
                taken.append(dims.pop(0))
            if prod(self.shape[d] for d in taken) != size:
                raise NotRowwise(f"{what} moves elements between rows")
            found.append(tuple(taken))
        return tuple(found)

    def expanded(self, roles: Roles, shape: Sequence[int], what: str) -> Roles:
        """The roles after `expand`."""
        old = ((),) * (len(shape) - len(roles)) + roles
        found: list[tuple[int, ...]] = []
        for place, (role, size) in enumerate(zip(old, shape, strict=True)):
            dim = place - len(shape)
            fits = -dim <= len(self.shape) and self.shape[dim] == size
            if not role and size != 1 and not fits:
                raise NotRowwise(f"{what} broadcasts to a shape that is not that of the rows")
            found.append(role if role or size == 1 else (dim,))
        dims = [dim for role in found for dim in role]
        if dims != sorted(set(dims)):
            raise NotRowwise(f"{what} broadcasts rows along rows")
        return tuple(found)


# -- operators -------------------------------------------------------------------------------------


# functions that Triton lacks: near zero their formulas lose digits; tanh has a series there, and
# for the others, after Kahan, the rounding of 1 + x, and of exp(x), is taken out again
HELPERS: Mapping[str, str] = {
    "tanh": """    square = x * x
    series = 0.05396825397 - square * 0.02186948854
    series = x * (1.0 - square * (0.33333333333 - square * (0.13333333333 - square * series)))
    return tl.where(tl.abs(x) < 0.2, series, 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x)))
""",
    "log1p": """    more = 1.0 + x
    return tl.where(more == 1.0, x, tl.log(more) * (x / (more - 1.0)))
""",
    "expm1": """    value = tl.exp(x)
    near = (value - 1.0) * (x / tl.log(value))
    far = (x < -16.0) | (x > 16.0)
    return tl.where(value == 1.0, x, tl.where(far, value - 1.0, near))
""",
}
# what is not a number stays so, as in torch
_LARGER = "tl.where(({0} != {0}) | ({0} > {1}), {0}, {1})"
_SMALLER = "tl.where(({0} != {0}) | ({0} < {1}), {0}, {1})"

POINTWISE: Mapping[str, str] = {
    "aten.add.Tensor": "{0} + {1}",
    "aten.add.Scalar": "{0} + {1}",
    "aten.sub.Tensor": "{0} - {1}",
    "aten.sub.Scalar": "{0} - {1}",
    "aten.rsub.Scalar": "{1} - {0}",
    "aten.mul.Tensor": "{0} * {1}",
    "aten.mul.Scalar": "{0} * {1}",
    "aten.div.Tensor": "{0} / {1}",
    "aten.div.Scalar": "{0} / {1}",
    "prims.fma.default": "{0} * {1} + {2}",
    "aten.addcmul.default": "{0} + {1} * {2}",
    "aten.neg.default": "-{0}",
    "aten.abs.default": "tl.abs({0})",
    "aten.exp.default": "tl.exp({0})",
    "aten.exp2.default": "tl.exp2({0})",
    "aten.expm1.default": "expm1({0})",
    "aten.log.default": "tl.log({0})",
    "aten.log2.default": "tl.log2({0})",
    "aten.log1p.default": "log1p({0})",
    "aten.sqrt.default": "tl.sqrt({0})",
    "aten.rsqrt.default": "tl.rsqrt({0})",
    "aten.sin.default": "tl.sin({0})",
    "aten.cos.default": "tl.cos({0})",
    "aten.tanh.default": "tanh({0})",
    "aten.erf.default": "tl.erf({0})",
    "aten.sigmoid.default": "1.0 / (1.0 + tl.exp(-{0}))",
    "aten.reciprocal.default": "1.0 / {0}",
    "aten.square.default": "{0} * {0}",
    "aten.relu.default": _LARGER.replace("{1}", "0.0"),
    "aten.maximum.default": _LARGER,
    "aten.minimum.default": _SMALLER,
    "aten.clamp_min.default": _LARGER,
    "aten.clamp_max.default": _SMALLER,
    "aten.where.self": "tl.where({0}, {1}, {2})",
    "aten.sign.default": "tl.where({0} > 0.0, 1.0, tl.where({0} < 0.0, -1.0, {0}))",
    "aten.floor.default": "tl.floor({0})",
    "aten.ceil.default": "tl.ceil({0})",
    **{
        f"aten.{name}.{kind}": f"{{0}} {sign} {{1}}"
        for name, sign in (
            ("gt", ">"),
            ("ge", ">="),
            ("lt", "<"),
            ("le", "<="),
            ("eq", "=="),
            ("ne", "!="),
        )
        for kind in ("Tensor", "Scalar")
    },
    "aten.logical_and.default": "{0} & {1}",
    "aten.bitwise_and.Tensor": "{0} & {1}",
    "aten.logical_or.default": "{0} | {1}",
    "aten.bitwise_or.Tensor": "{0} | {1}",
    "aten.logical_not.default": "{0} == 0",
    "aten.bitwise_not.default": "{0} == 0",
    "aten.isnan.default": "{0} != {0}",
}

# the same values under another shape, or another name
SAME = frozenset(
    f"aten.{name}"
    for name in (
        "view.default",
        "reshape.default",
        "_unsafe_view.default",
        "unsqueeze.default",
        "squeeze.default",
        "squeeze.dim",
        "squeeze.dims",
        "expand.default",
        "alias.default",
        "clone.default",
        "detach.default",
        "_reshape_alias.default",
        "lift_fresh_copy.default",
    )
)
CASTS = frozenset(("prims.convert_element_type.default", "aten._to_copy.default"))
FULL = frozenset(
    f"aten.{name}.default"
    for name in (
        "full",
        "full_like",
        "zeros_like",
        "ones_like",
        "zeros",
        "ones",
        "scalar_tensor",
        "new_zeros",
        "new_full",
    )
)
IDLE = frozenset(("aten._assert_tensor_metadata.default",))
POWERS: Mapping[float, str] = {
    -2.0: "1.0 / ({0} * {0})",
    -1.0: "1.0 / {0}",
    -0.5: "tl.rsqrt({0})",
    0.0: "1.0",
    0.5: "tl.sqrt({0})",
    1.0: "{0}",
    2.0: "{0} * {0}",
    3.0: "{0} * {0} * {0}",
    4.0: "({0} * {0}) * ({0} * {0})",
}
SUMS = frozenset(("aten.sum.dim_IntList", "aten.sum.default", "aten.mean.dim", "aten.mean.default"))
EXTREMES: Mapping[str, str] = {"aten.amax.default": "max", "aten.amin.default": "min"}
VARIANCES = frozenset(("aten.var_mean.correction", "aten.var.correction"))


def value_of(target: str, args: tuple[Any, ...]) -> float:
    """The number that a tensor of one number holds."""
    name = target.split(".")[1]
    if name.startswith("zeros") or name == "new_zeros":
        return 0.0
    if name.startswith("ones"):
        return 1.0
    return float(args[0] if name == "scalar_tensor" else args[2 if name == "new_full" else 1])


# -- the chain -------------------------------------------------------------------------------------


How = Literal["given", "point", "row", "column"]


@dataclass(frozen=True, eq=False)  # two are equal if they are one
class Value:
    """One value of a chain.

    how    `given`: a tensor, number `place`; `point`: an expression of the operands; `row`: a
           reduction along each row (`text` is sum, max or min); `column`: a sum over all rows
    rows   whether it differs from row to row
    cols   whether it differs from column to column
    """

    name: str
    how: How
    text: str
    operands: tuple[Value, ...]
    rows: bool
    cols: bool
    dtype: torch.dtype
    place: int = -1


@dataclass(frozen=True)
class Stored:
    """A result that the kernel writes."""

    value: Value
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class From:
    """The source of an output of the graph: `given`, `stored` or `tail`, number `place`."""

    where: Literal["given", "stored", "tail", "none"]
    place: int = 0


@dataclass(frozen=True)
class Chain:
    """A graph as one kernel, and what torch does after it with the few sums over rows.

    tail   a graph of (the sums in order, given tensors numbered `wanted`); it is a few operators
           on tensors of one row: casts, sums of gradients
    """

    grid: Grid
    given: tuple[Value, ...]
    stored: tuple[Stored, ...]
    sums: tuple[Stored, ...]
    outputs: tuple[From, ...]
    tail: fx.Graph | None = field(default=None, repr=False)
    wanted: tuple[int, ...] = ()
