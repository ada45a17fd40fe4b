"""Runs the cases of one part in this process, and tells of each as it goes.

    python -m schedlang.testing.gpu.child PART DEVICE SIZE FILE WORDS FIRST

Lines of JSON are added to FILE: the names of all cases, then for each that it begins and what came
of it.  It begins with case FIRST: whoever reads starts it again behind a case that ended it.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from typing import Any

from schedlang.testing.gpu.case import PARTS, Case, Found, Setup, Skipped, Wrong

LOST = 17  # the exit code where the device can no longer be used


def cases_of(name: str, setup: Setup, words: str = "") -> list[Case]:
    """The cases of a part, or those whose names begin with some words."""
    part = next(part for part in PARTS if part.name == name)
    home, _, function = part.home.partition(".")
    module = import_module(f"schedlang.testing.gpu.{home}")
    every: list[Case] = getattr(module, function or "cases")(setup)
    return [case for case in every if case.name.startswith(words)]


def found_of(part: str, case: Case, check: Callable[[], object] = bool) -> Found:
    """Run a case, and `check` behind it; nothing is raised."""
    start, numbers, note = time.perf_counter(), {}, ""
    try:
        told = case.run()
        check()
        outcome, note, numbers = "ok", told.note, dict(told.numbers)
    except Wrong as error:
        outcome, note = "wrong", str(error)
    except Skipped as error:
        outcome, note = "skipped", str(error)
    except Exception as error:  # a kernel of anybody's, on a device that nobody has tried
        outcome, note = "failed", in_a_line(error)
        traceback.print_exc()
    return Found(part, case.name, outcome, note, numbers, round(time.perf_counter() - start, 3))


def in_a_line(error: BaseException) -> str:
    """The error's kind and its first line that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}".rstrip(": ")


def _lost(note: str) -> bool:
    """Tell whether a failure leaves the device unusable for this process."""
    return "CUDA error" in note or "AcceleratorError" in note or "unspecified launch" in note


def _device(setup: Setup) -> Callable[[], object]:
    """Set up the device for this process; return the check for races after each case."""
    if setup.device != "sim":
        return bool
    from schedlang.testing.accelerator import simulated

    simulation = _alive.enter_context(simulated())

    def check() -> None:
        simulation.check()
        simulation.reset()

    return check


_alive = ExitStack()


def main(words: list[str]) -> None:
    """Run them."""
    name, device, size, file, some, first = words
    setup = Setup(device, size)
    with open(file, "a") as out:

        def tell(**line: Any) -> None:
            out.write(json.dumps(line) + "\n")
            out.flush()

        check = _device(setup)
        cases = cases_of(name, setup, some)
        tell(names=[case.name for case in cases])
        for place, case in enumerate(cases):
            if place < int(first):
                continue
            tell(begins=place)
            found = found_of(name, case, check)
            tell(found=found.plain())
            if found.outcome == "failed" and _lost(found.note):
                out.flush()
                os._exit(LOST)
        tell(ends=True)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)  # whatever else is alive (ranks, compilers) goes with their pipes


if __name__ == "__main__":
    main(sys.argv[1:])
