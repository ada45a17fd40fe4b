"""Train a few steps under a plan, and say how the loss went and what it took."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from schedlang.diagnostic import Diagnostic, Refusal
from schedlang.plan import Plan

if TYPE_CHECKING:
    from schedlang.passes.preparing.prepare import Prepared
    from schedlang.passes.running.measured import Measured
    from schedlang.runtime.left import Left
    from schedlang.runtime.measure import Memory
    from schedlang.runtime.program import Program
    from schedlang.runtime.staging.watch import Watch

RATES = {"adamw": 3e-3, "sgd": 0.1}  # by optimizer


@dataclass(frozen=True)
class Course:
    """What is trained, all that a rank needs; `batch(seed)` gives the batch of a step."""

    plan: Plan
    batch: Callable[[int], Mapping[str, Any]]
    loss: Callable[..., Any] | None = None
    weight: Callable[..., float] | None = None
    steps: int = 20
    optimizer: str = "adamw"
    rate: float | None = None
    seed: int = 0
    watched: int = 0  # of how many steps at the end the operations are timed
    prepared: Prepared | None = None  # what is known of the plan before there are ranks
    check: Callable[..., None] | None = None  # of `build`: asked before anything is built

    @property
    def lr(self) -> float:
        """The learning rate, that of the optimizer where none is given."""
        return RATES[self.optimizer] if self.rate is None else self.rate


@dataclass(frozen=True)
class Step:
    """One step: its loss, the seconds that it took, and how much its batch held."""

    number: int
    loss: float
    seconds: float
    work: int
    unit: str


@dataclass(frozen=True)
class Trained:
    """The steps as rank 0 saw them, and the memory of every rank after the last."""

    steps: tuple[Step, ...]
    memory: tuple[Memory, ...]
    measured: Measured | None = None
    left: tuple[Left, ...] = ()  # calls that kernels left to the model, on any rank

    @property
    def settled(self) -> tuple[Step, ...]:
        """The steps that count for speed: the first one also warms up."""
        return self.steps[1:] or self.steps

    @property
    def median(self) -> float:
        """Seconds of the median step."""
        return statistics.median(step.seconds for step in self.settled)

    @property
    def per_second(self) -> float:
        """Tokens (or rows) of all ranks together a second."""
        settled = self.settled
        return sum(step.work for step in settled) / sum(step.seconds for step in settled)

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return {
            "losses": [step.loss for step in self.steps],
            "first_loss": self.steps[0].loss,
            "last_loss": self.steps[-1].loss,
            "unit": self.steps[0].unit,
            "per_second": self.per_second,
            "step_seconds": self.median,
            "memory": [one.to_json() for one in self.memory],
            "left": [str(one) for one in self.left],
            "activations": "not measured" if self.memory[0].peak is None else "in the peak",
        } | ({} if self.measured is None else {"pipeline": self.measured.to_json()})


Tell = Callable[[Step], None]


def train(course: Course, tell: Tell | None = None) -> Trained:
    """Run the course on this rank, which stands in the job's process group; all ranks together.

    `tell` is called after each step, on every rank.  Without it a rank of a Pool tells its parent.
    """
    from schedlang.passes.running.build import build
    from schedlang.runtime.launching.launch import progress
    from schedlang.runtime.left import merged

    tell = tell or progress
    home = _home(course.plan)
    batch = home(course.batch(course.seed))
    program = build(
        course.plan, batch, loss=course.loss, weight=course.weight, seed=course.seed,
        dropout="native",
        optimizer=optimizer(course.optimizer, course.lr), prepared=course.prepared,
        check=course.check,
    )  # fmt: skip
    watch = _watch(program) if course.watched else None
    steps = []
    for number in range(course.steps):
        batch = home(course.batch(course.seed + number)) if number else batch
        program.watch = watch if number >= course.steps - course.watched else None
        with program.watch.step() if program.watch is not None else nullcontext():
            steps.append(_step(program, number, batch))
        tell(steps[-1])
    seen = None if watch is None else _measured(course.plan, program, watch)
    everyone = _everyones(program)
    left = merged(one for _, mine in everyone for one in mine)
    return Trained(tuple(steps), tuple(memory for memory, _ in everyone), seen, left)


def _watch(program: Program) -> Watch:
    from schedlang.runtime.staging.watch import Watch

    device = program.assembly.pipeline.mail.device
    return Watch(program.assembly.pipeline, device)


def _measured(plan: Plan, program: Program, watch: Watch) -> Measured:
    """The median watched step of the pipeline at place 0 of all other axes."""
    from schedlang.passes.running.measured import settled
    from schedlang.runtime.staging.watch import gathered

    everyone, axis = gathered(watch), plan.cuts[0].axis
    zero = dict.fromkeys(plan.mesh.sizes, 0)
    places = [plan.mesh.rank(zero | {axis: k}) for k in range(plan.mesh.size(axis))]
    return settled(program.assembly.pipeline.timeline, [everyone[rank] for rank in places])


def _step(program: Any, number: int, batch: Mapping[str, Any]) -> Step:
    from schedlang.runtime.measure import work_in

    start = time.perf_counter()
    loss = float(program.train_step(batch))
    return Step(number, loss, time.perf_counter() - start, *work_in(batch))


def _everyones(program: Any) -> tuple[tuple[Memory, tuple[Left, ...]], ...]:
    """Of each rank its memory, and the calls that kernels left to the model there."""
    from schedlang.runtime.collectives import comm
    from schedlang.runtime.left import left_in
    from schedlang.runtime.measure import memory_of

    return tuple(comm.gathered((memory_of(program), left_in(program.assembly.module))))


def _home(plan: Plan) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Puts batches where the model's parameters are."""
    from torch import Tensor

    from schedlang.runtime import nests as pytree

    where = next((p.device for p in plan.model.model.parameters()), None)
    home = lambda value: value.to(where) if isinstance(value, Tensor) else value  # noqa: E731
    return lambda batch: pytree.tree_map(home, dict(batch))


def optimizer(name: str, rate: float) -> Callable[..., Any]:
    """A function from named parameters to the optimizer of this name."""
    import torch

    kinds: Mapping[str, Any] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    assert kinds.keys() == RATES.keys()
    return partial(kinds[name], lr=rate)


def check(course: Course) -> None:
    """Refuse numbers and names that no training can have (S109)."""
    if course.optimizer not in RATES:
        _refuse(
            f"unknown optimizer: `--optimizer {course.optimizer}`", f"choose {' or '.join(RATES)}"
        )
    if course.steps < 1:
        _refuse(f"`--steps` must be above 0, not {course.steps}", "give a number above 0")
    if course.lr < 0:
        _refuse(f"`--lr` cannot be negative: {course.lr}", "give a number of 0 or more")


def _refuse(title: str, help_: str) -> None:
    raise Refusal(Diagnostic("S109", title, helps=(help_,)))
