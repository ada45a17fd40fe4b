"""Judge a program in a low dtype: by how far roundings at every operator move its original."""

from __future__ import annotations

import contextlib
import math
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal
from schedlang.passes.judge.beside import (
    alike,
    dropped,
    grouped,
    initial,
    of_saved,
    saved,
    with_own,
)
from schedlang.passes.judge.causes import causes
from schedlang.passes.judge.choices import Choosing, Moment, Noted, Routes, untold
from schedlang.passes.judge.layouts import Table
from schedlang.passes.judge.loaded import reloaded
from schedlang.passes.judge.masks import Dropping, Drops, Placed
from schedlang.passes.judge.placing import dropped_alike, noted_drops, of_dropout, places_of
from schedlang.passes.judge.program import Make
from schedlang.passes.judge.subject import Judged, Kept
from schedlang.passes.verify.conditioning import Bounds
from schedlang.passes.verify.eight_bits import FORMATS, KEPT, EightBits
from schedlang.passes.verify.finite import check_original
from schedlang.passes.verify.observe import HIDDEN, Batch, Condition, Observation, observe
from schedlang.passes.verify.runs import unoffered
from schedlang.passes.verify.sides import Case, as_worked
from schedlang.passes.verify.working_dtype import bounds_of, undecided
from schedlang.report import Report, Row
from schedlang.runtime.comm import world as comm
from schedlang.runtime.launch.pool import Pool, temporary
from schedlang.runtime.modes import ambient

LOW = ("float32", "bfloat16", "float16")
Chosen = Mapping[Moment, Sequence[Noted]]
COPIES = 4.0  # roundings by which copies of one tensor on different ranks may differ


def judged_in(
    dtype: str,
    case: Case,
    told: Sequence[Condition],
    make: Make,
    ranks: int,
    pool: Pool,
    aside: bool,
) -> Report:
    """Compare a program that is given the model in a dtype with what that makes of the original.

    case  the original as it is given, in its own dtype
    told  the conditions of the judge in float64
    dtype  of eight bits: that of operands of products, in a model that is kept in bfloat16
    """
    batches = _every(told)
    kept_in = KEPT if dtype in FORMATS else dtype
    working = as_worked(replace(case, batches=batches, dtype=_known(kept_in)))
    assert working is not None, "a judge in float64 is another"
    rounding = partial(EightBits, dtype) if dtype in FORMATS else contextlib.nullcontext
    low = {id(wide): narrow for wide, narrow in zip(batches, working.batches)}
    told = [replace(one, batches=tuple(low[id(b)] for b in one.batches)) for one in told]
    module = working.plan.model.model

    def run(drops: Drops) -> tuple[tuple[Observation, Chosen], Kept]:
        seen, kept, chosen = pool.run(_rank, ranks, make, module, told, aside, drops)[0]
        return (seen, chosen), kept

    with temporary() as folder:
        drops = noted_drops(working, told, folder, ())
        drops, (seen, chosen), kept = dropped_alike(drops, run)
    holdings, own = kept.holdings, kept.optimizer
    assert holdings is not None
    asked, seen = with_own(told, seen, pickle.loads(own)) if own is not None else (told, seen)
    asked = [replace(one, optimizer=grouped(one.optimizer, holdings)) for one in asked]
    held = _Held(working, asked, drops, ranks, rounding, seen, kept).compared(chosen)
    check_original(case, told, held.first)
    rows = [*initial(module, kept), *dropped(drops, kept), *held.rows]
    rows += [*_counts(held.bounds.exact, held.actual), *_copies(held.actual, kept_in)]
    rows += saved(working, held.actual, kept, asked)
    rows += kept.loaded.rows(asked[-1]) if kept.loaded else ()
    facts = [("", f"{ranks} rank{'s' * (ranks > 1)}"), ("seed", str(case.seed))]
    facts += [("dtype", dtype), ("torch", torch.__version__), *held.facts]
    gaps = (*of_dropout(drops, kept), *of_saved(kept), *unoffered(held.actual))
    wrong = any(not row.ok for row in rows)
    said = causes(rows, held.bounds, held.actual, kept, ranks) if wrong else ()
    report = Report(tuple(rows), facts=tuple(facts), gaps=gaps, unchecked=tuple(held.unsure))
    return replace(report, localised=said)


