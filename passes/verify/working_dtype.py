"""Compare the program in its working dtype: with float64, with the original, and loss curves."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from schedlang.ir.facets import Cast
from schedlang.passes.analyze.cast_trial import Failure, refuse_failing, tried
from schedlang.passes.analyze.routing import routings
from schedlang.passes.propagate.casts import lowest
from schedlang.passes.verify.asked import Curve, asked
from schedlang.passes.verify.compare import is_left_out, over, unhidden
from schedlang.passes.verify.observe import (
    Batch,
    Condition,
    Key,
    MakeOptimizer,
    Observation,
    conditions,
    observe,
)
from schedlang.passes.verify.original import Sequential
from schedlang.passes.verify.pooled_draws import CHANCE, bound
from schedlang.passes.verify.relaxed import cast_twin
from schedlang.passes.verify.sides import (
    Case,
    dropout_of,
    modes_of,
    original,
    program_of,
    sequential,
    twin,
)
from schedlang.report import Row
from schedlang.runtime.batch import called
from schedlang.runtime.launch.pool import Pool
from schedlang.runtime.modes import ambient
from schedlang.runtime.moe.choices import Choices

# ---- Rounding: the model as it stands, in its working dtype, against the original's own error.
# With r the float64 result from the rounded weights, s the original's and x the program's in the
# working dtype, two orders of the same sums: |x - r| <= k |s - r| + 4 u |r| per tensor, u the
# dtype's unit roundoff. What a fixed tolerance cannot know, the condition of a sum, is in |s - r|.
#
# Of a tensor whose elements err together, a small bias, one |s - r| may be small by luck. Other
# runs of the original are more draws of the same error: one by the parts that the program makes,
# whose sums are rounded one by one before they cancel (the larger of both counts), and several
# from values that differ by one rounding, which together tell how large an error may be by luck
# (`pooled_draws`). The program's may be twice that: it rounds parts of sums before it adds them.


# how much larger than the original's an error may be: above all that was measured on random models
_TIMES = {
    "outputs": 4.0,
    "training outputs": 4.0,
    "gradients": 8.0,
    "input gradients": 8.0,
    "parameters": 16.0,
}


# a single number: its error may vanish by luck, so it has a gate by its own size, in roundings
_SCALARS = {"loss": 16.0, "gradient norm": 16.0}
IN_DTYPE = " in working dtype"
OVERFLOWS = "the original itself is not finite"


def within_rounding(
    exact: Observation,
    original: Observation,
    program: Observation,
    *,
    rtol: Mapping[str, float] | None = None,
    low: float = 0.0,
    parts: Observation | None = None,
    draws: Sequence[Observation] = (),
) -> tuple[Row, ...]:
    """Rows for outputs, loss, gradients, norm and parameter updates; an error of 1 is the gate.

    `exact` is the original in float64 started from the weights of the other two. For kinds in
    `rtol` the schedule has given a bound of its own for the relative error.
    With `low`, the spacing of a low dtype at 1, that both computed in: an error is at most twice
    the original's own under the same casts, or `low` times its size. Of its errors the larger
    counts: of the run `original`, and of the one by `parts`. What is above all that is held against
    `draws`, runs of the original from values that differ by a rounding: in a right program some row
    is above twice their bound with a chance of at most `CHANCE`.
    """
    rtol, unit, found = rtol or {}, unit_of(original), list[Row]()
    chance = CHANCE / max(1, len(exact.tensors))
    last = {key[:2]: key.step for key in exact.tensors}
    for key in exact.tensors:
        if key.kind in _SCALARS:
            pass
        elif key.kind not in _TIMES or (key.kind == "parameters" and key.step != last[key[:2]]):
            continue
        r, s, x = (_value(seen, key) for seen in (exact, original, program))
        if r is None or not r.is_floating_point() or (r.dim() == 0 and key.kind not in _SCALARS):
            continue
        if key.kind in program.missing or is_left_out(key, program.left_out):
            continue
        gate = rtol.get(key.kind, 1.0)
        row = Row(key.condition, key.kind + IN_DTYPE, key.name, math.inf, gate, False, key.step)
        if x is None or s is None or x.shape != r.shape:
            found.append(replace(row, note="missing"))
            continue
        r, s, x = unhidden(key, r, s, x)
        if not low and bool((r.isfinite() & ~s.isfinite()).any()):
            found.append(replace(row, error=math.nan, note=OVERFLOWS))
            continue
        note = "the bound of the schedule" if key.kind in rtol else ""
        if key.kind in rtol:
            error = over(_size(x, r), float(r.double().norm()))
        elif low:
            error = _twice(x, s, r, low, _off([original, parts], key, r))
        elif key.kind in _SCALARS:
            error = _number(x, s, r, unit * _SCALARS[key.kind])
        else:
            error = _error(x, s, r, _TIMES[key.kind])
        if draws and not error <= gate and key.kind not in rtol:
            error = min(error, _beyond(exact, program, draws, key, chance))
        found.append(replace(row, error=error, ok=error <= gate, note=note))
    return tuple(found)


def unit_of(original: Observation) -> float:
    """The unit roundoff of the coarsest dtype that the original worked in."""
    floats = {v.dtype for v in original.tensors.values() if v is not None and v.is_floating_point()}
    return max((torch.finfo(dtype).eps / 2 for dtype in floats), default=0.0)


def _size(x: Tensor, r: Tensor) -> float:
    """The norm of an error."""
    return float((x.double() - r.double()).norm())


def _off(runs: Sequence[Observation | None], key: Key, r: Tensor) -> float:
    """The largest finite error of a tensor in some runs of the original."""
    found = (_value(one, key) for one in runs if one is not None)
    errors = [_size(v, r) for v in found if v is not None and v.shape == r.shape]
    return max((error for error in errors if math.isfinite(error)), default=0.0)


def _beyond(
    exact: Observation, program: Observation, draws: Sequence[Observation], key: Key, chance: float
) -> float:
    """Return the ratio of an error to the bound of what luck explains, told from draws of it."""
    error = _errors(exact, program, [key])
    every = [key]
    if key.kind in _SCALARS:  # one number tells little of its law, those of all steps tell more
        every = [k for k in exact.tensors if k._replace(step=0) == key._replace(step=0)]
    found = [_errors(exact, one, every) for one in draws]
    gate = 2.0 * bound([e for e in found if e is not None], chance)
    size = math.inf if error is None else float(error.norm())
    return size / gate if gate and math.isfinite(size) else math.inf


def _errors(exact: Observation, seen: Observation, keys: Sequence[Key]) -> Tensor | None:
    """The errors of a tensor, or of numbers each by its size; None if one is not there."""
    found = []
    for key in keys:
        r, v = (_value(one, key) for one in (exact, seen))
        if r is None or v is None or v.shape != r.shape:
            return None
        r, v = unhidden(key, r.double(), v.double())
        same = (v == r) & r.isinf()
        v, r = (torch.where(same, 0, t) for t in (v, r))
        size = float(r.abs()) or 1.0 if key.kind in _SCALARS else 1.0
        found.append((v - r).flatten() / size)
    return torch.cat(found)


def _twice(x: Tensor, s: Tensor, r: Tensor, low: float, own: float) -> float:
    """The rule for casts, `own` being the original's own error; what overflows there must here."""
    if not bool(s.isfinite().all()):
        return math.inf if bool(x.isfinite().all()) else 0.0
    return over(_size(x, r), max(2.0 * own, low * float(r.double().norm())))


