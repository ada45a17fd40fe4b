"""Tensors sent to another process arrive unchanged, by pickle to a rank or among ranks."""

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


def pickle_packed(value: Any) -> bytes:
    data = io.BytesIO()
    Pickler(data).dump(value)
    return data.getvalue()


def bits_of(tensor: Tensor) -> Tensor:
    dense = tensor.detach().to_dense().resolve_conj()
    return dense.reshape(-1).contiguous().view(torch.uint8)


def marked_tensor() -> Tensor:
    """Return a tensor with an attribute, by which some libraries mark parameters."""
    tensor = torch.ones(2)
    tensor.of_rows = 3  # type: ignore[attr-defined]
    return tensor


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
SPECIAL: dict[str, Callable[[], Tensor]] = {
    "bfloat16": lambda: torch.randn(3).bfloat16(),
    "transposed": lambda: torch.randn(3, 4).t(),
    "channels last": lambda: torch.randn(1, 2, 3, 3).to(memory_format=torch.channels_last),
    "a part": lambda: torch.randn(4)[:2],
    "trained": lambda: torch.ones(2, requires_grad=True),
    "a parameter": lambda: nn.Parameter(torch.ones(2)),
    "conjugate": lambda: torch.randn(2, dtype=torch.complex64).conj(),
    "marked": marked_tensor,
    "sparse": lambda: torch.eye(3).to_sparse(),
    "meta": lambda: torch.ones(2, device="meta"),
}


@pytest.mark.parametrize("ways", [pickling.dumps, pickle_packed], ids=["to a rank", "among ranks"])
@pytest.mark.parametrize("made", [*PLAIN.values(), *SPECIAL.values()], ids=[*PLAIN, *SPECIAL])
def test_it_comes_as_it_was(made: Callable[[], Tensor], ways: Callable[[Any], bytes]) -> None:
    """Class, dtype, shape, strides, attributes and every bit; and it may be written to."""
    tensor = made()
    received, same = pickle.loads(ways([tensor, tensor]))
    assert received is same and type(received) is type(tensor) and vars(received) == vars(tensor)
    assert (received.dtype, received.shape, received.layout) == (
        tensor.dtype,
        tensor.shape,
        tensor.layout,
    )
    assert received.requires_grad == tensor.requires_grad and received.device == tensor.device
    if tensor.layout == torch.strided:
        assert received.stride() == tensor.stride()
    if tensor.is_meta:
        return
    assert torch.equal(bits_of(received), bits_of(tensor))
    with torch.no_grad():
        received.zero_()
    assert not received.detach().to_dense().any()


@pytest.mark.parametrize("made", PLAIN.values(), ids=PLAIN)
def test_plain_ones_are_arrays(made: Callable[[], Tensor]) -> None:
    """A plain tensor needs no archive of torch's."""
    assert tensor_pickling.reduce_tensor(made()) is not NotImplemented
    assert b"torch.storage" not in pickling.dumps(made()) + pickle_packed(made())


@pytest.mark.parametrize("made", SPECIAL.values(), ids=SPECIAL)
def test_others_are_torchs(made: Callable[[], Tensor]) -> None:
    """Tensors with more than numbers and a shape are pickled by torch."""
    assert tensor_pickling.reduce_tensor(made()) is NotImplemented


def test_alike_ones_are_the_same_bytes() -> None:
    """So ranks can compare digests of equal tensors."""
    assert pickle_packed([torch.ones(3), torch.zeros(2)]) == pickle_packed(
        [torch.ones(3), torch.zeros(2)]
    )


def test_a_model_that_has_collected_hidden_states() -> None:
    """A model of transformers with the hooks of its first such run is sent, and collects again."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "vocab_size": 9}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = transformers.LlamaModel(transformers.LlamaConfig(**sizes, **heads)).eval()
    ids = torch.arange(6)[None]
    expected = model(ids, output_hidden_states=True).hidden_states
    sent = pickle.loads(pickling.dump_job(model))
    torch.testing.assert_close(sent(ids, output_hidden_states=True).hidden_states, expected)


def test_operators_and_their_namespaces() -> None:
    """`aten = torch.ops.aten` is common in programs, and is the same on a rank."""
    aten = torch.ops.aten
    for value in (torch.ops, aten, aten.mm, aten.mm.default):
        assert pickle.loads(pickling.dumps(value)) is value
