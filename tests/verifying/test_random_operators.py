"""Detection of random operators, also inside composed functions of torch."""

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
from tests.proofs import assert_proven, make_plan

Layer = Callable[[Any, Tensor], Tensor]


class LayerModel(nn.Module):
    """A linear layer, and a function of its output [rows, 3, 8]."""

    def __init__(self, layer: Layer, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.enter, self.layer, self.inner = nn.Linear(8, 8), layer, inner
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self, self.enter(x)).square().mean()


BATCH = {"x": torch.ones(4, 3, 8, dtype=torch.float64)}


def attention(dropout: float, **options: Any) -> nn.Module:
    """Return torch's attention with batch_first."""
    torch.manual_seed(0)
    return nn.MultiheadAttention(8, 2, dropout=dropout, batch_first=True, **options)


def run_attention(model: Any, x: Tensor, weights: bool = False) -> Tensor:
    """Apply the attention of a model."""
    output: Tensor = model.inner(x, x, x, need_weights=weights)[0]
    return output


def run_recurrent(model: Any, x: Tensor) -> Tensor:
    """Apply the recurrent layer of a model."""
    output: Tensor = model.inner(x)[0]
    return output


def trace_model(layer: Layer, inner: nn.Module | None = None) -> Traced:
    """Trace one forward on the meta device."""
    return propagate(make_plan(LayerModel(layer, inner), "enter  checkpoint()"), BATCH)


def gumbel_layer(model: Any, x: Tensor) -> Tensor:
    """A random operator inside torch.nn.functional."""
    return F.gumbel_softmax(x)


LOGICAL: dict[str, tuple[Layer, nn.Module | None]] = {
    "attention": (run_attention, attention(0.3)),
    "attention with weights": (lambda m, x: run_attention(m, x, True), attention(0.3)),
    "dropout_p": (lambda m, x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1), None),
    "gumbel": (gumbel_layer, None),
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
    """Random operators inside functions are found and have a logical form."""
    traced_model = trace_model(*LOGICAL[name])
    assert traced_model.is_random and not traced_model.unequal_draws


UNEQUAL_DRAWS: dict[str, tuple[Layer, nn.Module | None]] = {
    "torch.randint": (lambda m, x: x * torch.randint(3, (len(x), 1, 1), device=x.device), None),
    "torch.multinomial": (lambda m, x: x * torch.multinomial(x[0].softmax(-1), 2).sum(), None),
    "torch.poisson": (lambda m, x: x * torch.poisson(x.detach().abs()), None),
    "torch.rrelu": (lambda m, x: F.rrelu(x, training=True), None),
    "torch.rand": (lambda m, x: F.fractional_max_pool2d(x[..., None], (2, 1), (2, 1)), None),
    "torch.uniform_": (lambda m, x: x * nn.init.uniform_(torch.empty_like(x)), None),
}


@pytest.mark.parametrize("name", UNEQUAL_DRAWS)
def test_what_cannot_be_drawn_alike_is_refused_by_several_ranks(name: str) -> None:
    """Operators without a logical form are refused by name on several ranks, not on one."""
    model = LayerModel(*UNEQUAL_DRAWS[name])
    assert name in trace_model(*UNEQUAL_DRAWS[name]).unequal_draws
    prepare(make_plan(model, "enter  checkpoint()"), BATCH)
    with pytest.raises(Refusal, match=f"S812.*{name}"):
        prepare(make_plan(model, "zero(stage=1, over=dp)", "dp=2"), BATCH)


NOT_RANDOM: dict[str, tuple[Layer, nn.Module | None]] = {
    "attention": (run_attention, attention(0.0)),
    "leaky": (lambda m, x: F.rrelu(x, training=False), None),
    "recurrent": (run_recurrent, nn.LSTM(8, 8, num_layers=2, batch_first=True)),
    "eval": (lambda m, x: F.dropout(x, training=False), None),
    "none": (lambda m, x: F.alpha_dropout(x, 0.0, training=True), None),
    "nothing": (lambda m, x: x.tanh(), None),
}


@pytest.mark.parametrize("name", NOT_RANDOM)
def test_what_draws_nothing_is_not_random(name: str) -> None:
    """Dropout with rate 0 or in eval mode is not random."""
    traced_model = trace_model(*NOT_RANDOM[name])
    assert not traced_model.is_random and not traced_model.unequal_draws


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
    """A model whose only random operator is torch's attention is equal, recomputed and on ranks."""
    model: nn.Module = LayerModel(lambda m, x: run_attention(m, x, weights), attention(0.3))
    if "pp" in mesh:
        model = AttentionStack(weights)
    draw = torch.Generator().manual_seed(0)
    batches = [{"x": torch.randn(n, 3, 8, generator=draw, dtype=torch.float64)} for n in (4, 5)]
    assert_proven(pool, make_plan(model, rows, mesh), batches)


class AttentionStack(nn.Module):
    """Two attention layers with dropout."""

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
    """Uses random operators in every block."""

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
    """Random factors and noise that do not depend on the batch."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        mask = torch.rand(len(x), 1, device=x.device) > 0.2
        bernoulli = torch.empty(len(x), 1, dtype=x.dtype, device=x.device).bernoulli_(0.8)
        cpu_mask = torch.rand(len(x), 1) > 0.2  # on the default device, as in most code
        return x * mask * bernoulli * cpu_mask.to(x.dtype) + 0.1 * torch.randn_like(x)


def test_shapes_are_found_without_drawing(pool: Pool) -> None:
    """Finding shapes of other stages does not change torch's generator."""
    draw = torch.Generator().manual_seed(0)
    batches = [{"x": torch.randn(n, 8, generator=draw, dtype=torch.float64)} for n in (4, 5)]
    rows = 'blocks  pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)'
    assert_proven(pool, make_plan(Noisy(), rows, "pp=2"), batches)
