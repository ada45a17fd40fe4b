"""Judge a program in a low dtype: by how far roundings at every operator move its original."""

from __future__ import annotations

import contextlib
import math
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal
from schedlang.passes.judge.beside import alike, grouped, initial, of_saved, saved, with_own
from schedlang.passes.judge.causes import causes
from schedlang.passes.judge.choices import Choosing, Moment, Noted, Routes, untold
from schedlang.passes.judge.layouts import Table
from schedlang.passes.judge.loaded import reloaded
from schedlang.passes.judge.program import Make
from schedlang.passes.judge.subject import Judged, Kept
from schedlang.passes.verify.conditioning import Bounds
from schedlang.passes.verify.eight_bits import FORMATS, KEPT, EightBits
from schedlang.passes.verify.finite import check_original
from schedlang.passes.verify.observe import HIDDEN, Batch, Condition, Observation, observe
from schedlang.passes.verify.runs import unoffered
from schedlang.passes.verify.sides import Case, as_worked
from schedlang.passes.verify.working_dtype import bounds_of, undecided
from schedlang.report import Gap, Report, Row
from schedlang.runtime.comm import world as comm
from schedlang.runtime.launch.pool import Pool
from schedlang.runtime.modes import ambient
from schedlang.runtime.rng.logical_dropout import Still, Undropped

LOW = ("float32", "bfloat16", "float16")
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
    Nothing drops on either side: masks are compared in float64 only.
    """
    batches = _every(told)
    kept_in = KEPT if dtype in FORMATS else dtype
    working = as_worked(replace(case, batches=batches, dtype=_known(kept_in)))
    assert working is not None, "a judge in float64 is another"
    rounding = partial(EightBits, dtype) if dtype in FORMATS else contextlib.nullcontext
    module = working.plan.model.model
    low = {id(wide): narrow for wide, narrow in zip(batches, working.batches)}
    told = [replace(one, batches=tuple(low[id(b)] for b in one.batches)) for one in told]
    seen, kept, chosen = pool.run(_rank, ranks, make, module, told, aside)[0]
    holdings = kept.holdings
    own = kept.optimizer
    asked, seen = with_own(told, seen, pickle.loads(own)) if own is not None else (told, seen)
    asked = [replace(one, optimizer=grouped(one.optimizer, holdings)) for one in asked]
    quiet = (lambda: Undropped(Still()),)

    def against(choosing: Callable[[int | None], Choosing]) -> tuple[Bounds, Observation]:
        """The bounds of runs that choose so, and what is held against them."""
        options: dict[str, Any] = {"modes": quiet, "ranks": ranks, "rounding": rounding}
        bounds = bounds_of(module, asked, case.loss, choosing=choosing, **options)
        expected, actual = alike(bounds.exact, seen, kept)
        return replace(bounds, exact=expected, state=True), actual

    routes = Routes(chosen)
    bounds, actual = against(routes.mode)
    check_original(case, told, bounds.exact)
    held, unsure = undecided(bounds.rows(actual))
    again = routes.again() if any(not row.ok for row in held) else None
    if again is not None:
        bounds, actual = against(again.mode)
        held, unsure = undecided(bounds.rows(actual))
        if again.other and any(not row.ok for row in held):
            held, more = untold(held, bounds.rows(against(again.otherwise)[0].exact))
            unsure += more
    rows = [*initial(module, kept), *held]
    rows += [*_counts(bounds.exact, actual), *_copies(actual, kept_in)]
    rows += saved(working, actual, kept, asked)
    rows += kept.loaded.rows(asked[-1]) if kept.loaded else ()
    facts = [("", f"{ranks} rank{'s' * (ranks > 1)}"), ("seed", str(case.seed))]
    facts += [("dtype", dtype), ("torch", torch.__version__)]
    facts += again.facts() if again is not None else ()
    gaps = (_DROPOUT, *of_saved(kept), *unoffered(actual))
    wrong = any(not row.ok for row in rows)
    said = causes(rows, bounds, actual, kept, ranks) if wrong else ()
    report = Report(tuple(rows), facts=tuple(facts), gaps=gaps, unchecked=tuple(unsure))
    return replace(report, localised=said)


def _known(dtype: str) -> str:
    """The dtype; refuse (S704) one that no program is judged in."""
    if dtype in LOW:
        return dtype
    title = f"`{dtype}` is not a dtype that programs are judged in"
    helps = (f"choose one of {', '.join((*LOW, *FORMATS))}, or none: float64",)
    raise Refusal(Diagnostic("S704", title, helps=helps))


_DROPOUT = Gap("dropout", "dropout that is missing or scaled wrongly")


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
    make: Make, original: nn.Module, told: Sequence[Condition], aside: bool
) -> tuple[Observation, Kept, Mapping[Moment, Sequence[Noted]]] | None:
    """One rank's part; only rank 0 tells what it saw, and what all of them chose."""
    kept, table, choosing = Kept(), Table(original), Choosing()
    made: list[Judged] = []

    def subject(condition: Condition) -> Judged:
        made.clear()
        made.append(Judged(make, original, table, condition, kept))
        return made[0]

    lines = contextlib.redirect_stdout(sys.stderr) if aside else contextlib.nullcontext()
    with lines, ambient(Undropped(Still())):
        with ambient(choosing):
            seen = observe(subject, told, keep=comm.rank() == 0)
        chosen = choosing.everyone()
        kept.loaded = reloaded(made[0], told[-1], lambda step: None, step=False)
    sys.stdout.flush()
    return (seen, kept, chosen) if comm.rank() == 0 else None
