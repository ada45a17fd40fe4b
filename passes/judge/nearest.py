"""The place of a tensor of few bits in another one: the window that is nearest, and by far."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

FAR = 16.0  # roundings by which a part may differ from where it lies, in the mean square
APART = 4.0  # how much further off, at least, any other window is
MOST = 256  # windows that are tried


def nearest(part: Tensor, whole: Tensor) -> list[Tensor] | None:
    """Return by dim the indices of a window; None where none is near, or more than one.

    part   as many dims as the whole; blocks of dims, or every n-th slice of them
    In few bits numbers are not unique, and those of two sides differ: none tells its place.
    """
    value, there = part.detach().double(), whole.double()
    unit = torch.finfo(part.dtype).eps * float(value.norm())
    found: list[tuple[float, Sequence[Tensor]]] = []
    for some in windows(part.shape, whole.shape):
        window = there[torch.meshgrid(*some, indexing="ij")] if some else there
        found.append((float((window - value).norm()), some))
    if not found:
        return None
    found.sort(key=lambda one: one[0])
    best, index = found[0]
    alone = len(found) == 1 or found[1][0] > APART * max(best, unit)
    return list(index) if alone and best <= FAR * unit else None


def windows(part: Sequence[int], whole: Sequence[int]) -> Iterator[Sequence[Tensor]]:
    """The windows of a shape, by the indices of each dim; none where there are too many."""
    options = [_cuts(p, w) for p, w in zip(part, whole)]
    if math.prod(part) and math.prod(map(len, options)) <= MOST:
        yield from itertools.product(*options)


def _cuts(part: int, whole: int) -> list[Tensor]:
    """The slices that ranks and microbatches take of a dim: blocks, and every n-th."""
    if part == whole:
        return [torch.arange(whole)]
    step, rest = divmod(whole, max(1, part))
    starts = range(0, whole - part + 1, 1 if rest else part)
    blocks = [torch.arange(start, start + part) for start in starts]
    strided = [torch.arange(start, whole, step) for start in range(step)] if not rest else []
    return blocks + (strided if part > 1 else [])
