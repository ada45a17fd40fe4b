"""Storages of tensors that are made larger or smaller, heard of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Heard = Callable[[torch.UntypedStorage, int], None]


@contextmanager
def resizes(heard: Heard) -> Iterator[None]:
    """Tell, for the time of a block, of each storage that is resized, and to how many bytes.

    No dispatch mode sees that: fully_shard frees and fills what it gathers by it.
    """
    plain = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        out = plain(storage, size)
        heard(storage, size)
        return out

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = plain  # type: ignore[method-assign]
