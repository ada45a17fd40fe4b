"""Chains of many rows from those of few: all that units cost grows by as much with each row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from schedlang.passes.planner.values import Chain, Operator, Run, Sent, Unit, Work

Line = Callable[[float, float], float]
SIZES = ("kept", "input", "most", "handed", "entering")


def of_rows(few: Chain, more: Chain, rows: int) -> Chain | None:
    """The chain of so many rows, from two of the same placement but for theirs.

    None where the two are not alike: other operators ran, or others of them were equal.
    """
    low, high = few.placement.rows, more.placement.rows
    share = (rows - low) / (high - low)

    def line(first: float, second: float) -> float:
        return first + (second - first) * share

    runs = []
    for one, other in zip(few.runs, more.runs):
        unit = _unit(one.unit, other.unit, line) if one.count == other.count else None
        if unit is None:
            return None
        runs.append(Run(unit, one.count))
    if len(few.runs) != len(more.runs) or few.tied != more.tied:
        return None
    return replace(few, placement=replace(few.placement, rows=rows), runs=tuple(runs))


def _unit(one: Unit, other: Unit, line: Line) -> Unit | None:
    forward, backward = (
        _work(getattr(one, n), getattr(other, n), line) for n in ("forward", "backward")
    )
    if forward is None or backward is None:
        return None
    sizes = {name: max(0.0, line(getattr(one, name), getattr(other, name))) for name in SIZES}
    return replace(one, forward=forward, backward=backward, **sizes)


def _work(one: Work, other: Work, line: Line) -> Work | None:
    pairs = list(zip(one.operators, other.operators))
    sent = list(zip(one.sent, other.sent))
    alike = (
        len(one.operators) == len(other.operators)
        and len(one.sent) == len(other.sent)
        and all(a.kind == b.kind and a.count == b.count for a, b in pairs)
        and all((a.op, a.axis, a.count) == (b.op, b.axis, b.count) for a, b in sent)
    )
    if not alike:
        return None
    return Work(
        tuple(
            Operator(a.kind, line(a.flops, b.flops), line(a.moved, b.moved), a.count)
            for a, b in pairs
        ),
        tuple(Sent(a.op, a.axis, line(a.bytes, b.bytes), a.count) for a, b in sent),
    )
