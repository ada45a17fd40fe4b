"""Saved activations of a microbatch: packed parts have the sizes that were announced."""

from __future__ import annotations

import pytest
import torch

from schedlang.runtime.pipeline.in_flight import ALIGNED, SMALL, SavedStorages


@pytest.mark.parametrize("counts", [(6,), (6, 7), (SMALL + 1,), (5, SMALL + 3, 9)])
def test_parts_are_as_long_as_announced(counts: tuple[int, ...]) -> None:
    """One storage or several, large or small: parts have the announced sizes and are restored."""
    bag, inputs_and_results = SavedStorages(), []
    with bag.collect():
        for count in counts:
            x = torch.rand(count, dtype=torch.float64, requires_grad=True)
            inputs_and_results.append((x, x.exp()))  # saves its result alone
    bag.close(())
    assert counts[0] * 8 % ALIGNED
    sizes = bag.sizes()
    parts = bag.pack()
    assert [part.numel() for part in parts] == sizes
    bag.set_loader(lambda: parts)
    bag.restore()
    for x, y in inputs_and_results:
        y.sum().backward()
        assert torch.equal(x.grad, y)  # type: ignore[arg-type]
