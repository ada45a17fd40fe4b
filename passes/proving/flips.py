"""Flips: choices that rounding tips, behind which errors in the working dtype say nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from schedlang.passes.proving.observe import Condition, Observation, observe
from schedlang.passes.proving.rounding import IN_DTYPE, OVERFLOWS
from schedlang.passes.proving.sides import Case, modes_of, sequential
from schedlang.report import Row

if TYPE_CHECKING:
    from torch import Tensor


def undecided(
    rows: Sequence[Row], case: Case, working: Case | None, told: Sequence[Condition],
    program: Observation,
) -> tuple[list[Row], list[str]]:  # fmt: skip
    """The rows without those that a tipped choice leaves undecided; and what those are.

    A top-k of nearly equal scores chooses otherwise in a coarser dtype, and everything behind it is
    another function.  No bound is widened for that: such rows are not checked, which is said.
    Neither are those of which the original itself, in its working dtype, makes no finite number.
    """
    rows, said = _overflown(rows)
    bad = [row for row in rows if not row.ok and row.kind.endswith(IN_DTYPE)]
    if not bad or working is None:
        return rows, said
    first = [told[0]]
    right = chosen(case, first, wide=True)
    plain = chosen(working, [replace(told[0], batches=working.batches)], wide=False)
    words = [*tipped(right, plain), *tipped(right, program.choices)]
    if not words:
        return rows, said
    said += [f"{len(bad)} rows in the working dtype, the first {bad[0].place}: {words[0]}"]
    return [row for row in rows if row not in bad], said


def _overflown(rows: Sequence[Row]) -> tuple[list[Row], list[str]]:
    over = [row for row in rows if row.note == OVERFLOWS and row.kind.endswith(IN_DTYPE)]
    if not over:
        return list(rows), []
    said = f"{len(over)} rows in the working dtype, the first {over[0].place}: {OVERFLOWS} there"
    return [row for row in rows if row not in over], [said]


def tipped(right: Mapping[Any, Tensor], other: Mapping[Any, Tensor]) -> list[str]:
    """By site and operator, how many of the choices that can be compared are others."""
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
    """What the original chooses, in float64 or in its working dtype."""
    from schedlang.runtime.modes import ambient
    from schedlang.runtime.routing.choices import Choices

    (float64, dropout), _ = modes_of(case.seed)
    noted = Choices()
    modes = (float64, dropout, noted) if wide else (dropout, noted)
    with ambient(*modes):
        observe(lambda condition: sequential(case, condition), told, keep=False)
    return noted.found
