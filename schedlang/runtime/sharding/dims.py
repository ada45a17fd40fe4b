"""What calls do to the dims of a tensor, as far as their names and arguments tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

FILLS = {"zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty",
         "zeros_like", "ones_like", "full_like", "empty_like"}  # fmt: skip
PARTS = {"split", "chunk", "tensor_split", "split_with_sizes", "unsafe_split", "unsafe_chunk"}
ALONG = {"softmax", "log_softmax", "cumsum", "cumprod", "logcumsumexp", "sort", "argsort", "topk",
         "flip", "roll", "cross_entropy", "nll_loss", "normalize", "softmin", "gumbel_softmax",
         "glu"}  # fmt: skip


def index_at(given: Any, dim: int, dims: int) -> Any:
    """What stands for one dim in an index of a tensor of so many dims."""
    index = given if isinstance(given, tuple) else (given,)
    if any(one is Ellipsis for one in index):
        at = next(k for k, one in enumerate(index) if one is Ellipsis)
        behind = len(index) - at - 1
        index = (slice(None),) * (dims - behind) + index[len(index) - behind :]
    return index[dim] if dim < len(index) else slice(None)


def block_cut(cut: Any, blocks: Sequence[int], ranks: int) -> int | None:
    """The block that a slice takes from what each of the ranks has; None if it is another cut."""
    start = 0
    for size in blocks:
        if cut == slice(start // ranks or None, (start + size) // ranks) or (
            isinstance(cut, slice)
            and (cut.start or 0) * ranks == start
            and cut.step is None
            and (cut.stop is None or cut.stop * ranks == start + size)
        ):
            return size
        start += size
    return None
