"""squeeze equals its model on two ranks in float64, and rounds to 8 bits as its paper says."""

import math
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import schedlang
from schedlang.cli import app
from schedlang.ir.modelfile import load_model_file

SCHEDULE = Path(__file__).parent / "squeeze.sched"


def test_it_equals_the_model() -> None:
    """Everything in float64, gradients within 8 bits in float32, and the products themselves."""
    result = CliRunner().invoke(app, ["verify", str(SCHEDULE)])
    assert result.exit_code == 0, result.output
    assert "squeeze itself" in result.output


def number(x: float, a: float, b: float) -> float:
    """The oracle, one number at a time: the nearest of the 8-bit floats, of 2 bits, by counting."""
    if x == 0.0:
        return 0.0
    y = 2.0**b * abs(x) ** a
    unit = 2.0 ** (max(math.frexp(y)[1] - 1, -14) - 2)
    nearest = round(y / unit) * unit  # halves to the even one, as Python's own
    return math.copysign((nearest / 2.0**b) ** (1 / a), x)


@pytest.mark.parametrize("size", [1.0, 1e-12, 1e12])
def test_numbers_are_rounded_as_the_paper_says(size: float) -> None:
    """Tensors of any size: what float8 itself would make 0 or infinity keeps two digits."""
    from squeeze import rounded

    generator = torch.Generator().manual_seed(0)
    x = size * torch.randn(300, generator=generator)
    x[:3] = 0
    logs = [math.log2(abs(value)) for value in x.tolist() if value]
    mean = sum(logs) / len(logs)
    a = 15 / (max(logs) - mean)
    expected = torch.tensor([number(value, a, -a * mean) for value in x.tolist()])
    result = rounded(x)
    off = (
        result - expected
    ).abs() > 1e-3 * expected.abs()  # a float32 beside a half goes either way
    assert off.sum() <= 1, (result[off], expected[off])
    assert len(result.unique()) < 250
    assert torch.equal(rounded(x.double()), x.double())


def test_the_backward_rounds_what_comes_back() -> None:
    """Gradients are products of rounded operands, and sums of what they were made of are wide."""
    from squeeze import product, rounded

    x, w, dy = (torch.randn(*shape, requires_grad=True) for shape in ((2, 4, 6), (5, 6), (2, 4, 5)))
    y = product(x, w, None)
    y.backward(dy.detach())
    q, v, g = (rounded(tensor.detach()) for tensor in (x, w, dy))
    assert torch.equal(y, q @ v.t())
    torch.testing.assert_close(x.grad, g @ v)
    torch.testing.assert_close(w.grad, torch.einsum("abo,abi->oi", g, q))


def test_nothing_and_equal_sizes_stay() -> None:
    """Zeros, ones that differ in sign alone, and a tensor without elements."""
    from squeeze import rounded

    for x in (torch.zeros(3), torch.tensor([3.0, -3.0]), torch.zeros(0, 4)):
        torch.testing.assert_close(rounded(x), x)


def test_what_is_no_product_is_refused() -> None:
    """The model itself."""
    sch = schedlang.create_schedule(load_model_file(None, SCHEDULE).model())
    step = sch.step("eight bits", relax=("dtype",))
    with pytest.raises(schedlang.Refusal, match="not a linear layer"), step:
        sch.squeeze()
