"""Models with random operators in evaluation: equal with the model's draws, or refused."""

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
from tests.proofs import make_plan

WIDTH = 8
DP = ("dp=2", "zero(stage=1, over=dp)")
TP = ("tp=2", "blocks.*.0  shard(col, over=tp)\nblocks.*.2  shard(row, over=tp)")
PP = ("pp=2", 'blocks  pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)')
Noise = Callable[[nn.Module, Tensor], Tensor]


class Noisy(nn.Module):
    """Residual blocks with activations to which noise may be added."""

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
        output = self.leave(self.noise(self, h))
        return {"loss": (output - x).square().mean(), "out": output}


class Activation(nn.Module):
    """A tanh, optionally with noise."""

    def __init__(self, noise: Noise | None) -> None:
        super().__init__()
        self.noise = noise

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() if self.noise is None else self.noise(self, x.tanh())


def no_noise(_: nn.Module, x: Tensor) -> Tensor:
    return x


def vae_noise(_: nn.Module, x: Tensor) -> Tensor:
    """A sample around a mean, as in a VAE."""
    return x + torch.exp(0.1 * x) * torch.randn_like(x)


def normal_noise(_: nn.Module, x: Tensor) -> Tensor:
    """The same sample by torch.distributions."""
    return torch.distributions.Normal(x, torch.exp(0.1 * x)).rsample()


def dropout_noise(_: nn.Module, x: Tensor) -> Tensor:
    """Dropout that stays on."""
    return F.dropout(x, 0.3)


def second_draw(module: nn.Module, x: Tensor) -> Tensor:
    """In training the second draw of its module, in evaluation the first one."""
    x = F.dropout(x, 0.2, module.training)
    return x * torch.rand_like(x)


def row_noise(_: nn.Module, x: Tensor) -> Tensor:
    """One random factor per row."""
    return x * torch.bernoulli(torch.full((len(x), 1), 0.7, dtype=x.dtype, device=x.device))


def eval_noise(module: nn.Module, x: Tensor) -> Tensor:
    """Noise only in evaluation."""
    return x if module.training else x * torch.rand_like(x)


def make_batches() -> tuple[dict[str, Tensor], ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple({"x": torch.randn(6, 5, generator=generator).double()} for _ in range(2))


def run_proof(model: nn.Module, rows: tuple[str, str], pool: Pool) -> Any:
    return prove(Case(make_plan(model, rows[1], rows[0]), make_batches(), dtype="none"), pool=pool)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "a sample around a mean": lambda: Noisy(vae_noise),
    "a distribution": lambda: Noisy(normal_noise),
    "dropout that stays on": lambda: Noisy(no_noise, dropout_noise),
    "another count of calls": lambda: Noisy(second_draw, second_draw),
    "numbers by row": lambda: Noisy(row_noise, row_noise),
}


@pytest.mark.parametrize("rows", [DP, TP, PP], ids=["dp", "tp", "pp"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_draws_in_evaluation_is_proven(
    name: str, rows: tuple[str, str], pool: Pool
) -> None:
    """Outputs in evaluation equal the original's, also with sharded activations."""
    report = run_proof(MODELS[name](), rows, pool)
    assert report.ok, report
    assert any(row.kind == "outputs" for row in report.rows)


@pytest.mark.parametrize("rows", [DP, PP], ids=["dp", "pp"])
def test_noise_in_evaluation_alone(rows: tuple[str, str], pool: Pool) -> None:
    """Noise only in evaluation is equal if training draws too and nothing is sharded."""
    assert run_proof(Noisy(vae_noise, eval_noise), rows, pool).ok


def test_noise_of_evaluation_on_split_activations(pool: Pool) -> None:
    """Its layout on sharded activations is unknown: refused at the line of the model."""
    with pytest.raises(Refusal) as caught:
        run_proof(Noisy(vae_noise, eval_noise), TP, pool)
    message = caught.value.render()
    line = eval_noise.__code__.co_firstlineno + 2
    assert (
        "S812" in message and f"test_evaluated.py:{line}" in message and "in evaluation" in message
    ), message


@pytest.mark.parametrize("rows", [DP, TP, PP], ids=["dp", "tp", "pp"])
def test_a_program_that_draws_in_evaluation_alone(rows: tuple[str, str], pool: Pool) -> None:
    """Without random operators in training there are no logical draws: refused at the line."""
    with pytest.raises(Refusal) as caught:
        run_proof(Noisy(eval_noise), rows, pool)
    message = caught.value.render()
    assert "S812" in message and "test_evaluated.py:" in message and "`blocks" not in message, (
        message
    )


def evaluate_twice(plan: Plan, batch: Any) -> list[Tensor]:
    program = build(plan, batch, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    evaluations = [program.eval_step(batch)["out"] for _ in range(2)]
    program.train_step(batch)
    return [*evaluations, program.eval_step(batch)["out"]]


def test_every_evaluation_draws_anew_and_ranks_agree(threads: Threads) -> None:
    """Every evaluation draws a new sample, equal on all ranks."""
    plan = make_plan(Noisy(vae_noise), TP[1], TP[0])
    rank0, rank1 = threads.run(evaluate_twice, 2, plan, make_batches()[0])
    assert all(torch.equal(a, b) for a, b in zip(rank0, rank1))
    assert not torch.allclose(rank0[0], rank0[1]) and not torch.allclose(rank0[1], rank0[2])
