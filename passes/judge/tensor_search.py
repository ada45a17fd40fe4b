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
        parts = self._look_up(part)
        options = [] if parts is None else [_complete_index(i, n) for i, n in zip(parts, shape)]
        fits: list[list[Tensor]] = []
        for pick in itertools.islice(itertools.product(*options), MOST_FITS) if options else ():
            if self._fits(part, pick):
                fits.append(list(pick))
        return fits[0] if len(fits) == 1 else None if fits else self._match_slices(part)

    def _match_slices(self, part: Tensor) -> list[Tensor] | None:
        """Find a part that is divided along one dim in any order, slice by slice.

        Along at most one other dim it may be a block, or every n-th slice. None if no such part
        fits, or several do.
        """
        shape = self.values.shape
        divided = [dim for dim, (p, w) in enumerate(zip(part.shape, shape)) if p < w]
        if not 1 <= len(divided) <= 2 or not part.numel():
            return None
        full = [torch.arange(size) for size in shape]
        fits: dict[tuple[int, ...], list[Tensor]] = {}
        for dim, other in itertools.product(divided, divided):
            if dim == other and len(divided) > 1:
                continue
            ranges = [full[dim]] if dim == other else _index_ranges(part.shape[other], shape[other])
            for indices in ranges:
                index = [indices if d == other else whole for d, whole in enumerate(full)]
                if (fit := self._match_along(part, dim, index, other)) is not None:
                    fits[tuple(torch.cat(fit).tolist())] = fit
        return next(iter(fits.values())) if len(fits) == 1 else None

    def _match_along(
        self, part: Tensor, dim: int, index: Sequence[Tensor], other: int
    ) -> list[Tensor] | None:
        """Find each slice of a part along a dim, at given indices of another dim."""
        values = self.values if other == dim else self.values.index_select(other, index[other])
        size = part.shape[dim]
        if size > MOST_SLICES:
            return None
        rows, full = (t.movedim(dim, 0).reshape(t.shape[dim], -1) for t in (part, values))
        matches = [((full - row).abs().amax(1) <= self.atol).nonzero() for row in rows.detach()]
        if any(len(match) != 1 for match in matches):
            return None
        found = torch.cat(matches).reshape(-1)
        return [found if d == dim else i for d, i in enumerate(index)]

    def _fits(self, part: Tensor, index: Sequence[Tensor]) -> bool:
        window = self.values[torch.meshgrid(*index, indexing="ij")] if index else self.values
        gap = (window - part.to(window.dtype)).abs()
        return not gap.numel() or bool(gap.max() <= self.atol)

    def _look_up(self, part: Tensor) -> list[Tensor] | None:
        """Return the index of each slice of a part, -1 where unknown; None: values contradict."""
        if self._sorted is None:
            values, order = self.values.reshape(-1).sort()
            separated = torch.full((len(values) + 1,), True)
            separated[1:-1] = values[1:] - values[:-1] > 4 * self.atol
            self._sorted = values, order, separated[1:] & separated[:-1]
        values, order, unique = self._sorted
        flat = part.detach().reshape(-1).to(values.dtype)
        sampled = torch.linspace(0, len(flat) - 1, min(len(flat), MOST_LOOKUPS)).round().long()
        spots = torch.searchsorted(values, flat[sampled] - 2 * self.atol).clamp(max=len(values) - 1)
        matched = unique[spots] & ((values[spots] - flat[sampled]).abs() <= self.atol)
        part_positions = torch.unravel_index(sampled[matched], part.shape)
        full_positions = torch.unravel_index(order[spots[matched]], self.values.shape)
        indices = []
        for size, part_index, full_index in zip(part.shape, part_positions, full_positions):
            index = torch.full((size,), -1)
            index[part_index] = full_index
            if not torch.equal(index[part_index], full_index):
                return None
            indices.append(index)
        return indices


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
        runs = [x + (steps - a) * stride]
    elif len(known):
        strides = (1, size // count) if size > count else (1,)
        runs = [index[known[0]] + (steps - known[0]) * stride for stride in strides]
    else:
        runs = [start + steps for start in range(size - count + 1)]
        runs += [start + steps * (size // count) for start in range(size // count)]
    fits = [run for run in runs if int(run.min()) >= 0 and int(run.max()) < size]
    return list({tuple(run.tolist()): run for run in fits}.values())


def find_elements(part: Tensor, full: FullTensor) -> Tensor | None:
    """Find the flat index of each element of a part in a full tensor, whose dims may be merged."""
    dims, shape = part.dim(), full.values.shape
    if dims == len(shape) + 1 and dims > 1:
        merged = find_elements(part.flatten(0, 1), full)
        return None if merged is None else merged.reshape(part.shape)
    numbers = torch.arange(shape.numel()).reshape(shape)
    for view in _VIEWS.get(dims - len(shape), ()):
        if view is not None and len(shape) < 2:
            continue
        viewed = full if view is None else type(full)(view(full.values))
        window = viewed.find_window(part)
        if window is not None:
            elements: Tensor = (numbers if view is None else view(numbers))[
                torch.meshgrid(*window, indexing="ij")
            ]
            return elements
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

        def off(window: Tensor) -> float:  # grows with the squared angle
            return 1.0 - float((window * value).sum()) / (size * float(window.norm()) or 1.0)

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
    windows = _all_windows(value, full.double(), lambda window: float((window - value).norm()))
    return _clear_nearest(windows, MOST_ROUNDINGS * unit, unit)


def _all_windows(
    part: Tensor, full: Tensor, distance: Callable[[Tensor], float]
) -> Iterator[Window]:
    """Yield all windows of a part's shape with their distances; none if there are too many."""
    options = [_index_ranges(p, w) for p, w in zip(part.shape, full.shape)]
    if part.numel() and math.prod(map(len, options)) <= MOST_WINDOWS:
        for ranges in itertools.product(*options):
            yield distance(full[torch.meshgrid(*ranges, indexing="ij")] if ranges else full), ranges


def _clear_nearest(
    windows: Iterator[Window], max_distance: float, min_distance: float = 0.0
) -> list[Tensor] | None:
    """Return the indices of the nearest window, if it is near and the others are not."""
    ranked = sorted(windows, key=lambda window: window[0])
    if not ranked or ranked[0][0] > max_distance:
        return None
    clear = len(ranked) == 1 or ranked[1][0] > MARGIN * max(ranked[0][0], min_distance)
    return list(ranked[0][1]) if clear else None


def _index_ranges(part: int, full: int) -> list[Tensor]:
    """Return the index ranges that ranks or microbatches take of a dim: blocks, and every n-th."""
    if part == full:
        return [torch.arange(full)]
    step, remainder = divmod(full, max(1, part))
    starts = range(0, full - part + 1, 1 if remainder else part)
    blocks = [torch.arange(start, start + part) for start in starts]
    strided = [torch.arange(start, full, step) for start in range(step)] if not remainder else []
    return blocks + (strided if part > 1 else [])
