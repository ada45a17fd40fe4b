"""Products over split dims inside modules of the user's own: partial sums, summed at `output=R`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import Refusal
from tests.engine import Threads
from tests.proofs import assert_proven, make_plan
from tests.zoo_models.written import Written, hand_text, judge
from tests.zoo_models.written_language import MODELS
from tests.zoo_models.written_mixers import MODELS as MIXERS

HEADS = "layers.*.mix  shard(w_q=S(1), w_kv=S(2), w_o=S(0), input=R, output=R, over=tp)"
WIDTH = "layers.*.feed_forward  shard(w_in=S(2), w_out=S(1), input=R, output=R, over=tp)"
CUT = '\n  layers  pipeline_split(over=pp)\n  pipeline(order="1F1B", micro=2)'


@pytest.mark.parametrize(
    "name, mesh, rows",
    [
        ("einsum", "tp=2", HEADS),
        ("einsum", "tp=4", HEADS),
        ("einsum", "dp=2, tp=2", f"{HEADS}\n  zero(stage=3, over=dp)"),
        ("switch", "tp=2", WIDTH),
        ("switch", "pp=2, tp=2", WIDTH + CUT),
    ],
)
def test_weights_of_einsums(threads: Threads, name: str, mesh: str, rows: str) -> None:
    """Attention by einsum is split by heads, stacked experts by their width."""
    written = (MODELS | MIXERS)[name]
    assert judge(written, hand_text(f"{mesh}\n  {rows}"), threads) == ""


Computes = Callable[["Layer", Tensor, Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """A product of two split weights, and what computes with it."""

    def __init__(self, computes: Computes, hidden: int = 8) -> None:
        super().__init__()
        self.computes = computes
        self.a = nn.Parameter(torch.randn(16, hidden) / 4)
        self.b = nn.Parameter(torch.randn(hidden, 16) / 4)
        self.bias, self.gate = nn.Parameter(torch.randn(16)), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sigmoid(x @ self.a)
        return self.computes(self, x, h, h @ self.b)


class Net(nn.Module):
    """Two such layers with residuals."""

    def __init__(self, computes: Computes, hidden: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(computes, hidden) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(F.layer_norm(x, (16,)))
        return F.mse_loss(x.square().mean((1, 2)), y)


def _sequences(rows: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(rows, 5, 17, generator=generator)
    return {"x": draw[..., :16], "y": draw[:, 0, 16]}


def _written(x: Tensor, y: Tensor) -> Tensor:
    filled = torch.zeros_like(x)
    filled[:] = y
    return filled


ROW = "layers.*  shard(a=S(1), b=S(0), input=R, output=R, over=tp)"
LINEAR_USES: dict[str, Computes] = {
    "gated": lambda layer, x, h, y: y * torch.sigmoid(layer.gate(x)),
    "divided": lambda layer, x, h, y: y / (1 + x.abs()),
    "scaled": lambda layer, x, h, y: 0.5 * y * layer.bias,
    "added": lambda layer, x, h, y: torch.cat([*y.chunk(2, -1)][::-1], -1) - y,
    "product": lambda layer, x, h, y: torch.einsum("btc,btd,c->btd", y, x, layer.bias),
    "sum": lambda layer, x, h, y: (h.unsqueeze(-1) * layer.b).sum(2),
}
OTHER_USES: dict[str, Computes] = {
    "add": lambda layer, x, h, y: y + layer.bias,
    "add 1": lambda layer, x, h, y: y + 1.0,
    "residual": lambda layer, x, h, y: x + y,
    "gelu": lambda layer, x, h, y: F.gelu(y),
    "square": lambda layer, x, h, y: y * y,
    "layer_norm": lambda layer, x, h, y: F.layer_norm(y, (16,)),
    "setitem": lambda layer, x, h, y: _written(x, y),
    "add_": lambda layer, x, h, y: torch.zeros_like(x).add_(y),
    "linear": lambda layer, x, h, y: F.linear(h, layer.b.t(), layer.bias),
    "baddbmm": lambda layer, x, h, y: torch.baddbmm(x, h, layer.b.expand(len(h), -1, -1)),
    "mean": lambda layer, x, h, y: (h.unsqueeze(-1) * layer.b).mean(2),
    "compared": lambda layer, x, h, y: torch.where(y > 0, x, -x),
    "module": lambda layer, x, h, y: layer.gate(y),
    "vmap": lambda layer, x, h, y: torch.vmap(lambda row: row * row)(y),
    "item": lambda layer, x, h, y: y * y.sum().item(),
}


@pytest.mark.parametrize("use", LINEAR_USES)
def test_what_is_linear_in_a_partial_sum(threads: Threads, use: str) -> None:
    """Its gradients, and those of full tensors that it multiplies, are complete."""
    written = Written(lambda: Net(LINEAR_USES[use]), _sequences)
    assert judge(written, hand_text(f"tp=2\n  {ROW}"), threads) == ""


@pytest.mark.parametrize("use", OTHER_USES)
def test_what_needs_the_sum_is_refused(use: str) -> None:
    """A call that is not linear in it, or adds a full tensor to it on each rank, is refused."""
    with pytest.raises(Refusal) as refused:
        judge(Written(lambda: Net(OTHER_USES[use]), _sequences), hand_text(f"tp=2\n  {ROW}"), None)
    assert refused.value.diagnostic.code == "S405"


def test_padded_widths(threads: Threads) -> None:
    """A width that the ranks do not divide is right with padding, or refused."""
    written = Written(lambda: Net(LINEAR_USES["gated"], 7), _sequences)
    text = hand_text(f"tp=2\n  {ROW.replace('over', 'uneven=pad, over')}")
    try:
        assert judge(written, text, threads) == ""
    except Refusal as refusal:
        assert refusal.diagnostic.code.startswith("S4")


def test_the_whole_proof_holds(threads: Threads) -> None:
    """Also the proof by types, which knows no layouts, and the program's state."""
    net = Net(LINEAR_USES["product"]).double()
    batches = [
        {name: value.double() for name, value in _sequences(4, seed).items()} for seed in (0, 1)
    ]
    assert_proven(threads, make_plan(net, ROW, "tp=2"), batches)
