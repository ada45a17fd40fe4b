"""Training flags set by hand are kept, also by `verify`; no tensor is compared with None."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from schedlang.passes.lower.build import build
from schedlang.passes.verify.kernel_trials import _collect_calls
from schedlang.runtime.launch.pool import Pool
from schedlang.runtime.training_mode import TrainingMode
from tests.engine import Threads
from tests.proofs import assert_proven, make_plan


class FrozenNorm(nn.Module):
    """A batch norm that the user has put in eval before training, as for fine-tuning."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.norm, self.leave = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)
        self.norm.eval()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.norm(self.enter(x))).square().mean()


def _batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(7, 4, generator=generator, dtype=torch.float64)}


def test_a_frozen_batch_norm_stays_frozen(pool: Pool) -> None:
    """Its statistics do not change, so parts of a batch give the results of the whole; no S703."""
    report = assert_proven(
        pool, make_plan(FrozenNorm(), "zero(stage=0, over=dp)", "dp=2"), [_batch(1)]
    )
    assert any(row.name == "norm.running_mean" for row in report.rows)


def test_a_program_keeps_the_flags() -> None:
    """In steps and evaluations the flags are those of the user's own loop."""
    model = FrozenNorm()
    program = build(make_plan(model, ""), _batch(1))
    initial = program.module.norm.running_mean.clone()
    for _ in range(2):
        program.train_step(_batch(1))
        assert program.module.training and not program.module.norm.training
        program.eval_step(_batch(1))
        assert not program.module.training
    assert torch.equal(program.module.norm.running_mean, initial)


def test_flags_come_back() -> None:
    """A model all in eval trains completely; a flag set by hand, before or later, stays."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout()).eval()
    TrainingMode(model).train()
    assert all(module.training for module in model.modules())
    switch = TrainingMode(model)
    model[1].eval()
    switch.evaluate()
    assert not any(module.training for module in model.modules())
    switch.train()
    assert model.training and model[0].training and not model[1].training


class OwnTrain(FrozenNorm):
    """Freezes its norm, and merges an addition into a weight, in its own `train`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm.train()
        self.merged = False

    def train(self, mode: bool = True) -> OwnTrain:
        """Keep the norm in eval; merge for evaluation."""
        super().train(mode)
        self.norm.eval()
        self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (3.0 if self.merged else 1.0)


def test_a_train_of_its_own_is_called(threads: Threads) -> None:
    """Also for a model as its constructor left it, and after an evaluation."""

    def trained() -> tuple[list[float], Tensor]:
        plan = make_plan(OwnTrain(), "zero(stage=1, over=dp)", "dp=2")
        program = build(plan, _batch(1))
        losses = [program.train_step(_batch(1)).item()]
        program.eval_step(_batch(1))
        return [*losses, program.train_step(_batch(1)).item()], program.buffers()[
            "norm.running_mean"
        ]

    losses, mean = threads.run(trained, 2)[0]
    original = OwnTrain().train()
    assert torch.equal(mean, original.norm.running_mean)
    torch.testing.assert_close(losses, [original(**_batch(1)).item()] * 2)


def test_a_trial_leaves_the_flags() -> None:
    """Tracing the arguments of a kernel changes no flag of the user's model."""
    model = FrozenNorm()
    _collect_calls(model, [_batch(1), _batch(2)], {"enter"})
    assert model.training and model.enter.training and not model.norm.training


class ErrorCounter(TorchFunctionMode):
    """Counts torch calls whose error torch hides as `not equal`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(arg is None for arg in args[:2]) and "eq" in getattr(func, "__name__", ""):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def test_no_tensor_is_asked_whether_it_is_nothing() -> None:
    """`None in tensors` compares each with None by a hidden torch error: a tenth of a millisecond
    per microbatch."""
    with ErrorCounter() as heard:
        assert None not in {0: torch.ones(())}.values()
    assert heard.found
    program = build(
        make_plan(FrozenNorm(), 'pipeline(order="GPipe", micro=2)'), _batch(1), clip=1.0
    )
    for _ in range(2):
        with ErrorCounter() as heard:
            program.train_step(_batch(1))
        assert not heard.found
