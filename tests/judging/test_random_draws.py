"""Draws of Python's and numpy's generators, and dropout beside the original's own."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

from schedlang import TrainingProgram, verify_program
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.judge.dropout_masks import IN_EXCESS
from schedlang.report import Report
from schedlang.runtime.launch.pool import Pool
from tests.judging.net import batch_part

WIDTH = 6
OWN = "its own generator `own`"
DRAWS: dict[str, Any] = {"Python's `random`": random.random, "`numpy.random`": np.random.rand}


def numbers(seed: int) -> dict[str, Tensor]:
    """Return a batch of rows of floats, and targets of the same shape."""
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(6, WIDTH, generator=draw) for name in ("x", "y")}


def squared(output: Any, batch: Any) -> Tensor:
    """Return the mean squared error."""
    return F.mse_loss(output, batch["y"])


class Skipping(nn.Module):
    """Layers of which some are skipped in training: by Python's generator, or by numpy's."""

    def __init__(self, of: str) -> None:
        super().__init__()
        self.layers, self.of = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)), of
        self.own = np.random.default_rng(3)

    def forward(self, x: Tensor) -> Tensor:
        """Add the layers that are not skipped."""
        for k, layer in enumerate(self.layers):
            if self.training and DRAWS.get(self.of, self.own.random)() < 0.5 and k:
                continue
            x = x + layer(x).tanh()
        return x


class Masking(nn.Module):
    """A layer that masks each input by a draw of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Mask, and project."""
        drawn = torch.tensor([random.random() for _ in range(x.numel())])
        output: Tensor = self.layer(x.masked_fill(drawn.reshape(x.shape) < 0.3, 0.0))
        return output


class Dropping(nn.Module):
    """Three layers with a dropout after the first."""

    def __init__(self, p: float = 0.1) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.drop = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers."""
        return self.third(self.second(self.drop(self.first(x).tanh())).tanh())


def replicated(change: Any = lambda model: None, factor: int = 1, draws: bool = False) -> Any:
    """Return a program with DDP; `change` changes its model, `factor` scales its loss."""

    def program(model: Any) -> TrainingProgram:
        change(model)
        module = DistributedDataParallel(model, find_unused_parameters=True)

        def step(batch: Any) -> Tensor:
            local = batch_part(batch, dist.get_rank(), dist.get_world_size())
            scale = 1.0 + random.random() if draws else 1.0
            value = squared(module(scale * local["x"]), local) * factor
            value.backward()
            return value

        return TrainingProgram(module, step)

    return program


def judge_program(pool: Pool, program: Any, model: nn.Module, **options: Any) -> Report:
    """Return the verdict on two ranks."""
    torch.manual_seed(0)
    return verify_program(
        program, model=model, batch=numbers, loss=squared, ranks=2, pool=pool, **options
    )


@pytest.mark.parametrize("name", [*DRAWS, OWN])
def test_ranks_draw_what_the_original_draws(name: str, pool: Pool) -> None:
    """Layers are skipped alike on both sides, and mistakes beside that are named."""
    report = judge_program(pool, replicated(), Skipping(name))
    assert report.ok and any(name in gap.condition for gap in report.gaps), str(report)
    localised = judge_program(pool, replicated(factor=2), Skipping(name)).localised
    assert any("ranks = 2 times the right value everywhere" in t for _, t in localised), localised
    assert all(head != "first module" for head, _ in localised), localised


def test_ranks_draw_alike_in_a_low_dtype(pool: Pool) -> None:
    """The runs that measure roundings draw the same numbers, too."""
    report = judge_program(pool, replicated(), Skipping("Python's `random`"), dtype="bfloat16")
    assert report.ok, str(report)


def test_draws_for_each_row_are_refused(pool: Pool) -> None:
    """Ranks that draw for their rows only cannot be aligned, and the refusal says so."""
    with pytest.raises(Refusal) as refused:
        judge_program(pool, replicated(), Masking())
    assert refused.value.diagnostic.code == "S812"
    assert "rank 0, 1 draws less or more often" in " ".join(str(refused.value).split())


