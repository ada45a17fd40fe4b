"""Culprits: the fewest rows, at the fewest modules, on which a failure shows again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from schedlang.passes.blaming.again import Again
from schedlang.passes.blaming.blame import Blame, blame
from schedlang.plan import Action

MOST_RUNS = 24  # to find fewer modules


def culprits(rows: Sequence[Action], again: Again, hints: Sequence[str]) -> Blame[Action]:
    """The rows to blame; first those at the modules that are suspected, each by itself.

    That all rows fail together is known.
    """
    asked = 0
    for near in _near(rows, hints):
        asked += 1
        if again(near):
            found = blame(near, again)
            return replace(found, runs=found.runs + asked)
    found = blame(rows, again)
    return replace(found, runs=found.runs + asked)


def _near(rows: Sequence[Action], hints: Sequence[str]) -> Iterator[tuple[Action, ...]]:
    """Rows that change what a module computes: each alone, all of them, with those around it."""
    told: set[tuple[int, ...]] = set()
    for hint in hints:
        for around in _outwards(hint):
            at = [row for row in rows if _shapes(row) and _acts(row, around)]
            for near in (*((row,) for row in at if around == hint), tuple(at)):
                numbers = tuple(row.row for row in near)
                if near and len(near) < len(rows) and numbers not in told:
                    told.add(numbers)
                    yield near


def _outwards(fqn: str) -> Iterator[str]:
    """A module, and the two around it."""
    for _ in range(3):
        if fqn:
            yield fqn
        fqn = fqn.rpartition(".")[0]


def _shapes(row: Action) -> bool:
    return bool(row.primitive.writes & {"placement", "structure", "shape"})


def _acts(row: Action, fqn: str) -> bool:
    return any(_touches(site, fqn) for site in row.sites)


def _touches(site: str, fqn: str) -> bool:
    inside = site == fqn or site.startswith(f"{fqn}.")
    return bool(site) and bool(fqn) and (inside or fqn.startswith(f"{site}."))


def fewest_sites(rows: Sequence[Action], again: Again, hints: Sequence[str]) -> tuple[Action, ...]:
    """The rows at the fewest modules that still fail; nothing if each acts at one already.

    First only at the modules that are suspected.
    """
    single = [replace(row, sites=group) for row in rows for group in row.each]
    if len(single) == len(rows):
        return ()
    fails = _at_most(MOST_RUNS, again)
    wanted = {row.row for row in rows}
    for hint in hints:
        for around in _outwards(hint):
            near = [one for one in single if _acts(one, around)]
            if len(near) < len(single) and {one.row for one in near} == wanted and fails(near):
                return tuple(_joined(near))
    places = {name: k for k, name in enumerate(again.failure.case.plan.model.sites)}
    single.sort(key=lambda one: (places[one.sites[0]], one.row))
    return tuple(_joined(blame(single, fails).rows))


def _at_most(runs: int, again: Again) -> Callable[[Sequence[Action]], bool]:
    """The predicate on parts of rows; what would cost more runs is taken to hold."""
    left = [runs]

    def fails(some: Sequence[Action]) -> bool:
        left[0] -= 1
        return left[0] >= 0 and again(_joined(some))

    return fails


def _joined(some: Sequence[Action]) -> list[Action]:
    """Actions of one row as one, in the order of rows."""
    joined: dict[int, Action] = {}
    for one in some:
        known = joined.get(one.row)
        joined[one.row] = one if known is None else replace(known, sites=known.sites + one.sites)
    return [joined[row] for row in sorted(joined)]
