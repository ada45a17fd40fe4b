"""The original's loop with a step that the user simulates, for algorithms that do not train by the
gradient of the batch: local steps on each rank (DiLoCo), delayed or compressed gradients."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from schedlang.diagnostics.diagnostic import Refusal, kind_of, quote_names
from schedlang.passes.judge.program import TrainingProgram, pickle_function, user_errors
from schedlang.passes.judge.record import RunRecord
from schedlang.passes.judge.step_draws import SeededSequential, Unevaluated, seeded_generators
from schedlang.passes.verify.observe import Batch
from schedlang.report import Gap
from schedlang.runtime.scope import Scope, enter_scope
from schedlang.runtime.submodules import remove_hooks_after

MOST_NAMES = 4
OFFERS = ("clip", "evaluate", "evaluate_loss", "state_dict", "load")
Loop = Callable[..., SeededSequential]


class SimulatedStep(SeededSequential):
    """The original's loop, whose gradients a user's function leaves in the parameters.

    simulate  simulate(model) -> step(batch), as `TrainingProgram.original`
    record    says whether the program evaluates; the parameters that the step changes are recorded
    """

    def __init__(
        self,
        simulate: Callable[[Any], Any],
        record: RunRecord,
        module: nn.Module,
        *args: Any,
        **kw: Any,
    ) -> None:
        super().__init__(module, *args, **kw)
        self._simulate, self._record = simulate, record
        self._given_parameters = dict(module.named_parameters())
        with user_errors(simulate, "original", None):
            self._step = simulate(module)
        if not callable(self._step):
            message = f"`original` of the program returns {kind_of(self._step)}, not a function"
            helps = ("write `def original(model): ... return step`, with `step(batch)`",)
            raise Refusal.of("S767", message, helps=helps)
        self._check_parameters()

    def _check_parameters(self) -> None:
        """Refuse (S767) parameters that the simulation adds, removes or replaces."""
        given, now = self._given_parameters, dict(self.module.named_parameters())
        others = [name for name in {**given, **now} if given.get(name) is not now.get(name)]
        if others:
            message = f"`original` adds, removes or replaces parameters: {quote_names(others)}"
            helps = ("leave gradients in the parameters of the model that it is given",)
            raise Refusal.of("S767", message, helps=helps)

    def _sums(self) -> dict[str, float]:
        """Return the sum of each parameter, to detect a step that changes them."""
        return {name: float(p.detach().double().sum()) for name, p in self._parameters}

    def forward_backward(self, batch: Batch, samples: Sequence[int]) -> Tensor:
        """Run the simulated step; see `Sequential`."""
        self._set_mode()
        self.module.zero_grad(set_to_none=True)
        with (
            seeded_generators(self._steps, [self.module]) as drawn,
            enter_scope(Scope(self._steps, 0, tuple(samples), seeding=self._seeding)),
            user_errors(self._simulate, "original", None),
        ):
            before = self._sums()
            result = self._step(self._given(batch))
        self._check_parameters()
        changed = {name for name, total in self._sums().items() if total != before[name]}
        self._record.changed_by_simulation |= changed
        value, self.output = _split_result(result)
        self.drawn, self.order = drawn, tuple(name for name, _ in self._parameters)
        return value

    def eval_step(self, batch: Batch) -> Any:
        """Return the output in eval mode; None beside a program without `evaluate`."""
        return super().eval_step(batch) if "evaluate" in self._record.offers else None


def _split_result(result: Any) -> tuple[Tensor, Any]:
    """Return the loss and the output that a simulated step returns; refuse (S767) anything else."""
    loss, output = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    with suppress(TypeError, ValueError, RuntimeError):  # of `float`
        if not isinstance(loss, str):
            number = float(loss.detach() if isinstance(loss, Tensor) else loss)
            return torch.tensor(number, dtype=torch.float64), output
    description = kind_of(loss)
    if isinstance(loss, (Tensor, tuple)):
        description += f" of {len(loss)}" if isinstance(loss, tuple) else f" of {loss.numel()}"
    message = f"the step of `original` returns {description}, not the loss"
    helps = ("return the loss of the batch, a number, or `(loss, output)`",)
    raise Refusal.of("S767", message, helps=helps)


def record_claims(program: TrainingProgram, record: RunRecord) -> None:
    """Record what a program offers, and what it says of its step and of the dtype of its sums."""
    record.offers |= {k for k in OFFERS if getattr(program, k) is not None}
    record.reduce_dtype = program.reduce_dtype_name
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
    if record.simulation is not None:
        return partial(SimulatedStep, pickle.loads(record.simulation), record)
    return SeededSequential if "evaluate" in record.offers else Unevaluated


def simulation_gaps(dtype: str | None, record: RunRecord) -> Iterator[Gap]:
    """Yield a gap for a simulated step in a low dtype."""
    if record.simulation is not None and dtype is not None:
        text = (
            f"`original` in {dtype} (local steps are mostly roundings of it: leave out `--dtype`)"
        )
        yield Gap(text, "wrong averages and lost state of local steps")


def add_local_steps(
    lines: Sequence[tuple[str, str]], record: RunRecord
) -> tuple[tuple[str, str], ...]:
    """Explain a failing program whose step, or whose `original`, itself moves the weights."""
    if names := sorted(record.changed_by_simulation - record.changed_by_step):
        text = (
            f"the step of `original` itself changes {quote_names(names, MOST_NAMES)}, and the "
            "program's does not: the judge steps the optimizer after it. Put back what they were, "
            "and leave in `p.grad` what the optimizer is to step by"
        )
        others = (line for line in lines if line[0] != "parameters")  # of the optimizer
        return (("original", text), *others)
    if record.stepped and record.simulation is None:
        text = (
            f"the step itself steps {', '.join(sorted(record.stepped))}: the original does one "
            "backward of the whole batch, and then the judge steps the optimizer. Local steps "
            "(DiLoCo) are another algorithm: simulate it, `TrainingProgram(..., original=...)`"
        )
        return (("step", text), *lines)
    return tuple(lines)
