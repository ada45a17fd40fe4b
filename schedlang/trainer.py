"""Trainer: a loop around `program.train_step` in the open, each part of which can be replaced.

It builds the program of a schedule, goes on from the last checkpoint of a folder, takes batches,
steps, and at times that it is given looks at the loss, evaluates and saves.  What it tells goes to
callbacks: plain objects with some of the methods `on_begin`, `on_step`, `on_log`, `on_evaluate`,
`on_save`, `on_end`, each called with the trainer (and the figures), on every rank.
"""

from __future__ import annotations

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
    at_their_callers_lines,
    guess,
    kind_of,
)
from schedlang.diagnostics.source import python_span
from schedlang.language.syntax import given, parse
from schedlang.passes.elaborate.state import Settings, job_size
from schedlang.runtime.launch.heart import inside
from schedlang.schedule import Schedule

if TYPE_CHECKING:
    from torch import Tensor, nn

    from schedlang.runtime.checkpointing.position import Stream
    from schedlang.runtime.program import Program

Batch = Mapping[str, Any]
Figures = dict[str, float]  # by name; `step` is among them
ON_SPIKE = ("stop", "skip", "roll back")
ROLLS = 3  # times that a run rolls back without a checkpoint in between
MEMORY = 0.9  # of the running mean of losses, at each look


