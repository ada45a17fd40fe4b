"""The program in the working dtype, against float64 and against the original's own rounding."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from schedlang.passes.proving.asked import asked
from schedlang.passes.proving.observe import Condition, Observation, observe
from schedlang.passes.proving.sides import Case, original, sequential
from schedlang.report import Row

if TYPE_CHECKING:
    from torch import Tensor

    from schedlang.passes.proving.original import Sequential

DRAWS = 8  # runs of the original from values that differ by a rounding
TIPPED = "numbers that roundings tip are taken as ranks took them"


def working_rows(
    case: Case, working: Case, told: Sequence[Condition], exact: Observation, program: Observation,
    *, wrong: bool = False,
) -> list[Row]:  # fmt: skip
    """Rows of the first condition; `exact` is the original in float64, `program` in the other.

    Of activations in fewer bits a number that lies where two are as near falls to either side: one
    is a whole step of its block off, above every gate for rounding.  Where rows fail for it, the
    original is run again with such numbers, and no others, as ranks took them; gates stay.
    What fails then may be luck, unless the program is known to be `wrong`, and is drawn again.
    """
    plain = _plain(working, told)
    rows, note = list(_rows(working, told, exact, program, plain)), ""
    if program.tipped and not all(row.ok for row in rows):
        case, working = (replace(one, tipped=program.tipped) for one in (case, working))
        exact, _ = original(case, told[:1])
        plain, note = _plain(working, told), TIPPED
        rows = list(_rows(working, told, exact, program, plain))
    if not wrong and not all(row.ok for row in rows):
        rows = _drawn_again(rows, case, working, told, exact, program, plain)
    return [replace(row, note=note) if row.ok and not row.note else row for row in rows]


def _rows(
    working: Case, told: Sequence[Condition], exact: Observation, program: Observation,
    plain: Observation, parts: Observation | None = None, draws: Sequence[Observation] = (),
) -> Iterator[Row]:  # fmt: skip
    from schedlang.passes.laying.casts import lowest
    from schedlang.passes.proving.rounding import within_rounding

    names = {condition.name for condition in told[:1]}
    tensors = {k: v for k, v in exact.tensors.items() if k.condition in names}
    wanted = replace(exact, tensors=tensors)
    rtol, low = asked(working.plan).rtol, lowest(working.plan)
    return iter(
        within_rounding(
            wanted, plain, program, rtol=rtol, low=low, parts=parts, draws=draws
        )
    )  # fmt: skip


def _plain(working: Case, told: Sequence[Condition]) -> Observation:
    """The original in the working dtype, under the casts of the plan, and what it chose."""
    from schedlang.runtime.drawing.random import LogicalDropout
    from schedlang.runtime.modes import ambient
    from schedlang.runtime.routing.choices import Choices

    def make(condition: Condition) -> Sequential:
        return sequential(working, condition, cast=True)

    first = [replace(condition, batches=working.batches) for condition in told[:1]]
    noted = Choices()
    with ambient(LogicalDropout(working.seed), noted):
        return replace(observe(make, first), choices=noted.found)


# -- more draws of the original's error ------------------------------------------------------------


def _drawn_again(
    rows: list[Row], case: Case, working: Case, told: Sequence[Condition], exact: Observation,
    program: Observation, plain: Observation,
) -> list[Row]:  # fmt: skip
    """Where rows fail: the same against more runs of the original.

    The first goes by the parts of the program: parts whose sums cancel are rounded one by one.  The
    others start from values that differ by one rounding, and tell together what is luck.  One that
    chooses otherwise than float64 does is a run of another function, and tells nothing.
    """
    from schedlang.passes.laying.casts import lowest
    from schedlang.passes.preparing.routing import routings
    from schedlang.passes.proving.flips import chosen, tipped
    from schedlang.passes.proving.rounding import unit_of

    plan, known = working.plan, working.prepared
    low = lowest(plan)
    right = chosen(case, told[:1], wide=True) if plain.choices else {}
    if known is None or tipped(right, plain.choices) or tipped(right, program.choices):
        return rows
    parts = None
    whole = any(routings(plan)) or known.traced.statistics is not None  # parts are another function
    whole = whole or bool(plan.kept) or plan.compression is not None  # and these go by parts
    if math.prod(working.cuts) > 1 and not (whole or working.parted or working.table is not None):
        working = replace(working, parted=True)
        parts = _plain(working, told)
        rows = list(_rows(working, told, exact, program, plain, parts))
        if all(row.ok for row in rows):
            return rows
    first = plain if parts is None else parts
    unit = low / 2 or unit_of(plain)
    draws = [first, *(_plain(nudged(working, unit, k), told) for k in range(DRAWS))]
    draws = [one for one in draws if not tipped(right, one.choices)]
    return list(_rows(working, told, exact, program, plain, parts, draws))


def nudged(case: Case, unit: float, draw: int) -> Case:
    """The case with every weight and float input off by at most one rounding.

    Whole numbers stay: no dtype rounds them, and of a mask of 0 and 1 other ones make no mask.
    """
    import torch

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
