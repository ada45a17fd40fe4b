"""Size limits of the runtime, lowered so that toy models exceed them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

PREFIX = "schedlang.runtime"
# limits that a program with a few thousand numbers would never reach
SIZES = {
    f"{PREFIX}.offload.offloaded_activations.MIN_BYTES": 1,  # every activation is offloaded
    f"{PREFIX}.pipeline.in_flight.SMALL": 64,  # bytes: most tensors are sent separately
    f"{PREFIX}.grad_reduction.gradient.BUCKET_BYTES": 256,  # many gradient buckets
    f"{PREFIX}.activation_memory.quantized.PIECE_SIZE": 16,  # elements
    f"{PREFIX}.optim.full_tensor_step.BATCH_ELEMENTS": 16,
    f"{PREFIX}.storage.offloaded_gradients._MAX_BYTES": 64,  # bytes
    f"{PREFIX}.storage.tiers._PIECE": 40,  # bytes, not a multiple of an element
}


@contextmanager
def small_limits(enabled: bool = True) -> Iterator[None]:
    """Lower all limits in this process; rank threads share them."""
    with ExitStack() as stack:
        for name, size in SIZES.items() if enabled else ():
            stack.enter_context(patch(name, size))
        yield
