"""Modules whose input enters as a whole (`input=R`): full tensors inside meet split ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import Refusal
from tests.engine import Threads
from tests.zoo_models.written import Written, hand_text, init_text, judge
from tests.zoo_models.written_language import MODELS

LATENT = """
  at layers.* {{
    attention.{{wq_b,wkv_b}}  shard(col, over=tp)
    attention.wo            shard(row, over=tp)
    {}
  }}"""
ENTERS = "attention  shard(input=R, over=tp)"


@pytest.mark.parametrize("name", ["mla", "mla_absorbed"])
def test_a_key_that_all_heads_share(threads: Threads, name: str) -> None:
    """DeepSeek's rotary key is full beside split heads: the attention's input enters once.

    Its weights before the split heads are full, and their gradients are summed over the ranks.
    """
    written = MODELS[name]
    assert judge(written, hand_text("tp=2" + LATENT.format(ENTERS)), threads) == ""
    with pytest.raises(Refusal) as refused:
        judge(written, hand_text("tp=2" + LATENT.format("")), threads)
    assert refused.value.diagnostic.code == "S405"


def test_init_lets_the_attention_enter(threads: Threads) -> None:
    """`init` writes that row where split heads need it, and no other row is gathered for it."""
    text = init_text(MODELS["mla"], "tp")
    assert "attention                            shard(input=R, over=tp)" in text
    assert "output=R" not in text
    assert judge(MODELS["mla"], text, threads) == ""


def test_what_is_refused_says_where_to_enter() -> None:
    """The refusal of a full tensor beside a split one names the module, and following it helps."""
    written = MODELS["mla_absorbed"]
    with pytest.raises(Refusal) as refused:
        judge(written, hand_text("tp=2" + LATENT.format("")), None)
    helps = refused.value.diagnostic.helps
    assert "or let it enter `layers.0.attention`: `input=R` on a row of this module" in helps


class OwnWeights(nn.Module):
    """Attention with one parameter for q, k and v, [3, H, D, C], cast to the input's dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.w_qkv = nn.Parameter(torch.randn(3, 4, 4, 16) / 4)
        self.temperature = nn.Parameter(torch.ones(()))
        self.proj = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = torch.einsum("btc,nhdc->nbhtd", x, self.w_qkv.type_as(x))
        y = F.scaled_dot_product_attention(q * self.temperature, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(2))


class Own(nn.Module):
    """Two such blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(OwnWeights() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(F.layer_norm(x, (16,)))
        return F.mse_loss(x.mean((1, 2)), y)


def _sequences(rows: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(rows, 5, 16, generator=generator),
        "y": torch.randn(rows, generator=generator),
    }


@pytest.mark.parametrize("mesh, data", [("tp=2", ""), ("dp=2, tp=2", "\n  zero(stage=3, over=dp)")])
def test_parameters_of_the_model_itself(threads: Threads, mesh: str, data: str) -> None:
    """A parameter that is no layer's is split by heads; a scalar beside it gets the full sum."""
    rows = "\n  layers.*  shard(w_qkv=S(1), input=R, over=tp)\n  layers.*.proj  shard(row, over=tp)"
    assert judge(Written(Own, _sequences), hand_text(mesh + rows + data), threads) == ""


class Plain(nn.Module):
    """Three layers without a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(16, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.down(torch.tanh(self.up(x.mean(1)))))
        return F.mse_loss(self.head(h)[:, 0], y)


@pytest.mark.parametrize("name", ["up", "down", "head"])
def test_a_loss_that_would_be_counted_on_each_rank(threads: Threads, name: str) -> None:
    """A layer held by all ranks whose gradients are summed, without a split reader, is refused.

    The gradient of the full loss, which each rank computes, would be counted twice.
    """
    row = f"\n  {name}  shard(col, heads=1, uneven=replicate, over=tp)"
    with pytest.raises(Refusal) as refused:
        judge(Written(Plain, _sequences), hand_text("tp=2" + row), threads)
    assert refused.value.diagnostic.code == "S405"
    assert "computed in full on each rank of `tp`" in refused.value.diagnostic.title