def test_draws_that_the_original_does_not_make(pool: Pool) -> None:
    """A program that fails, and draws where the original does not, is told both."""
    report = judge_program(pool, replicated(draws=True), Dropping(0.0))
    text = "rank 0, 1 draws from Python's `random` in a step, and the original draws nothing"
    assert not report.ok and any(text in said for _, said in report.localised), str(report)


def drop_second(model: Any) -> None:
    """Drop after the second layer."""
    model.second = nn.Sequential(model.second, nn.Dropout(0.2))


def drop_input(model: Any) -> None:
    """Drop from the input of the first layer."""
    model.first.register_forward_pre_hook(
        lambda module, args: (F.dropout(args[0], 0.2, module.training),)
    )


def drop_nothing(model: Any) -> None:
    """Drop from rows of zeros whose result counts for nothing."""
    model.first.register_forward_hook(
        lambda module, args, output: (
            output + 0.0 * F.dropout(torch.zeros(2, 3), 0.5, module.training).sum()
        )
    )


@pytest.mark.parametrize(
    "change, site", [(drop_second, "module.second.1"), (drop_input, "module.first")]
)
def test_dropout_beside_the_original_s(change: Any, site: str, pool: Pool) -> None:
    """Dropout in excess fails if all of the original's is found elsewhere."""
    report = judge_program(pool, replicated(change), Dropping())
    failing = [row for row in report.rows if not row.ok]
    assert [(row.name, row.note) for row in failing] == [(site, IN_EXCESS)], str(report)


def test_dropout_without_effect(pool: Pool) -> None:
    """Dropout of rows that count for nothing is a gap, and no mistake."""
    report = judge_program(pool, replicated(drop_nothing), Dropping())
    assert report.ok and any("module.first" in gap.condition for gap in report.gaps), str(report)


def staged(model: Any) -> TrainingProgram:
    """Return a program with stages of torch, which learn shapes on dummy inputs."""
    rank = dist.get_rank()
    first, second = (nn.ModuleDict({"layer": layer}) for layer in (model.first, model.second))
    first["drop"], second["last"] = model.drop, model.third

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = second if rank else first

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.held["layer"](x).tanh()
            last: Tensor = self.held["last"](output) if rank else self.held["drop"](output)
            return last

    stage = Stage()

    def step(batch: Any) -> Any:
        pipeline_stage = PipelineStage(stage, rank, 2, torch.device("cpu"))
        schedule = ScheduleGPipe(pipeline_stage, 2, loss_fn=F.mse_loss)
        losses: list[Tensor] = []
        schedule.step(*([] if rank else [batch["x"]]), target=batch["y"], losses=losses)
        return torch.stack(losses).mean() if rank else None

    return TrainingProgram(stage, step)


def test_dropout_of_stages_that_learn_shapes(pool: Pool) -> None:
    """Calls on dummy inputs are no dropout of the step: all of it is compared."""
    report = judge_program(pool, staged, Dropping())
    assert report.ok, str(report)
    assert not any("is not known" in gap.condition for gap in report.gaps), report.gaps


def seeded(by_rank: bool, own: bool) -> Any:
    """Return data parallel ranks that seed the generators of the model, alike or by rank."""

    def seed(model: Any) -> None:
        number = 5 + dist.get_rank() * by_rank
        random.seed(number)
        model.own = np.random.default_rng(number if own else 3)

    return replicated(seed)


@pytest.mark.parametrize("of", ["Python's `random`", OWN])
def test_seeds_with_the_rank_in_them(of: str, pool: Pool) -> None:
    """Ranks that seed alike pass; if each has a seed of its own, the generator is named."""
    own = of == OWN
    report = judge_program(pool, seeded(False, own), Skipping(of))
    assert report.ok, str(report)
    report = judge_program(pool, seeded(True, own), Skipping(of))
    assert report.exit_code == 1 and of in report.localised[0][1], str(report)
    assert judge_program(pool, seeded(True, own), Skipping("`numpy.random`")).ok
