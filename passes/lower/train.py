"""Train a few steps under a plan (the verb `run`): losses, speed and memory.

For a pipeline the operations of the last steps are timed, and compared with the timeline simulated
under the measured costs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.plan import Plan
from schedlang.pipeline.timeline.simulation import Timing, simulate_timeline
from schedlang.pipeline.timeline.table import COMPUTE_KINDS, Kind, Timeline, dependencies

if TYPE_CHECKING:
    from schedlang.passes.analyze.prepare import Prepared
    from schedlang.runtime.declined_calls import DeclinedCalls
    from schedlang.runtime.pipeline.measured_times import MeasuredOp, StepTimer
    from schedlang.runtime.program import Program
    from schedlang.runtime.program_measurements import MemoryUse


Floats = NDArray[np.float64]
MIN_WAIT = 2e-5  # seconds; an operation that starts later than this has waited for its inputs


@dataclass(frozen=True, eq=False)
class MeasuredStep:
    """One measured step: for each planned row the times of its turn, start and end, in seconds."""

    timeline: Timeline
    turn: Floats
    start: Floats
    end: Floats

    @cached_property
    def times(self) -> Timing:
        """Return the measured times, counted from the first operation of all ranks."""
        zero = self.start.min(initial=np.inf) if len(self.start) else 0.0
        none = np.zeros(self.timeline.ranks, dtype=np.int64)
        return Timing(
            self.timeline, self.start - zero, self.end - zero, None, none, none.astype(np.float64)
        )

    @cached_property
    def costs(self) -> Floats:
        """Return, for each row, the mean time of operations of its kind at its stage."""
        t, durations = self.timeline, self.end - self.start
        key = (t.kind.astype(np.int64) * t.stages + t.stage) * t.replicas + t.replica
        count = np.maximum(np.bincount(key), 1)
        mean: Floats = (np.bincount(key, durations) / count)[key]
        return mean

    @cached_property
    def transfer(self) -> float:
        """Return the median time from the end of a value's producer to the start of its consumer.

        Only consumers that waited for the value count.
        """
        t = self.timeline
        producers, consumers = dependencies(t)
        remote = t.rank[producers] != t.rank[consumers]
        latest = np.full(len(t), -np.inf)
        np.maximum.at(latest, consumers[remote], self.end[producers[remote]])
        waited = np.isfinite(latest) & (self.start - self.turn > MIN_WAIT) & (latest >= self.turn)
        return max(0.0, float(np.median((self.start - latest)[waited]))) if waited.any() else 0.0

    @cached_property
    def planned(self) -> Timing:
        """Return the timeline simulated with the mean measured costs."""
        return simulate_timeline(self.timeline, self.costs, self.transfer)

    def means(self) -> dict[tuple[str, int], float]:
        """Return the mean seconds of each kind of operation at each stage."""
        t = self.timeline
        pairs = zip(t.kind.tolist(), t.stage.tolist(), self.costs.tolist())
        cost_by_op = {
            (Kind(kind).name, stage): cost
            for kind, stage, cost in pairs
            if Kind(kind) in COMPUTE_KINDS
        }
        return dict(sorted(cost_by_op.items(), key=lambda item: (Kind[item[0][0]], item[0][1])))

    def to_json(self) -> dict[str, Any]:
        """Return measured and simulated figures, and the mean costs, in seconds."""
        return {
            "micro": self.timeline.microbatches,
            "slices": self.timeline.slices,
            "measured": _figures(self.times),
            "simulated": _figures(self.planned),
            "transfer": self.transfer,
            "means": [
                {"kind": kind, "stage": stage, "seconds": cost}
                for (kind, stage), cost in self.means().items()
            ],
        }

    def text(self) -> str:
        """Return one line for display."""
        real, ideal = self.times, self.planned
        return (
            f"bubble {float(real.bubble):.1%} measured, {float(ideal.bubble):.1%} simulated   "
            f"step of the pipeline {float(real.makespan) * 1e3:.1f} ms measured, "
            f"{float(ideal.makespan) * 1e3:.1f} ms simulated"
        )


def _figures(times: Timing) -> dict[str, float]:
    return {
        "makespan": float(times.makespan),
        "rank_span": float(times.rank_span),
        "makespan_bubble": float(times.bubble),
        "bubble": float(times.span_bubble),
    }


def join_measured(timeline: Timeline, measured_ops: Sequence[Sequence[MeasuredOp]]) -> MeasuredStep:
    """Join the notes of each place of a pipeline on one step, in the order of the rows.

    Rows without notes (evicted activations, updates) get the time when the row before ended.
    """
    t = timeline.compute()
    turn, start, end = (np.zeros(len(t)) for _ in range(3))
    for rank in range(t.ranks):
        rank_ops, last = list(measured_ops[rank]), 0.0
        for row, op in zip(range(int(t.starts[rank]), int(t.starts[rank + 1])), t.rows(rank)):
            if rank_ops and rank_ops[0].op == op:
                _, turn[row], start[row], end[row] = rank_ops.pop(0)
            else:
                assert op.kind not in (Kind.F, Kind.B, Kind.I, Kind.W), f"{op} was not noted"
                turn[row] = start[row] = end[row] = last
            last = end[row]
        assert not rank_ops, f"{rank_ops[0].op} was noted and not planned"
    return MeasuredStep(t, turn, start, end)


def median_step(
    timeline: Timeline, steps: Sequence[Sequence[Sequence[MeasuredOp]]]
) -> MeasuredStep:
    """Return the step of median duration; `steps` is indexed [place][step]."""
    measured = [join_measured(timeline, rank_ops) for rank_ops in zip(*steps)]
    return sorted(measured, key=lambda rank_ops: float(rank_ops.times.makespan))[len(measured) // 2]


DEFAULT_RATES = {"adamw": 3e-3, "sgd": 0.1}  # by optimizer


@dataclass(frozen=True)
class TrainingRun:
    """The settings of a training, sent to every rank; `batch(seed)` returns the batch of a step."""

    plan: Plan
    batch: Callable[[int], Mapping[str, Any]]
    loss: Callable[..., Any] | None = None
    weight: Callable[..., float] | None = None
    steps: int = 20
    optimizer: str = "adamw"
    rate: float | None = None
    seed: int = 0
    timed_steps: int = 0  # number of last steps whose operations are timed
    prepared: Prepared | None = None  # the prepared plan, if known
    check: Callable[..., None] | None = None  # option of `build`

    @property
    def lr(self) -> float:
        """Return the learning rate; without `rate`, the default of the optimizer."""
        return DEFAULT_RATES[self.optimizer] if self.rate is None else self.rate


@dataclass(frozen=True)
class StepResult:
    """One step: its loss and duration in seconds, and the work (tokens or rows) of its batch."""

    number: int
    loss: float
    seconds: float
    work: int
    unit: str


@dataclass(frozen=True)
class TrainingResult:
    """The result of a training: steps of this rank, and memory of all ranks after the last step."""

    steps: tuple[StepResult, ...]
    memory: tuple[MemoryUse, ...]
    measured: MeasuredStep | None = None
    declined_calls: tuple[DeclinedCalls, ...] = ()  # calls that kernels declined, on any rank

    @property
    def steps_after_warmup(self) -> tuple[StepResult, ...]:
        """Return the steps that count for speed: without the first one, which warms up."""
        return self.steps[1:] or self.steps

    @property
    def median(self) -> float:
        """Return the seconds of the median step."""
        return statistics.median(step.seconds for step in self.steps_after_warmup)

    @property
    def per_second(self) -> float:
        """Return the tokens (or rows) per second of all ranks together."""
        steps = self.steps_after_warmup
        return sum(step.work for step in steps) / sum(step.seconds for step in steps)

    def to_json(self) -> dict[str, Any]:
        """Return all results as JSON values."""
        return {
            "losses": [step.loss for step in self.steps],
            "first_loss": self.steps[0].loss,
            "last_loss": self.steps[-1].loss,
            "unit": self.steps[0].unit,
            "per_second": self.per_second,
            "step_seconds": self.median,
            "memory": [calls_declined.to_json() for calls_declined in self.memory],
            "left": [str(calls_declined) for calls_declined in self.declined_calls],
            "activations": "not measured" if self.memory[0].peak is None else "in the peak",
        } | ({} if self.measured is None else {"pipeline": self.measured.to_json()})


OnStep = Callable[[StepResult], None]


def train(training_run: TrainingRun, on_step: OnStep | None = None) -> TrainingResult:
    """Run the training on this rank. All ranks of the job call it together.

    `on_step` is called after each step, on every rank. By default a rank of a Pool reports to its
    parent process.
    """
    from schedlang.passes.lower.build import build
    from schedlang.runtime.declined_calls import merge_declined
    from schedlang.runtime.launch.pool import report_progress

    on_step = on_step or report_progress
    to_device = _to_model_device(training_run.plan)
    batch = to_device(training_run.batch(training_run.seed))
    program = build(
        training_run.plan,
        batch,
        loss=training_run.loss,
        weight=training_run.weight,
        seed=training_run.seed,
        dropout="native",
        optimizer=make_optimizer(training_run.optimizer, training_run.lr),
        prepared=training_run.prepared,
        check=training_run.check,
    )
    watch = _make_watch(program) if training_run.timed_steps else None
    steps = []
    for number in range(training_run.steps):
        batch = to_device(training_run.batch(training_run.seed + number)) if number else batch
        program.watch = watch if number >= training_run.steps - training_run.timed_steps else None
        with program.watch.step() if program.watch is not None else nullcontext():
            steps.append(_step(program, number, batch))
        on_step(steps[-1])
    measured = None if watch is None else _median_watched(training_run.plan, program, watch)
    results = _gather_ranks(program)
    declined = merge_declined(calls for _, rank_calls in results for calls in rank_calls)
    return TrainingResult(tuple(steps), tuple(memory for memory, _ in results), measured, declined)


def _make_watch(program: Program) -> StepTimer:
    from schedlang.runtime.pipeline.measured_times import StepTimer

    device = program.assembly.pipeline.mail.device
    return StepTimer(program.assembly.pipeline, device)


def _median_watched(plan: Plan, program: Program, watch: StepTimer) -> MeasuredStep:
    """Return the median timed step of the pipeline at place 0 of all other axes."""
    from schedlang.runtime.pipeline.measured_times import gather_times

    ops_by_rank, axis = gather_times(watch), plan.cuts[0].axis
    zero = dict.fromkeys(plan.mesh.sizes, 0)
    ranks = [plan.mesh.rank(zero | {axis: k}) for k in range(plan.mesh.size(axis))]
    return median_step(program.assembly.pipeline.timeline, [ops_by_rank[rank] for rank in ranks])


def _step(program: Any, number: int, batch: Mapping[str, Any]) -> StepResult:
    from schedlang.runtime.program_measurements import work_in

    start = time.perf_counter()
    loss = float(program.train_step(batch))
    return StepResult(number, loss, time.perf_counter() - start, *work_in(batch))


def _gather_ranks(program: Any) -> tuple[tuple[MemoryUse, tuple[DeclinedCalls, ...]], ...]:
    """Gather the memory and the declined kernel calls of all ranks."""
    from schedlang.runtime.comm import world
    from schedlang.runtime.declined_calls import declined_in
    from schedlang.runtime.program_measurements import memory_of

    return tuple(
        world.all_gather_object((memory_of(program), declined_in(program.assembly.module)))
    )


def _to_model_device(plan: Plan) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return a function that moves a batch to the device of the model's parameters."""
    from torch import Tensor

    from schedlang.ir import pytree

    device = next((p.device for p in plan.model.model.parameters()), None)
    to_device = lambda value: value.to(device) if isinstance(value, Tensor) else value  # noqa: E731
    return lambda batch: pytree.tree_map(to_device, dict(batch))


def make_optimizer(name: str, rate: float) -> Callable[..., Any]:
    """Return a function from named parameters to the optimizer of this name."""
    import torch

    kinds: Mapping[str, Any] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    assert kinds.keys() == DEFAULT_RATES.keys()
    return partial(kinds[name], lr=rate)


def check_run(course: TrainingRun) -> None:
    """Refuse (S109) an unknown optimizer and numbers out of range."""
    if course.optimizer not in DEFAULT_RATES:
        _refuse(
            f"unknown optimizer: `--optimizer {course.optimizer}`",
            f"choose {' or '.join(DEFAULT_RATES)}",
        )
    if course.steps < 1:
        _refuse(f"`--steps` must be above 0, not {course.steps}", "give a number above 0")
    if course.lr < 0:
        _refuse(f"`--lr` cannot be negative: {course.lr}", "give a number of 0 or more")


def _refuse(title: str, help_: str) -> None:
    raise Refusal.of("S109", title, helps=(help_,))
