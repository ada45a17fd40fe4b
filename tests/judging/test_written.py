"""Programs as people write them, right and with one mistake: the verdict, and what it says."""

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
from tests.judging.catches.parts import own, ranks
from tests.judging.catches.words import WIDTH, Words, batch, loss


def model() -> nn.Module:
    """Words and two layers."""
    return Words(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)))


def rows(module: Any, after: Any = None) -> Any:
    """A step on this rank's rows under DDP; `after`: what is done then."""

    def step(batch: Any) -> Tensor:
        mine = {"ids": own(batch["ids"])}
        value = loss(module(mine["ids"]), mine)
        value.backward()
        if after is not None:
            after()
        return value

    return step


class Mean:
    """The mean of weights over time, as evaluations use it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self) -> None:
        """After each step."""
        for name, p in self.model.named_parameters():
            self.weights[name].lerp_(p.detach(), 0.1)

    def swap(self) -> None:
        """Train on from it, as a mistake does."""
        for name, p in self.model.named_parameters():
            p.data.copy_(self.weights[name])
        self.update()


def averaged(order: tuple[str, str], loaded: str = "model", swapped: bool = False) -> Any:
    """A mean of weights beside the weights; loaded is one of them."""

    def program(model: Any) -> TrainingProgram:
        mean = Mean(model)

        def saved() -> Any:
            return {k: mean.weights if k == "mean" else model.state_dict() for k in order}

        return TrainingProgram(
            module := DistributedDataParallel(model),
            rows(module, mean.swap if swapped else mean.update),
            state_dict=saved,
            load=lambda state: model.load_state_dict(state[loaded]),
        )

    return program


def compressed(rank: int) -> Any:
    """PowerSGD: gradients of some rank, and what is left of them is added to the next."""

    def program(model: Any) -> TrainingProgram:
        module = DistributedDataParallel(model)
        options: Any = {"matrix_approximation_rank": rank, "start_powerSGD_iter": 2}
        state = power.PowerSGDState(None, **options, min_compression_rate=0.1)
        module.register_comm_hook(state, power.powerSGD_hook)
        return TrainingProgram(module, rows(module))

    return program


def sliced(sent: bool) -> Any:
    """Each rank steps every other parameter, and sends what it has done."""

    class Sliced(torch.optim.SGD):
        """SGD of this rank's parameters."""

        def __init__(self, named: Any) -> None:
            self.all = [p for _, p in named]
            place, of = (dist.get_rank(), ranks()) if dist.is_initialized() else (0, 1)
            super().__init__(self.all[place::of], lr=0.1)

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            """Step, and take what others did."""
            super().step()
            for k, p in enumerate(self.all if sent and dist.is_initialized() else ()):
                dist.broadcast(p.data, k % ranks())

    def program(model: Any) -> TrainingProgram:
        module = DistributedDataParallel(model)
        return TrainingProgram(module, rows(module), optimizer=Sliced)

    return program


def bucketed(zeroed: bool) -> Any:
    """Gradients are summed in buckets that stay from step to step."""

    def program(model: Any) -> TrainingProgram:
        buckets = {name: torch.zeros_like(p) for name, p in model.named_parameters()}

        def step(batch: Any) -> Tensor:
            mine = {"ids": own(batch["ids"])}
            value = loss(model(mine["ids"]), mine)
            value.backward()
            for name, p in model.named_parameters():
                bucket = buckets[name].zero_() if zeroed else buckets[name]
                bucket += p.grad / ranks()
                dist.all_reduce(bucket)
                p.grad.copy_(bucket)
            return value

        return TrainingProgram(model, step)

    return program


def gathered(transposed: bool) -> Any:
    """All ranks have all rows, and average them by a gather of torch.distributed.nn.

    transposed  the gradient that comes back to it is not contiguous
    """

    def program(model: Any) -> TrainingProgram:
        plain, one = model.inner.forward, torch.eye(WIDTH, dtype=torch.float64)

        def forward(x: Tensor) -> Tensor:
            mean = torch.stack(all_gather(x)).mean(0)
            return plain((one @ mean.mT).mT if transposed else mean)

        def step(batch: Any) -> Tensor:
            value = loss(model(batch["ids"]), batch)
            value.backward()
            return value

        model.inner.forward = forward
        return TrainingProgram(model, step, world_loss="same")

    return program


RIGHT = {
    "buckets that are set to zero": bucketed(zeroed=True),
    "a gather of contiguous gradients": gathered(transposed=False),
    "a mean of weights before them": averaged(("mean", "model")),
    "a mean of weights after them": averaged(("model", "mean")),
    "gradients of full rank": compressed(WIDTH),
    "an optimizer in parts": sliced(sent=True),
}
WRONG: dict[str, tuple[Any, str]] = {
    "the mean is loaded": (averaged(("model", "mean"), "mean"), "not what was saved"),
    "the mean is trained": (averaged(("model", "mean"), swapped=True), "the step itself changes"),
    "gradients of rank one": (compressed(1), "of 96 elements are wrong|no simple pattern"),
    "buckets that are not set to zero": (
        bucketed(zeroed=False),
        "ranks = 2 times the value of head.weight after step 0 has been added: it was not set to",
    ),
    "a gather of gradients of other strides": (
        gathered(transposed=True),
        "collectives: `scatter` (test_written.py:",
    ),
    "an optimizer that sends nothing": (sliced(sent=False), "ranks hold different values after"),
}


@pytest.mark.parametrize("program", RIGHT.values(), ids=RIGHT)
def test_a_right_one_passes(program: Any, pool: Pool) -> None:
    """Nothing is taken for something else."""
    torch.manual_seed(0)
    report = verify_program(program, model=model(), batch=batch, loss=loss, ranks=2, pool=pool)
    assert report.ok, str(report)


@pytest.mark.parametrize("program, said", WRONG.values(), ids=WRONG)
def test_a_mistake_is_named(program: Any, said: str, pool: Pool) -> None:
    """By what it does."""
    torch.manual_seed(0)
    report = verify_program(program, model=model(), batch=batch, loss=loss, ranks=2, pool=pool)
    told = "; ".join(f"{kind}: {text}" for kind, text in report.localised)
    assert not report.ok and "not finite" not in told, str(report)
    assert any(words in told for words in said.split("|")), told


def test_gradients_that_stay_where_they_are(pool: Pool) -> None:
    """Around the ring they belong to the rank that the keys came from."""
    torch.manual_seed(0)
    given = {"batch": batch, "loss": loss, "ranks": 2, "pool": pool}
    report = verify_program(lambda m: ring.program(m, "kept"), model=ring.model(), **given)
    said = dict(report.localised)["first module"]
    assert "`inner.value`: " in said or "`inner.key`: " in said, said
    assert "parts of them belong to the places of other ranks" in said, said
