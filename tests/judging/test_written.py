"""Common hand-written programs, right and with one mistake: the verdict and its message."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel

from schedlang import TrainingProgram, verify_program
from schedlang.runtime.launch.pool import Pool
from tests.judging.catches import ring
from tests.judging.catches.collectives import local_part, world_size
from tests.judging.catches.language_model import WIDTH, LanguageModel, batch, loss


def model() -> nn.Module:
    """Return a language model with two layers."""
    return LanguageModel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)))


def ddp_step(module: Any, after: Any = None) -> Any:
    """Return a step on this rank's rows under DDP, which calls `after` at its end."""

    def step(batch: Any) -> Tensor:
        local = {"ids": local_part(batch["ids"])}
        value = loss(module(local["ids"]), local)
        value.backward()
        if after is not None:
            after()
        return value

    return step


class MeanWeights:
    """A moving average of weights, as used for evaluation."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self) -> None:
        """Update the average after a step."""
        for name, p in self.model.named_parameters():
            self.weights[name].lerp_(p.detach(), 0.1)

    def swap(self) -> None:
        """Wrong: continue training from the average."""
        for name, p in self.model.named_parameters():
            p.data.copy_(self.weights[name])
        self.update()


def averaging(order: tuple[str, str], loaded: str = "model", swapped: bool = False) -> Any:
    """Return a program with averaged weights saved beside the weights; one of both is loaded."""

    def program(model: Any) -> TrainingProgram:
        mean = MeanWeights(model)

        def saved() -> Any:
            return {k: mean.weights if k == "mean" else model.state_dict() for k in order}

        return TrainingProgram(
            module := DistributedDataParallel(model),
            ddp_step(module, mean.swap if swapped else mean.update),
            state_dict=saved,
            load=lambda state: model.load_state_dict(state[loaded]),
        )

    return program


def power_sgd(rank: int) -> Any:
    """Return DDP with PowerSGD compression of the given matrix rank."""

    def program(model: Any) -> TrainingProgram:
        module = DistributedDataParallel(model)
        options: Any = {"matrix_approximation_rank": rank, "start_powerSGD_iter": 2}
        state = power.PowerSGDState(None, **options, min_compression_rate=0.1)
        module.register_comm_hook(state, power.powerSGD_hook)
        return TrainingProgram(module, ddp_step(module))

    return program


def sliced_sgd(sent: bool) -> Any:
    """Return a program whose ranks step every other parameter, and broadcast them if `sent`."""

    class Sliced(torch.optim.SGD):
        """SGD of this rank's parameters."""

        def __init__(self, named_params: Any) -> None:
            self.all = [p for _, p in named_params]
            index, count = (dist.get_rank(), world_size()) if dist.is_initialized() else (0, 1)
            super().__init__(self.all[index::count], lr=0.1)

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            """Step, and receive the other ranks' parameters."""
            super().step()
            for k, p in enumerate(self.all if sent and dist.is_initialized() else ()):
                dist.broadcast(p.data, k % world_size())

    def program(model: Any) -> TrainingProgram:
        module = DistributedDataParallel(model)
        return TrainingProgram(module, ddp_step(module), optimizer=Sliced)

    return program


def with_buckets(zeroed: bool) -> Any:
    """Return a program that sums gradients in persistent buckets, zeroed or not."""

    def program(model: Any) -> TrainingProgram:
        buckets = {name: torch.zeros_like(p) for name, p in model.named_parameters()}

        def step(batch: Any) -> Tensor:
            local = {"ids": local_part(batch["ids"])}
            value = loss(model(local["ids"]), local)
            value.backward()
            for name, p in model.named_parameters():
                bucket = buckets[name].zero_() if zeroed else buckets[name]
                bucket += p.grad / world_size()
                dist.all_reduce(bucket)
                p.grad.copy_(bucket)
            return value

        return TrainingProgram(model, step)

    return program


def with_gather(transposed: bool) -> Any:
    """Return a program with all rows on all ranks, averaged by torch.distributed.nn's all_gather.

    transposed  the gradient of the gather is not contiguous
    """

    def program(model: Any) -> TrainingProgram:
        plain_forward, identity = model.inner.forward, torch.eye(WIDTH, dtype=torch.float64)

        def forward(x: Tensor) -> Tensor:
            mean = torch.stack(all_gather(x)).mean(0)
            return plain_forward((identity @ mean.mT).mT if transposed else mean)

        def step(batch: Any) -> Tensor:
            value = loss(model(batch["ids"]), batch)
            value.backward()
            return value

        model.inner.forward = forward
        return TrainingProgram(model, step, world_loss="same")

    return program


RIGHT = {
    "buckets that are set to zero": with_buckets(zeroed=True),
    "a gather of contiguous gradients": with_gather(transposed=False),
    "a mean of weights before them": averaging(("mean", "model")),
    "a mean of weights after them": averaging(("model", "mean")),
    "gradients of full rank": power_sgd(WIDTH),
    "an optimizer in parts": sliced_sgd(sent=True),
}
WRONG: dict[str, tuple[Any, str]] = {
    "the mean is loaded": (averaging(("model", "mean"), "mean"), "not what was saved"),
    "the mean is trained": (averaging(("model", "mean"), swapped=True), "the step itself changes"),
    "gradients of rank one": (power_sgd(1), "of 96 elements are wrong|no simple pattern"),
    "buckets that are not set to zero": (
        with_buckets(zeroed=False),
        "ranks = 2 times the value of head.weight after step 0 has been added: it was not set to",
    ),
    "a gather of gradients of other strides": (
        with_gather(transposed=True),
        "collectives: `scatter` (test_written.py:",
    ),
    "an optimizer that sends nothing": (
        sliced_sgd(sent=False),
        "ranks hold different values after",
    ),
}


@pytest.mark.parametrize("program", RIGHT.values(), ids=RIGHT)
def test_a_right_one_passes(program: Any, pool: Pool) -> None:
    """A right program passes."""
    torch.manual_seed(0)
    report = verify_program(program, model=model(), batch=batch, loss=loss, ranks=2, pool=pool)
    assert report.ok, str(report)


@pytest.mark.parametrize("program, said", WRONG.values(), ids=WRONG)
def test_a_mistake_is_named(program: Any, said: str, pool: Pool) -> None:
    """The mistake is named."""
    torch.manual_seed(0)
    report = verify_program(program, model=model(), batch=batch, loss=loss, ranks=2, pool=pool)
    messages = "; ".join(f"{kind}: {text}" for kind, text in report.localised)
    assert not report.ok and "not finite" not in messages, str(report)
    assert any(phrase in messages for phrase in said.split("|")), messages


def test_gradients_that_stay_where_they_are(pool: Pool) -> None:
    """In ring attention, gradients left on the wrong rank are named."""
    torch.manual_seed(0)
    inputs = {"batch": batch, "loss": loss, "ranks": 2, "pool": pool}
    report = verify_program(lambda m: ring.program(m, "kept"), model=ring.model(), **inputs)
    message = dict(report.localised)["first module"]
    assert "`inner.value`: " in message or "`inner.key`: " in message, message
    assert "parts of them belong to the places of other ranks" in message, message
