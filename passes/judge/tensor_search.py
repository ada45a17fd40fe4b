"""Find a tensor inside another one: by its values, or in a low dtype by the nearest window.

Used to match ranks' activations with the original's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

RTOL = 1e-9  # of the largest element: tolerance between the two sides
MOST_LOOKUPS = 4096  # elements of a rank's tensor that are looked up
MOST_FITS = 64  # windows that are tried where values are not unique
MOST_ROUNDINGS = 16.0  # roundings (RMS) by which a part may differ from its window
MARGIN = 4.0  # by which any other window must be further off
LEAST_COSINE = 0.9  # least cosine between a part and its window
MOST_WINDOWS = 256  # tried in a low dtype
MOST_SLICES = 256  # of a part, each compared with all slices of the full tensor


class FullTensor:
    """A full tensor in which parts are looked up."""

    def __init__(self, values: Tensor) -> None:
        self.values = values.detach()
        self.atol = RTOL * float(self.values.abs().max()) if self.values.numel() else 0.0
        self._sorted: tuple[Tensor, Tensor, Tensor] | None = None

    def find_window(self, part: Tensor) -> list[Tensor] | None:
        """Return the indices of a part along each dim; None if no window fits, or several do."""
        shape = self.values.shape
        if part.dim() != len(shape) or any(p > w for p, w in zip(part.shape, shape)):
            return None
        if self.values.dtype != torch.float64:
            return (
                find_nearest_window(part, self.values) if part.dtype == self.values.dtype else None
            )
        full = [torch.arange(size) for size in shape]
        if part.shape == shape and self._fits(part, full):
            return full
        found = self._look_up(part)
        options = [] if found is None else [_complete_index(one, n) for one, n in zip(found, shape)]
        fits: list[list[Tensor]] = []
        for some in itertools.islice(itertools.product(*options), MOST_FITS) if options else ():
            if self._fits(part, some):
                fits.append(list(some))
        return fits[0] if len(fits) == 1 else None if fits else self._match_slices(part)

    def _match_slices(self, part: Tensor) -> list[Tensor] | None:
        """Find a part that is divided along one dim only, in any order, slice by slice."""
        shape = self.values.shape
        cut = [dim for dim, (p, w) in enumerate(zip(part.shape, shape)) if p < w]
        if len(cut) != 1 or not part.numel() or part.shape[cut[0]] > MOST_SLICES:
            return None
        ours, theirs = (t.movedim(cut[0], 0).flatten(1) for t in (part, self.values))
        near = [((theirs - one).abs().amax(1) <= self.atol).nonzero() for one in ours.detach()]
        if any(len(there) != 1 for there in near):
            return None
        found = [torch.arange(size) for size in shape]
        found[cut[0]] = torch.cat(near).reshape(-1)
        return found

    def _fits(self, part: Tensor, index: Sequence[Tensor]) -> bool:
        there = self.values[torch.meshgrid(*index, indexing="ij")] if index else self.values
        gap = (there - part.to(there.dtype)).abs()
        return not gap.numel() or bool(gap.max() <= self.atol)

    def _look_up(self, part: Tensor) -> list[Tensor] | None:
        """Return the index of each slice of a part, -1 where unknown; None: values contradict."""
        if self._sorted is None:
            values, order = self.values.reshape(-1).sort()
            apart = torch.full((len(values) + 1,), True)
            apart[1:-1] = values[1:] - values[:-1] > 4 * self.atol
            self._sorted = values, order, apart[1:] & apart[:-1]
        values, order, alone = self._sorted
        flat = part.detach().reshape(-1).to(values.dtype)
        some = torch.linspace(0, len(flat) - 1, min(len(flat), MOST_LOOKUPS)).round().long()
        at = torch.searchsorted(values, flat[some] - 2 * self.atol).clamp(max=len(values) - 1)
        good = alone[at] & ((values[at] - flat[some]).abs() <= self.atol)
        here = torch.unravel_index(some[good], part.shape)
        there = torch.unravel_index(order[at[good]], self.values.shape)
        found = []
        for size, mine, theirs in zip(part.shape, here, there):
            index = torch.full((size,), -1)
            index[mine] = theirs
            if not torch.equal(index[mine], theirs):
                return None
            found.append(index)
        return found


def _complete_index(index: Tensor, size: int) -> list[Tensor]:
    """Return candidate indices of a dim, of which some are known, as runs with one stride."""
    count = len(index)
    known = (index >= 0).nonzero().reshape(-1)
    if len(known) == count:
        return [index]
    steps = torch.arange(count)
    if len(known) > 1:
        (a, b), (x, y) = (known[0], known[-1]), (index[known[0]], index[known[-1]])
        stride = int((y - x) // (b - a))
        made = [x + (steps - a) * stride]
    elif len(known):
        strides = (1, size // count) if size > count else (1,)
        made = [index[known[0]] + (steps - known[0]) * stride for stride in strides]
    else:
        made = [start + steps for start in range(size - count + 1)]
        made += [start + steps * (size // count) for start in range(size // count)]
    fits = [one for one in made if int(one.min()) >= 0 and int(one.max()) < size]
    return list({tuple(one.tolist()): one for one in fits}.values())


def find_elements(part: Tensor, full: FullTensor) -> Tensor | None:
    """Find the flat index of each element of a part in a full tensor, whose dims may be merged."""
    dims, shape = part.dim(), full.values.shape
    if dims == len(shape) + 1 and dims > 1:
        found = find_elements(part.flatten(0, 1), full)
        return None if found is None else found.reshape(part.shape)
    numbers = torch.arange(shape.numel()).reshape(shape)
    for view in _VIEWS.get(dims - len(shape), ()):
        if view is not None and len(shape) < 2:
            continue
        seen = full if view is None else type(full)(view(full.values))
        window = seen.find_window(part)
        if window is not None:
            there: Tensor = (numbers if view is None else view(numbers))[
                torch.meshgrid(*window, indexing="ij")
            ]
            return there
    return None


# layouts that programs may use: positions before rows, or both in one dim
_VIEWS: dict[int, tuple[Callable[[Tensor], Tensor] | None, ...]] = {
    0: (None, lambda x: x.transpose(0, 1)),
    -1: (lambda x: x.flatten(0, 1), lambda x: x.transpose(0, 1).flatten(0, 1)),
}


# ---- In a low dtype values are not unique and differ between sides: compare windows.

Window = tuple[float, Sequence[Tensor]]  # distance, and indices by dim


class DirectionSearch(FullTensor):
    """A full tensor in which a part is looked up by direction: a wrong scale does not matter."""

    def find_window(self, part: Tensor) -> list[Tensor] | None:
        """Return the indices of the window with the highest cosine, if it is far ahead."""
        if part.dim() != self.values.dim():
            return None
        value = part.detach().double()
        size = float(value.norm())

        def off(there: Tensor) -> float:  # grows with the squared angle
            return 1.0 - float((there * value).sum()) / (size * float(there.norm()) or 1.0)

        return (
            _clear_nearest(_all_windows(value, self.values, off), 1.0 - LEAST_COSINE)
            if size
            else None
        )


def find_nearest_window(part: Tensor, full: Tensor) -> list[Tensor] | None:
    """Return the indices of the nearest window by dim; None if none is near, or several are.

    `part` has as many dims as `full`; windows are blocks of dims, or every n-th slice of them.
    """
    value = part.detach().double()
    unit = torch.finfo(part.dtype).eps * float(value.norm())
    found = _all_windows(value, full.double(), lambda there: float((there - value).norm()))
    return _clear_nearest(found, MOST_ROUNDINGS * unit, unit)


def _all_windows(part: Tensor, full: Tensor, off: Callable[[Tensor], float]) -> Iterator[Window]:
    """Yield all windows of a part's shape with their distances; none if there are too many."""
    options = [_index_ranges(p, w) for p, w in zip(part.shape, full.shape)]
    if part.numel() and math.prod(map(len, options)) <= MOST_WINDOWS:
        for some in itertools.product(*options):
            yield off(full[torch.meshgrid(*some, indexing="ij")] if some else full), some


def _clear_nearest(
    windows: Iterator[Window], most: float, least: float = 0.0
) -> list[Tensor] | None:
    """Return the indices of the nearest window, if it is near and the others are not."""
    found = sorted(windows, key=lambda one: one[0])
    if not found or found[0][0] > most:
        return None
    far = len(found) == 1 or found[1][0] > MARGIN * max(found[0][0], least)
    return list(found[0][1]) if far else None


def _index_ranges(part: int, full: int) -> list[Tensor]:
    """Return the index ranges that ranks or microbatches take of a dim: blocks, and every n-th."""
    if part == full:
        return [torch.arange(full)]
    step, rest = divmod(full, max(1, part))
    starts = range(0, full - part + 1, 1 if rest else part)
    blocks = [torch.arange(start, start + part) for start in starts]
    strided = [torch.arange(start, full, step) for start in range(step)] if not rest else []
    return blocks + (strided if part > 1 else [])
