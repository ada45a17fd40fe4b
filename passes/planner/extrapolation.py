"""Extrapolation of chains in rows: all costs of a unit are affine functions of a microbatch's rows.

`profile` simulates two small microbatches, and derives other numbers of rows from them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from schedlang.passes.planner.values import Chain, CollectiveCost, OperatorCost, Unit, UnitRun, Work

Line = Callable[[float, float], float]
CARRY_OPERATORS = (
    22,
    8,
)  # operators that pass keys to a slice, and their gradients back, as in a Llama


def extrapolate_slices(few: Chain, more: Chain, rows: int, slices: int) -> Chain | None:
    """Extrapolate to microbatches of `rows` that are split into slices along the sequence; a unit's
    cost is that of a mean slice.  None as in `extrapolate_rows`.

    A slice has as many tokens as so many fewer rows.  Its attention sees half of all earlier keys,
    and half of its own.  Keys and values are passed from each slice to the next, and stay saved.
    """
    found = extrapolate_rows(few, more, rows, slices)
    if found is None:
        return None

    def with_slices(work: Work, carried: int) -> Work:
        calls = [one for one in work.operators if one.kind == "attention"]
        seen, later = (slices + 1) / (2 * slices), carried * (slices - 1) / slices
        some = [one for one in work.operators if one.kind != "attention"]
        some += [replace(one, flops=one.flops * seen) for one in calls]
        some += [OperatorCost("other", 0.0, one.moved / 2, one.count * later) for one in calls]
        return replace(work, operators=tuple(some))

    def cut(one: Unit) -> Unit:
        calls = (op for op in one.forward.operators if op.kind == "attention")
        keys = sum(op.moved / 2 * op.count for op in calls)  # with values: about half of all
        ahead, back = (
            with_slices(one.forward, CARRY_OPERATORS[0]),
            with_slices(one.backward, CARRY_OPERATORS[1]),
        )
        return replace(one, forward=ahead, backward=back, kept=one.kept + keys)

    runs = tuple(UnitRun(cut(run.unit), run.count) for run in found.runs)
    return replace(found, placement=replace(found.placement, slices=slices), runs=runs)


def extrapolate_rows(few: Chain, more: Chain, rows: int, parts: int = 1) -> Chain | None:
    """Extrapolate to `rows` rows, or to one of `parts` parts of them, from two chains of the same
    placement but for their rows.

    None where the two differ: other operators ran, or other units were equal.
    """
    low, high = few.placement.rows, more.placement.rows
    share = (rows / parts - low) / (high - low)

    def line(first: float, second: float) -> float:
        return max(0.0, first + (second - first) * share)

    runs = []
    for one, other in zip(few.runs, more.runs):
        unit = _unit(one.unit, other.unit, line) if one.count == other.count else None
        if unit is None:
            return None
        runs.append(UnitRun(unit, one.count))
    if len(few.runs) != len(more.runs) or few.tied != more.tied:
        return None
    return replace(few, placement=replace(few.placement, rows=rows), runs=tuple(runs))


def _unit(one: Unit, other: Unit, line: Line) -> Unit | None:
    forward, backward = (
        _work(getattr(one, n), getattr(other, n), line) for n in ("forward", "backward")
    )
    if forward is None or backward is None:
        return None
    kept, given, most, handed, entering, waiting = map(line, _sizes(one), _sizes(other))
    return replace(
        one,
        forward=forward,
        backward=backward,
        kept=kept,
        input=given,
        peak=most,
        output=handed,
        entering=entering,
        waiting=waiting,
    )


def _sizes(one: Unit) -> tuple[float, ...]:
    """All bytes of a unit."""
    return one.kept, one.input, one.peak, one.output, one.entering, one.waiting


def _work(one: Work, other: Work, line: Line) -> Work | None:
    """The work of a unit; operators are paired by size within their kind."""
    pairs = list(zip(_each(one), _each(other)))
    sent = list(zip(one.collectives, other.collectives))
    same = (
        len(_each(one)) == len(_each(other))
        and all(a.kind == b.kind for a, b in pairs)
        and len(one.collectives) == len(other.collectives)
        and all((a.op, a.axis, a.count) == (b.op, b.axis, b.count) for a, b in sent)
    )
    if not same:
        return None
    often = Counter((a.kind, line(a.flops, b.flops), line(a.moved, b.moved)) for a, b in pairs)
    return Work(
        tuple(OperatorCost(*key, float(count)) for key, count in often.items()),
        tuple(CollectiveCost(a.op, a.axis, line(a.bytes, b.bytes), a.count) for a, b in sent),
    )


def _each(work: Work) -> list[OperatorCost]:
    """Repeat every operator as often as it runs."""
    found = [replace(one, count=1) for one in work.operators for _ in range(round(one.count))]
    return sorted(found, key=lambda one: (one.kind, one.flops, one.moved))
