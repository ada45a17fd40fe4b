"""A chain for any number of rows, of two that were played: what units cost grows by the row."""

from __future__ import annotations

from dataclasses import replace

from schedlang.passes.planner.values import Chain, Operator, Run, Sent, Unit, Work


def extended(one: Chain, two: Chain, rows: int) -> Chain | None:
    """The chain of `rows` rows, on the line through two chains that differ in rows alone.

    None where they are not alike, as where a model computes otherwise with more rows.
    """
    first, second = one.placement.rows, two.placement.rows
    share = (rows - first) / (second - first)
    if [run.count for run in one.runs] != [run.count for run in two.runs] or one.tied != two.tied:
        return None
    units = [_unit(a.unit, b.unit, share) for a, b in zip(one.runs, two.runs)]
    if None in units:
        return None
    runs = tuple(Run(unit, run.count) for unit, run in zip(units, one.runs) if unit is not None)
    return replace(one, placement=replace(one.placement, rows=rows), runs=runs)


def _between(one: float, two: float, share: float) -> float:
    return one + share * (two - one)


def _unit(one: Unit, two: Unit, share: float) -> Unit | None:
    forward, backward = (
        _work(a, b, share)
        for a, b in ((one.forward, two.forward), (one.backward, two.backward))
    )
    same = (one.name, one.numbers, one.spread) == (two.name, two.numbers, two.spread)
    if forward is None or backward is None or not same:
        return None
    return replace(
        one,
        forward=forward,
        backward=backward,
        kept=_between(one.kept, two.kept, share),
        input=_between(one.input, two.input, share),
        most=max(_between(one.most, two.most, share), min(one.most, two.most)),
        handed=_between(one.handed, two.handed, share),
    )


def _work(one: Work, two: Work, share: float) -> Work | None:
    """Operators of many operations one by one, of the others how often they run and their bytes:
    which of these are alike differs with the rows."""
    alike = [_operator(a, b, share) for a, b in zip(_counted(one), _counted(two))]
    others = _operator(_others(one), _others(two), share)
    sent = [_sent(a, b, share) for a, b in zip(one.sent, two.sent)]
    same = len(_counted(one)) == len(_counted(two)) and len(one.sent) == len(two.sent)
    if not same or others is None or None in alike or None in sent:
        return None
    operators = (*filter(None, alike), *([others] if others.count else []))
    return Work(operators, tuple(filter(None, sent)))


def _counted(work: Work) -> list[Operator]:
    return [one for one in work.operators if one.kind != "other"]


def _others(work: Work) -> Operator:
    """The mean of those that only move bytes."""
    some = [one for one in work.operators if one.kind == "other"]
    count = sum(one.count for one in some)
    flops, moved = (
        sum(getattr(one, name) * one.count for one in some) / (count or 1)
        for name in ("flops", "moved")
    )
    return Operator("other", flops, moved, count)


def _operator(one: Operator, two: Operator, share: float) -> Operator | None:
    if (one.kind, one.count) != (two.kind, two.count):
        return None
    flops = _between(one.flops, two.flops, share)
    return replace(one, flops=flops, moved=_between(one.moved, two.moved, share))


def _sent(one: Sent, two: Sent, share: float) -> Sent | None:
    if (one.op, one.axis, one.count) != (two.op, two.axis, two.count):
        return None
    return replace(one, bytes=_between(one.bytes, two.bytes, share))
