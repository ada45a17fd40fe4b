"""Two kernels in one module: an attention that turns by one and attends by another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.kernels.kernel_device import backend_runs
from schedlang.runtime.kernel_injection.kernel import match, replace
from tests import models
from tests.kernels.looking import kernels_of
from tests.proofs import planned, proven, refused
from tests.tiers import thinned

pytest.importorskip("transformers")
ROPE = "model.layers.*.self_attn replace_kernel(rope)\n"
SPLIT = """model.layers.*.self_attn.{q,k,v}_proj shard(col, over=tp)
model.layers.*.self_attn.o_proj shard(row, over=tp)
model.layers.* checkpoint()
"""


def attending(kernel: str) -> str:
    """The row of another kernel at the same modules."""
    return f"model.layers.*.self_attn replace_kernel({kernel})\n"


CASES = [
    ("eager", ROPE + attending("sdpa")),
    ("sdpa", attending("flex_attention") + ROPE),
    ("eager", attending("sdpa") + ROPE),
    ("sdpa", ROPE + attending("flex_attention")),
]


@pytest.mark.parametrize(("attend", "rows"), thinned(CASES, 4))
def test_over_ranks(attend: str, rows: str, threads: Any) -> None:
    """In either order of rows, beside split heads and recomputation: the whole proof."""
    plan = planned(models.llama(1, attend=attend), rows + SPLIT, "tp=2")
    proven(threads, plan, [models.tokens(rows=4, seed=seed) for seed in (1, 2, 3)])


def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Halves of heads turned by angles."""
    cos, sin = cos[:, None], sin[:, None]
    made = []
    for x in (q, k):
        a, b = x.chunk(2, -1)
        made.append(x * cos + torch.cat((-b, a), -1) * sin)
    return made[0], made[1]


class Own(nn.Module):
    """Attention of nobody's library: it turns by a function of its file, and calls torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Causal, two heads; the angles are those of places."""
        lines = (t.view(*x.shape[:2], 2, 4).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        q, k, v = lines
        speed = torch.tensor([1.0, 0.1, 1.0, 0.1], dtype=torch.double)
        angle = torch.arange(x.shape[1])[None, :, None] * speed
        q, k = turned(q, k, angle.cos(), angle.sin())
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("order", [("rope", "flex_attention"), ("flex_attention", "rope")])
def test_in_a_module_that_calls_torch(order: tuple[str, str]) -> None:
    """Both run, whichever is put first, and the module computes what it did."""
    torch.manual_seed(0)
    module = Own().double()
    x = torch.randn(2, 5, 8, dtype=torch.double, requires_grad=True)
    expected = module(x)
    (slope,) = torch.autograd.grad(expected.square().sum(), x)
    found = [match(module, kernel) for kernel in order]
    for each in found:
        replace(module, each)  # type: ignore[arg-type]
    assert kernels_of(module) == ("rope", "flex_attention")
    before = backend_runs().get("reference", 0)
    made = module(x)
    assert backend_runs()["reference"] == before + 2
    torch.testing.assert_close(made, expected, rtol=1e-13, atol=1e-14)
    (again,) = torch.autograd.grad(made.square().sum(), x)
    torch.testing.assert_close(again, slope, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("first", "second"), [("sdpa", "flex_attention"), ("rope", "rope")])
def test_one_part_is_replaced_once(first: str, second: str) -> None:
    """Two kernels for one part of a module, or one twice, are refused."""
    said = refused(models.llama(1), attending(first) + attending(second))
    assert "S501" in said and "is computed by a kernel twice" in said
