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

DRAWS = 3  # runs of the original from values that differ by a rounding, at most
TIPPED = "numbers that roundings tip are taken as ranks took them"


def working_rows(
    case: Case, working: Case, told: Sequence[Condition], exact: Observation, program: Observation
) -> list[Row]:
    """Rows of the first condition; `exact` is the original in float64, `program` in the other.

    Of activations in fewer bits a number that lies where two are as near falls to either side: one
    is a whole step of its block off, above every gate for rounding.  Where rows fail for it, the
    original is run again with such numbers, and no others, as ranks took them; gates stay.
    """
    plain = _plain(working, told)
    rows = list(_rows(working, told, exact, program, plain))
    if all(row.ok for row in rows):
        return rows
    if not program.tipped:
        return _drawn_again(rows, working, told, exact, program, plain)
    case, working = (replace(one, tipped=program.tipped) for one in (case, working))
    again, _ = original(case, told[:1])
    rows = list(_rows(working, told, again, program, _plain(working, told)))
    return [replace(row, note=TIPPED) if row.ok and not row.note else row for row in rows]


def _rows(
    working: Case, told: Sequence[Condition], exact: Observation, program: Observation,
    plain: Observation, parts: Observation | None = None, nudged: Sequence[Observation] = (),
) -> Iterator[Row]:  # fmt: skip
    from schedlang.passes.laying.casts import lowest
    from schedlang.passes.proving.rounding import within_rounding

    names = {condition.name for condition in told[:1]}
    tensors = {k: v for k, v in exact.tensors.items() if k.condition in names}
    wanted = replace(exact, tensors=tensors)
    rtol, low = asked(working.plan).rtol, lowest(working.plan)
    return iter(
        within_rounding(
            wanted, plain, program, rtol=rtol, low=low, parts=parts, nudged=nudged
        )
    )  # fmt: skip


def _plain(working: Case, told: Sequence[Condition]) -> Observation:
    """The original in the working dtype, under the casts of the plan."""
    from schedlang.runtime.drawing.random import LogicalDropout
    from schedlang.runtime.modes import ambient

    def make(condition: Condition) -> Sequential:
        return sequential(working, condition, cast=True)

    first = [replace(condition, batches=working.batches) for condition in told[:1]]
    with ambient(LogicalDropout(working.seed)):
        return observe(make, first)


# -- more draws of the original's error ------------------------------------------------------------


def _drawn_again(
    rows: list[Row], working: Case, told: Sequence[Condition], exact: Observation,
    program: Observation, plain: Observation,
) -> list[Row]:  # fmt: skip
    """Where rows fail under casts: the same against more runs of the original, as few as do.

    The first goes by the parts of the program: parts whose sums cancel are rounded one by one.  The
    others start from values that differ by one rounding.  What fails after them is no rounding.
    Where a code's steps would tip there are none.
    """
    from schedlang.passes.laying.casts import lowest
    from schedlang.passes.preparing.routing import routings

    plan, known = working.plan, working.prepared
    low = lowest(plan)
    if not low or plan.kept or plan.compression is not None or known is None:
        return rows
    case, parts = working, None
    whole = any(routings(plan)) or known.traced.statistics is not None  # parts are another function
    if math.prod(working.cuts) > 1 and not (whole or working.parted or working.table is not None):
        case = replace(working, parted=True)
        parts = _plain(case, told)
        rows = list(_rows(working, told, exact, program, plain, parts))
    nudged: list[Observation] = []
    while len(nudged) < DRAWS and not all(row.ok for row in rows):
        nudged.append(_plain(_nudged(case, low / 2, len(nudged)), told))
        rows = list(_rows(working, told, exact, program, plain, parts, nudged))
    return rows


def _nudged(case: Case, unit: float, draw: int) -> Case:
    """The case with every weight and float input off by at most one rounding."""
    import torch

    generator = torch.Generator().manual_seed(case.seed * DRAWS + draw)

    def nudged(value: Tensor) -> Tensor:
        noise = 2 * torch.rand(value.shape, generator=generator, dtype=torch.float64) - 1
        return (value.double().cpu() * (1 + unit * noise)).to(value)

    module = copy.deepcopy(case.plan.model.base.model)
    with torch.no_grad():
        for p in module.parameters():
            if p.is_floating_point():
                p.copy_(nudged(p))
    batches = tuple(
        {
            k: nudged(v) if isinstance(v, torch.Tensor) and v.is_floating_point() else v
            for k, v in batch.items()
        }
        for batch in case.batches
    )
    return replace(case.with_model(module), batches=batches)
