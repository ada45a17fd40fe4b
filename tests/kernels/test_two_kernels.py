"""Two kernels in one attention: `rope` and an attention kernel, in either order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.kernels.kernel_device import backend_runs
from schedlang.runtime.kernel_injection.kernel import match, replace
from tests import models
from tests.kernels.kernels_in_use import kernels_of
from tests.proofs import assert_proven, make_plan, refusal_text
from tests.tiers import thin_out

pytest.importorskip("transformers")
ROPE = "model.layers.*.self_attn replace_kernel(rope)\n"
SPLIT = """model.layers.*.self_attn.{q,k,v}_proj shard(col, over=tp)
model.layers.*.self_attn.o_proj shard(row, over=tp)
model.layers.* checkpoint()
"""


def kernel_row(kernel: str) -> str:
    """Return the row of an attention kernel for the same modules."""
    return f"model.layers.*.self_attn replace_kernel({kernel})\n"


CASES = [
    ("eager", ROPE + kernel_row("sdpa")),
    ("sdpa", kernel_row("flex_attention") + ROPE),
    ("eager", kernel_row("sdpa") + ROPE),
    ("sdpa", ROPE + kernel_row("flex_attention")),
]


@pytest.mark.parametrize(("attend", "rows"), thin_out(CASES, 4))
def test_over_ranks(attend: str, rows: str, threads: Any) -> None:
    """In either order of rows, with split heads and recomputation, the proof holds."""
    plan = make_plan(models.llama(1, attend=attend), rows + SPLIT, "tp=2")
    assert_proven(threads, plan, [models.tokens(rows=4, seed=seed) for seed in (1, 2, 3)])


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate halves of heads by angles."""
    cos, sin = cos[:, None], sin[:, None]
    rotated = []
    for x in (q, k):
        a, b = x.chunk(2, -1)
        rotated.append(x * cos + torch.cat((-b, a), -1) * sin)
    return rotated[0], rotated[1]


class CustomAttention(nn.Module):
    """Attention that is in no library: it rotates by a function of its file and calls torch's
    attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Compute causal attention of two heads; angles follow from positions."""
        heads = (t.view(*x.shape[:2], 2, 4).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        q, k, v = heads
        speed = torch.tensor([1.0, 0.1, 1.0, 0.1], dtype=torch.double)
        angle = torch.arange(x.shape[1])[None, :, None] * speed
        q, k = apply_rotary(q, k, angle.cos(), angle.sin())
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("order", [("rope", "flex_attention"), ("flex_attention", "rope")])
def test_in_a_module_that_calls_torch(order: tuple[str, str]) -> None:
    """Both kernels run in either order, and the results stay the same."""
    torch.manual_seed(0)
    module = CustomAttention().double()
    x = torch.randn(2, 5, 8, dtype=torch.double, requires_grad=True)
    expected = module(x)
    (slope,) = torch.autograd.grad(expected.square().sum(), x)
    kernels = [match(module, kernel) for kernel in order]
    for kernel_match in kernels:
        replace(module, kernel_match)  # type: ignore[arg-type]
    assert kernels_of(module) == ("rope", "flex_attention")
    runs_before = backend_runs().get("reference", 0)
    actual = module(x)
    assert backend_runs()["reference"] == runs_before + 2
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-14)
    (actual_slope,) = torch.autograd.grad(actual.square().sum(), x)
    torch.testing.assert_close(actual_slope, slope, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("first", "second"), [("sdpa", "flex_attention"), ("rope", "rope")])
def test_one_part_is_replaced_once(first: str, second: str) -> None:
    """Two kernels for one part of a module, or one twice, are refused."""
    message = refusal_text(models.llama(1), kernel_row(first) + kernel_row(second))
    assert "S501" in message and "is computed by a kernel twice" in message
