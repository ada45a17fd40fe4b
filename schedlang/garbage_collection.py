"""garbage_collection: work whose results stay, done without the garbage collector, or with less of
it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


class ProcessState:
    """State of the process.

    `own` is true if it runs only a schedlang command, so that no other code's garbage is in it.
    `keeps_frozen` is true if its owner freezes what is imported, and wants it left so.
    `left_frozen` counts the blocks that have frozen what was there before them, for an owner that
    unfreezes and collects all of it now and then; None: blocks leave nothing frozen.
    """

    own = False
    keeps_frozen = False
    left_frozen: int | None = None


@contextmanager
def without_collector(*, imports: bool = False) -> Iterator[None]:
    """Disable the garbage collector in the whole process for a block.

    It would visit all new objects again and again: a third of the time of a plan of a million
    actions. Objects that a block `imports` are frozen: a command never visits them again.
    """
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if imports and ProcessState.own:
            gc.freeze()
        if running:
            gc.enable()


def collect_less_often() -> None:
    """Collect cyclic garbage less often, in a process of a command or a rank.

    A proof makes almost no cyclic garbage, and spent a twentieth of its time on collections.
    """
    gc.set_threshold(10_000, 10, 10)
