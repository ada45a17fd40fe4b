"""Which dim of a result each axis splits, where several axes have the same size."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from schedlang.placement import EVEN
from schedlang.runtime import nests as pytree
from schedlang.runtime.following.notes import Tag
from schedlang.runtime.recording.torch_calls import name_of

Shape = tuple[int, ...]
RESHAPES = {"view", "reshape", "flatten", "unflatten", "view_as", "reshape_as"}


def fitting(
    axes: Sequence[str], dims: Sequence[int], fits: Callable[[str, int], bool]
) -> list[dict[str, int]]:
    """All ways to give each axis one of the dims whose sizes differ from the original's."""
    return [
        dict(zip(axes, order))
        for order in itertools.permutations(dims)
        if all(fits(axis, d) for axis, d in zip(axes, order))
    ]


def reshaped(before: Shape, tag: Tag, after: Shape, dims: Sequence[int]) -> int | None:
    """The dim of a reshape's result that holds the slowest parts of a split dim."""
    outer = math.prod(before[: tag.dim])
    for outer_now in (outer, outer * len(tag.blocks)):
        found = [d for d in dims if math.prod(after[:d]) == outer_now]
        if len(found) == 1:
            return found[0]
    return None


@dataclass(frozen=True)
class Given:
    """A call: its function, what it was given, and the whole shapes of the tensors in that."""

    func: Callable[..., Any]
    args: Any
    kwargs: Any
    shapes: Sequence[Shape]

    @property
    def name(self) -> str:
        """The name of the function."""
        return name_of(self.func)


def told_apart(
    ways: list[dict[str, int]], call: Given, tags: Mapping[str, Sequence[Tag | None]],
    sizes: Mapping[str, int], whole: Shape, place: int,
) -> list[dict[str, int]]:  # fmt: skip
    """Those of several ways that hold for each axis when it is followed through the call alone.

    `tags` are the splits of the tensors that the call is given; `whole` the original's result.
    """
    for axis in ways[0]:
        if len(ways) > 1:
            dims = sorted({way[axis] for way in ways})
            dim = _followed(call, tags[axis], sizes[axis], whole, dims, place)
            ways = [way for way in ways if dim is None or way[axis] == dim]
    return ways


def _followed(
    call: Given, tags: Sequence[Tag | None], size: int, whole: Shape, dims: Sequence[int],
    place: int,
) -> int | None:  # fmt: skip
    """The dim of the result that one axis splits, as far as this can be told."""
    found = next(((tag, shape) for tag, shape in zip(tags, call.shapes) if tag is not None), None)
    if found is None:
        return None
    tag, before = found
    if call.name in RESHAPES:
        return reshaped(before, tag, whole, dims)
    if tag.uneven != EVEN:
        return None
    seen = alone(call.func, call.args, call.kwargs, call.shapes, tags, size, place)
    if seen is None or len(seen) != len(whole):
        return tag.dim if len(before) == len(whole) and tag.dim in dims else None
    fits = [d for d in dims if seen[d] * size == whole[d]]
    return fits[0] if len(fits) == 1 else None


def alone(
    func: Callable[..., Any], args: Any, kwargs: Any, shapes: Sequence[Shape],
    tags: Sequence[Tag | None], size: int, place: int,
) -> Shape | None:  # fmt: skip
    """The shape of a result where one axis alone splits what goes in; None where it cannot run.

    `shapes` are the whole shapes of the tensors among the arguments, `tags` their splits.
    """
    turn = itertools.count()

    def given(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        at = next(turn)
        shape, tag = list(shapes[at]), tags[at]
        if tag is not None:
            shape[tag.dim] //= size
        return torch.empty(shape, dtype=value.dtype, device="meta")

    with torch._C.DisableTorchFunction(), torch.no_grad():
        args, kwargs = pytree.tree_map(given, (args, kwargs))
        try:
            out = func(*args, **kwargs)
        except (RuntimeError, ValueError, IndexError, TypeError):
            return None  # its numbers are those of parts along all axes
    found = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
    return tuple(found[place].shape)
