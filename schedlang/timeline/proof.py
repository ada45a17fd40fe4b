"""Proof of a timeline before it runs: complete, in a possible order, its messages matched."""

from __future__ import annotations

import numpy as np

from schedlang.timeline.needs import GROUPS, Places
from schedlang.timeline.table import Kind, Timeline, TimelineError
from schedlang.timeline.timing import timing
from schedlang.timeline.transfers import check_transfers


def check(timeline: Timeline, *, complete: bool = True) -> None:
    """Raise TimelineError unless every operation is there once, in a possible order, and it ends.

    Each (stage, microbatch) has one F and one B or one I and one W, on one rank, F first and I
    before W; a timeline without backwards is an evaluation. Transfers, if any, are matched in the
    order in which they were sent. `complete=False` allows (stage, microbatch) pairs to be missing.
    """
    t = timeline.compute()
    table = Places(t)
    forward, backward, weight = (table.rows_of(*kinds) for kinds in GROUPS)
    lacks = (forward < 0) & (table.used() if t.replicas > 1 else True)
    if complete and lacks.any():
        raise TimelineError(f"{table.name(np.argmax(lacks))} has no forward")
    trained = bool((backward >= 0).any())
    if trained and ((backward >= 0) != (forward >= 0)).any():
        which = table.name(np.argmax((backward >= 0) != (forward >= 0)))
        raise TimelineError(f"{which} has a forward without a backward, or the reverse")
    split = np.where(backward >= 0, t.kind[backward] == Kind.I, False) if trained else weight >= 0
    if (split != (weight >= 0)).any():
        which = table.name(np.argmax(split != (weight >= 0)))
        raise TimelineError(f"{which} has an input gradient without a weight gradient, or reverse")
    for first, then, what in ((forward, backward, "F before B"), (backward, weight, "I before W")):
        both = (first >= 0) & (then >= 0)
        wrong = both & ((first > then) | (t.rank[first] != t.rank[then]))
        if wrong.any():
            raise TimelineError(f"{table.name(np.argmax(wrong))}: {what}, on the same rank")
    timing(t)
    if len(t) != len(timeline):
        check_transfers(timeline)
