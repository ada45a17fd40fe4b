"""Programs in the styles of others: zero bubbles, selective checkpoints, ZeRO by hooks, zigzags."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleZBVZeroBubble
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from schedlang import TrainingProgram, verify_program
from schedlang.report import Report
from schedlang.runtime.launch.pool import Pool
from tests.judging.catches.collectives import rank_sum, world_size
from tests.judging.catches.language_model import LanguageModel
from tests.judging.catches.language_model import batch as token_batch
from tests.judging.catches.language_model import loss as token_loss
from tests.judging.net import batch_part

WIDTH, STAGES, MICRO = 6, 4, 4


def numbers(seed: int) -> dict[str, Tensor]:
    """Return a batch of rows of floats, and targets of the same shape."""
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(8, WIDTH, generator=draw) for name in ("input", "y")}


def squared(output: Any, batch: Any) -> Tensor:
    """Return the mean squared error."""
    return nn.functional.mse_loss(output, batch["y"])


def layers() -> nn.Module:
    """Return as many layers as stages."""
    parts = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(STAGES)]
    return nn.Sequential(*parts)


def dropping() -> nn.Module:
    """Return layers with dropout."""
    parts = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)) for _ in range(2)]
    return nn.Sequential(*parts)


def judge_program(
    pool: Pool, program: Any, model: Any = layers, batch: Any = numbers, loss: Any = squared
) -> Report:
    """Return the verdict on two ranks."""
    torch.manual_seed(0)
    return verify_program(program, model=model(), batch=batch, loss=loss, ranks=2, pool=pool)


def zero_bubble(scaled: bool) -> Any:
    """Return a V-shaped schedule without bubbles; the loss is divided by microbatches once more."""

    def program(model: Any) -> TrainingProgram:
        rank = dist.get_rank()
        chunks = {number: model[number] for number in (rank, STAGES - 1 - rank)}
        device = torch.device("cpu")

        def share(output: Tensor, target: Tensor) -> Tensor:
            return nn.functional.mse_loss(output, target) / MICRO

        def step(batch: Any) -> Any:
            stages = [PipelineStage(m, k, STAGES, device) for k, m in chunks.items()]
            order = ScheduleZBVZeroBubble(stages, MICRO, loss_fn=share, scale_grads=scaled)
            losses: list[Tensor] = []
            if rank == 0:
                order.step(batch["input"], target=batch["y"], losses=losses)
                return torch.stack(losses).sum()
            order.step()
            return None

        return TrainingProgram([*chunks.values()], step)

    return program


def test_a_zero_bubble_sends_each_gradient_once(pool: Pool) -> None:
    """The backward of weights, which runs later, is no second gradient of an output."""
    report = judge_program(pool, zero_bubble(scaled=False))
    assert report.ok, str(report)
    report = judge_program(pool, zero_bubble(scaled=True))
    assert [head for head, _ in report.localised] == ["gradients"], str(report)
    assert "1/microbatches = 1/4 times the right value" in report.localised[0][1]


def selective(restores: bool) -> Any:
    """Return data parallel ranks whose layers keep products, and recompute all else."""

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = operator is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    options = {"use_reentrant": False, "preserve_rng_state": restores, "context_fn": contexts}

    def program(model: Any) -> TrainingProgram:
        for layer in model:
            layer.forward = partial(checkpoint, layer.forward, **options)
        module = DistributedDataParallel(model)

        def step(batch: Any) -> Tensor:
            local = batch_part(batch, dist.get_rank(), world_size())
            value = squared(module(local["input"]), local)
            value.backward()
            return value

        return TrainingProgram(module, step)

    return program


def test_selective_checkpoints_with_dropout(pool: Pool) -> None:
    """The judge's own masks call no operator that torch counts."""
    report = judge_program(pool, selective(restores=True), dropping)
    assert report.ok and "dropout" in {row.kind for row in report.rows}, str(report)
    report = judge_program(pool, selective(restores=False), dropping)
    assert "another state of the generator" in dict(report.localised)["dropout"], str(report)


class OwnedSGD(torch.optim.SGD):
    """SGD of parameters that have a gradient here, which owners send to other ranks."""

    def __init__(self, named: Any, unsent: int | None) -> None:
        self.all, self.unsent = [p for _, p in named], unsent
        super().__init__(self.all, lr=0.1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step, and receive what others step."""
        super().step()
        if dist.is_initialized():
            for number, p in enumerate(self.all):
                if number != self.unsent:
                    dist.broadcast(p, number % world_size())


def owned(unsent: int | None = None) -> Any:
    """Return ranks that reduce each gradient to its owner when backward has computed it."""

    def program(model: Any) -> TrainingProgram:
        for number, p in enumerate(model.parameters()):

            def reduce(p: Tensor, owner: int = number % world_size()) -> None:
                dist.reduce(p.grad, owner)
                if owner != dist.get_rank():
                    p.grad = None

            p.register_post_accumulate_grad_hook(reduce)

        def step(batch: Any) -> Tensor:
            local = batch_part(batch, dist.get_rank(), world_size())
            value = squared(model(local["input"]), local) / world_size()
            value.backward()
            return value

        optimizer = partial(OwnedSGD, unsent=unsent)
        return TrainingProgram(model, step, world_loss="sum", optimizer=optimizer)

    return program


def test_a_parameter_that_its_owner_does_not_send(pool: Pool) -> None:
    """Ranks have no gradient of what others own: this is no mistake."""
    report = judge_program(pool, owned())
    assert report.ok, str(report)
    report = judge_program(pool, owned(unsent=2))
    text = "`1.0.weight`: with right gradients ranks hold different values after the step"
    assert text in dict(report.localised)["parameters"], str(report)


def accumulating(model: Any) -> TrainingProgram:
    """Wrong: DDP averages over ranks, and the loss of a rank's rows is not scaled by them."""
    module = DistributedDataParallel(model)

    def step(batch: Any) -> Any:
        local, total = batch_part(batch, dist.get_rank(), world_size()), 0.0
        for number in range(2):
            part = batch_part(local, number, 2)
            with nullcontext() if number else module.no_sync():
                value = squared(module(part["input"]), part) / (2 * world_size())
                value.backward()
            total += value.item()
        return total

    return TrainingProgram(module, step, world_loss="sum")


def test_a_loss_that_is_too_small_by_ranks(pool: Pool) -> None:
    """With two ranks and two microbatches, both are named."""
    report = judge_program(pool, accumulating)
    text = "1/ranks (or microbatches) = 1/2 times the right value everywhere"
    assert text in dict(report.localised)["gradients"], str(report)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_an_output_of_zigzag_slices(dtype: str | None, pool: Pool) -> None:
    """Ranks hold outer and inner tokens, and return the outputs of these."""

    def program(model: Any) -> TrainingProgram:
        def step(batch: Any) -> Any:
            own = [[0, 1, 5], [2, 3, 4]][dist.get_rank()]  # of six tokens
            output = model(batch["ids"])
            value = token_loss(output, batch) / world_size()
            value.backward()
            for p in model.parameters():
                p.grad = rank_sum(p.grad)
            return value, output[:, own]

        return TrainingProgram(model, step, world_loss="sum")

    torch.manual_seed(0)
    inputs = {"batch": token_batch, "loss": token_loss, "ranks": 2, "pool": pool, "dtype": dtype}
    model = LanguageModel(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    report = verify_program(program, model=model, **inputs)
    assert report.ok and any("training outputs" in row.kind for row in report.rows), str(report)
