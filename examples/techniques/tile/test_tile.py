"""tile equals its model on two ranks, and no product is larger than a block."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

import schedlang
from schedlang.cli import app
from schedlang.ir.modelfile import load_model_file

SCHEDULE = Path(__file__).parent / "tile.sched"


class Products(TorchDispatchMode):
    """Notes the sizes of each product: rows, inputs, outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note it, and compute it."""
        if func is torch.ops.aten.mm.default:
            self.sizes.append((*args[0].shape, args[1].shape[1]))
        return func(*args, **(kwargs or {}))


def test_it_equals_the_model() -> None:
    """Outputs, loss, gradients and three steps on two ranks, in float64."""
    result = CliRunner().invoke(app, ["verify", str(SCHEDULE)])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("blocks", [(5, 4, 3), (1, 1, 1), (13, 6, 20), (100, 100, 100)])
def test_products_are_blocks(blocks: tuple[int, int, int]) -> None:
    """The oracle: sums of products of single numbers, and how many blocks there are."""
    from tile import tile

    outputs, inputs, rows = blocks
    layer = load_model_file(None, SCHEDULE).model().double().up
    x = torch.randn(4, 5, 6, dtype=torch.float64)
    expected = (x[..., None, :] * layer.weight).sum(-1) + layer.bias
    tile(outputs=outputs, inputs=inputs, rows=rows).rewrite(layer)
    with Products() as products:
        torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)
        assert layer(x[:0]).shape == (0, 5, 13)
        products.sizes = [sizes for sizes in products.sizes if sizes[0]]
    count = -(-13 // outputs) * -(-6 // inputs) * -(-20 // rows)
    assert len(products.sizes) == count
    assert all(a <= rows and b <= inputs and c <= outputs for a, b, c in products.sizes)


def test_what_is_no_product_is_refused() -> None:
    """The model itself, and empty blocks."""
    sch = schedlang.create_schedule(load_model_file(None, SCHEDULE).model())
    with pytest.raises(schedlang.Refusal, match="not a linear layer"):
        sch.tile(outputs=4, inputs=4, rows=4)
    with pytest.raises(schedlang.Refusal, match="one row and one column"):
        sch["up"].tile(outputs=0, inputs=4, rows=4)
