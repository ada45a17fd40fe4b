"""Gradients that parts of a batch make: which parts count in a wrong one, and how much."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from schedlang.passes.localize.diagnose import fits

MOST_PARTS = 8
MOST_BYTES = 1 << 28  # of gradients of parts, where there are more parts than ranks
SPARE = 3
APART = 1e-6  # parts whose gradients depend on each other this much have no weights of their own


def divisions(rows: int, ranks: int, size: int) -> Iterator[int]:
    """Yield into how many parts a batch is cut: as ranks cut it, then finer ones of micro-batches.

    `size` is how many bytes all gradients of one part have.
    """
    for parts in range(2, min(rows, max(ranks, MOST_PARTS)) + 1):
        finer = parts <= MOST_PARTS and parts * size <= MOST_BYTES
        if ranks % parts == 0 or parts % ranks == 0 and rows % parts == 0 and finer:
            yield parts


def of_means(want: Tensor, got: Tensor, parts: Sequence[Tensor]) -> str:
    """Whether a gradient is the plain mean of those of parts, and the right one is not; and why."""
    mean = torch.stack(list(parts)).mean(0)
    if not _along(got, mean) or _along(want, mean):
        return ""
    said = f"it is the plain mean of what {len(parts)} parts of the batch give by themselves"
    weights = _weights(want, parts)
    if weights is not None:
        each = _listed(weights / weights.sum())
        return (
            f"{said}, but they weigh {each}: divide the sum of all losses by the count of all "
            "labels (or rows)"
        )
    return (
        f"{said}; the original sees the whole batch at once (statistics of a batch norm, a loss "
        "over all rows)"
    )


def of_weights(want: Tensor, got: Tensor, parts: Sequence[Tensor]) -> str:
    """Say by which weights parts make a wrong gradient, if others make the right one.

    Two sums that fit to rounding are no chance: more elements than parts have gradients, by
    `SPARE` or more, and no part's gradient is made by those of others.
    """
    columns = torch.stack([part.reshape(-1) for part in parts], 1)
    used = torch.cat([columns, got.reshape(-1, 1)], 1).any(1)
    if int(used.sum()) < len(parts) + SPARE or not _apart(columns):
        return ""
    right, wrong = _weights(want, parts), _weights(got, parts)
    if right is None or wrong is None or not float(right.sum()):
        return ""
    right, wrong = right / right.sum(), wrong / right.sum()
    if _along(got, want) or _along(-got, want):
        return ""
    gone = [k for k, w in enumerate(wrong.tolist()) if abs(w) < APART]
    lost = f"parts {', '.join(map(str, gone))} of {len(parts)} parts of the batch do not count: "
    return (
        f"{lost if gone else ''}what {len(parts)} parts of the batch give weighs {_listed(wrong)}"
        f" instead of {_listed(right)}"
    )


def _weights(total: Tensor, parts: Sequence[Tensor]) -> Tensor | None:
    """Return the weights by which parts sum up to a tensor, if they do."""
    columns = torch.stack([part.reshape(-1) for part in parts], 1)
    weights = torch.linalg.lstsq(columns, total.reshape(-1, 1)).solution
    return weights[:, 0] if fits((columns @ weights).reshape(total.shape), total) else None


def _apart(columns: Tensor) -> bool:
    """Whether no part's gradient is made by those of others."""
    values = torch.linalg.svdvals(columns)
    return bool(values[-1] > APART * values[0])


def _along(x: Tensor, r: Tensor) -> bool:
    """Whether two tensors are one but for a positive factor (what clipping has left of it)."""
    if x.shape != r.shape or not x.any() or not r.any():
        return False
    factor = float((x * r).sum() / (r * r).sum())
    return factor > 0 and fits(x, factor * r)


def _listed(weights: Tensor) -> str:
    return ", ".join(f"{float(w) + 0.0:.3g}" if abs(w) >= APART else "0" for w in weights)
