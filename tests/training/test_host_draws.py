"""Models that draw from Python's `random` and from numpy: ranks draw what the original draws."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.lower.build import build
from schedlang.runtime.float64 import Float64
from schedlang.runtime.launch.pool import Pool
from schedlang.runtime.modes import enter_modes
from tests.proofs import assert_proven, make_plan, sgd

WIDTH, DEPTH, STEPS = 8, 4, 3
drawn: list[float] = []  # by the forwards of this process
replayed: list[float] = []  # what the next forwards use instead


def draw() -> float:
    """Return a sum of two numbers of the process's generators, or a number of an earlier run."""
    if replayed:
        return replayed.pop(0)
    drawn.append(random.random() + float(np.random.rand()))
    return drawn[-1]


class Block(nn.Module):
    """A feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.down(self.up(x).relu())
        return output


class Noisy(nn.Module):
    """Blocks whose inputs are scaled by draws, the same for all rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x * (0.5 + draw()) if self.training else x)
        return x.square().mean()


class Dropping(Noisy):
    """Blocks that are left out by chance."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x if self.training and random.random() < 0.3 else block(x)
        return x.square().mean()


class RowMasks(Noisy):
    """A mask of rows, drawn by numpy."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            keeps = torch.from_numpy(np.random.rand(len(x)) < 0.5).to(x.device)
            x = block(x * keeps[:, None])
        return x.square().mean()


def batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(8, WIDTH, generator=generator, dtype=torch.float64)}


SPLIT = "blocks.*.up shard(col, over=tp)\nblocks.*.down shard(row, over=tp)"
ROWS = {
    "tensor parallel": ("tp=2", SPLIT),
    "sharded state": ("dp=2", "zero(stage=3, over=dp)"),
    "stages": ("pp=2", 'blocks pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)'),
}
Trained = tuple[list[float], list[list[float]], dict[str, Tensor]]


def train(rows: str, mesh: str, rank_seeds: bool = True) -> Trained:
    """Train on this rank; return losses, what each step has drawn, and the state."""
    if rank_seeds:  # as processes have them that nobody seeds
        random.seed(torch.distributed.get_rank())
        np.random.seed(torch.distributed.get_rank())
    plan = make_plan(Noisy().double(), rows, mesh)
    with enter_modes(Float64()):
        program = build(plan, batch(0), optimizer=sgd)
        before, losses, draws = random.getstate(), [], []
        for step in range(STEPS):
            drawn.clear()
            losses.append(float(program.train_step(batch(step))))
            draws.append([*drawn])
        assert random.getstate() == before, "a step moves the generators of the process"
        return losses, draws, {n: v.clone() for n, v in program.state_dict().items()}


def train_plainly(draws: list[list[float]]) -> tuple[list[float], nn.Module]:
    """Train in one process, with what each step has drawn."""
    model = Noisy().double()
    optimizer = sgd(model.named_parameters())
    losses = []
    for step in range(STEPS):
        replayed[:] = draws[step]
        optimizer.zero_grad()
        loss = model(**batch(step))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        assert not replayed
    return losses, model


@pytest.mark.parametrize("name", ROWS)
def test_ranks_draw_what_one_process_draws(pool: Pool, name: str) -> None:
    """Losses and weights of three steps are those of a plain loop with the same draws."""
    mesh, rows = ROWS[name]
    results: list[Trained] = pool.run(train, 2, rows, mesh)
    (losses, first_draws, state), (other_losses, draws, _) = results
    # a stage runs the model's code up to its end, for each microbatch
    draws = [[*dict.fromkeys(step)] for step in draws]
    assert len({value for step in draws for value in step}) == STEPS * DEPTH
    assert all({*first} <= {*step} for first, step in zip(first_draws, draws))
    expected, model = train_plainly(draws)
    assert losses == pytest.approx(expected, rel=1e-9)
    assert other_losses == pytest.approx(expected, rel=1e-9)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=1e-9, atol=1e-12)


def call_module() -> tuple[list[float], list[float]]:
    """Return on a rank the losses of a loop of one's own, and what it has drawn."""
    random.seed(torch.distributed.get_rank())
    torch.manual_seed(0)
    program: Any = build(make_plan(Noisy().double(), SPLIT, "tp=2"), batch(0), optimizer=sgd)
    drawn.clear()
    return [float(program.module(**batch(0))) for _ in range(2)], [*drawn]


def test_a_loop_of_ones_own() -> None:
    """Calls of the module draw equally on all ranks, and each call anew."""
    with Pool() as own_ranks:  # a module that is handed out lets its process check all gradients
        first, second = own_ranks.run(call_module, 2)
    assert first == second
    assert len(set(first[1])) == 2 * DEPTH and first[0][0] != first[0][1]


def test_modules_that_are_called_by_chance() -> None:
    """They are refused, by name, with what to write."""
    from schedlang.passes.analyze.prepare import prepare

    plan = make_plan(Dropping().double(), SPLIT, "tp=2")
    with pytest.raises(Refusal, match=r"(?s)S614.*is called or not.*torch.rand"):
        prepare(plan, batch(0))


def test_draws_by_rows(pool: Pool) -> None:
    """Ranks with the same rows draw the same masks; parts of a batch cannot draw as the whole."""
    batches = [batch(0), batch(1)]
    assert_proven(pool, make_plan(RowMasks().double(), SPLIT, "tp=2"), batches)
    plan = make_plan(RowMasks().double(), "zero(stage=0, over=dp)", "dp=2")
    with pytest.raises(Refusal, match="S703"):
        assert_proven(pool, plan, batches)
