"""Calls that no rule is about: whether they give parts of their result for parts of their tensors.

The shapes of a call tell along which dim its result is split, not whether each rank computes there
what the whole has there: a sort, a sum from left to right or a write to one column keep every
shape.  Such a call is made with numbers, of whole tensors and of the parts that ranks have of them,
and both must agree.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from schedlang.ir import pytree
from schedlang.runtime.propagation.trace import Tag

if TYPE_CHECKING:
    from schedlang.runtime.propagation.follow import Compared

Shape = tuple[int, ...]
Tags = Sequence[Tag | None]  # of some tensors, along one axis
Tried = MutableMapping[object, str]  # what is wrong with calls that were tried; "": nothing

LARGE = 2**20  # elements above which dims that no call names are made shorter
RANKS = 3  # that are tried: the first, its neighbour and the last


def mixing(step: Compared, axis: str, given: Tags, made: Tags, tried: Tried) -> str:
    """Return what speaks against parts along an axis in a call that no rule is about; "": nothing.

    `given` and `made`: how its tensors, and its results, are split over the axis.
    """
    leaves = pytree.tree_leaves((step.args, step.kwargs))
    constants = [one for one in leaves if not isinstance(one, Tensor)]
    ranks = step.follower.sizes[axis]
    shapes = step.expected.inputs
    key = (step.name, repr(constants), shapes, repr(given), repr(made), ranks)
    if _bare(step.name):
        return _untried(step, axis)
    if key not in tried:
        tried[key] = _Trial(step, ranks, given, made).wrong(axis)
    return tried[key]


def _bare(name: str) -> bool:
    """Return whether a call is one of torch's own parts, which do not look at what they are given:
    with tensors that do not fit they write beyond them."""
    inner = name.startswith("_") and not name.startswith("__")
    return inner or name.startswith(("native_", "cudnn_", "miopen_", "mkldnn_"))


def _untried(step: Compared, axis: str) -> str:
    return f"what `{step.name}` computes along a dim that is sharded over `{axis}` is not known"


class _Trial:
    """A call that is made with numbers, of the whole and of parts."""

    def __init__(self, step: Compared, ranks: int, given: Tags, made: Tags) -> None:
        self.step, self.ranks, self.given, self.made = step, ranks, given, made

    def wrong(self, axis: str) -> str:
        """Return what differs, in words; "" where nothing does."""
        same: bool | None = None
        with torch._C.DisableTorchFunction(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            for shapes in self._sizes():
                same = self._agrees(shapes)
                if same is not None:
                    break
        if same is None:
            return _untried(self.step, axis)
        return (
            "" if same else f"`{self.step.name}` computes along a dim that is sharded over `{axis}`"
        )

    def _sizes(self) -> Iterator[Sequence[Shape]]:
        """The shapes to try with: first shorter ones, where the tensors are large."""
        shapes = self.step.expected.inputs
        if sum(map(_count, shapes)) > LARGE:
            split = {s[tag.dim] for s, tag in zip(shapes, self.given) if tag is not None}
            named = {*split, *self.step.expected.integers}
            long = sorted({n for shape in shapes for n in shape if n > 16} - named)
            short = {n: 5 + place for place, n in enumerate(long)}
            yield tuple(tuple(short.get(n, n) for n in shape) for shape in shapes)
        yield shapes

    def _agrees(self, shapes: Sequence[Shape]) -> bool | None:
        """Return whether parts give parts, in three ranges of numbers; None: the call fails."""
        finite = False
        for turn in range(3):
            whole = self._numbers(shapes, turn)
            try:
                expected = self._call(whole)
            except Exception:  # whatever torch raises: of a number that is one of parts, say
                return None
            for rank in sorted({0, 1, self.ranks - 1})[:RANKS]:
                try:
                    found = self._call([self._part(*one, rank) for one in zip(whole, self.given)])
                except Exception:
                    return None
                if not self._alike(expected, found, rank):
                    return False
            finite |= all(bool(_plain(one).isfinite().any()) for one in expected if one.numel())
        return True if finite else None

    def _numbers(self, shapes: Sequence[Shape], turn: int) -> list[Tensor]:
        """Tensors of these shapes: of floats around 0, between 0 and 1, and above; of indices."""
        drawing = torch.Generator().manual_seed(turn)
        found = []
        for tensor, shape in zip(self.step.inputs, shapes):
            if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
                wide = torch.complex128 if tensor.dtype.is_complex else torch.float64
                numbers = torch.rand(shape, generator=drawing, dtype=wide) * 0.8 + 0.1
                normal = torch.randn(shape, generator=drawing, dtype=wide)
                found.append((normal, numbers, numbers + 1)[turn])
            else:
                numbers = torch.randint(0, 2, shape, generator=drawing)
                found.append(numbers.to(tensor.dtype))
        return found

    def _part(self, tensor: Tensor, tag: Tag | None, rank: int) -> Tensor:
        """The part of a tensor that a rank has."""
        if tag is None:
            return tensor.clone()
        size = tensor.shape[tag.dim]
        places = torch.tensor(tag.positions(size, self.ranks, rank), dtype=torch.long)
        zeros = (places >= size).view(-1, *[1] * (tensor.dim() - 1 - tag.dim % tensor.dim()))
        return tensor.index_select(tag.dim, places.clamp(max=size - 1)).masked_fill(zeros, 0)

    def _call(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The results of the call for these tensors, or the one that it writes into."""
        turn = iter([one.clone() for one in tensors])
        first: list[Tensor] = []

        def given(value: Any) -> Any:
            if isinstance(value, Tensor):
                first.append(next(turn))
                return first[-1]
            return torch.device("cpu") if isinstance(value, torch.device) else value

        args, kwargs = pytree.tree_map(given, (self.step.args, self.step.kwargs))
        out = self.step.func(*args, **kwargs)
        found = [one for one in pytree.tree_leaves(out) if isinstance(one, Tensor)]
        return found or first[:1]

    def _alike(self, whole: Sequence[Tensor], part: Sequence[Tensor], rank: int) -> bool:
        """Return whether a rank's results are its parts of the whole ones."""
        if not len(whole) == len(part) == len(self.made):
            return False
        for one, mine, tag in zip(whole, part, self.made):
            if tag is None:
                theirs = one
            else:
                size = one.shape[tag.dim]
                places = tag.positions(size, self.ranks, rank)
                if len(places) != mine.shape[tag.dim]:
                    return False
                true = [k for k, place in enumerate(places) if place < size]
                theirs = one.index_select(
                    tag.dim, torch.tensor([places[k] for k in true], dtype=torch.long)
                )
                mine = mine.index_select(tag.dim, torch.tensor(true, dtype=torch.long))
            if theirs.shape != mine.shape or theirs.dtype != mine.dtype:
                return False
            if not torch.allclose(_plain(theirs), _plain(mine), rtol=1e-9, equal_nan=True):
                return False
        return True


def _plain(tensor: Tensor) -> Tensor:
    """The numbers of a tensor, as ones that can be compared."""
    return tensor if tensor.dtype.is_floating_point or tensor.dtype.is_complex else tensor.double()


def _count(shape: Shape) -> int:
    return torch.Size(shape).numel()
