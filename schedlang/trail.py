"""Which rows of a plan stand at each module, and which inside of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from schedlang.alike import above
from schedlang.persistent import Persistent

Rows = tuple[int, ...]

MANY = 16  # modules, from which on keeping an answer is worth its place


def _none() -> Persistent[str, Rows]:
    return Persistent({})


@dataclass(frozen=True)
class Trail:
    """Places of rows in `of`: those `at` a module itself, and `below` it at what it holds.

    `alone`: some row took its modules each by itself, and may have made equal ones unlike.
    """

    of: tuple[Any, ...] = ()
    alone: bool = False
    at: Persistent[str, Rows] = field(default_factory=_none)
    below: Persistent[str, Rows] = field(default_factory=_none)
    answers: dict[tuple[str, tuple[str, ...]], list[Rows]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @staticmethod
    def along(rows: tuple[Any, ...]) -> Trail:
        """The trail of some rows."""
        trail = Trail(rows)
        for count in range(len(rows)):
            trail = trail.after(rows[: count + 1], True)
        return replace(trail, of=rows)

    def after(self, rows: tuple[Any, ...], alone: bool) -> Trail:
        """The trail of rows that are one more than these."""
        place, sites = len(rows) - 1, rows[-1].sites
        holding = tuple(above(sites))
        at = _noted(self.at, place, sites, self.standing(sites))
        below = _noted(self.below, place, holding, self.within(holding))
        self.answers.clear()  # who asks next asks the next one
        return Trail(rows, self.alone or alone, at, below)

    def standing(self, sites: tuple[str, ...]) -> list[Rows]:
        """The rows at each of some modules."""
        return self._answer("at", sites)

    def within(self, sites: tuple[str, ...]) -> list[Rows]:
        """The rows inside of each of some modules."""
        return self._answer("below", sites)

    def _answer(self, which: str, sites: tuple[str, ...]) -> list[Rows]:
        """An answer for many modules is kept: it is asked for several times of one row."""
        known: Persistent[str, Rows] = getattr(self, which)
        if len(sites) < MANY:
            return known.many(sites, ())
        found = self.answers.get((which, sites))
        if found is None:
            found = self.answers[which, sites] = known.many(sites, ())
        return found

    def around(self, sites: tuple[str, ...]) -> set[int]:
        """The rows at these modules, at what holds them and at what they hold."""
        holding = self.standing(tuple(above(sites)))
        marks = {*self.standing(sites), *holding, *self.within(sites)}
        return {row for rows in marks for row in rows}


def _noted(
    known: Persistent[str, Rows], row: int, sites: tuple[str, ...], before: list[Rows]
) -> Persistent[str, Rows]:
    longer = {rows: (*rows, row) for rows in set(before)}
    return known.put(dict(zip(sites, map(longer.__getitem__, before))))
