"""Small tensors are read without the unpickler of torch, and anything else is left to it."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedlang.runtime.checkpointing.index import DTYPES
from schedlang.runtime.checkpointing.small_tensors import MOST_BYTES, read_small_tensor


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


KINDS = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "int64", "uint8", "bool")


@pytest.mark.parametrize("name", (*KINDS, "complex64"))
def test_it_is_what_was_saved(name: str) -> None:
    """Tensors of usual dtypes, also without dims, have their bits."""
    for shape in ((3, 4), (5,), ()):
        tensor = torch.randn(shape, dtype=torch.float64).mul(3).to(DTYPES[name])
        read = read_small_tensor(saved(tensor), tensor.dtype, shape)
        assert read is not None and read.dtype == tensor.dtype and read.is_contiguous()
        bits = (t.reshape(-1, 1).view(torch.uint8) for t in (read, tensor))
        assert torch.equal(*bits) and read.shape == tensor.shape


class Other(Tensor):
    """A tensor of a class of its own."""


SQUARE = torch.arange(16.0).view(4, 4)


@pytest.mark.parametrize(
    "value",
    [
        SQUARE.t(),  # other strides
        torch.arange(32.0).view(8, 4)[:4],  # with more bytes than its own
        torch.arange(32.0).view(8, 4)[4:],  # behind others
        SQUARE.clone().requires_grad_(),
        nn.Parameter(SQUARE.clone()),
        SQUARE.clone().as_subclass(Other),
        SQUARE.double(),
        SQUARE.view(2, 8),
        [SQUARE],
        SQUARE.to("meta"),
    ],
)
def test_anything_else_is_left(value: Any) -> None:
    """A value that is no plain tensor of the dtype and shape is not read."""
    assert read_small_tensor(saved(value), torch.float32, (4, 4)) is None


def test_damaged_and_large_ones_are_left() -> None:
    """So are bytes that torch did not write, and large tensors."""
    data = saved(SQUARE)
    for damaged in (b"", data[:100], data[:-30], b"x" * len(data)):
        assert read_small_tensor(damaged, torch.float32, (4, 4)) is None
    large = torch.zeros(MOST_BYTES // 4 + 1)
    assert read_small_tensor(saved(large), torch.float32, tuple(large.shape)) is None
    assert read_small_tensor(saved(large[:0].clone()), torch.float32, (0,)) is None
