"""Check the program in its working dtype: errors against float64, loss curves, and casts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.ir.annotations import Cast
from schedlang.ir.copied import copied
from schedlang.passes.analyze.cast_trial import Failure, refuse_failing, tried
from schedlang.passes.propagate.casts import lowest
from schedlang.passes.verify.asked import Curve, asked
from schedlang.passes.verify.conditioning import DRAWS, IN_DTYPE, OVERFLOWS, Bounds, Nudged
from schedlang.passes.verify.observe import (
    Batch,
    Condition,
    Loss,
    MakeOptimizer,
    Observation,
    conditions,
    observe,
)
from schedlang.passes.verify.original import Sequential
from schedlang.passes.verify.relaxed import cast_twin
from schedlang.passes.verify.sides import (
    Case,
    dropout_of,
    observed,
    original,
    program_of,
    sequential,
    twin,
)
from schedlang.report import Row
from schedlang.runtime.activation_memory.quantized import noting
from schedlang.runtime.batch import called
from schedlang.runtime.float64 import Float64, as_float64, widened
from schedlang.runtime.launch.pool import Pool, threads_of_ranks
from schedlang.runtime.modes import ModeOrFactory, ambient
from schedlang.runtime.moe.choices import Choices
from schedlang.runtime.program import Program

# ---- The program in the working dtype, compared with float64 by the original's roundings.


def rounded(working: Case, conditions: Sequence[Condition], made: list[Program]) -> Observation:
    """Observe a rank's program in the working dtype, with the choices and codes of all ranks."""
    first = [replace(condition, batches=working.batches) for condition in conditions[:1]]
    chosen = Choices()
    with ambient(chosen), noting() as tipped:
        seen = observed(working, first, made, brief=True)  # nothing else is compared
    return replace(seen, choices=chosen.everyone(), tipped=tipped.everyone())


CHOSEN = "as ranks chose"
TIPPED = "numbers that roundings tip are taken as ranks took them"
SCALED = "a loss scaled by"
LESS = 16  # divides the loss scale if the scale decides which gradients overflow
Again = Callable[[Case], Observation]


