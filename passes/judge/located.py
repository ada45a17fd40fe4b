"""Follow a wrong step on both sides: the first module that differs, and from what that comes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.judge import modules, sights, terms
from schedlang.passes.judge.kinds import INITIAL, Located
from schedlang.passes.judge.layouts import Table
from schedlang.passes.judge.masks import Dropping, Drops, Placed
from schedlang.passes.judge.owners import Notes, Noting, shapes, unmasked
from schedlang.passes.judge.placing import places_of
from schedlang.passes.judge.program import Make
from schedlang.passes.judge.subject import Judged, Kept
from schedlang.passes.verify.observe import Batch, Condition
from schedlang.passes.verify.original import Sequential, rows
from schedlang.passes.verify.sides import Case, twin
from schedlang.report import Report
from schedlang.runtime.float64 import Float64
from schedlang.runtime.launch.pool import Hang, Pool, RankDied
from schedlang.runtime.modes import ambient

_OF_A_STEP = ("training outputs", "loss", "gradients", "replicas")
_FAILS = (Refusal, RankDied, Hang, RuntimeError)  # what has run before does not run with hooks


@dataclass(frozen=True)
class Step:
    """A step of a program and of its original, to be run again and again."""

    case: Case
    make: Make
    world: int
    condition: Condition
    drops: Drops
    pool: Pool

    @property
    def batch(self) -> Batch:
        """The batch of it."""
        return self.condition.batches[0]

    def original(self, batch: Batch, *modes: Any, live: bool = False) -> modules.Run:
        """Follow the original's."""
        subject = Sequential(twin(self.case), loss=self.case.loss, follow=False)
        return modules.followed(
            dict(subject.module.named_modules()),
            lambda: subject.derive(batch, range(rows(batch))),
            Float64(),
            Dropping(self.drops.seed, self.drops.off),
            *modes,
            live=live,
        )

    def on_ranks(self, part: Callable[..., Any], *more: Any) -> list[Any]:
        """Run a part of each rank's."""
        given = self.make, self.case.plan.model.model, self.condition, self.drops
        found: list[Any] = self.pool.run(part, self.world, *given, *more)
        return found


def located(
    case: Case,
    make: Make,
    world: int,
    asked: Sequence[Condition],
    told: Sequence[Condition],
    drops: Drops,
    report: Report,
    pool: Pool,
) -> Located:
    """Name the first module that is wrong in the first step; nothing where that says nothing.

    It says nothing of a program that starts from other weights.
    `told` are the conditions as the report names them, `asked` as ranks know them.
    """
    wrong = [row for row in report.rows if not row.ok]
    if any(row.kind == INITIAL for row in wrong):
        return Located()
    first = next((row for row in wrong if row.step == 0 and row.kind in _OF_A_STEP), None)
    if first is None:
        return Located()
    place = next(k for k, one in enumerate(told) if one.name == first.condition)
    condition = replace(asked[place], batches=asked[place].batches[:1])
    step = Step(case, make, world, condition, drops, pool)
    try:
        right = step.original(step.batch)
        ranks = step.on_ranks(_followed)
    except _FAILS:
        return Located()
    turns, factors = modules.turns_and_factors(right, ranks)
    found = modules.first_difference(right, ranks, {"ranks": world})
    if found is None:
        return Located("", turns, factors)
    if found.unknown:
        with contextlib.suppress(*_FAILS):
            found = replace(found, because=_cause(step, found))
    return Located(found.text, turns, factors)


def _cause(step: Step, found: modules.Found) -> str:
    """Say what makes an output or a gradient wrong whose numbers follow no known pattern."""
    return _of_gradient(step, found) if found.back else _of_output(step, found)


# ---- A gradient: its terms.


def _of_gradient(step: Step, found: modules.Found) -> str:
    tape = terms.Tape()
    run = step.original(step.batch, tape, live=True)
    got = [
        terms.Got(p.rank, p.value.reshape(-1), p.places.reshape(-1))
        for p in found.parts
        if p.places is not None
    ]
    with ambient(Float64()):
        said = terms.made_of(tape, run.live[found.at], got) if got else ""
    if said or step.world < 2:
        return said
    return unmasked(tape, step.on_ranks(_noted, shapes(tape)))


# ---- An output: the places of the batch that it depends on.


