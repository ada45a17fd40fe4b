"""Which rows of a plan stand at each module, and which inside of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from schedlang.alike import above
from schedlang.persistent import Persistent

Rows = tuple[int, ...]


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
        at, below = _noted(self.at, place, sites), _noted(self.below, place, tuple(above(sites)))
        return Trail(rows, self.alone or alone, at, below)

    def around(self, sites: tuple[str, ...]) -> set[int]:
        """The rows at these modules, at what holds them and at what they hold."""
        marks = {*self.at.many((*sites, *above(sites)), ()), *self.below.many(sites, ())}
        return {row for rows in marks for row in rows}


def _noted(known: Persistent[str, Rows], row: int, sites: tuple[str, ...]) -> Persistent[str, Rows]:
    before = known.many(sites, ())
    longer = {rows: (*rows, row) for rows in set(before)}
    return known.put(dict(zip(sites, map(longer.__getitem__, before))))
