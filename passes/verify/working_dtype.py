"""Check the program in its working dtype: errors against float64, loss curves, and casts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.ir.annotations import Cast
from schedlang.ir.module_copies import copy_module
from schedlang.passes.analyze.cast_trial import ForwardFailure, check_forward, try_forward
from schedlang.passes.propagate.casts import coarsest_epsilon
from schedlang.passes.verify.conditioning import (
    DRAWS,
    IN_DTYPE,
    OVERFLOWS,
    ErrorBounds,
    PerturbedRounding,
)
from schedlang.passes.verify.observe import (
    Batch,
    Condition,
    Loss,
    MakeOptimizer,
    Observation,
    observe,
    standard_conditions,
)
from schedlang.passes.verify.original import Sequential
from schedlang.passes.verify.proof_case import (
    Case,
    build_program,
    copy_original,
    make_dropout,
    make_original_subject,
    observe_programs,
    run_original,
)
from schedlang.passes.verify.relaxed_original import apply_casts
from schedlang.passes.verify.requirements import Curve, requirements_of
from schedlang.report import Row
from schedlang.runtime.activation_memory.quantized import record_near_ties
from schedlang.runtime.batch import run_model
from schedlang.runtime.float64 import Float64, as_float64, to_float64
from schedlang.runtime.launch.pool import Pool, use_threads_of_ranks
from schedlang.runtime.modes import ModeOrFactory, enter_modes
from schedlang.runtime.moe.discrete_choices import ChoiceRecorder
from schedlang.runtime.program import Program

# ---- The program in the working dtype, compared with float64 by the original's roundings.


def observe_ranks(
    working: Case, conditions: Sequence[Condition], programs: list[Program]
) -> Observation:
    """Observe a rank's program in the working dtype, with the choices and codes of all ranks."""
    single = [replace(condition, batches=working.batches) for condition in conditions[:1]]
    recorder = ChoiceRecorder()
    with enter_modes(recorder), record_near_ties() as tipped:
        # nothing else is compared
        observed = observe_programs(working, single, programs, brief=True)
    return replace(observed, choices=recorder.gather(), tipped=tipped.gather())


CHOICES_NOTE = "as ranks chose"
ROUNDED_NOTE = "numbers that roundings tip are taken as ranks took them"
SCALE_NOTE = "a loss scaled by"
SCALE_DIVISOR = 16  # divides the loss scale if the scale decides which gradients overflow
RunAgain = Callable[[Case], Observation]