def _of_output(step: Step, found: modules.Found) -> str:
    """Say on which places it depends that it should not; each rank's are those before it."""
    frame, k = found.at
    for made in sights.changes(step.batch):
        batches = [step.batch, *(one.batch for one in made)]
        right = [step.original(batch).calls[frame].outputs[k] for batch in batches]
        if all(torch.equal(one, right[0]) for one in right) or right[0].dim() < 2:
            continue
        if right[0].shape[1] != batches[0][made[0].source].shape[1]:
            continue
        wanted = [(part.rank, part.frame, part.k) for part in found.parts]
        ranks = step.on_ranks(_outputs, batches, wanted)
        parts = [
            sights.Part([one[place] for one in ranks[part.rank]], there)
            for part in found.parts
            if (there := _rows(part, found.anchors, right[0])) is not None
            for place in [_place(wanted, (part.rank, part.frame, part.k))]
        ]
        return sights.seen_otherwise(right, parts, made)
    return ""


def _place(wanted: Sequence[tuple[int, Any, int]], one: tuple[int, Any, int]) -> int:
    return [other for other in wanted if other[0] == one[0]].index(one)


def _rows(part: modules.Part, anchors: Sequence[modules.Part], want: Tensor) -> Tensor | None:
    """The rows (of the first two dims) of the whole that a rank has, as those before it tell."""
    lead = part.value.shape[:2]
    for one in anchors:
        if (one.rank, one.frame[1], one.value.shape[:2]) != (part.rank, part.frame[1], lead):
            continue
        if one.places is not None and one.places.dim() > 2:
            return one.places.flatten(2)[..., 0] // one.value.shape[2:].numel()
    whole = torch.arange(want.shape[:2].numel()).reshape(want.shape[:2])
    return whole if lead == want.shape[:2] else None


# ---- A rank's part.


@contextlib.contextmanager
def _judged(
    make: Make, original: nn.Module, condition: Condition, drops: Drops
) -> Iterator[tuple[Judged, Callable[[], Placed]]]:
    """This rank's program, and what drops as in the step, from its beginning."""
    kept, table = Kept(), Table(original)
    eager = torch.compiler.set_stance("force_eager") if drops.sites else contextlib.nullcontext()
    with contextlib.redirect_stdout(sys.stderr), eager:
        places = places_of(make, original, table, [condition], kept, drops) if drops.sites else {}

        def begun() -> Placed:
            dropping = Placed(drops.seed, kept.met.off(drops))
            dropping.begin(places.get(drops.numbers[condition.name, 0], {}))
            return dropping

        with ambient(Float64(), begun()):
            judged = Judged(make, original, table, condition, kept)
        yield judged, begun


def _followed(
    make: Make, original: nn.Module, condition: Condition, drops: Drops
) -> tuple[modules.Run, dict[str, str]]:
    """A step that is followed, and the original's names of its modules."""
    with _judged(make, original, condition, drops) as (judged, begun):
        named = judged.named_modules()
        batch = condition.batches[0]
        run = modules.settled(named, lambda: judged.derive(batch), Float64(), begun())
    names = {name: judged.original_module(name) for name in named}
    return run, {name: meant for name, meant in names.items() if meant is not None}


def _noted(
    make: Make,
    original: nn.Module,
    condition: Condition,
    drops: Drops,
    wanted: frozenset[torch.Size],
) -> Notes:
    """The tensors of a step that have one of some shapes, with their gradients."""
    notes = Notes(wanted)
    judging = _judged(make, original, condition, drops)
    with judging as (judged, begun), ambient(Float64(), begun(), Noting(notes)):
        judged.derive(condition.batches[0])
    return notes


def _outputs(
    make: Make,
    original: nn.Module,
    condition: Condition,
    drops: Drops,
    batches: Sequence[Batch],
    wanted: Sequence[tuple[int, Any, int]],
) -> list[list[Tensor]]:
    """Return for each of some batches what this rank's modules give that are asked for."""
    found = []
    with _judged(make, original, condition, drops) as (judged, begun):
        named = judged.named_modules()
        for batch in batches:

            def derive(given: Batch = batch) -> Any:
                return judged.derive(given)

            run = modules.followed(named, derive, Float64(), begun())
            mine = [(frame, k) for rank, frame, k in wanted if rank == judged.rank]
            found.append([run.calls[frame].outputs[k] for frame, k in mine])
    return found
