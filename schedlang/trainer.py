"""Trainer: a loop around `program.train_step`; each part of it can be replaced.

The trainer builds the program of a schedule, continues from the last checkpoint of a folder, takes
batches and steps, and at given intervals logs the loss, evaluates and saves. It reports to
callbacks: plain objects with some of the methods `on_begin`, `on_step`, `on_log`, `on_evaluate`,
`on_save`, `on_end`, each called with the trainer (and the figures), on every rank.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import schedlang
from schedlang import elastic
from schedlang.callbacks import Console, Meter
from schedlang.diagnostics.diagnostic import (
    Diagnostic,
    Label,
    Refusal,
    kind_of,
    refuse_methods_at_caller,
    suggest_name,
)
from schedlang.diagnostics.source import python_span
from schedlang.language.syntax import parse, source_of
from schedlang.passes.elaborate.state import Settings, job_size
from schedlang.runtime.launch.hang_watch import waits_for_ranks
from schedlang.schedule import Schedule

if TYPE_CHECKING:
    from torch import Tensor, nn

    from schedlang.runtime.checkpointing.data_position import BatchStream
    from schedlang.runtime.program import Program

Batch = Mapping[str, Any]
Figures = dict[str, float]  # by name; `step` is among them
ON_SPIKE = ("stop", "skip", "roll back")
MAX_ROLL_BACKS = 3  # roll-backs of a run without a checkpoint in between
MEAN_DECAY = 0.9  # decay of the running mean of losses, per log


@refuse_methods_at_caller
@dataclass(eq=False)
class Trainer:
    """A run: a model under a schedule, data, and the length of the run.

    schedule        a `Schedule`, the path of a file, or its text
    model           the module, or the result of `deferred_init`; the same on every rank
    data            batches, each the keyword arguments of the model for one step, restarted at
                    their end.  Full batches, equal on all ranks, or (`local`) this rank's own rows
    steps           the step after which the run ends, counted from the first start of the run
    optimizer       a function from (name, parameter) pairs to an optimizer
    scheduler       a function from the optimizer to a scheduler of torch, stepped once a step;
                    `ReduceLROnPlateau` with the loss of each evaluation
    loss            loss(output, batch), for a model that returns no loss
    clip            bound for the global norm of the gradients
    folder          of checkpoints: the run continues from the last, and saves every `save_every`
                    steps (in the background, unless `wait`) and at its end; `keep` of them stay
    evaluation      batches whose mean loss is reported every `evaluate_every` steps
    log_every       steps between two logs of the loss, for which the host waits
    on_spike        for a loss that is not finite, or above `spike` times its running mean: "stop"
                    at the log that finds it; "roll back" there to the last checkpoint, and continue
                    with the following data; "skip" the update of that very step, for which the
                    host waits for the loss in each step
    callbacks       receive the events of the run; default: a line for each log, on the first rank
    accept          continue even if the schedule differs from that of the checkpoint
    elastic         the job may have other ranks at each start: the planner sets the named knobs,
                    or else those that size the mesh or say `micro=`, for the fastest step
    build           further arguments of `Schedule.build`

    Raises Refusal S691 for arguments that contradict each other.
    """

    schedule: Schedule | str | os.PathLike[str]
    model: nn.Module
    data: Iterable[Batch]
    steps: int
    optimizer: Callable[..., Any]
    scheduler: Callable[[Any], Any] | None = None
    loss: Callable[..., Any] | None = None
    clip: float | None = None
    local: bool = False
    folder: str | os.PathLike[str] | None = None
    save_every: int = 0
    keep: int | None = 3
    wait: bool = False
    evaluation: Iterable[Batch] | None = None
    evaluate_every: int = 0
    log_every: int = 10
    on_spike: str = "stop"
    spike: float = math.inf
    callbacks: Sequence[Any] | None = None
    accept: bool = False
    elastic: bool | Sequence[str] = False
    build: Mapping[str, Any] = field(default_factory=dict)
    program: Program = field(init=False)
    skipped: int = field(default=0, init=False)  # number of skipped updates
    rolled_back: int = field(default=0, init=False)
    rate: float | None = field(
        default=None, init=False
    )  # learning rate of the last step, with a scheduler
    meter: Meter = field(default_factory=Meter, init=False)
    _mean: float = field(default=math.nan, init=False)  # running mean of the losses
    _lr: Any = field(default=None, init=False)
    _on_plateau: bool = field(default=False, init=False)  # the scheduler looks at a loss
    _stream: BatchStream = field(init=False)
    _saved_at: int = field(default=-1, init=False)
    _setting: dict[str, Any] | None = field(default=None, init=False)  # chosen for these ranks

    def __post_init__(self) -> None:
        if mistake := self._find_mistake():
            raise refusal_of(*mistake)
        self.schedule = self._load_schedule()
        if self.callbacks is None:
            self.callbacks = (Console(),)

    # -- the run ---------------------------------------------------------------------------------

    def fit(self) -> Program:
        """Train to `steps`, from the last checkpoint of the folder if there is one; return the
        program.

        All ranks together. Raises Refusal S692 for data that end before, S693 for another schedule
        than the checkpoint's, S694 for a loss that is not finite with `on_spike="stop"`.
        """
        self._start_run()
        self._notify("on_begin")
        try:
            self._train()
        finally:
            self._notify("on_end")
        return self.program

    def _train(self) -> None:
        program, callbacks = self.program, self._callbacks_with("on_step")
        if self.on_spike == "roll back" and self._saved_at < 0:
            self.save()
        self.meter.begin(program.step)
        times, next_due = program.dp_size if self.local else 1, self._next_due()
        while program.step < self.steps:
            batch = self._next()
            loss = program.train_step(batch, local=self.local)
            self.meter.add(batch, times)
            if self._lr is not None:
                assert program.optimizer is not None
                self.rate = program.optimizer.param_groups[0]["lr"]
                if not self._on_plateau:
                    self._lr.step()
            for callback in callbacks:
                callback(self)
            if program.step >= next_due:
                self._do_due(loss)
                next_due = self._next_due()
        if self.folder is not None and self._saved_at != program.step:
            self.save()
        program.saved()

    def save(self) -> None:
        """Save a checkpoint with everything that the run needs to continue; all ranks together."""
        assert self.folder is not None
        with waits_for_ranks():
            self.program.save(self.folder, self.keep, wait=self.wait, beside=self._state())
        self._saved_at = self.program.step
        self._notify("on_save")

    def evaluate(self) -> Figures:
        """Return the mean loss of the evaluation's batches, weighted; all ranks together."""
        from schedlang.runtime.batch import batch_to_device

        total = weights = 0.0
        assembly = self.program.assembly
        for batch in self.evaluation or ():
            output = self.program.eval_step(batch)
            if self.loss is not None:
                loss = self.loss(output, batch_to_device(batch, assembly.ranks.device))
            else:
                loss = output["loss"] if isinstance(output, Mapping) else output.loss
            weight = float(assembly.weight(batch))
            total, weights = total + float(loss) * weight, weights + weight
        mean = total / weights if weights else math.nan
        return {"step": self.program.step, "evaluation loss": mean}

    # -- before the first step -------------------------------------------------------------------

    def _start_run(self) -> None:
        """Build the program and restore the run.

        Data, scheduler and generators are restored before the first batch is taken, parameters once
        the program exists.
        """
        from schedlang.runtime.checkpointing import archive, data_generators
        from schedlang.runtime.checkpointing.data_position import (
            BatchStream,
            DataEnded,
            check_parts,
            check_schedule,
            restore_scheduler,
        )
        from schedlang.runtime.comm import world

        sch = self.schedule
        assert isinstance(sch, Schedule)
        meeting = (
            elastic.Rendezvous(self.build) if self.elastic else elastic.JoinedJob(sch, self.build)
        )
        self._stream = BatchStream(self.data)
        last = saved_state = None
        if self.folder is not None:
            last = meeting.from_first_rank(schedlang.last_checkpoint(self.folder))
        if last is not None:
            saved_state = archive.read_beside(last, world.rank()) or archive.read_beside(last)
            if not self.accept:
                check_schedule(saved_state, sch.to_sched(), last)
            if saved_state is not None:
                check_parts(saved_state, self._data_parts(), last)
        try:
            if saved_state is not None:
                self._stream.restore(saved_state["place"])
            first = self._stream.peek()
        except DataEnded:
            raise self._refuse_ended(0) from None
        states = data_generators.generator_states(self.data)
        options = dict(loss=self.loss, optimizer=self.optimizer, clip=self.clip, **self.build)
        self.schedule, self._setting, drawing = meeting.fit_schedule(self, sch, first, saved_state)
        with waits_for_ranks():
            built: Any = self.schedule.build(
                batch=None if self.local else first, **drawing | options
            )
            self.program = built
            if self.local:
                built._built(first, True)
                self.program = built._program
            if self.scheduler is not None and self.program.optimizer is not None:
                self._lr = self.scheduler(self.program.optimizer)
                self._check_scheduler()
            if last is not None:
                self.program.load(last)
                self._saved_at = self.program.step
        if saved_state is not None:
            self._mean = saved_state["mean"]
            restore_scheduler(self._lr, saved_state["scheduler"])
        data_generators.restore_generators(self.data, states)
        if self.on_spike == "skip":
            assembly = self.program.assembly
            if assembly.pipeline.timeline.stale or assembly.compressor is not None:
                raise refusal_of(
                    "updates cannot be skipped: rows have already changed state of later steps",
                    'without `compress(gradients)` and stale weights, or `on_spike="stop"`',
                )
            self.program.allowed = self._may_update

    def _check_scheduler(self) -> None:
        """Refuse (S691) a scheduler that this loop cannot step or save."""
        from torch.optim.lr_scheduler import ReduceLROnPlateau

        self._on_plateau = isinstance(self._lr, ReduceLROnPlateau)
        if self._on_plateau and not (self.evaluate_every and self.evaluation is not None):
            raise refusal_of(
                "`ReduceLROnPlateau` looks at a loss, and this run evaluates none",
                "give `evaluation=` and `evaluate_every=`: it steps with the loss of each",
            )
        wanted = ("step", "state_dict", "load_state_dict")
        if missing := [name for name in wanted if not hasattr(self._lr, name)]:
            raise refusal_of(
                f"`scheduler` returned {kind_of(self._lr)} without `{missing[0]}`",
                "return a scheduler of `torch.optim.lr_scheduler`, or one with these methods",
            )
        try:
            inspect.signature(self._lr.step).bind(*[0.0] * self._on_plateau)
        except ValueError:  # a function that does not tell its arguments
            pass
        except TypeError as error:
            raise refusal_of(
                f"`step` of the scheduler cannot be called without arguments: {error}",
                "step it yourself, in a callback: `on_step(trainer)`",
            ) from None

    def _load_schedule(self) -> Schedule:
        if isinstance(self.schedule, Schedule):
            return self.schedule
        from schedlang.runtime.comm import world

        # without a job: one rank; an elastic run sets its size when all ranks have arrived
        size = None if self.elastic else job_size() or world.size()
        return Schedule(self.model, parse(source_of(self.schedule)), Settings(world=size))

    def _data_parts(self) -> int:
        """Return the number of parts that the data are read in; 1 where every rank has full
        batches."""
        assert isinstance(self.schedule, Schedule)
        return self.schedule.plan().shares if self.local else 1

    def _state(self) -> dict[str, Any]:
        from schedlang.runtime.checkpointing.data_position import library_versions

        assert isinstance(self.schedule, Schedule)
        return {
            "place": self._stream.state(),
            "parts": self._data_parts(),
            "scheduler": None if self._lr is None else self._lr.state_dict(),
            "mean": self._mean,
            "schedule": self.schedule.to_sched(),
            "versions": library_versions(),
            "setting": self._setting,
        }

    # -- a step ----------------------------------------------------------------------------------

    def _next(self) -> Batch:
        from schedlang.runtime.checkpointing.data_position import DataEnded

        try:
            return next(self._stream)
        except DataEnded:
            raise self._refuse_ended(self.program.step) from None

    def _next_due(self) -> int:
        """Return the next step with something to do besides training."""
        step = self.program.step
        intervals = [n for n in (self.log_every, self._save_interval(), self.evaluate_every) if n]
        return min([self.steps, *(step - step % n + n for n in intervals)])

    def _save_interval(self) -> int:
        return self.save_every if self.folder is not None else 0

    def _do_due(self, loss: Tensor) -> None:
        """Do what is due after this step; check the loss first, so that no bad state is saved."""
        step = self.program.step
        value = float(loss)
        if self.on_spike != "skip" and self._is_spike(value, self.program.grad_norm):
            self._handle_spike(value)
            return
        if self.on_spike != "skip":
            self._update_mean(value)
        if step % self.log_every == 0 or step == self.steps:
            self._notify("on_log", self.meter.figures(self, value))
        if self.evaluate_every and step % self.evaluate_every == 0:
            self._notify("on_evaluate", figures := self.evaluate())
            if self._on_plateau:
                self._lr.step(figures["evaluation loss"])
        if self._save_interval() and step % self.save_every == 0:
            self.save()
            self.rolled_back = 0

    # -- spikes of the loss ----------------------------------------------------------------------

    def _is_spike(self, loss: float, norm: float | None) -> bool:
        """Return whether a loss is not finite, or far above the running mean.

        The norm of gradients counts, too, except under a loss scale, which has its own rule for it.
        """
        finite = math.isfinite(loss)
        if self.program.loss_scale is None and norm is not None:
            finite = finite and math.isfinite(norm)
        return not finite or loss > self.spike * self._mean

    def _update_mean(self, loss: float) -> None:
        has_mean = not math.isnan(self._mean)
        self._mean = MEAN_DECAY * self._mean + (1 - MEAN_DECAY) * loss if has_mean else loss

    def _may_update(self, loss: Tensor, norm: Tensor | float) -> bool:
        """Return whether a step updates: the same on all ranks, which have the same loss and
        norm."""
        value = float(loss)
        if self._is_spike(value, float(norm)):
            self.skipped += 1
            return False
        self._update_mean(value)
        return True

    def _handle_spike(self, loss: float) -> None:
        """Stop, or go back to the last checkpoint and continue with the following data."""
        from schedlang.runtime.checkpointing import archive
        from schedlang.runtime.checkpointing.data_position import restore_scheduler

        step = self.program.step
        title = f"the loss of step {step} is {loss:g}"
        notes = () if math.isnan(self._mean) else (f"the losses before were about {self._mean:g}",)
        if self.on_spike == "roll back" and self.rolled_back < MAX_ROLL_BACKS:
            self.rolled_back += 1
            assert self.folder is not None
            self.program.load(self.folder)
            restore_scheduler(self._lr, (archive.read_beside(self.folder) or {}).get("scheduler"))
            self.meter.begin(self.program.step)
            self._notify("on_log", {"step": self.program.step, "rolled back from": step})
            return
        helps: tuple[str, ...] = (
            'leave such updates out: `on_spike="skip"`',
            'or go back to the last checkpoint: `folder=..., on_spike="roll back"`',
        )
        if self.on_spike == "roll back":
            helps = (
                f"it came back {MAX_ROLL_BACKS} times: look at the data, or at the learning rate",
            )
        raise Refusal(Diagnostic("S694", title, notes=notes, helps=helps))

    # -- callbacks and messages ------------------------------------------------------------------

    def _callbacks_with(self, name: str) -> list[Callable[..., Any]]:
        methods = (getattr(callback, name, None) for callback in self.callbacks or ())
        return [callback for callback in methods if callback is not None]

    def _notify(self, name: str, *figures: Figures) -> None:
        for callback in self._callbacks_with(name):
            callback(self, *figures)

    def _refuse_ended(self, step: int) -> Refusal:
        title = f"the data ended after {step} of {self.steps} steps"
        helps = (
            "give a list or a loader of batches, which can start again: an iterator cannot",
            f"or train for fewer steps: `steps={step}`",
        )
        return Refusal(Diagnostic("S692", title, helps=helps))

    def _find_mistake(self) -> tuple[str, str] | None:
        """Return a mistake in the arguments, and what to write instead; None if there is none."""
        functions = {"optimizer": self.optimizer, "scheduler": self.scheduler, "loss": self.loss}
        for name, function in functions.items():
            if not callable(function) and (function is not None or name == "optimizer"):
                return f"`{name}` is {kind_of(function)}, not a function", (
                    "`optimizer=lambda named: torch.optim.AdamW(named, lr=3e-4)`"
                )
        if not hasattr(self.data, "__iter__") and not hasattr(self.data, "__getitem__"):
            return f"`data` is {kind_of(self.data)}, not batches", "give a list or a loader"
        counts = ("steps", "save_every", "evaluate_every", "log_every")
        for name in counts:
            minimum = 1 if name in ("steps", "log_every") else 0
            if type(getattr(self, name)) is not int or getattr(self, name) < minimum:
                return f"`{name}` is {getattr(self, name)!r}", f"give {minimum} or more steps"
        if self.on_spike not in ON_SPIKE:
            return f"no `on_spike={self.on_spike!r}`", suggest_name(
                str(self.on_spike), ON_SPIKE, "it is"
            )
        if self.elastic and self.local:
            return "an elastic run needs full batches, equal on all ranks", (
                "leave out `local`: with another number of ranks, a rank has other rows"
            )
        if self.folder is None and (self.save_every or self.on_spike == "roll back"):
            return "there is no folder of checkpoints", 'give one: `folder="saved"`'
        return None


def refusal_of(title: str, help_: str) -> Refusal:
    """Return the refusal (S691) of something that a training loop cannot do, at the user's line."""
    return Refusal(Diagnostic("S691", title, Label(python_span()), helps=(help_,)))
