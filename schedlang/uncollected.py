"""uncollected: work whose results stay, done without the garbage collector, or with less of it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


class Process:
    """Whether this process is a command's own: nobody else's garbage lies in it."""

    own = False


@contextmanager
def uncollected(*, imports: bool = False) -> Iterator[None]:
    """Stop the garbage collector in the whole process, for the time of a block.

    It would walk all that has been made again and again, a third of the time that a plan of a
    million actions takes.  What a block `imports` stays: a command never looks at it again.
    """
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if imports and Process.own:
            gc.freeze()
        if running:
            gc.enable()


def seldom() -> None:
    """Look for circles of garbage less often, in a process that is a command's or a rank's own.

    Of what a proof makes hardly anything is in circles: a twentieth of its time went there.
    """
    gc.set_threshold(10_000, 10, 10)
