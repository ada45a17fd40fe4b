"""How often sliced parameters are gathered: rows of the timeline may hold a stage for a run."""

from __future__ import annotations

from collections.abc import Iterator

from schedlang.passes.cutting.staging import Staged
from schedlang.passes.preparing.holdings import slicing
from schedlang.plan import Plan

Places = frozenset[int] | None


def gathers_by_rows(plan: Plan, staged: Staged) -> bool:
    """Whether rows of the timeline gather parameters: in a pipeline that slices them (stage 3)."""
    sliced, _ = slicing(plan)
    return staged.axis is not None and sliced is not None and sliced.stage == 3


def gathers_of(plan: Plan, staged: Staged, stage: int, place: int) -> tuple[int, int] | None:
    """How many runs of forwards and of backwards hold a stage gathered at a place; None: none."""
    from schedlang.timeline import runs

    if not gathers_by_rows(plan, staged):
        return None
    t = staged.timeline
    found = runs(t)
    mine = (t.stage[found.first] == stage) & (t.rank[found.first] == place)
    back = int(found.backward[mine].sum())
    return (int(mine.sum()) - back, back) if mine.any() else None


def gathers(
    plan: Plan, staged: Staged, stage: int, places: Places, microbatches: int
) -> Iterator[tuple[Places, int, int]]:
    """Where a stage is, and how often stage 3 gathers it there: in forwards and in backwards."""
    often = (microbatches * staged.timeline.slices,) * 2
    if places is None:
        yield None, *often
        return
    alike: dict[tuple[int, int], set[int]] = {}
    for place in places:
        alike.setdefault(gathers_of(plan, staged, stage, place) or often, set()).add(place)
    for times, here in alike.items():
        yield frozenset(here), *times
