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
    chain = extrapolate_rows(few, more, rows, slices)
    if chain is None:
        return None

    def with_slices(work: Work, carried: int) -> Work:
        attention = [op for op in work.operators if op.kind == "attention"]
        key_share, carry_count = (slices + 1) / (2 * slices), carried * (slices - 1) / slices
        operators = [op for op in work.operators if op.kind != "attention"]
        operators += [replace(op, flops=op.flops * key_share) for op in attention]
        operators += [
            OperatorCost("other", 0.0, op.moved / 2, op.count * carry_count) for op in attention
        ]
        return replace(work, operators=tuple(operators))

    def cut(unit: Unit) -> Unit:
        calls = (op for op in unit.forward.operators if op.kind == "attention")
        keys = sum(op.moved / 2 * op.count for op in calls)  # with values: about half of all
        forward, backward = (
            with_slices(unit.forward, CARRY_OPERATORS[0]),
            with_slices(unit.backward, CARRY_OPERATORS[1]),
        )
        return replace(unit, forward=forward, backward=backward, kept=unit.kept + keys)

    runs = tuple(UnitRun(cut(run.unit), run.count) for run in chain.runs)
    return replace(chain, placement=replace(chain.placement, slices=slices), runs=runs)


def extrapolate_rows(few: Chain, more: Chain, rows: int, parts: int = 1) -> Chain | None:
    """Extrapolate to `rows` rows, or to one of `parts` parts of them, from two chains of the same
    placement but for their rows.

    None where the two differ: other operators ran, or other units were equal.
    """
    few_rows, more_rows = few.placement.rows, more.placement.rows
    share = (rows / parts - few_rows) / (more_rows - few_rows)

    def line(first: float, second: float) -> float:
        return max(0.0, first + (second - first) * share)

    runs = []
    for few_run, more_run in zip(few.runs, more.runs):
        unit = _unit(few_run.unit, more_run.unit, line) if few_run.count == more_run.count else None
        if unit is None:
            return None
        runs.append(UnitRun(unit, few_run.count))
    if len(few.runs) != len(more.runs) or few.tied != more.tied:
        return None
    return replace(few, placement=replace(few.placement, rows=rows), runs=tuple(runs))


def _unit(few: Unit, more: Unit, line: Line) -> Unit | None:
    forward, backward = (
        _work(getattr(few, name), getattr(more, name), line) for name in ("forward", "backward")
    )
    if forward is None or backward is None:
        return None
    kept, input_bytes, peak, output, entering, waiting = map(line, _sizes(few), _sizes(more))
    return replace(
        few,
        forward=forward,
        backward=backward,
        kept=kept,
        input=input_bytes,
        peak=peak,
        output=output,
        entering=entering,
        waiting=waiting,
    )


def _sizes(unit: Unit) -> tuple[float, ...]:
    """All bytes of a unit."""
    return unit.kept, unit.input, unit.peak, unit.output, unit.entering, unit.waiting


def _work(few: Work, more: Work, line: Line) -> Work | None:
    """The work of a unit; operators are paired by size within their kind."""
    pairs = list(zip(_each(few), _each(more)))
    sent = list(zip(few.collectives, more.collectives))
    alike = (
        len(_each(few)) == len(_each(more))
        and all(a.kind == b.kind for a, b in pairs)
        and len(few.collectives) == len(more.collectives)
        and all((a.op, a.axis, a.count) == (b.op, b.axis, b.count) for a, b in sent)
    )
    if not alike:
        return None
    op_counts = Counter((a.kind, line(a.flops, b.flops), line(a.moved, b.moved)) for a, b in pairs)
    return Work(
        tuple(OperatorCost(*key, float(count)) for key, count in op_counts.items()),
        tuple(CollectiveCost(a.op, a.axis, line(a.bytes, b.bytes), a.count) for a, b in sent),
    )


def _each(work: Work) -> list[OperatorCost]:
    """Repeat every operator as often as it runs."""
    operators = [replace(op, count=1) for op in work.operators for _ in range(round(op.count))]
    return sorted(operators, key=lambda op: (op.kind, op.flops, op.moved))
