"""Calls without a propagation rule, tried with numbers: are results on shards shards of the result?

The shapes of a call show along which dim its result is split.  They do not show whether each rank
computes the values that the full result has there: a sort, a sum from left to right or a write to
one column keep every shape.  Such a call is made with random numbers, of full tensors and of the
ranks' shards, and both results must agree.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from schedlang.ir import pytree
from schedlang.runtime.propagation.trace import RunningCall, Tag

if TYPE_CHECKING:
    from schedlang.runtime.propagation.follower import ComparedCall

Shape = tuple[int, ...]
Tags = Sequence[Tag | None]  # of some tensors, over one axis
TrialCache = MutableMapping[object, str]  # call -> its fault, "" if it has none

MANY_ELEMENTS = 2**20  # elements above which dims whose sizes no argument contains are made shorter
MAX_RANKS = 3  # ranks that are tried: the first, the second and the last


def find_shard_fault(
    step: ComparedCall, axis: str, input_tags: Tags, output_tags: Tags, tried: TrialCache
) -> str:
    """Return why a call without a rule cannot be split over an axis; "" if it can.

    `input_tags` and `output_tags`: how the call's inputs and results are split over the axis.
    """
    leaves = pytree.tree_leaves((step.args, step.kwargs))
    constants = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
    ranks = step.follower.sizes[axis]
    shapes = step.expected.inputs
    key = (step.name, repr(constants), shapes, repr(input_tags), repr(output_tags), ranks)
    if _is_internal(step.name):
        return _describe_untried(step, axis)
    if key not in tried:
        tried[key] = _Trial(step, ranks, input_tags, output_tags).wrong(axis)
    return tried[key]


def _is_internal(name: str) -> bool:
    """Return whether a call is internal to torch, and does not check its arguments.

    Such a call writes out of bounds where tensors do not fit each other.
    """
    inner = name.startswith("_") and not name.startswith("__")
    return inner or name.startswith(("native_", "cudnn_", "miopen_", "mkldnn_"))


def _describe_untried(step: ComparedCall, axis: str) -> str:
    return f"it is not known what `{step.name}` computes along a dim that is sharded over `{axis}`"


class _Trial:
    """A call that is made with numbers, for full tensors and for shards."""

    def __init__(self, step: ComparedCall, ranks: int, input_tags: Tags, output_tags: Tags) -> None:
        self.step, self.ranks, self.given, self.made = step, ranks, input_tags, output_tags

    def wrong(self, axis: str) -> str:
        """Return a description of what differs; "" if nothing does."""
        same: bool | None = None
        with torch._C.DisableTorchFunction(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            for shapes in self._sizes():
                same = self._agrees(shapes)
                if same is not None:
                    break
        if same is None:
            return _describe_untried(self.step, axis)
        return (
            "" if same else f"`{self.step.name}` computes along a dim that is sharded over `{axis}`"
        )

    def _sizes(self) -> Iterator[Sequence[Shape]]:
        """Yield the shapes to try with; where the tensors are large, smaller shapes come first."""
        shapes = self.step.expected.inputs
        if sum(map(_count, shapes)) > MANY_ELEMENTS:
            split = {s[tag.dim] for s, tag in zip(shapes, self.given) if tag is not None}
            fixed = {*split, *self.step.expected.integers}
            large = sorted({n for shape in shapes for n in shape if n > 16} - fixed)
            reduced = {n: 5 + index for index, n in enumerate(large)}
            yield tuple(tuple(reduced.get(n, n) for n in shape) for shape in shapes)
        yield shapes

    def _agrees(self, shapes: Sequence[Shape]) -> bool | None:
        """Return whether shards give shards, in three ranges of numbers; None: the call fails."""
        finite = False
        for trial_number in range(3):
            full = self._numbers(shapes, trial_number)
            try:
                expected = self._call(full)
            except Exception:  # torch raises any class, e.g. for an integer that is a shard's size
                return None
            for rank in sorted({0, 1, self.ranks - 1})[:MAX_RANKS]:
                try:
                    results = self._call([self._part(*t, rank) for t in zip(full, self.given)])
                except Exception:
                    return None
                if not self._is_shard_of(expected, results, rank):
                    return False
            finite |= all(bool(_comparable(t).isfinite().any()) for t in expected if t.numel())
        return True if finite else None

    def _numbers(self, shapes: Sequence[Shape], trial_number: int) -> list[Tensor]:
        """Return random tensors of these shapes: floats around 0, in (0, 1), in (1, 2); indices.

        `trial_number` (0, 1, 2) chooses the range of the floats.
        """
        generator = torch.Generator().manual_seed(trial_number)
        tensors = []
        for tensor, shape in zip(self.step.inputs, shapes):
            if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
                dtype = torch.complex128 if tensor.dtype.is_complex else torch.float64
                numbers = torch.rand(shape, generator=generator, dtype=dtype) * 0.8 + 0.1
                normal = torch.randn(shape, generator=generator, dtype=dtype)
                tensors.append((normal, numbers, numbers + 1)[trial_number])
            else:
                numbers = torch.randint(0, 2, shape, generator=generator)
                tensors.append(numbers.to(tensor.dtype))
        return tensors

    def _part(self, tensor: Tensor, tag: Tag | None, rank: int) -> Tensor:
        """Return a rank's shard of a tensor."""
        if tag is None:
            return tensor.clone()
        size = tensor.shape[tag.dim]
        indices = torch.tensor(tag.positions(size, self.ranks, rank), dtype=torch.long)
        zeros = (indices >= size).view(-1, *[1] * (tensor.dim() - 1 - tag.dim % tensor.dim()))
        return tensor.index_select(tag.dim, indices.clamp(max=size - 1)).masked_fill(zeros, 0)

    def _call(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the results of the call for these tensors, or the tensor that it writes into."""
        remaining = iter([tensor.clone() for tensor in tensors])
        inputs: list[Tensor] = []

        def given(value: Any) -> Any:
            if isinstance(value, Tensor):
                inputs.append(next(remaining))
                return inputs[-1]
            return torch.device("cpu") if isinstance(value, torch.device) else value

        args, kwargs = pytree.tree_map(given, (self.step.args, self.step.kwargs))
        output = self.step.func(*args, **kwargs)
        results = [tensor for tensor in pytree.tree_leaves(output) if isinstance(tensor, Tensor)]
        return results or inputs[:1]

    def _is_shard_of(self, full: Sequence[Tensor], part: Sequence[Tensor], rank: int) -> bool:
        """Return whether a rank's results are its shards of the full results."""
        if not len(full) == len(part) == len(self.made):
            return False
        for tensor, shard, tag in zip(full, part, self.made):
            if tag is None:
                expected = tensor
            else:
                size = tensor.shape[tag.dim]
                indices = tag.positions(size, self.ranks, rank)
                if len(indices) != shard.shape[tag.dim]:
                    return False
                held = [k for k, index in enumerate(indices) if index < size]
                expected = tensor.index_select(
                    tag.dim, torch.tensor([indices[k] for k in held], dtype=torch.long)
                )
                shard = shard.index_select(tag.dim, torch.tensor(held, dtype=torch.long))
            if expected.shape != shard.shape or expected.dtype != shard.dtype:
                return False
            if not torch.allclose(
                _comparable(expected), _comparable(shard), rtol=1e-9, equal_nan=True
            ):
                return False
        return True


def _comparable(tensor: Tensor) -> Tensor:
    """Return a tensor in a dtype that `torch.allclose` can compare."""
    return tensor if tensor.dtype.is_floating_point or tensor.dtype.is_complex else tensor.double()


def _count(shape: Shape) -> int:
    return torch.Size(shape).numel()


def infer_shard_shapes(
    call: RunningCall, shapes: Sequence[Shape], split: Sequence[int | None], parts: int
) -> list[Shape] | None:
    """Return the shapes of a call's results where one axis alone splits its tensors.

    `shapes` are the full shapes of the tensors among the call's arguments.  `split` has the dim of
    each tensor of which a rank has one of `parts` shards (None: no dim).  The result is None where
    the call cannot run with such shapes: its integers are those of shards along all axes.
    """
    counter = itertools.count()

    def given(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        index = next(counter)
        shape, dim = list(shapes[index]), split[index]
        if dim is not None:
            shape[dim] //= parts
        return torch.empty(shape, dtype=value.dtype, device="meta")

    with torch._C.DisableTorchFunction(), torch.no_grad():
        args, kwargs = pytree.tree_map(given, (call.args, call.kwargs))
        try:
            output = call.func(*args, **kwargs)
        except (RuntimeError, ValueError, IndexError, TypeError):
            return None
    return [tuple(leaf.shape) for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
