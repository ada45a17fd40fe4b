"""Run the parts one after the other, each in processes of its own with a limit of time.

    python -m schedlang.testing.gpu.driver PART DEVICE SIZE FILE WORDS FIRST

is such a process.  It adds lines of JSON to FILE: the names of all cases, then for each that it
begins and what came of it.  It begins with case FIRST: whoever reads starts it again behind a case
that ended it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from schedlang.kernels.device import environment
from schedlang.testing.gpu.case import PARTS, Case, Found, Part, Setup, Skipped, Wrong

Say = Callable[[str], None]
_TIME_IS_UP = "the time of its part was up before it was done"
_LOOK = 0.05  # seconds between two looks at what a child has told


def chosen(only: Sequence[str]) -> list[tuple[Part, str]]:
    """The parts that are asked for, all without a word, and how the names of cases begin.

    `only` holds names of parts, `kernels`, or of cases in one, `kernels:rms_norm`. Raises
    ValueError for a part that there is not.
    """
    wanted = {word.partition(":")[0]: word.partition(":")[2] for word in only}
    known = [part.name for part in PARTS]
    if odd := [name for name in wanted if name not in known]:
        raise ValueError(f"there is no part `{odd[0]}`: {', '.join(known)}")
    return [(part, wanted.get(part.name, "")) for part in PARTS if not only or part.name in wanted]


def examine(
    setup: Setup, parts: Sequence[tuple[Part, str]], say: Say, spare: float = 1.0
) -> list[Found]:
    """Run all cases. `spare` stretches all limits, for slow machines."""
    end, found = time.monotonic(), []
    for part, words in parts:
        end += spare * (part.limit if setup.size == "full" else part.quick)
        say(f"-- {part.title}")
        found += _Run(part, setup, words, say, spare * part.each).until(end)
    return found


class _Run:
    """One part, until it is done or its time is up."""

    def __init__(self, part: Part, setup: Setup, words: str, say: Say, each: float) -> None:
        self.part, self.setup, self.words, self.say, self.each = part, setup, words, say, each
        self.found: list[Found] = []
        self.names: list[str] | None = None

    def until(self, end: float) -> list[Found]:
        """Start processes until all cases are done."""
        with tempfile.TemporaryDirectory() as folder:
            turn = 0
            while self.names is None or len(self.found) < len(self.names):
                log = Path(folder, f"log{turn}")
                if time.monotonic() >= end or not self._started(Path(folder, f"{turn}"), log, end):
                    break
                turn += 1
        for name in (self.names or [])[len(self.found) :]:
            self._note(Found(self.part.name, name, "late", "no time was left for it"))
        if self.names is None and not self.found:
            self._note(Found(self.part.name, "begin", "late", "no time was left for it"))
        if self.names == [] and self.words:
            self._note(Found(self.part.name, self.words, "failed", "no case's name begins so"))
        return self.found

    def _note(self, found: Found) -> None:
        self.found.append(found)
        note = f": {found.note}" if found.note else ""
        self.say(f"{found.outcome:8} {self.part.name}: {found.name}{note}")

    def _started(self, told: Path, log: Path, end: float) -> bool:
        """Run a process; whether another may go on behind the case that ended it."""
        told.touch()
        before = len(self.found)
        with log.open("wb") as err:
            child = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "schedlang.testing.gpu.driver",
                    self.part.name,
                    self.setup.device,
                    self.setup.size,
                    str(told),
                    self.words,
                    str(len(self.found)),
                ],
                env=_environment(self.part, self.setup, told.with_suffix(".cache")),
                stdin=subprocess.DEVNULL,
                stdout=err,
                stderr=err,
                start_new_session=True,
            )
        try:
            why, begun = self._heard(child, told, end)
        finally:
            _ended(child)
        if why is None:
            return True
        if why == _TIME_IS_UP:
            if self.names is not None and begun is not None:
                self._note(Found(self.part.name, self.names[begun], "late", why))
            return False
        if self.names is None:
            self._note(Found(self.part.name, "begin", "failed", f"{why}{_last(log)}"))
            return False
        begun = len(self.found) if begun is None and len(self.found) == before else begun
        if begun is not None and begun < len(self.names):
            more = "" if "seconds" in why else _last(log)
            self._note(Found(self.part.name, self.names[begun], "failed", why + more))
        return True

    def _heard(
        self, child: subprocess.Popen[bytes], told: Path, end: float
    ) -> tuple[str | None, int | None]:
        """Read until it ends: why it did before it was done, and at which case."""
        begun, since, rest = None, time.monotonic(), ""
        with told.open() as file:
            while True:
                running = child.poll() is None
                *lines, rest = (rest + file.read()).split("\n")
                for line in lines:
                    heard: dict[str, Any] = json.loads(line)
                    since = time.monotonic()
                    if "names" in heard:
                        self.names = heard["names"]
                    elif "begins" in heard:
                        begun = heard["begins"]
                    elif "found" in heard:
                        self._note(Found(**heard["found"]))
                        begun = None
                    else:
                        return None, None
                if not running:
                    return _said(child.returncode), begun
                now = time.monotonic()
                if now - since > self.each:
                    return f"not done in {self.each:.0f} seconds", begun
                if now > end:
                    return _TIME_IS_UP, begun
                time.sleep(_LOOK)


def _environment(part: Part, setup: Setup, cache: Path) -> dict[str, str]:
    """Return a child's environment: its device, Triton's interpreter for kernels on a CPU.

    What it compiles it keeps apart, unless somebody says where: a child that is ended while it
    writes would leave half a file, which all later programs of this user would load.
    """
    kernels = part.name in ("kernels", "programs", "contests", "layers")
    found = environment(setup.device == "cpu" and kernels)
    for name, inside in (("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TRITON_CACHE_DIR", "triton")):
        found.setdefault(name, str(cache / inside))
    if setup.timed:  # all of it on one device
        found["CUDA_VISIBLE_DEVICES"] = found.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        found["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # ranks are forked from a process that asks
    return found


def _said(code: int) -> str:
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process ended with {code}"


def _ended(child: subprocess.Popen[bytes]) -> None:
    """End what is left of a child, and those that it has started in its session."""
    if child.poll() is None:
        with suppress(ProcessLookupError):  # all of it ended meanwhile
            os.killpg(child.pid, signal.SIGKILL)
        child.kill()
    child.wait()


def _last(log: Path) -> str:
    """The last line that a child has printed."""
    lines = [one.strip() for one in log.read_text(errors="replace").splitlines() if one.strip()]
    return f": {lines[-1][:300]}" if lines else ""


# -- in such a process -----------------------------------------------------------------------------

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
