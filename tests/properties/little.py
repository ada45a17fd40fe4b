"""Sizes from which on a program does more: made so small that toy models reach them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

ROOM = "schedlang.runtime"
# what a program of a few thousand numbers would never do, or always do at once
SIZES = {
    f"{ROOM}.offload.offloaded_activations.MIN_BYTES": 1,  # every activation moves
    f"{ROOM}.pipeline.in_flight.SMALL": 64,  # bytes: most tensors cross a cut by themselves
    f"{ROOM}.grad_reduction.gradient.BUCKET_BYTES": 256,  # many sums of gradients
    f"{ROOM}.activation_memory.quantized.PIECE_SIZE": 16,  # elements
    f"{ROOM}.optim.full_tensor_step.BATCH_ELEMENTS": 16,
    f"{ROOM}.storage.offloaded_gradients._MAX_BYTES": 64,  # bytes
    f"{ROOM}.storage.tiers._PIECE": 40,  # bytes, in the midst of a number
}


@contextmanager
def little(on: bool = True) -> Iterator[None]:
    """All sizes made small, in this process; threads that are ranks share them."""
    with ExitStack() as stack:
        for name, size in SIZES.items() if on else ():
            stack.enter_context(patch(name, size))
        yield
