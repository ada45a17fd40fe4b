"""Models that draw where they evaluate: compared under the draws of the model, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.plan import Plan
from schedlang.passes.lower.build import build
from schedlang.passes.prove import Case, prove
from schedlang.runtime.launch.pool import Pool
from tests.engine.threads import Threads
from tests.proofs import planned

WIDTH = 8
DP = ("dp=2", "zero(stage=1, over=dp)")
TP = ("tp=2", "blocks.*.0  shard(col, over=tp)\nblocks.*.2  shard(row, over=tp)")
PP = ("pp=2", 'blocks  pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)')
Noise = Callable[[nn.Module, Tensor], Tensor]


class Noisy(nn.Module):
    """Residual blocks, in the middle of each an activation that noise may change."""

    def __init__(self, noise: Noise, inside: Noise | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.noise = noise
        self.enter, self.leave = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 5)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), Activation(inside), nn.Linear(WIDTH, WIDTH))
            for _ in range(2)
        )
        self.double()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.enter(x)
        for block in self.blocks:
            h = h + block(h)
        out = self.leave(self.noise(self, h))
        return {"loss": (out - x).square().mean(), "out": out}


class Activation(nn.Module):
    """A tanh, and noise on it."""

    def __init__(self, noise: Noise | None) -> None:
        super().__init__()
        self.noise = noise

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() if self.noise is None else self.noise(self, x.tanh())


def plain(_: nn.Module, x: Tensor) -> Tensor:
    return x


def vae(_: nn.Module, x: Tensor) -> Tensor:
    """A sample around a mean."""
    return x + torch.exp(0.1 * x) * torch.randn_like(x)


def distribution(_: nn.Module, x: Tensor) -> Tensor:
    """The same by torch.distributions."""
    return torch.distributions.Normal(x, torch.exp(0.1 * x)).rsample()


def monte_carlo(_: nn.Module, x: Tensor) -> Tensor:
    """Dropout that stays on."""
    return F.dropout(x, 0.3)


def after_dropout(module: nn.Module, x: Tensor) -> Tensor:
    """In training the second draw of its module, in evaluation the first."""
    x = F.dropout(x, 0.2, module.training)
    return x * torch.rand_like(x)


def depth(_: nn.Module, x: Tensor) -> Tensor:
    """One number a row, by which a block counts."""
    return x * torch.bernoulli(torch.full((len(x), 1), 0.7, dtype=x.dtype, device=x.device))


def evaluating(module: nn.Module, x: Tensor) -> Tensor:
    """Noise in evaluation alone."""
    return x if module.training else x * torch.rand_like(x)


def batches() -> tuple[dict[str, Tensor], ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple({"x": torch.randn(6, 5, generator=generator).double()} for _ in range(2))


def proof(model: nn.Module, rows: tuple[str, str], pool: Pool) -> Any:
    return prove(Case(planned(model, rows[1], rows[0]), batches(), dtype="none"), pool=pool)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "a sample around a mean": lambda: Noisy(vae),
    "a distribution": lambda: Noisy(distribution),
    "dropout that stays on": lambda: Noisy(plain, monte_carlo),
    "another count of calls": lambda: Noisy(after_dropout, after_dropout),
    "numbers by row": lambda: Noisy(depth, depth),
}


@pytest.mark.parametrize("rows", [DP, TP, PP], ids=["dp", "tp", "pp"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_draws_in_evaluation_is_proven(
    name: str, rows: tuple[str, str], pool: Pool
) -> None:
    """Outputs in evaluation are those of the original, split activations among them."""
    report = proof(MODELS[name](), rows, pool)
    assert report.ok, report
    assert any(row.kind == "outputs" for row in report.rows)


@pytest.mark.parametrize("rows", [DP, PP], ids=["dp", "pp"])
def test_noise_in_evaluation_alone(rows: tuple[str, str], pool: Pool) -> None:
    """Beside draws of training it is drawn alike, where nothing is split."""
    assert proof(Noisy(vae, evaluating), rows, pool).ok


def test_noise_of_evaluation_on_split_activations(pool: Pool) -> None:
    """Nothing tells how it lies on the ranks: refused at the line of the model."""
    with pytest.raises(Refusal) as caught:
        proof(Noisy(vae, evaluating), TP, pool)
    said = caught.value.render()
    line = evaluating.__code__.co_firstlineno + 2
    assert "S812" in said and f"test_evaluated.py:{line}" in said and "in evaluation" in said, said


@pytest.mark.parametrize("rows", [DP, TP, PP], ids=["dp", "tp", "pp"])
def test_a_program_that_draws_in_evaluation_alone(rows: tuple[str, str], pool: Pool) -> None:
    """Without draws in training a program has no logical ones: refused, at the line."""
    with pytest.raises(Refusal) as caught:
        proof(Noisy(evaluating), rows, pool)
    said = caught.value.render()
    assert "S812" in said and "test_evaluated.py:" in said and "`blocks" not in said, said


def evaluated_twice(plan: Plan, batch: Any) -> list[Tensor]:
    program = build(plan, batch, optimizer=lambda named: torch.optim.SGD(named, lr=0.1))
    first = [program.eval_step(batch)["out"] for _ in range(2)]
    program.train_step(batch)
    return [*first, program.eval_step(batch)["out"]]


def test_every_evaluation_draws_anew_and_ranks_agree(threads: Threads) -> None:
    """As often as a program evaluates, as many samples; the same on each rank."""
    plan = planned(Noisy(vae), TP[1], TP[0])
    ours, theirs = threads.run(evaluated_twice, 2, plan, batches()[0])
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs))
    assert not torch.allclose(ours[0], ours[1]) and not torch.allclose(ours[1], ours[2])