@dataclass(frozen=True)
class Rounded:
    """A program that ran in its working dtype, and the data that it is compared with.

    Only the first condition is compared. `exact` is the original in float64, `program` the program
    in the working dtype.
      `again`  runs the program of another working case; None: it cannot run again
      plain    the original's unperturbed run, if known (`as_it_stands`)
    """

    case: Case
    working: Case
    conditions: Sequence[Condition]
    exact: Observation
    program: Observation
    again: Again | None = None
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
        other = tipped(self.exact.choices, program.choices)
        if wrong or all(row.ok for row in rows) or not (program.tipped or other):
            return rows
        codes: Any = program.tipped or None
        case, working = (
            replace(one, tipped=codes, chosen=program.choices) for one in (self.case, self.working)
        )
        exact, _ = original(case, self.conditions[:1])
        again = replace(self, case=case, working=working, exact=exact, plain=None)
        rows = again._against(draws)
        note = TIPPED if program.tipped else f"{CHOSEN}: {other[0]}"
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
        seen = replace(exact, tensors=tensors)
        bounds = Bounds(seen, self._run, draws, _plain=self.plain)
        row = plan.scaled
        if row is None or row.scale == 1 or self.again is None:
            return [*bounds.rows(self.program, rtol=asked(plan).rtol, casts=bool(lowest(plan)))]
        if not bounds.tells_apart(self.program):
            return [*bounds.rows(self.program, rtol=asked(plan).rtol, casts=True)]
        scale = max(1, row.scale // LESS)
        casts = tuple(replace(one, scale=scale) if one is row else one for one in plan.casts)
        less = replace(self.working, plan=replace(plan, casts=casts))
        rows = replace(self, working=less, program=self.again(less), plain=None)._against(draws)
        note = f"{SCALED} {scale:,}, not {row.scale:,}, with which sides skip different steps"
        return [replace(one, note=one.note or note) for one in rows]

    def _run(self, draw: int) -> Observation:
        return as_it_stands(self.working, self.conditions, self.exact, draw)


def as_it_stands(
    working: Case, conditions: Sequence[Condition], exact: Observation, draw: int = 0
) -> Observation:
    """Observe the original in the working dtype under the plan's casts; `Nudged` by a draw > 0.

    The run chooses as the float64 run `exact` does.
    """
    nudged = Nudged(draw) if draw else nullcontext()
    threads = threads_of_ranks(working.plan.mesh.world)
    first = [replace(condition, batches=working.batches) for condition in conditions[:1]]
    with ambient(dropout_of(working), Choices(exact.choices)), nudged, threads:
        return observe(lambda condition: sequential(working, condition, cast=True), first)


def bounds_of(
    model: nn.Module,
    conditions: Sequence[Condition],
    loss: Loss | None = None,
    *,
    autocast: torch.dtype | None = None,
    modes: Sequence[ModeOrFactory] = (),
    ranks: int = 1,
    choosing: Callable[[int | None], ModeOrFactory] = lambda draw: nullcontext(),
    rounding: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Bounds:
    """Return error bounds for any program that trains a model in a low dtype.

      model     the model with the ranks' initial weights, in the dtype that stores them
      conditions  training runs, with batches in the program's dtype
      autocast  dtype of operators, if it is another
      modes     modes of the program, such as one without dropout
      ranks     ranks of the program on this machine: the model uses as many threads as one rank
      choosing  returns the mode of a run's choices: for float64 (None) first, then for each draw
      rounding  returns a context that rounds besides the dtype, such as products in eight bits
    The reference is the model in float64 from the same weights; the program need not run in
    float64.
    """

    def seen(
        module: nn.Module, conditions: Sequence[Condition], *more: ModeOrFactory
    ) -> Observation:
        def make(c: Condition) -> Sequential:
            twin: Any = copied(module)
            given = loss
            if autocast is not None:
                twin.forward = torch.autocast("cpu", autocast)(twin.forward)
                given = loss and torch.autocast("cpu", autocast)(loss)
            options: dict[str, Any] = {"clip": c.clip, "scale": c.scale, "evaluate": c.evaluate}
            return Sequential(twin, c.optimizer, loss=given, follow=c.follow, **options)

        with ambient(*more, *modes):
            return observe(make, conditions)

    wide = [replace(one, batches=tuple(map(widened, map(dict, one.batches)))) for one in conditions]

    def run(draw: int) -> Observation:
        with threads_of_ranks(ranks), Nudged(draw) if draw else nullcontext(), rounding():
            return seen(model, conditions, choosing(draw))

    return Bounds(seen(as_float64(model), wide, choosing(None), Float64()), run)


def magnified(case: Case, conditions: Sequence[Condition], exact: Observation) -> Bounds:
    """Return bounds of how far the original itself magnifies roundings in float64."""

    def run(draw: int) -> Observation:
        with Nudged(draw + 1, wide=True):
            return original(case, conditions)[0]

    return Bounds(exact, run)


# ---- Casts that torch cannot run on this machine.


def check_cast(working: Case | None) -> None:
    """Refuse (S895) casts that torch cannot run on this machine.

    The casts run with values: on the meta device kernels accept dtypes that they reject otherwise.
    """
    if working is None or not working.plan.casts:
        return
    plan, batch = working.plan, working.batches[0]

    def run(casts: Sequence[Cast]) -> Failure | None:
        module, options = twin(working), {"loss": working.loss}
        cast_twin(replace(plan, casts=tuple(casts)), module, options)

        def forward() -> None:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                output = called(module.train(), batch)
                if options["loss"] is not None:
                    options["loss"](output, batch)

        return tried(module, forward)

    refuse_failing(plan, run)


# ---- Undecided rows, and choices that roundings change.


def undecided(rows: Sequence[Row]) -> tuple[list[Row], list[str]]:
    """Drop rows whose original is not finite in the working dtype; return the rest and a note."""
    over = [row for row in rows if row.note == OVERFLOWS and row.kind.endswith(IN_DTYPE)]
    why = f"{OVERFLOWS} there"
    said = [
        f"{len(over)} rows in the working dtype, the first {one.place}: {why}" for one in over[:1]
    ]
    return [row for row in rows if row not in over], said


def tipped(right: Mapping[Any, Tensor], other: Mapping[Any, Tensor]) -> list[str]:
    """Describe the number of changed choices, by module and operator."""
    counts: dict[tuple[str, str], list[int]] = {}
    for key, wanted in right.items():
        found = other.get(key)
        if found is not None and found.shape == wanted.shape:
            count = counts.setdefault((key[1], key[2]), [0, 0])
            count[0] += int((found != wanted).sum())
            count[1] += wanted.numel()
    return [
        f"{wrong} of {many} choices of `{name}` in `{site or 'the model'}` differ"
        for (site, name), (wrong, many) in counts.items()
        if wrong
    ]


# ---- Loss curves of program and original in the working dtype.


def curve_rows(working: Case, curves: Sequence[Curve], pool: Pool) -> list[Row]:
    """Return a row for each loss curve: the step at which it is farthest from the original's."""
    if not curves:
        return []
    steps = max(curve.steps for curve in curves)
    right = _original(working, steps)
    seen = pool.run(_program, working.plan.mesh.world, working, steps)[0]
    rows = []
    for curve in curves:
        off = [abs(x - r) / (abs(r) or 1.0) for x, r in zip(seen, right)][: curve.steps]
        bad = next((k for k, error in enumerate(off) if not error <= curve.within), None)
        step = bad if bad is not None else max(range(len(off)), key=lambda k: off[k])
        name = f"{curve.steps} steps ({curve.place})"
        rows.append(
            Row("loss curve", "loss curve", name, off[step], curve.within, bad is None, step)
        )
    return rows


def _original(working: Case, steps: int) -> list[float]:
    with ambient(dropout_of(working)):
        subject = Sequential(twin(working), _adamw(working), loss=working.loss)
        return [float(subject.train_step(batch)) for batch in _cycled(working, steps)]


def _program(working: Case, steps: int) -> list[float]:
    """Train on a rank, and return the program's losses."""
    program = program_of(working, optimizer=_adamw(working))
    return [float(program.train_step(batch)) for batch in _cycled(working, steps)]


def _adamw(working: Case) -> MakeOptimizer:
    return conditions(working.batches, 1.0)[1].optimizer


def _cycled(working: Case, steps: int) -> list[Batch]:
    return [working.batches[k % len(working.batches)] for k in range(steps)]
