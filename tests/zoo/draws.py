"""Bugs of what masks are drawn from, in the one function that original and program share."""

from __future__ import annotations

from schedlang.runtime import scope
from schedlang.runtime.drawing import random as drawing
from tests.zoo.bug import Operator, Patch, Site, bug


def _without(patch: Patch, left_out: int) -> None:
    """A stream does not hang on one of (seed, step, site, call, sample)."""
    plain = drawing._key
    patch.setattr(drawing, "_key", lambda *of: plain(*of[:left_out], 0, *of[left_out + 1 :]))


@bug("D50", "", Operator.FREEZE, "dp", row="none", planning=True)
def masks_of_the_first_step(patch: Patch, site: Site) -> None:
    """Every step drops what the first did."""
    _without(patch, 1)


@bug("D51", "", Operator.FREEZE, "dp", row="none", planning=True)
def masks_of_another_module(patch: Patch, site: Site) -> None:
    """All modules drop by the same numbers."""
    _without(patch, 2)


@bug("D52", "", Operator.FREEZE, "dropping twice", row="none", planning=True)
def masks_of_the_first_call(patch: Patch, site: Site) -> None:
    """A module that is called twice drops the same in both calls."""
    _without(patch, 3)


@bug("D53", "", Operator.FREEZE, "dp", row="none", planning=True)
def masks_of_the_first_row(patch: Patch, site: Site) -> None:
    """All rows of a batch drop the same."""
    _without(patch, 4)


@bug("D54", "", Operator.SKIP, "dropping twice", row="none", planning=True)
def calls_not_counted(patch: Patch, site: Site) -> None:
    """Calls of a module are not counted, so that the second draws as the first did."""
    patch.setattr(scope, "next_call", lambda where: 0)


@bug("D55", "", Operator.SLICE, "dp", row="none", planning=True)
def masks_that_are_shifted(patch: Patch, site: Site) -> None:
    """The stream of a row is that of the row before it, from the next number on."""
    plain = drawing._key

    def key(seed: int, step: int, place: str, call: int, sample: int) -> int:
        first = plain(seed, step, place, call, 0) + sample * drawing._GAMMA
        return drawing._signed(first % (1 << 64))

    patch.setattr(drawing, "_key", key)