def _number(x: Tensor, s: Tensor, r: Tensor, share: float) -> float:
    """A mean or a norm is a sum of terms of one sign, so its own size is that of its terms."""
    gate = 4.0 * abs(float(s) - float(r)) + share * abs(float(r))
    return over(abs(float(x) - float(r)), gate)


def _value(seen: Observation, key: Key) -> Tensor | None:
    """A tensor; of parameters the change since the first step, which their size does not swamp."""
    value = seen.tensors.get(key)
    if key.kind != "parameters" or value is None:
        return value
    first = seen.tensors.get(key._replace(step=0))
    return value if first is None else value - first


def _error(x: Tensor, s: Tensor, r: Tensor, times: float) -> float:
    unit = torch.finfo(s.dtype).eps / 2
    x, s, r = x.double(), s.double(), r.double()
    same = (x == s) & r.isinf()  # masked scores
    x, s, r = (torch.where(same, 0, t) for t in (x, s, r))
    return over(_size(x, r), times * _size(s, r) + 4 * unit * float(r.norm()))


# ---- The program in the working dtype, against float64 and against the original's own rounding.


DRAWS = 8  # runs of the original from values that differ by a rounding
TIPPED = "numbers that roundings tip are taken as ranks took them"


@dataclass(frozen=True)
class Rounded:
    """A program that ran in its working dtype, and what it is held against.

    Only rows of the first condition; `exact` is the original in float64, `program` in the other.
    """

    case: Case
    working: Case
    told: Sequence[Condition]
    exact: Observation
    program: Observation

    def rows(self, *, wrong: bool = False) -> list[Row]:
        """Compare the errors of the program with those of the original, which they may not exceed.

        Of activations in fewer bits a number that lies where two are as near falls to either side:
        one is a whole step of its block off, above every gate for rounding.  Where rows fail for
        it, the original is run again with such numbers, and no others, as ranks took them; gates
        stay.  What fails then may be luck, unless the program is known to be `wrong`, and is drawn
        again.
        """
        judge, plain, note = self, self._plain(self.working), ""
        rows = self._against(plain)
        if self.program.tipped and not all(row.ok for row in rows):
            case, working = (
                replace(one, tipped=self.program.tipped) for one in (self.case, self.working)
            )
            exact, _ = original(case, self.told[:1])
            judge = replace(self, case=case, working=working, exact=exact)
            plain, note = judge._plain(working), TIPPED
            rows = judge._against(plain)
        if not wrong and not all(row.ok for row in rows):
            rows = judge._drawn_again(rows, plain)
        return [replace(row, note=note) if row.ok and not row.note else row for row in rows]

    def _plain(self, working: Case) -> Observation:
        """The original in the working dtype, under the casts of the plan, and what it chose."""
        first = [replace(condition, batches=working.batches) for condition in self.told[:1]]
        noted = Choices()
        with ambient(dropout_of(working), noted):
            seen = observe(lambda condition: sequential(working, condition, cast=True), first)
        return replace(seen, choices=noted.found)

    def _against(
        self,
        plain: Observation,
        parts: Observation | None = None,
        draws: Sequence[Observation] = (),
    ) -> list[Row]:
        """The rows against one run of the original, or several."""
        tensors = {k: v for k, v in self.exact.tensors.items() if k.condition == self.told[0].name}
        wanted, plan = replace(self.exact, tensors=tensors), self.working.plan
        rules: dict[str, Any] = {"rtol": asked(plan).rtol, "low": lowest(plan)}
        return [*within_rounding(wanted, plain, self.program, **rules, parts=parts, draws=draws)]

    def _drawn_again(self, rows: list[Row], plain: Observation) -> list[Row]:
        """Hold the program against more runs of the original, where rows fail.

        The first goes by the parts of the program: parts whose sums cancel are rounded one by one.
        The others start from values that differ by one rounding, and tell together what is luck.
        One that chooses otherwise than float64 does is a run of another function, and tells
        nothing.
        """
        working, program = self.working, self.program
        plan, known = working.plan, working.prepared
        right = chosen(self.case, self.told[:1], wide=True) if plain.choices else {}
        if known is None or tipped(right, plain.choices) or tipped(right, program.choices):
            return rows
        parts = None
        # of some parts are another function, and others go by parts as it is
        whole = any(routings(plan)) or known.traced.statistics is not None
        whole = whole or bool(plan.kept) or plan.compression is not None
        whole = whole or working.parted or working.table is not None
        if math.prod(working.cuts) > 1 and not whole:
            working = replace(working, parted=True)
            parts = self._plain(working)
            rows = self._against(plain, parts)
            if all(row.ok for row in rows):
                return rows
        unit = lowest(plan) / 2 or unit_of(plain)
        near = (self._plain(nudged(working, unit, draw)) for draw in range(DRAWS))
        draws = [plain if parts is None else parts, *near]
        draws = [one for one in draws if not tipped(right, one.choices)]
        return self._against(plain, parts, draws)


