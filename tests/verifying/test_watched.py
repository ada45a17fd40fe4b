"""Tests of watched: what draws random numbers is seen wherever torch hides it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.analyze.prepare import prepare
from schedlang.passes.propagate.propagate import Traced, propagate
from schedlang.runtime.launch.pool import Pool
from tests.proofs import planned, proven

Layer = Callable[[Any, Tensor], Tensor]


class Drawing(nn.Module):
    """A linear layer, and a function of what it gives [rows, 3, 8]."""

    def __init__(self, layer: Layer, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.enter, self.layer, self.inner = nn.Linear(8, 8), layer, inner
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self, self.enter(x)).square().mean()


BATCH = {"x": torch.ones(4, 3, 8, dtype=torch.float64)}


def attention(dropout: float, **more: Any) -> nn.Module:
    """Torch's own, with its rows first."""
    torch.manual_seed(0)
    return nn.MultiheadAttention(8, 2, dropout=dropout, batch_first=True, **more)


def attend(model: Any, x: Tensor, weights: bool = False) -> Tensor:
    """The attention inside of a model."""
    out: Tensor = model.inner(x, x, x, need_weights=weights)[0]
    return out


def recur(model: Any, x: Tensor) -> Tensor:
    """The recurrent layer inside of a model."""
    out: Tensor = model.inner(x)[0]
    return out


def traced(layer: Layer, inner: nn.Module | None = None) -> Traced:
    """What one forward without values shows."""
    return propagate(planned(Drawing(layer, inner), "enter  checkpoint()"), BATCH)


def gumbel(model: Any, x: Tensor) -> Tensor:
    """Draws inside of a function of torch.nn.functional."""
    return F.gumbel_softmax(x)


LOGICAL: dict[str, tuple[Layer, nn.Module | None]] = {
    "attention": (attend, attention(0.3)),
    "attention with weights": (lambda m, x: attend(m, x, True), attention(0.3)),
    "dropout_p": (lambda m, x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1), None),
    "gumbel": (gumbel, None),
    "alpha": (lambda m, x: F.alpha_dropout(x, training=True), None),
    "feature alpha": (lambda m, x: F.feature_alpha_dropout(x, training=True), None),
    "channels": (lambda m, x: F.dropout1d(x, training=True), None),
    "uniform": (lambda m, x: x * torch.empty_like(x).uniform_(), None),
    "normal": (lambda m, x: x + torch.empty_like(x).normal_(), None),
    "normal of a mean": (lambda m, x: x + torch.normal(x.detach(), 1.0), None),
    "a distribution": (lambda m, x: torch.distributions.Normal(x, 1 + x.square()).rsample(), None),
    "exponential": (lambda m, x: x + torch.empty_like(x).exponential_(), None),
    "rand": (lambda m, x: x * torch.rand(len(x), 1, 1, dtype=x.dtype, device=x.device), None),
}


@pytest.mark.parametrize("name", LOGICAL)
def test_what_functions_draw_inside_is_seen(name: str) -> None:
    """It is random, and it has a logical form."""
    found = traced(*LOGICAL[name])
    assert found.is_random and not found.unequal_draws


APART: dict[str, tuple[Layer, nn.Module | None]] = {
    "torch.randint": (lambda m, x: x * torch.randint(3, (len(x), 1, 1), device=x.device), None),
    "torch.multinomial": (lambda m, x: x * torch.multinomial(x[0].softmax(-1), 2).sum(), None),
    "torch.poisson": (lambda m, x: x * torch.poisson(x.detach().abs()), None),
    "torch.rrelu": (lambda m, x: F.rrelu(x, training=True), None),
    "torch.rand": (lambda m, x: F.fractional_max_pool2d(x[..., None], (2, 1), (2, 1)), None),
    "torch.uniform_": (lambda m, x: x * nn.init.uniform_(torch.empty_like(x)), None),
}


@pytest.mark.parametrize("name", APART)
def test_what_cannot_be_drawn_alike_is_refused_by_several_ranks(name: str) -> None:
    """Before anything runs, at its name; one rank draws as torch does."""
    model = Drawing(*APART[name])
    assert name in traced(*APART[name]).unequal_draws
    prepare(planned(model, "enter  checkpoint()"), BATCH)
    with pytest.raises(Refusal, match=f"S812.*{name}"):
        prepare(planned(model, "zero(stage=1, over=dp)", "dp=2"), BATCH)


STILL: dict[str, tuple[Layer, nn.Module | None]] = {
    "attention": (attend, attention(0.0)),
    "leaky": (lambda m, x: F.rrelu(x, training=False), None),
    "recurrent": (recur, nn.LSTM(8, 8, num_layers=2, batch_first=True)),
    "eval": (lambda m, x: F.dropout(x, training=False), None),
    "none": (lambda m, x: F.alpha_dropout(x, 0.0, training=True), None),
    "nothing": (lambda m, x: x.tanh(), None),
}


@pytest.mark.parametrize("name", STILL)
def test_what_draws_nothing_is_not_random(name: str) -> None:
    """Dropout of nothing, or out of training."""
    found = traced(*STILL[name])
    assert not found.is_random and not found.unequal_draws


@pytest.mark.parametrize(
    "rows, mesh",
    [
        ("inner  checkpoint()", ""),
        ("zero(stage=2, over=dp)", "dp=2"),
        ('blocks  pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)', "pp=2"),
    ],
)
@pytest.mark.parametrize("weights", [False, True])
def test_dropout_inside_of_attention_is_that_of_the_model(
    rows: str, mesh: str, weights: bool, pool: Pool
) -> None:
    """Torch's own attention is the only thing in a model that drops, recomputed and over ranks."""
    model: nn.Module = Drawing(lambda m, x: attend(m, x, weights), attention(0.3))
    if "pp" in mesh:
        model = Stacked(weights)
    draw = torch.Generator().manual_seed(0)
    batches = [{"x": torch.randn(n, 3, 8, generator=draw, dtype=torch.float64)} for n in (4, 5)]
    proven(pool, planned(model, rows, mesh), batches)


class Stacked(nn.Module):
    """Two attentions that drop, one after the other."""

    def __init__(self, weights: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(attention(0.3) for _ in range(2))
        self.weights = weights
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x, x, x, need_weights=self.weights)[0]
        return x.square().mean()


class Noisy(nn.Module):
    """Draws as it likes, in every block."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), Noise()) for _ in range(2))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


class Noise(nn.Module):
    """Numbers that nothing of the batch decides."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = torch.rand(len(x), 1, device=x.device) > 0.2
        some = torch.empty(len(x), 1, dtype=x.dtype, device=x.device).bernoulli_(0.8)
        where = torch.rand(len(x), 1) > 0.2  # on the device that there is, as most write it
        return x * kept * some * where.to(x.dtype) + 0.1 * torch.randn_like(x)


def test_shapes_are_found_without_drawing(pool: Pool) -> None:
    """A stage that runs others for their shapes alone leaves torch's generator as it was."""
    draw = torch.Generator().manual_seed(0)
    batches = [{"x": torch.randn(n, 8, generator=draw, dtype=torch.float64)} for n in (4, 5)]
    rows = 'blocks  pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)'
    proven(pool, planned(Noisy(), rows, "pp=2"), batches)
