"""Coverage: which conditions were not exercised, and what that could hide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from schedlang.passes.observe import Batch, Observation
from schedlang.report import Gap

if TYPE_CHECKING:
    from torch import Tensor

_IGNORED = -100  # the label that torch's losses leave out


def gaps(
    batches: Sequence[Batch],
    *,
    sizes: Mapping[str, int],
    parts: int = 1,
    drawn: int | None = None,
    parameters: Mapping[str, int] | None = None,
) -> tuple[Gap, ...]:
    """What was not exercised.

    `sizes` are the mesh axes, `parts` how many parts a batch was cut into, `drawn` how many dropout
    masks were drawn, `parameters` the numbers of elements by name.
    """
    found = [*_batches(batches, parts), *_labels(batches), *_padding(batches)]
    if not any(_floats(batch) for batch in batches):
        found.append(Gap("no float inputs", "wrong gradients of inputs"))
    if drawn == 0:
        found.append(Gap("no dropout", "masks that differ between copies or on recomputation"))
    axes = {name: size for name, size in sizes.items() if size > 1}
    if len(axes) > 1 and len(set(axes.values())) == 1:
        size = next(iter(axes.values()))
        found.append(Gap(f"all axes have size {size}", "sums over or divisions by the wrong axis"))
    if parameters and axes and not any(n % s for n in parameters.values() for s in axes.values()):
        found.append(
            Gap("every axis divides every parameter", "elements dropped behind an even cut")
        )
    return tuple(found)


def unoffered(seen: Observation) -> tuple[Gap, ...]:
    """Kinds that the program does not offer for comparison, and values that could not be read."""
    kinds = [Gap(f"{kind} (not offered)", f"wrong {kind}") for kind in sorted(seen.missing)]
    types = [Gap(f"`{name}` in the output", "wrong values in it") for name in sorted(seen.unread)]
    left = [
        Gap(f"`{k}` in the output: {v}", "wrong values in it") for k, v in seen.left_out.items()
    ]
    return (*kinds, *types, *left)


def _batches(batches: Sequence[Batch], parts: int) -> list[Gap]:
    from schedlang.passes.original import rows

    found = []
    if len(batches) < 2 or all(_same(batches[0], batch) for batch in batches[1:]):
        found.append(Gap("one batch only", "values kept from one step to the next"))
    sizes = [rows(batch) for batch in batches]
    if parts > 1 and not any(size % parts for size in sizes):
        found.append(Gap("no batch with a smaller last part", "parts dropped or weighed alike"))
    if parts > 1 and all(size % parts for size in sizes):
        found.append(Gap("no batch of equal parts", "buffers reused while still needed"))
    return found


def _same(a: Batch, b: Batch) -> bool:
    from torch import Tensor, equal

    return a.keys() == b.keys() and all(
        v.shape == b[k].shape and equal(v, b[k]) if isinstance(v, Tensor) else bool(v == b[k])
        for k, v in a.items()
    )


def _labels(batches: Sequence[Batch]) -> list[Gap]:
    """Uneven numbers of labels that count, which tell a mean of means from a mean."""
    uneven = False
    for batch in batches:
        for value in _integers(batch).values():
            counted = (value != _IGNORED).flatten(1).sum(1) if value.dim() > 1 else None
            uneven |= counted is not None and bool((counted != counted[0]).any())
    return [] if uneven else [Gap("no ignored labels", "means of means, counts of padding")]


def _padding(batches: Sequence[Batch]) -> list[Gap]:
    masks = [v for batch in batches for k, v in _integers(batch).items() if "mask" in k]
    if any(bool((mask == 0).any()) for mask in masks):
        return []
    return [Gap("no padding", "masks that are dropped, shifted or not passed on")]


def _integers(batch: Batch) -> dict[str, Tensor]:
    from torch import Tensor

    return {k: v for k, v in batch.items() if isinstance(v, Tensor) and not v.is_floating_point()}


def _floats(batch: Mapping[str, Any]) -> bool:
    from torch import Tensor

    return any(isinstance(v, Tensor) and v.is_floating_point() for v in batch.values())
