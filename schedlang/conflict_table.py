"""The conflict table: how one verb may stand below another, from what both declare."""

from __future__ import annotations

from collections.abc import Mapping

from schedlang.primitive import Primitive, Relation, conflicts

SIGNS: Mapping[Relation, str] = {"commute": "=", "order": ">", "clash": "x", "both": "2"}
LEGEND = """\
The verb of the row stands above, that of the column below, where both touch one module:

  =  nothing in common: any order
  >  what stands below relies on what stands above: in this order only
  x  what stands below changes what the one above relied on: refused, turn them round
  2  both change one facet: the facet's own rule decides
"""


def table(known: Mapping[str, type[Primitive]]) -> dict[str, dict[str, Relation]]:
    """For each verb, and each verb below it, how they stand."""
    return {a: {b: conflicts(known[a], known[b]) for b in sorted(known)} for a in sorted(known)}


def text(known: Mapping[str, type[Primitive]]) -> str:
    """The table as it is printed; columns have the numbers of the rows."""
    found = table(known)
    width = max(map(len, found), default=0)
    head = " " * (width + 5) + " ".join(f"{at:>2}" for at, _ in enumerate(found, 1))
    rows = [
        f"{at:>2}  {name:<{width}} " + " ".join(f"{SIGNS[how]:>2}" for how in below.values())
        for at, (name, below) in enumerate(found.items(), 1)
    ]
    return "\n".join([LEGEND, head, *rows]) + "\n"