@dataclass(frozen=True)
class _Compared:
    """Rows of a program in a low dtype, by which bounds, and what is undecided.

    first  the original in float64 by its own choices
    """

    first: Observation
    bounds: Bounds
    actual: Observation
    rows: Sequence[Row]
    unsure: Sequence[str]
    facts: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class _Held:
    """A program that ran in a low dtype, and the original that it is held against."""

    working: Case
    told: Sequence[Condition]
    drops: Drops
    ranks: int
    rounding: Callable[[], Any]
    seen: Observation
    kept: Kept

    def compared(self, chosen: Chosen) -> _Compared:
        """Compare; once more by the choices of ranks, if rows fail where roundings tip some."""
        routes = Routes(chosen)
        bounds, actual = self._against(routes.mode)
        first = bounds.exact
        rows, unsure = undecided(bounds.rows(actual))
        again = routes.again() if any(not row.ok for row in rows) else None
        if again is None:
            return _Compared(first, bounds, actual, rows, unsure)
        bounds, actual = self._against(again.mode)
        rows, unsure = undecided(bounds.rows(actual))
        if again.other and any(not row.ok for row in rows):
            other, _ = self._against(again.otherwise)
            rows, more = untold(rows, bounds.rows(other.exact))
            unsure += more
        return _Compared(first, bounds, actual, rows, unsure, again.facts())

    def _against(self, choosing: Callable[[int | None], Choosing]) -> tuple[Bounds, Observation]:
        """The bounds of runs that choose so, and what is held against them."""
        bounds = bounds_of(
            self.working.plan.model.model,
            self.told,
            self.working.loss,
            modes=(Dropping(self.drops.seed, self.drops.off),),
            ranks=self.ranks,
            choosing=choosing,
            rounding=self.rounding,
        )
        expected, actual = alike(bounds.exact, self.seen, self.kept)
        return replace(bounds, exact=expected, state=True), actual


def _known(dtype: str) -> str:
    """The dtype; refuse (S704) one that no program is judged in."""
    if dtype in LOW:
        return dtype
    title = f"`{dtype}` is not a dtype that programs are judged in"
    helps = (f"choose one of {', '.join((*LOW, *FORMATS))}, or none: float64",)
    raise Refusal(Diagnostic("S704", title, helps=helps))


def _counts(expected: Observation, actual: Observation) -> Iterator[Row]:
    """Whether numbers that no rounding moves are the same: counted steps and batches."""
    for key, want in expected.tensors.items():
        counted = key.kind == "optimizer step" or key.kind in ("other state", HIDDEN)
        if want is None or not counted or key.kind in actual.missing:
            continue
        if want.is_floating_point() and (want.dim() or key.kind != "optimizer step"):
            continue  # it has a bound
        got = actual.tensors.get(key)
        ok = got is not None and torch.equal(got.double(), want.double())
        error = 0.0 if ok else math.inf
        yield Row(key.condition, key.kind, key.name, error, 0.0, ok, key.step)


def _every(told: Sequence[Condition]) -> tuple[Batch, ...]:
    """The batches of all conditions, each once."""
    return tuple({id(batch): batch for one in told for batch in one.batches}.values())


def _copies(seen: Observation, dtype: str) -> list[Row]:
    """Whether ranks that hold one tensor hold the same, but for roundings."""
    gate = COPIES * torch.finfo(getattr(torch, dtype)).eps
    return [
        Row(key.condition, key.kind, key.name, error, gate, error <= gate, key.step)
        for key, error in seen.replicas.items()
    ]


def _rank(
    make: Make, original: nn.Module, told: Sequence[Condition], aside: bool, drops: Drops
) -> tuple[Observation, Kept, Chosen] | None:
    """One rank's part; only rank 0 tells what it saw, and what all of them chose."""
    kept, table, choosing = Kept(), Table(original), Choosing()
    made: list[Judged] = []
    lines = contextlib.redirect_stdout(sys.stderr) if aside else contextlib.nullcontext()
    # a compiled region does not ask for masks
    eager = torch.compiler.set_stance("force_eager") if drops.sites else contextlib.nullcontext()
    with lines, eager:
        places = places_of(make, original, table, told, kept, drops, ()) if drops.sites else {}
        dropping = Placed(drops.seed, kept.met.off(drops))

        def subject(condition: Condition) -> Judged:
            def begin(step: int) -> None:
                dropping.begin(places.get(drops.numbers[condition.name, step], {}))

            made.clear()
            made.append(Judged(make, original, table, condition, kept, begin))
            return made[0]

        with ambient(dropping):
            with ambient(choosing):
                seen = observe(subject, told, keep=comm.rank() == 0)
            chosen = choosing.everyone()
            kept.loaded = reloaded(made[0], told[-1], lambda step: None, step=False)
    kept.stray = {site for one in comm.all_gather_object(dropping.stray) for site in one}
    sys.stdout.flush()
    return (seen, kept, chosen) if comm.rank() == 0 else None
