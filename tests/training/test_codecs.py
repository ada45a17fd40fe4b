"""Gradient compression codecs: what they compute, their largest error, and when they are exact."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from schedlang.ir.annotations import Codec
from schedlang.runtime.grad_reduction.compressed import (
    decode,
    encode,
    from_bits,
    from_int8,
    orthogonalize,
    to_bits,
    to_int8,
)


def test_eight_bits_round_without_bias() -> None:
    """Codes are within one step of the number, and their mean over draws is the number."""
    flat = torch.linspace(-3.0, 5.0, 83, dtype=torch.float64)
    total = torch.zeros_like(flat)
    generator = torch.Generator().manual_seed(0)
    for _ in range(400):
        draw = torch.rand(83, generator=generator, dtype=torch.float64)
        read = from_int8(to_int8(flat, 32, draw), 83, 32)
        assert (read - flat).abs().max() <= 5.0 / 127 * (1 + 1e-12)
        total += read / 400
    assert (total - flat).abs().max() < 5 * (5.0 / 127) / 2 / 400**0.5
    zeros = torch.zeros(9, dtype=torch.float64)
    assert torch.equal(from_int8(to_int8(zeros, 8, zeros), 9, 8), zeros)


def test_one_bit_keeps_the_means() -> None:
    """Each element becomes the mean of its side; numbers that are zero up to rounding count as
    positive."""
    flat = torch.tensor([1.0, 3.0, -2.0, -4.0, 0.0, 1e-17, -1e-17, 2.0, 5.0], dtype=torch.float64)
    read = from_bits(to_bits(flat, 8), 9, 8)
    assert torch.allclose(read[:8], torch.tensor([1.0, 1, -3, -3, 1, 1, 1, 1]).double())
    assert read[8] == 5.0
    assert torch.allclose(read.sum(), flat.sum())


def test_columns_are_orthonormal_or_zero() -> None:
    """A column that others span becomes zero, not the rounding error that remains of it."""
    a, b = torch.randn(2, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    p = orthogonalize(torch.stack([a, 2 * a + 1e-13 * b, b], 1))
    assert torch.allclose(p.T @ p, torch.diag(torch.tensor([1.0, 0.0, 1.0]).double()), atol=1e-12)


def vectors(size: int = 40) -> st.SearchStrategy[Tensor]:
    """Draw vectors of numbers of very different sizes, with zeros among them."""
    numbers = st.one_of(st.just(0.0), st.floats(-1e6, 1e6, width=32), st.floats(-1e-3, 1e-3))
    lists = st.lists(numbers, min_size=1, max_size=size)
    return lists.map(lambda values: torch.tensor(values, dtype=torch.float64))


@given(vectors(), st.integers(0, 5))
def test_both_codes_contract(flat: Tensor, step: int) -> None:
    """The error is smaller than the input, by a fraction that the block size bounds.

    So errors that are fed back stay bounded, and the sum over steps is followed (Karimireddy et al.
    2019).  One bit: the means are a projection, so that at least |x|_1^2 / block is kept.
    """
    block = 16
    for kind in ("onebit", "int8"):
        codec = Codec(kind, block=block)
        read = decode(codec, encode(codec, flat, "w", step, 0), flat.numel())
        error, size = float((flat - read).square().sum()), float(flat.square().sum())
        if kind == "onebit":
            assert error <= (1 - 1 / block) * size * (1 + 1e-6) + 1e-300
        else:  # less than a step of the block for each element: 1 / 127 of its largest
            assert error <= size * block / 127**2 * (1 + 1e-9) + 1e-300


def test_where_nothing_is_left_out() -> None:
    """Multiples of a block's step, and two values for the two signs, are coded exactly."""
    steps = torch.tensor([127.0, -3, 0, 64, -127, 1, 2, 100], dtype=torch.float64) / 127
    draw = torch.rand(8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact = steps * 4.0
    assert torch.allclose(from_int8(to_int8(exact, 8, draw), 8, 8), exact, rtol=1e-12)
    two = torch.tensor([2.5, -1, 2.5, 2.5, -1, -1, 2.5, -1], dtype=torch.float64)
    assert torch.equal(from_bits(to_bits(two, 8), 8, 8), two)
