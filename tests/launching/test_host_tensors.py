"""Tensors reach another process as they were, by pickle for a rank or among the ranks."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedlang.runtime.comm import tensor_pickling
from schedlang.runtime.comm.tensor_pickling import Pickler
from schedlang.runtime.launch import pickling


def packed(value: Any) -> bytes:
    data = io.BytesIO()
    Pickler(data).dump(value)
    return data.getvalue()


def bits(tensor: Tensor) -> Tensor:
    dense = tensor.detach().to_dense().resolve_conj()
    return dense.reshape(-1).contiguous().view(torch.uint8)


def marked() -> Tensor:
    """A tensor with an attribute, as some libraries mark parameters."""
    made = torch.ones(2)
    made.of_rows = 3  # type: ignore[attr-defined]
    return made


PLAIN: dict[str, Callable[[], Tensor]] = {
    # in an order that all workers share
    **{
        str(d): lambda d=d: torch.randn(3, 2).mul(9).to(d)
        for d in sorted(tensor_pickling.NUMPY_DTYPES, key=str)
    },
    "none": lambda: torch.ones(0, 3),
    "a number": lambda: torch.tensor(2.5),
    "not numbers": lambda: torch.tensor([float("nan"), -0.0, float("inf")]),
}
OTHER: dict[str, Callable[[], Tensor]] = {
    "bfloat16": lambda: torch.randn(3).bfloat16(),
    "transposed": lambda: torch.randn(3, 4).t(),
    "channels last": lambda: torch.randn(1, 2, 3, 3).to(memory_format=torch.channels_last),
    "a part": lambda: torch.randn(4)[:2],
    "trained": lambda: torch.ones(2, requires_grad=True),
    "a parameter": lambda: nn.Parameter(torch.ones(2)),
    "conjugate": lambda: torch.randn(2, dtype=torch.complex64).conj(),
    "marked": marked,
    "sparse": lambda: torch.eye(3).to_sparse(),
    "meta": lambda: torch.ones(2, device="meta"),
}


@pytest.mark.parametrize("ways", [pickling.dumps, packed], ids=["to a rank", "among ranks"])
@pytest.mark.parametrize("made", [*PLAIN.values(), *OTHER.values()], ids=[*PLAIN, *OTHER])
def test_it_comes_as_it_was(made: Callable[[], Tensor], ways: Callable[[Any], bytes]) -> None:
    """Class, dtype, shape, strides, attributes and every bit; and it may be written to."""
    one = made()
    got, again = pickle.loads(ways([one, one]))
    assert got is again and type(got) is type(one) and vars(got) == vars(one)
    assert (got.dtype, got.shape, got.layout) == (one.dtype, one.shape, one.layout)
    assert got.requires_grad == one.requires_grad and got.device == one.device
    if one.layout == torch.strided:
        assert got.stride() == one.stride()
    if one.is_meta:
        return
    assert torch.equal(bits(got), bits(one))
    with torch.no_grad():
        got.zero_()
    assert not got.detach().to_dense().any()


@pytest.mark.parametrize("made", PLAIN.values(), ids=PLAIN)
def test_plain_ones_are_arrays(made: Callable[[], Tensor]) -> None:
    """Torch writes an archive for each tensor, with its name; a plain one needs none."""
    assert pickling.reduce_tensor(made()) is not NotImplemented
    assert b"torch.storage" not in pickling.dumps(made()) + packed(made())


@pytest.mark.parametrize("made", OTHER.values(), ids=OTHER)
def test_others_are_torchs(made: Callable[[], Tensor]) -> None:
    """What numbers and shape do not tell whole is left to torch."""
    assert pickling.reduce_tensor(made()) is NotImplemented


def test_alike_ones_are_the_same_bytes() -> None:
    """So ranks that compare digests of what they hold see that it is alike."""
    assert packed([torch.ones(3), torch.zeros(2)]) == packed([torch.ones(3), torch.zeros(2)])