@dataclass(frozen=True)
class WorkingRun:
    """A program that ran in its working dtype, and the data that it is compared with.

    Only the first condition is compared. `exact` is the original in float64, `program` the program
    in the working dtype.
      run_again  runs the program of another working case; None: it cannot run again
      plain      the original's unperturbed run, if known (`observe_original`)
    """

    case: Case
    working: Case
    conditions: Sequence[Condition]
    exact: Observation
    program: Observation
    run_again: RunAgain | None = None
    plain: Observation | None = None

    def rows(self, *, wrong: bool = False) -> list[Row]:
        """Compare the program's errors with what roundings make of the original.

        If the program is known to be `wrong`, one run of the original must do.

        A rounding may change a choice (a top-k of nearly equal scores), and what follows is another
        function. A rounding may also change the code of an activation midway between two codes,
        which is a full quantisation step. If rows fail and such choices or codes exist, the
        original runs again, in float64 too, with the ranks' choices and codes.
        """
        draws, program = 0 if wrong else DRAWS, self.program
        rows = self._against(draws)
        choices_changed = describe_changed_choices(self.exact.choices, program.choices)
        if wrong or all(row.ok for row in rows) or not (program.tipped or choices_changed):
            return rows
        codes: Any = program.tipped or None
        case, working = (
            replace(one, tipped=codes, choices=program.choices) for one in (self.case, self.working)
        )
        exact, _ = run_original(case, self.conditions[:1])
        repeated = replace(self, case=case, working=working, exact=exact, plain=None)
        rows = repeated._against(draws)
        note = ROUNDED_NOTE if program.tipped else f"{CHOICES_NOTE}: {choices_changed[0]}"
        return [replace(row, note=note) if row.ok and not row.note else row for row in rows]

    def _against(self, draws: int) -> list[Row]:
        """Return rows against the original, whose runs all choose as its float64 run does.

        The loss scale decides which gradients overflow: those of a batch may, where those of its
        parts do not, or the reverse. Then sides skip different steps, which is no mistake but hides
        one. Both sides run again with a lower scale, until they skip the same steps.
        """
        exact = self.exact
        tensors = {k: v for k, v in exact.tensors.items() if k.condition == self.conditions[0].name}
        plan = self.working.plan
        first_exact = replace(exact, tensors=tensors)
        bounds = ErrorBounds(first_exact, self._run, draws, _plain=self.plain)
        row = plan.loss_scaling
        if row is None or row.scale == 1 or self.run_again is None:
            return [
                *bounds.rows(
                    self.program,
                    rtol=requirements_of(plan).rtol,
                    casts=bool(coarsest_epsilon(plan)),
                )
            ]
        if not bounds.overflows_elsewhere(self.program):
            return [*bounds.rows(self.program, rtol=requirements_of(plan).rtol, casts=True)]
        scale = max(1, row.scale // SCALE_DIVISOR)
        casts = tuple(replace(item, scale=scale) if item is row else item for item in plan.casts)
        rescaled = replace(self.working, plan=replace(plan, casts=casts))
        rows = replace(
            self, working=rescaled, program=self.run_again(rescaled), plain=None
        )._against(draws)
        note = f"{SCALE_NOTE} {scale:,}, not {row.scale:,}, with which sides skip different steps"
        return [replace(item, note=item.note or note) for item in rows]

    def _run(self, draw: int) -> Observation:
        return observe_original(self.working, self.conditions, self.exact, draw)


def observe_original(
    working: Case, conditions: Sequence[Condition], exact: Observation, draw: int = 0
) -> Observation:
    """Observe the original in the working dtype under the plan's casts; `PerturbedRounding` by a
    draw > 0.

    The run chooses as the float64 run `exact` does.
    """
    rounding = PerturbedRounding(draw) if draw else nullcontext()
    threads = use_threads_of_ranks(working.plan.mesh.world)
    single = [replace(condition, batches=working.batches) for condition in conditions[:1]]
    with enter_modes(make_dropout(working), ChoiceRecorder(exact.choices)), rounding, threads:
        return observe(
            lambda condition: make_original_subject(working, condition, cast=True), single
        )


def error_bounds(
    model: nn.Module,
    conditions: Sequence[Condition],
    loss: Loss | None = None,
    *,
    autocast: torch.dtype | None = None,
    modes: Sequence[ModeOrFactory] = (),
    ranks: int = 1,
    choosing: Callable[[int | None], ModeOrFactory] = lambda draw: nullcontext(),
    rounding: Callable[[], AbstractContextManager[Any]] = nullcontext,
    loop: Callable[..., Sequential] = Sequential,
) -> ErrorBounds:
    """Return error bounds for any program that trains a model in a low dtype.

      model     the model with the ranks' initial weights, in the dtype that stores them
      conditions  training runs, with batches in the program's dtype
      autocast  dtype of operators, if it is another
      modes     modes of the program, such as one without dropout
      ranks     ranks of the program on this machine: the model uses as many threads as one rank
      choosing  returns the mode of a run's choices: for float64 (None) first, then for each draw
      rounding  returns a context that rounds besides the dtype, such as products in eight bits
      loop      training loop of the original
    The reference is the model in float64 from the same weights; the program need not run in
    float64.
    """

    def seen(
        module: nn.Module, conditions: Sequence[Condition], *extra_modes: ModeOrFactory
    ) -> Observation:
        def make(c: Condition) -> Sequential:
            twin: Any = copy_module(module)
            cast_loss = loss
            if autocast is not None:
                twin.forward = torch.autocast("cpu", autocast)(twin.forward)
                cast_loss = loss and torch.autocast("cpu", autocast)(loss)
            options: dict[str, Any] = {"clip": c.clip, "scale": c.scale, "evaluate": c.evaluate}
            return loop(twin, c.optimizer, loss=cast_loss, follow=c.follow, **options)

        with enter_modes(*extra_modes, *modes):
            return observe(make, conditions)

    float64_conditions = [
        replace(item, batches=tuple(map(to_float64, map(dict, item.batches))))
        for item in conditions
    ]

    def run(draw: int) -> Observation:
        with (
            use_threads_of_ranks(ranks),
            PerturbedRounding(draw) if draw else nullcontext(),
            rounding(),
        ):
            return seen(model, conditions, choosing(draw))

    return ErrorBounds(seen(as_float64(model), float64_conditions, choosing(None), Float64()), run)


def float64_bounds(case: Case, conditions: Sequence[Condition], exact: Observation) -> ErrorBounds:
    """Return bounds of how far the original itself magnifies roundings in float64."""

    def run(draw: int) -> Observation:
        with PerturbedRounding(draw + 1, wide=True):
            return run_original(case, conditions)[0]

    return ErrorBounds(exact, run)


# ---- Casts that torch cannot run on this machine.


def check_cast(working: Case | None) -> None:
    """Refuse (S895) casts that torch cannot run on this machine.

    The casts run with values: on the meta device kernels accept dtypes that they reject otherwise.
    """
    if working is None or not working.plan.casts:
        return
    plan, batch = working.plan, working.batches[0]

    def run(casts: Sequence[Cast]) -> ForwardFailure | None:
        module, options = copy_original(working), {"loss": working.loss}
        apply_casts(replace(plan, casts=tuple(casts)), module, options)

        def forward() -> None:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                output = run_model(module.train(), batch)
                if options["loss"] is not None:
                    options["loss"](output, batch)

        return try_forward(module, forward)

    check_forward(plan, run)


# ---- Undecided rows, and choices that roundings change.


def split_undecided(rows: Sequence[Row]) -> tuple[list[Row], list[str]]:
    """Drop rows whose original is not finite in the working dtype; return the rest and a note."""
    lost = [row for row in rows if row.note == OVERFLOWS and row.kind.endswith(IN_DTYPE)]
    reason = f"{OVERFLOWS} there"
    messages = [
        f"{len(lost)} rows in the working dtype, the first {first_row.place}: {reason}"
        for first_row in lost[:1]
    ]
    return [row for row in rows if row not in lost], messages


def describe_changed_choices(
    expected: Mapping[Any, Tensor], actual: Mapping[Any, Tensor]
) -> list[str]:
    """Describe the number of changed choices, by module and operator."""
    counts: dict[tuple[str, str], list[int]] = {}
    for key, expected_choice in expected.items():
        choice = actual.get(key)
        if choice is not None and choice.shape == expected_choice.shape:
            count = counts.setdefault((key[1], key[2]), [0, 0])
            count[0] += int((choice != expected_choice).sum())
            count[1] += expected_choice.numel()
    return [
        f"{changed} of {total} choices of `{name}` in `{site or 'the model'}` differ"
        for (site, name), (changed, total) in counts.items()
        if changed
    ]


# ---- Loss curves of program and original in the working dtype.


def curve_rows(working: Case, curves: Sequence[Curve], pool: Pool) -> list[Row]:
    """Return a row for each loss curve: the step at which it is farthest from the original's."""
    if not curves:
        return []
    steps = max(curve.steps for curve in curves)
    original = _original(working, steps)
    program = pool.run(_program, working.plan.mesh.world, working, steps)[0]
    rows = []
    for curve in curves:
        errors = [abs(x - r) / (abs(r) or 1.0) for x, r in zip(program, original)][: curve.steps]
        wrong_step = next((k for k, error in enumerate(errors) if not error <= curve.within), None)
        step = (
            wrong_step
            if wrong_step is not None
            else max(range(len(errors)), key=lambda k: errors[k])
        )
        name = f"{curve.steps} steps ({curve.place})"
        rows.append(
            Row(
                "loss curve",
                "loss curve",
                name,
                errors[step],
                curve.within,
                wrong_step is None,
                step,
            )
        )
    return rows


def _original(working: Case, steps: int) -> list[float]:
    with enter_modes(make_dropout(working)):
        subject = Sequential(copy_original(working), _adamw(working), loss=working.loss)
        return [float(subject.train_step(batch)) for batch in _cycled(working, steps)]


def _program(working: Case, steps: int) -> list[float]:
    """Train on a rank, and return the program's losses."""
    program = build_program(working, optimizer=_adamw(working))
    return [float(program.train_step(batch)) for batch in _cycled(working, steps)]


def _adamw(working: Case) -> MakeOptimizer:
    return standard_conditions(working.batches, 1.0)[1].optimizer


def _cycled(working: Case, steps: int) -> list[Batch]:
    return [working.batches[k % len(working.batches)] for k in range(steps)]
