"""merge_products equals its model on two ranks, and does one product where there were three."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

import schedlang
from schedlang.cli import app
from schedlang.ir.modelfile import load_model_file

SCHEDULE = Path(__file__).parent / "merge_products.sched"


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.count = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the operator."""
        self.count[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_it_equals_the_model() -> None:
    """Outputs, loss, gradients and three steps on two ranks, in float64."""
    result = CliRunner().invoke(app, ["verify", str(SCHEDULE)])
    assert result.exit_code == 0, result.output


def test_one_product_in_place_of_three() -> None:
    """The oracle: the layer written by hand with its three weights stacked."""
    from merge_products import merge_products

    layer = load_model_file(None, SCHEDULE).model().double().layers[0]
    x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    packed = nn.functional.linear(
        x,
        torch.cat([layer.q.weight, layer.k.weight, layer.v.weight]),
        torch.cat([layer.q.bias, layer.k.bias, layer.v.bias]),
    )
    expected = x + nn.functional.scaled_dot_product_attention(*packed.chunk(3, -1))
    plain, merged = Products(), Products()
    with plain:
        torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)
    merge_products(("q", "k", "v")).rewrite(layer)
    with merged:
        assert torch.equal(layer(x), expected)
    assert (plain.count["addmm"], merged.count["addmm"]) == (3, 1)
    repeated = layer.q(x), layer.q(x)  # one layer alone, and again: each call is right
    assert torch.equal(*repeated) and torch.equal(repeated[0], packed.chunk(3, -1)[0])


def test_what_reads_other_inputs_is_refused() -> None:
    """A name that is no linear layer, and one layer alone."""
    sch = schedlang.create_schedule(load_model_file(None, SCHEDULE).model())
    for names in (("q", "o"), ("q",)):
        with pytest.raises(schedlang.Refusal, match="name two or more of `q`, `k`, `v`"):
            sch["layers.0"].merge_products(*names)
