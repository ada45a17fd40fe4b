"""The sums of gradients that a step does, at each place of the pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from schedlang.passes.preparing.holdings import slicing
from schedlang.passes.preparing.prepare import Prepared
from schedlang.passes.preparing.reductions import reductions, sliced_names, sliced_over
from schedlang.plan import Plan

if TYPE_CHECKING:
    from schedlang.passes.statics.roles import Role


@dataclass(frozen=True)
class Booked:
    """One sum: plain axes, names, the places of the pipeline that take part, what divides it."""

    axes: tuple[str, ...]
    names: frozenset[str]
    places: frozenset[int] = frozenset([0])
    divisor: float = 1.0


Book = Mapping[int, Sequence[Booked]]


def planned(plan: Plan, prepared: Prepared) -> dict[int, list[Booked]]:
    """The sums as the plan has them: buckets after the last backward, and those of sliced units."""
    mesh, staged = plan.mesh, prepared.staged
    count = mesh.size(staged.axis) if staged.axis is not None else 1
    book: dict[int, list[Booked]] = {place: [] for place in range(count)}
    for one in reductions(plan, prepared.traced, prepared.holdings):
        for place in one.stages if one.stages is not None else book:
            at = frozenset([place]) if one.stages is None else one.stages
            book[place].append(Booked(mesh.fold(one.axes), frozenset(one.names), at))
    row, _ = slicing(plan)
    for place in book if row is not None else ():
        for stage in staged.stages_at(place):
            units = sliced_names(plan, staged, prepared.holdings, stage)
            for names in units.values():
                axes = sliced_over(prepared.holdings, names)
                book[place].append(Booked(axes, frozenset(names), frozenset([place])))
    return book


def executed(
    plan: Plan, prepared: Prepared, played: Sequence[Role],
    slices: Mapping[int, Sequence[Booked]],
) -> dict[int, list[Booked]]:  # fmt: skip
    """The sums as played ranks were seen to do them; at places that were not played, as planned.

    Ranks are played with plain copies where state is sliced: there the sums of `slices` count.
    """
    plans = planned(plan, prepared)
    book = dict(plans)
    sliced = frozenset(n for n, holding in prepared.holdings.items() if holding.sliced)
    data = set(plan.data_axes)
    for role in sorted(played, key=lambda role: -role.rank):
        seen = []
        for one in role.sums:
            left = one.names - sliced if data & set(one.axes) else one.names
            if left:
                seen.append(Booked(one.axes, left, one.places, one.divisor))
        rest = slices.get(role.place)
        if rest is None:
            rest = [one for one in plans[role.place] if one.names <= sliced]
        book[role.place] = [*seen, *rest]
    return book
