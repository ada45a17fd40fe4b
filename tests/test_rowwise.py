"""Generated kernels: they compute what the chain computes, and take nothing but chains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from schedlang.kernels.check import compare
from schedlang.runtime.rowwise import launch, operator
from schedlang.runtime.rowwise.child import interpreted
from schedlang.runtime.rowwise.graphs import sorts_of
from schedlang.runtime.rowwise.roles import NotRowwise
from tests.chains import CHAINS

ROWS, SIZE = 24, 72


def drawn(kinds: tuple[str, ...], dtype: torch.dtype, shape: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape if k == "m" else shape[-1:]).to(dtype) for k in kinds]


def results(function: Callable[..., Any], given: list[Tensor]) -> list[Tensor]:
    """Results and gradients."""
    leaves = [t.detach().clone().requires_grad_() for t in given]
    made = function(*leaves)
    outs = [made] if isinstance(made, Tensor) else list(made)
    torch.manual_seed(1)
    grads = [torch.randn(t.shape).to(t.dtype) for t in outs]
    return [*(t.detach() for t in outs), *torch.autograd.grad(outs, leaves, grads)]


def generated(name: str, function: Callable[..., Any], rounding: str, count: int) -> Any:
    operator.declare(f"{name} {rounding}", function, rounding)
    return lambda *given: operator.apply(f"{name} {rounding}", given, count)


def both(
    name: str, rounding: str, dtype: torch.dtype, shape: tuple[int, ...] = (ROWS, SIZE)
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Of a kernel, of eager torch, and in float64."""
    function, kinds = CHAINS[name]
    given = drawn(kinds, dtype, shape)
    eager = results(function, given)
    fast = generated(name, function, rounding, len(eager) - len(given))
    return results(fast, given), eager, results(function, [t.double() for t in given])


BITWISE = ("rmsnorm", "add_rmsnorm", "swiglu", "geglu", "softmax")


def test_bit_for_bit_what_eager_computes() -> None:
    """Rounded where eager rounds: results and gradients in bfloat16 are the very same bits."""
    with interpreted("cpu"):
        for name in BITWISE:
            for place, (fast, eager, _) in enumerate(zip(*both(name, "eager", torch.bfloat16))):
                assert torch.equal(fast, eager), (name, place)


@pytest.mark.parametrize("shape", [(5, 3, 33), (1, 300)])
def test_as_right_as_eager(shape: tuple[int, ...]) -> None:
    """All chains, both roundings and types: errors against float64 within the rule for kernels."""
    with interpreted("cpu"):
        for name in CHAINS:
            for dtype in (torch.float32, torch.bfloat16):
                for rounding in ("eager", "fp32"):
                    for found in zip(*both(name, rounding, dtype, shape)):
                        fast, eager, exact = found
                        one = compare(name, fast, eager, exact.double(), times=4.0)
                        assert one.ok, (dtype, rounding, one)


def test_long_rows_are_read_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows longer than a program holds: the same results, from a text that loops over blocks."""
    monkeypatch.setattr(launch, "LONGEST", 32)
    monkeypatch.setattr(launch, "_BLOCK", 16)
    with interpreted("cpu"):
        for name, (function, kinds) in CHAINS.items():
            given = drawn(kinds, torch.float32, (9, 45))
            count = len(results(function, given)) - len(given)
            fast = results(generated(f"long {name}", function, "fp32", count), given)
            made = operator._regions[f"long {name} fp32"].made.values()
            assert all("for start in range" in k.text for pair in made for k in pair.kernels)
            exact = results(function, [t.double() for t in given])
            for one, right, eager in zip(fast, exact, results(function, given)):
                assert compare(name, one, eager, right, times=4.0).ok, name


@pytest.mark.parametrize("function, shapes, said", [
    (lambda x: x.sum(0), ((4, 8),), ""),
    (lambda x, y: x @ y, ((4, 8), (8, 8)), "`mm` is no row-wise operator"),
    (lambda x: x.cumsum(-1), ((4, 8),), "`cumsum` is no row-wise operator"),
    (lambda x: torch.softmax(x, 0), ((4, 8),), "`amax` over dim [0] goes across rows"),
    (lambda x: x - x.mean(1, keepdim=True), ((2, 4, 8),), "`mean` over dim [1] goes across rows"),
    (lambda x, m: x + m, ((2, 3, 4, 8), (2, 1, 4, 8)), "is broadcast over some of the leading"),
    (lambda x: x + x.mT, ((8, 8),), "`permute` is no row-wise operator"),
    (lambda x, y: x + y.unsqueeze(-1), ((8, 8), (8,)), "`add` joins rows with columns"),
    (lambda x: x.reshape(8, 4) * 2, ((4, 8),), "`view` moves numbers between rows"),
])  # fmt: skip
def test_what_is_no_chain_is_named(
    function: Callable[..., Any], shapes: tuple[tuple[int, ...], ...], said: str
) -> None:
    """The operator that goes across rows, and broadcasts that are none of rows or columns."""
    given = [torch.randn(shape) for shape in shapes]
    sorts = sorts_of(given, [True] * len(given))
    if not said:
        assert operator.pair_of(function, sorts, "fp32").forward.chain.sums
        return
    with pytest.raises(NotRowwise) as refused:
        operator.pair_of(function, sorts, "fp32")
    assert said in str(refused.value)
