"""Do the parts that meet in a call meet as their wholes do?

Shapes cannot tell: two tensors of which each rank holds as many elements may lie on the ranks in
different orders, or be split along different dims of which each part has one element.  Calls that
bring several tensors together say which dims of them meet; those must lie alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.nn import functional as F

from schedlang.runtime.following.notes import Mismatch, Tag

if TYPE_CHECKING:
    from schedlang.runtime.following.follow import Step

ELEMENTWISE = {
    "add", "sub", "rsub", "mul", "div", "true_divide", "floor_divide", "remainder", "fmod", "pow",
    "maximum", "minimum", "fmax", "fmin", "atan2", "lerp", "addcmul", "addcdiv", "where",
    "masked_fill", "copy", "xlogy", "hypot", "logaddexp", "logaddexp2", "ldexp", "mse_loss",
    "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "logical_and", "logical_or",
    "logical_xor", "bitwise_and", "bitwise_or", "bitwise_xor", "multiply", "subtract", "divide",
    "radd", "rmul", "rdiv", "rpow",
}  # fmt: skip
JOINS = {"cat", "concat", "concatenate", "stack"}
PRODUCTS = {"matmul", "bmm", "mm", "mv", "dot"}


@dataclass(frozen=True)
class Met:
    """One tensor of a call: its split over an axis, and its whole shape."""

    place: int  # among the tensors of the call
    tag: Tag
    whole: tuple[int, ...]

    @property
    def size(self) -> int:
        """The size of the whole dim."""
        return self.whole[self.tag.dim]

    def held(self, ranks: int, rank: int) -> list[int]:
        """The indices of the dim that a rank holds, in its order; -1 for zeros."""
        found = self.tag.positions(self.size, ranks, rank)
        return [index if index < self.size else -1 for index in found]


@dataclass(frozen=True)
class Asked:
    """A call by its function, its name and what it is given."""

    func: Any
    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


def check_meeting(step: Step, axis: str) -> None:
    """Refuse parts that meet others than those that their wholes have beside them."""
    notes = [step.follower.note(tensor).tags.get(axis) for tensor in step.inputs]
    shapes = step.expected.inputs if step.expected is not None else ()
    met = [Met(k, tag, shape) for k, (tag, shape) in enumerate(zip(notes, shapes)) if tag]
    asked = Asked(step.func, step.name, step.args, step.kwargs)
    how = _apart(asked, met, step.follower.sizes[axis]) if len(met) > 1 else ""
    if how:
        raise Mismatch(
            step.frame, f"`{step.name}` gets tensors that are sharded over `{axis}` {how}",
            axis, (), step.follower.agreed,
            ("give the blocks of fused weights: `blocks=`",
             "gather one of them first: `output=R` on its row"),
        )  # fmt: skip


def _apart(call: Asked, met: Sequence[Met], ranks: int) -> str:
    """How tensors that are split over one axis do not meet as their wholes do; "" if they do."""
    dims = {_meaning(call, one) for one in met}
    if len(met) < 2 or None in dims:
        return ""
    if len(dims) > 1:
        return "along different dims"
    alike = all(_alike(met[0], other, ranks) for other in met[1:])
    return "" if alike else "in different orders"


def _meaning(call: Asked, one: Met) -> object:
    """What the split dim of a tensor is in a call: equal for dims that meet; None: not known."""
    behind = one.tag.dim - len(one.whole)  # counted from the last
    name = call.name.strip("_").removeprefix("i" if call.name.startswith("__i") else "")
    if call.func is F.scaled_dot_product_attention:
        names = (("query", "size"), ("key", "size"), ("key", "size"), ("query", "key"))
        return behind if behind < -2 or one.place > 3 else names[one.place][behind]
    if name in ELEMENTWISE:
        return behind
    if name in JOINS:
        dim = call.kwargs.get("dim", call.args[1] if len(call.args) > 1 else 0)
        joined = isinstance(dim, int) and name != "stack" and dim % len(one.whole) == one.tag.dim
        return None if joined else behind
    if name in PRODUCTS:
        return _factor(one.place, behind, len(one.whole))
    if name == "baddbmm":
        return _factor(one.place - 1, behind, 3) if one.place else (-3, "left", "right")[behind]
    if name == "linear":
        if one.place:
            return ("out", "in")[behind] if one.place == 1 else "out"
        return "in" if behind == -1 else behind
    return _letter(call, one) if name == "einsum" else None


def _factor(place: int, behind: int, ndim: int) -> object:
    """What a dim is in a product of matrices: of the batch, of the left or right, or summed."""
    if ndim == 1:
        return "sum"
    if behind < -2:
        return behind
    return (("left", "sum") if place == 0 else ("sum", "right"))[behind]


def _letter(call: Asked, one: Met) -> object:
    """The letter of a dim in an einsum."""
    if not call.args or not isinstance(call.args[0], str) or "." in call.args[0]:
        return None
    terms = call.args[0].replace(" ", "").split("->")[0].split(",")
    return terms[one.place][one.tag.dim] if one.place < len(terms) else None


def _alike(a: Met, b: Met, ranks: int) -> bool:
    """Does each rank hold the same indices of both, or of one the head of each group of heads?"""
    if (a.tag.blocks, a.tag.uneven) == (b.tag.blocks, b.tag.uneven):
        return True
    few, many = sorted((a, b), key=lambda one: one.size)
    if not few.size or many.size % few.size:
        return False
    times = many.size // few.size
    for rank in range(ranks):
        heads, members = few.held(ranks, rank), many.held(ranks, rank)
        if len(members) % len(heads):
            return False
        each = len(members) // len(heads)
        if any(heads[at // each] != index // times for at, index in enumerate(members)):
            return False
    return True