def nudged(case: Case, unit: float, draw: int) -> Case:
    """The case with every weight and float input off by at most one rounding.

    Whole numbers stay: no dtype rounds them, and of a mask of 0 and 1 other ones make no mask.
    """
    generator = torch.Generator().manual_seed(case.seed * DRAWS + draw)

    def near(value: Tensor) -> Tensor:
        noise = 2 * torch.rand(value.shape, generator=generator, dtype=torch.float64) - 1
        wide = value.detach().double().cpu()
        return torch.where(wide == wide.round(), wide, wide * (1 + unit * noise)).to(value)

    module = copy.deepcopy(case.plan.model.base.model)
    with torch.no_grad():
        for p in module.parameters():
            if p.is_floating_point():
                p.copy_(near(p))
    batches = tuple(
        {
            k: near(v) if isinstance(v, torch.Tensor) and v.is_floating_point() else v
            for k, v in batch.items()
        }
        for batch in case.batches
    )
    return replace(case.with_model(module), batches=batches)


# ---- Casts that torch does not run on this machine.


def check_cast(working: Case | None) -> None:
    """Refuse (S895) what torch does not run on this machine under the casts of the rows.

    Without values more runs than with them: a kernel may refuse two dtypes where its shapes do not.
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


# ---- Flips: choices that rounding tips, behind which errors in the working dtype say nothing.


def undecided(
    rows: Sequence[Row],
    case: Case,
    working: Case | None,
    told: Sequence[Condition],
    program: Observation,
) -> tuple[list[Row], list[str]]:
    """The rows without those that a tipped choice leaves undecided; and what those are.

    A top-k of nearly equal scores chooses otherwise in a coarser dtype, and everything behind it is
    another function.  No bound is widened for that: such rows are not checked, which is said.
    Neither are those of which the original itself, in its working dtype, makes no finite number.
    """

    def without(some: Sequence[Row], why: str) -> list[Row]:
        said.append(f"{len(some)} rows in the working dtype, the first {some[0].place}: {why}")
        return [row for row in rows if row not in some]

    rows, said = list(rows), list[str]()
    over = [row for row in rows if row.note == OVERFLOWS and row.kind.endswith(IN_DTYPE)]
    if over:
        rows = without(over, f"{OVERFLOWS} there")
    bad = [row for row in rows if not row.ok and row.kind.endswith(IN_DTYPE)]
    if bad and working is not None:
        right = chosen(case, told[:1], wide=True)
        plain = chosen(working, [replace(told[0], batches=working.batches)], wide=False)
        words = [*tipped(right, plain), *tipped(right, program.choices)]
        rows = without(bad, words[0]) if words else rows
    return rows, said


def tipped(right: Mapping[Any, Tensor], other: Mapping[Any, Tensor]) -> list[str]:
    """Describe how many of the choices that can be compared are others, by site and operator."""
    counts: dict[tuple[str, str], list[int]] = {}
    for key, wanted in right.items():
        found = other.get(key)
        if found is not None and found.shape == wanted.shape:
            count = counts.setdefault((key[1], key[2]), [0, 0])
            count[0] += int((found != wanted).sum())
            count[1] += wanted.numel()
    return [
        f"{wrong} of {many} choices of `{name}` in `{site or 'the model'}` fall otherwise"
        for (site, name), (wrong, many) in counts.items()
        if wrong
    ]


def chosen(case: Case, told: Iterable[Condition], *, wide: bool) -> Mapping[Any, Tensor]:
    """Note what the original chooses, in float64 or in its working dtype."""
    (float64, dropout), _ = modes_of(case)
    noted = Choices()
    modes = (float64, dropout, noted) if wide else (dropout, noted)
    with ambient(*modes):
        observe(lambda condition: sequential(case, condition), told, keep=False)
    return noted.found


# ---- Loss curves: the program's and the original's, side by side in the working dtype.


def curve_rows(working: Case, curves: Sequence[Curve], pool: Pool) -> list[Row]:
    """One row for each curve: the step at which it is farthest from the original's."""
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
    """Train on a rank, and return the losses of the program, whole on each rank."""
    program = program_of(working, optimizer=_adamw(working))
    return [float(program.train_step(batch)) for batch in _cycled(working, steps)]


def _adamw(working: Case) -> MakeOptimizer:
    return conditions(working.batches, 1.0)[1].optimizer


def _cycled(working: Case, steps: int) -> list[Batch]:
    return [working.batches[k % len(working.batches)] for k in range(steps)]
