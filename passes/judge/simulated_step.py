"""The original's loop with a step that the user simulates, for algorithms that do not train by the
gradient of the batch: local steps on each rank (DiLoCo), delayed or compressed gradients."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal, kind_of
from schedlang.passes.judge.program import TrainingProgram, pickle_function, user_errors
from schedlang.passes.judge.record import RunRecord
from schedlang.passes.judge.step_draws import SeededSequential, Unevaluated, seeded_generators
from schedlang.passes.verify.observe import Batch
from schedlang.report import Gap
from schedlang.runtime.scope import Scope, enter_scope
from schedlang.runtime.submodules import remove_hooks_after

OFFERS = ("clip", "evaluate", "evaluate_loss", "state_dict", "load")
Loop = Callable[..., SeededSequential]


class SimulatedStep(SeededSequential):
    """The original's loop, whose gradients a user's function leaves in the parameters.

    simulate   simulate(model) -> step(batch), as `TrainingProgram.original`
    evaluates  whether the program evaluates
    """

    def __init__(
        self,
        simulate: Callable[[Any], Any],
        evaluates: bool,
        module: nn.Module,
        *args: Any,
        **kw: Any,
    ) -> None:
        super().__init__(module, *args, **kw)
        self._simulate, self._evaluates = simulate, evaluates
        with user_errors(simulate, "original", None):
            self._step = simulate(module)
        if not callable(self._step):
            message = f"`original` of the program returns {kind_of(self._step)}, not a function"
            helps = ("write `def original(model): ... return step`, with `step(batch)`",)
            raise Refusal(Diagnostic("S767", message, helps=helps))

    def forward_backward(self, batch: Batch, samples: Sequence[int]) -> Tensor:
        """Run the simulated step; see `Sequential`."""
        self._set_mode()
        self.module.zero_grad(set_to_none=True)
        with (
            seeded_generators(self._steps, [self.module]) as drawn,
            enter_scope(Scope(self._steps, 0, tuple(samples), seeding=self._seeding)),
            user_errors(self._simulate, "original", None),
        ):
            result = self._step(self._given(batch))
            loss, self.output = result if isinstance(result, tuple) else (result, None)
            value = torch.as_tensor(loss, dtype=torch.float64).detach().reshape(())
        self.drawn, self.order = drawn, tuple(name for name, _ in self._parameters)
        return value

    def eval_step(self, batch: Batch) -> Any:
        """Return the output in eval mode; None beside a program without `evaluate`."""
        return super().eval_step(batch) if self._evaluates else None


def record_claims(program: TrainingProgram, record: RunRecord) -> None:
    """Record what a program offers, and what it says of its step and of the dtype of its sums."""
    record.offers |= {k for k in OFFERS if getattr(program, k) is not None}
    record.reduce_dtype = program.reduce_dtype
    if program.original is not None and record.simulation is None:
        record.simulation = pickle_function(program.original, "original")


@contextmanager
def record_own_steps(record: RunRecord) -> Iterator[None]:
    """Record the kinds of optimizers that a program's step itself steps."""

    def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        record.stepped.add(type(optimizer).__name__)

    with remove_hooks_after([register_optimizer_step_post_hook(stepped)]):
        yield


def original_loop(record: RunRecord) -> Loop:
    """Return the original's loop: it evaluates where the program does, since that may write, and
    takes the step that the program's `original` simulates."""
    evaluates = "evaluate" in record.offers
    if record.simulation is not None:
        return partial(SimulatedStep, pickle.loads(record.simulation), evaluates)
    return SeededSequential if evaluates else Unevaluated


def simulation_gaps(dtype: str | None, record: RunRecord) -> Iterator[Gap]:
    """Yield a gap for a simulated step in a low dtype."""
    if record.simulation is not None and dtype is not None:
        text = (
            f"`original` in {dtype} (local steps are mostly roundings of it: leave out `--dtype`)"
        )
        yield Gap(text, "wrong averages and lost state of local steps")


def describe_local_steps(record: RunRecord) -> Iterator[tuple[str, str]]:
    """Describe a failing program that steps an optimizer within its step, without a simulation."""
    if record.stepped and record.simulation is None:
        text = (
            f"the step itself steps {', '.join(sorted(record.stepped))}: the original does one "
            "backward of the whole batch, and then the judge steps the optimizer. Local steps "
            "(DiLoCo) are another algorithm: simulate it, `TrainingProgram(..., original=...)`"
        )
        yield "step", text