@at_their_callers_lines
@dataclass(eq=False)
class Trainer:
    """A run: a model under a schedule, data, and how far it goes.

    schedule        a `Schedule`, the path of a file, or its text
    model           the module, or what `deferred_init` has made; the same on every rank
    data            batches, each the keyword arguments of the model for one step, begun again when
                    they end.  Whole batches, alike on all ranks, or (`local`) this rank's own rows
    steps           the step after which the run ends, those of before it was stopped included
    optimizer       a function from (name, parameter) pairs to an optimizer
    scheduler       a function from that to a scheduler of torch, stepped once a step
    loss            loss(output, batch), where the model returns none
    clip            bound for the global norm of the gradients
    folder          of checkpoints: the run goes on from the last, and saves every `save_every`
                    steps (in the background, but with `wait`) and at its end; `keep` of them stay
    evaluation      batches whose mean loss is told every `evaluate_every` steps
    log_every       steps between two looks at the loss, for which the host waits
    on_spike        of a loss that is not finite, or above `spike` times its running mean: "stop"
                    at the look that finds it; "roll back" there to the last checkpoint, and go on
                    with the data that follow; "skip" the update of that very step, for which the
                    host waits for the loss in each step
    callbacks       what is told of the run; default: a line for each look, on the first rank
    accept          go on although the schedule is another than that of the checkpoint
    elastic         the job may have other ranks at each start: the planner sets the knobs that are
                    named, or else those that size the mesh or say `micro=`, for the quickest step
    build           further arguments of `Schedule.build`

    Raises Refusal S691 for arguments that do not go together.
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
    skipped: int = field(default=0, init=False)  # updates that were left out
    rolled_back: int = field(default=0, init=False)
    rate: float | None = field(default=None, init=False)  # of the last step, where it is scheduled
    meter: Meter = field(default_factory=Meter, init=False)
    _mean: float = field(default=math.nan, init=False)  # of the losses that were looked at
    _lr: Any = field(default=None, init=False)
    _stream: Stream = field(init=False)
    _saved_at: int = field(default=-1, init=False)
    _setting: dict[str, Any] | None = field(default=None, init=False)  # chosen for these ranks

    def __post_init__(self) -> None:
        if found := self._wrong():
            raise refused(*found)
        self.schedule = self._scheduled()
        if self.callbacks is None:
            self.callbacks = (Console(),)

    # -- the run ---------------------------------------------------------------------------------

    def fit(self) -> Program:
        """Train to `steps`, from the last checkpoint of the folder if it has one; the program.

        All ranks together.  Raises Refusal S692 for data that end before, S693 for another schedule
        than the checkpoint's, S694 for a loss that is not finite where the run is to stop.
        """
        self._start()
        self._tell("on_begin")
        try:
            self._train()
        finally:
            self._tell("on_end")
        return self.program

    def _train(self) -> None:
        program, every = self.program, self._called("on_step")
        if self.on_spike == "roll back" and self._saved_at < 0:
            self.save()
        self.meter.begin(program.step)
        times, due = program.dp_size if self.local else 1, self._due()
        while program.step < self.steps:
            batch = self._next()
            loss = program.train_step(batch, local=self.local)
            self.meter.add(batch, times)
            if self._lr is not None:
                self.rate = self._lr.optimizer.param_groups[0]["lr"]
                self._lr.step()
            for tell in every:
                tell(self)
            if program.step >= due:
                self._look(loss)
                due = self._due()
        if self.folder is not None and self._saved_at != program.step:
            self.save()
        program.saved()

    def save(self) -> None:
        """Save a checkpoint with all that the run needs to go on; all ranks together."""
        assert self.folder is not None
        with inside():
            self.program.save(self.folder, self.keep, wait=self.wait, beside=self._state())
        self._saved_at = self.program.step
        self._tell("on_save")

    def evaluate(self) -> Figures:
        """Return the mean loss of the evaluation's batches, each by its weight; all ranks."""
        from schedlang.runtime.batch import moved

        total = weights = 0.0
        a = self.program.assembly
        for batch in self.evaluation or ():
            output = self.program.eval_step(batch)
            if self.loss is not None:
                loss = self.loss(output, moved(batch, a.ranks.device))
            else:
                loss = output["loss"] if isinstance(output, Mapping) else output.loss
            weight = float(a.weight(batch))
            total, weights = total + float(loss) * weight, weights + weight
        mean = total / weights if weights else math.nan
        return {"step": self.program.step, "evaluation loss": mean}

    # -- before the first step -------------------------------------------------------------------

    def _start(self) -> None:
        """The program, and where it goes on: data, scheduler and generators before the first batch
        is taken, parameters when there is a program."""
        from schedlang.runtime.checkpointing import archive
        from schedlang.runtime.checkpointing.position import (
            Ended,
            Stream,
            check_parts,
            check_same,
            generators,
            put_back,
            scheduled_on,
        )
        from schedlang.runtime.comm import world

        sch = self.schedule
        assert isinstance(sch, Schedule)
        met = elastic.Meeting(self.build) if self.elastic else elastic.Joined(sch)
        self._stream = Stream(self.data)
        last = told = None
        if self.folder is not None:
            last = met.first(schedlang.last_checkpoint(self.folder))
        if last is not None:
            told = archive.beside(last, world.rank()) or archive.beside(last)
            if not self.accept:
                check_same(told, sch.to_sched(), last)
            if told is not None:
                check_parts(told, self._parts(), last)
        try:
            if told is not None:
                self._stream.go_to(told["place"])
            first = self._stream.look()
        except Ended:
            raise self._ended(0) from None
        now = generators(self.data)
        given = dict(loss=self.loss, optimizer=self.optimizer, clip=self.clip, **self.build)
        self.schedule, self._setting, drawing = met.fitted(self, sch, first, told)
        with inside():
            built: Any = self.schedule.build(batch=None if self.local else first, **drawing | given)
            self.program = built
            if self.local:
                built._built(first, True)
                self.program = built._program
            if self.scheduler is not None and self.program.optimizer is not None:
                self._lr = self.scheduler(self.program.optimizer)
            if last is not None:
                self.program.load(last)
                self._saved_at = self.program.step
        if told is not None:
            self._mean = told["mean"]
            scheduled_on(self._lr, told["scheduler"])
        put_back(self.data, now)
        if self.on_spike == "skip":
            a = self.program.assembly
            if a.pipeline.timeline.stale or a.compressor is not None:
                raise refused(
                    "updates cannot be skipped: rows change what is kept from step to step before",
                    'without `compress(gradients)` and stale weights, or `on_spike="stop"`',
                )
            self.program.allowed = self._allowed

    def _scheduled(self) -> Schedule:
        if isinstance(self.schedule, Schedule):
            return self.schedule
        from schedlang.runtime.comm import world

        # alone it is a job of one; an elastic one has its setting when the ranks are there
        size = None if self.elastic else job_size() or world.size()
        return Schedule(self.model, parse(given(self.schedule)), Settings(world=size))

    def _parts(self) -> int:
        """The parts that the data are read in: one, where every rank has whole batches."""
        assert isinstance(self.schedule, Schedule)
        return self.schedule.plan().shares if self.local else 1

    def _state(self) -> dict[str, Any]:
        from schedlang.runtime.checkpointing.position import versions

        assert isinstance(self.schedule, Schedule)
        return {
            "place": self._stream.state(),
            "parts": self._parts(),
            "scheduler": None if self._lr is None else self._lr.state_dict(),
            "mean": self._mean,
            "schedule": self.schedule.to_sched(),
            "versions": versions(),
            "setting": self._setting,
        }

    # -- a step ----------------------------------------------------------------------------------

    def _next(self) -> Batch:
        from schedlang.runtime.checkpointing.position import Ended

        try:
            return next(self._stream)
        except Ended:
            raise self._ended(self.program.step) from None

    def _due(self) -> int:
        """The next step at which there is something to do but to train."""
        step = self.program.step
        every = [n for n in (self.log_every, self._saves(), self.evaluate_every) if n]
        return min([self.steps, *(step - step % n + n for n in every)])

    def _saves(self) -> int:
        return self.save_every if self.folder is not None else 0

    def _look(self, loss: Tensor) -> None:
        """Do what is due after this step: the look at the loss first: nothing bad is saved."""
        step = self.program.step
        value = float(loss)
        if self.on_spike != "skip" and self._bad(value, self.program.grad_norm):
            self._spiked(value)
            return
        if self.on_spike != "skip":
            self._note(value)
        if step % self.log_every == 0 or step == self.steps:
            self._tell("on_log", self.meter.figures(self, value))
        if self.evaluate_every and step % self.evaluate_every == 0:
            self._tell("on_evaluate", self.evaluate())
        if self._saves() and step % self.save_every == 0:
            self.save()
            self.rolled_back = 0

    # -- losses that are not as they should be ---------------------------------------------------

    def _bad(self, loss: float, norm: float | None) -> bool:
        """Return whether a loss is not finite, or far above those of before.  The norm of gradients
        counts, too, but under a loss scale, which has its own rule for it."""
        finite = math.isfinite(loss)
        if self.program.loss_scale is None and norm is not None:
            finite = finite and math.isfinite(norm)
        return not finite or loss > self.spike * self._mean

    def _note(self, loss: float) -> None:
        known = not math.isnan(self._mean)
        self._mean = MEMORY * self._mean + (1 - MEMORY) * loss if known else loss

    def _allowed(self, loss: Tensor, norm: Tensor | float) -> bool:
        """Return whether a step updates: the same on all ranks, who have the same loss and norm."""
        value = float(loss)
        if self._bad(value, float(norm)):
            self.skipped += 1
            return False
        self._note(value)
        return True

    def _spiked(self, loss: float) -> None:
        """Stop, or go back to the last checkpoint and on with the data that follow."""
        from schedlang.runtime.checkpointing import archive
        from schedlang.runtime.checkpointing.position import scheduled_on

        step = self.program.step
        title = f"the loss of step {step} is {loss:g}"
        notes = () if math.isnan(self._mean) else (f"the losses before were about {self._mean:g}",)
        if self.on_spike == "roll back" and self.rolled_back < ROLLS:
            self.rolled_back += 1
            assert self.folder is not None
            self.program.load(self.folder)
            scheduled_on(self._lr, (archive.beside(self.folder) or {}).get("scheduler"))
            self.meter.begin(self.program.step)
            self._tell("on_log", {"step": self.program.step, "rolled back from": step})
            return
        helps: tuple[str, ...] = (
            'leave such updates out: `on_spike="skip"`',
            'or go back to the last checkpoint: `folder=..., on_spike="roll back"`',
        )
        if self.on_spike == "roll back":
            helps = (f"it came back {ROLLS} times: look at the data, or at the learning rate",)
        raise Refusal(Diagnostic("S694", title, notes=notes, helps=helps))

    # -- callbacks and messages ------------------------------------------------------------------

    def _called(self, name: str) -> list[Callable[..., Any]]:
        found = (getattr(one, name, None) for one in self.callbacks or ())
        return [one for one in found if one is not None]

    def _tell(self, name: str, *figures: Figures) -> None:
        for tell in self._called(name):
            tell(self, *figures)

    def _ended(self, step: int) -> Refusal:
        title = f"the data ended after {step} of {self.steps} steps"
        helps = (
            "give batches that can be begun again, a list or a loader: an iterator ends for good",
            f"or train for fewer steps: `steps={step}`",
        )
        return Refusal(Diagnostic("S692", title, helps=helps))

    def _wrong(self) -> tuple[str, str] | None:
        """Return what is wrong with the arguments, and what to write instead."""
        functions = {"optimizer": self.optimizer, "scheduler": self.scheduler, "loss": self.loss}
        for name, one in functions.items():
            if not callable(one) and (one is not None or name == "optimizer"):
                return f"`{name}` is {kind_of(one)}, not a function", (
                    "`optimizer=lambda named: torch.optim.AdamW(named, lr=3e-4)`"
                )
        if not hasattr(self.data, "__iter__") and not hasattr(self.data, "__getitem__"):
            return f"`data` is {kind_of(self.data)}, not batches", "give a list or a loader"
        counts = ("steps", "save_every", "evaluate_every", "log_every")
        for name in counts:
            least = 1 if name in ("steps", "log_every") else 0
            if type(getattr(self, name)) is not int or getattr(self, name) < least:
                return f"`{name}` is {getattr(self, name)!r}", f"give {least} or more steps"
        if self.on_spike not in ON_SPIKE:
            return f"no `on_spike={self.on_spike!r}`", guess(str(self.on_spike), ON_SPIKE, "it is")
        if self.elastic and self.local:
            return "an elastic run needs whole batches, alike on all ranks", (
                "leave out `local`: rows of one rank are none of those of another number of ranks"
            )
        if self.folder is None and (self.save_every or self.on_spike == "roll back"):
            return "there is no folder of checkpoints", 'give one: `folder="saved"`'
        return None


def refused(title: str, help_: str) -> Refusal:
    """Refuse (S691) what a loop of training cannot do, at the line of the user's that asked."""
    return Refusal(Diagnostic("S691", title, Label(python_span()), helps=(help_,)))
