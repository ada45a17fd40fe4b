"""Run the parts one after the other, each in its own processes with a time limit.

    python -m schedlang.testing.gpu.driver PART DEVICE SIZE FILE WORDS FIRST

is such a process. It appends lines of JSON to FILE: the names of all cases, then the start and the
outcome of each. It begins with case FIRST: the parent restarts it after a case that ended it.
"""

from __future__ import annotations

import gc
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

from schedlang.kernels.kernel_device import environment
from schedlang.testing.gpu.case import PARTS, Case, Found, Part, Setup, Skipped, Wrong

Say = Callable[[str], None]
_TIME_IS_UP = "the time of its part was up before it was done"
_POLL_INTERVAL = 0.05  # seconds between two reads of a child's events


def chosen(only: Sequence[str]) -> list[tuple[Part, str]]:
    """Return the selected parts (all for no words), and the prefix of their cases' names.

    `only` has names of parts, `kernels`, or of cases in one, `kernels:rms_norm`. Raises ValueError
    for an unknown part.
    """
    prefixes = {selection.partition(":")[0]: selection.partition(":")[2] for selection in only}
    names = [part.name for part in PARTS]
    if unknown := [name for name in prefixes if name not in names]:
        raise ValueError(f"there is no part `{unknown[0]}`: {', '.join(names)}")
    return [
        (part, prefixes.get(part.name, "")) for part in PARTS if not only or part.name in prefixes
    ]


def examine(
    setup: Setup, parts: Sequence[tuple[Part, str]], say: Say, spare: float = 1.0
) -> list[Found]:
    """Run all cases. `spare` stretches all limits, for slow machines."""
    end, results = time.monotonic(), []
    for part, prefix in parts:
        end += spare * (part.limit if setup.size == "full" else part.quick)
        say(f"-- {part.title}")
        results += _Run(part, setup, prefix, say, spare * part.each).until(end)
    return results


class _Run:
    """One part, until it is done or its time is up."""

    def __init__(self, part: Part, setup: Setup, words: str, say: Say, each: float) -> None:
        self.part, self.setup, self.words, self.say, self.each = part, setup, words, say, each
        self.found: list[Found] = []
        self.names: list[str] | None = None

    def until(self, end: float) -> list[Found]:
        """Start processes until all cases are done."""
        with tempfile.TemporaryDirectory() as folder:
            attempt = 0
            while self.names is None or len(self.found) < len(self.names):
                log = Path(folder, f"log{attempt}")
                if time.monotonic() >= end or not self._run_process(
                    Path(folder, f"{attempt}"), log, end
                ):
                    break
                attempt += 1
        for name in (self.names or [])[len(self.found) :]:
            self._note(Found(self.part.name, name, "late", "no time was left for it"))
        if self.names is None and not self.found:
            self._note(Found(self.part.name, "begin", "late", "no time was left for it"))
        if self.names == [] and self.words:
            self._note(Found(self.part.name, self.words, "failed", "no case's name begins so"))
        return self.found

    def _note(self, result: Found) -> None:
        self.found.append(result)
        note = f": {result.note}" if result.note else ""
        self.say(f"{result.outcome:8} {self.part.name}: {result.name}{note}")

    def _run_process(self, event_file: Path, log: Path, end: float) -> bool:
        """Run a process; return whether another may continue after the case that ended it."""
        event_file.touch()
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
                    str(event_file),
                    self.words,
                    str(len(self.found)),
                ],
                env=_environment(self.part, self.setup, event_file.with_suffix(".cache")),
                stdin=subprocess.DEVNULL,
                stdout=err,
                stderr=err,
                start_new_session=True,
            )
        try:
            reason, started_case = self._read_events(child, event_file, end)
        finally:
            _end_child(child)
        if reason is None:
            return True
        if reason == _TIME_IS_UP:
            if self.names is not None and started_case is not None:
                self._note(Found(self.part.name, self.names[started_case], "late", reason))
            return False
        if self.names is None:
            self._note(Found(self.part.name, "begin", "failed", f"{reason}{_last_line(log)}"))
            return False
        started_case = (
            len(self.found) if started_case is None and len(self.found) == before else started_case
        )
        if started_case is not None and started_case < len(self.names):
            last_line = "" if "seconds" in reason else _last_line(log)
            self._note(
                Found(self.part.name, self.names[started_case], "failed", reason + last_line)
            )
        return True

    def _read_events(
        self, child: subprocess.Popen[bytes], event_file: Path, end: float
    ) -> tuple[str | None, int | None]:
        """Read events until the process ends; return why it ended early, and at which case."""
        started_case, since, rest = None, time.monotonic(), ""
        with event_file.open() as file:
            while True:
                running = child.poll() is None
                *lines, rest = (rest + file.read()).split("\n")
                for line in lines:
                    event: dict[str, Any] = json.loads(line)
                    since = time.monotonic()
                    if "names" in event:
                        self.names = event["names"]
                    elif "begins" in event:
                        started_case = event["begins"]
                    elif "found" in event:
                        self._note(Found(**event["found"]))
                        started_case = None
                    else:
                        return None, None
                if not running:
                    return _describe_exit(child.returncode), started_case
                now = time.monotonic()
                if now - since > self.each:
                    return f"not done in {self.each:.0f} seconds", started_case
                if now > end:
                    return _TIME_IS_UP, started_case
                time.sleep(_POLL_INTERVAL)


def _environment(part: Part, setup: Setup, cache: Path) -> dict[str, str]:
    """Return a child's environment: its device, Triton's interpreter for kernels on a CPU.

    Compiler caches are separate unless set: a killed child could leave half-written files, which
    later programs of this user would load.
    """
    kernels = part.name in ("kernels", "programs", "contests", "layers")
    variables = environment(setup.device == "cpu" and kernels)
    for name, inside in (("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TRITON_CACHE_DIR", "triton")):
        variables.setdefault(name, str(cache / inside))
    if setup.timed:  # everything on one device
        variables["CUDA_VISIBLE_DEVICES"] = variables.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        variables["PYTORCH_NVML_BASED_CUDA_CHECK"] = (
            "1"  # ranks are forked from a process that queries CUDA
        )
    return variables


def _describe_exit(code: int) -> str:
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process ended with {code}"


def _end_child(child: subprocess.Popen[bytes]) -> None:
    """Kill a child, and the processes that it has started in its session."""
    if child.poll() is None:
        with suppress(ProcessLookupError):  # all ended meanwhile
            os.killpg(child.pid, signal.SIGKILL)
        child.kill()
    child.wait()


def _last_line(log: Path) -> str:
    """Return the last line that a child has printed."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f": {lines[-1][:300]}" if lines else ""


# -- in such a process -----------------------------------------------------------------------------

LOST = 17  # the exit code where the device can no longer be used


def cases_of(name: str, setup: Setup, prefix: str = "") -> list[Case]:
    """Return the cases of a part, or those whose names begin with `prefix`."""
    part = next(part for part in PARTS if part.name == name)
    module_name, _, function = part.home.partition(".")
    module = import_module(f"schedlang.testing.gpu.{module_name}")
    all_cases: list[Case] = getattr(module, function or "cases")(setup)
    return [case for case in all_cases if case.name.startswith(prefix)]


def found_of(part: str, case: Case, check: Callable[[], object] = bool) -> Found:
    """Run a case, then `check`, and return the outcome; raise nothing."""
    start, numbers, note = time.perf_counter(), {}, ""
    try:
        result = case.run()
        check()
        outcome, note, numbers = "ok", result.note, dict(result.numbers)
    except Wrong as error:
        outcome, note = "wrong", str(error)
    except Skipped as error:
        outcome, note = "skipped", str(error)
    except Exception as error:  # any kernel, on an untested device
        outcome, note = "failed", in_a_line(error)
        traceback.print_exc()
    return Found(part, case.name, outcome, note, numbers, round(time.perf_counter() - start, 3))


def in_a_line(error: BaseException) -> str:
    """Return the error's type and its first non-empty line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}".rstrip(": ")


def _is_device_lost(note: str) -> bool:
    """Return whether a failure leaves the device unusable for this process."""
    return "CUDA error" in note or "AcceleratorError" in note or "unspecified launch" in note


def _set_up_device(setup: Setup) -> Callable[[], object]:
    """Set up the device for this process; return the check for races after each case."""
    if setup.device != "sim":
        return bool
    from schedlang.testing.accelerator import simulated

    simulation = _exit_stack.enter_context(simulated())

    def check() -> None:
        simulation.check()
        simulation.reset()

    return check


_exit_stack = ExitStack()


def main(argv: list[str]) -> None:
    """Run the cases of a part."""
    name, device, size, file, prefix, first = argv
    setup = Setup(device, size)
    with open(file, "a") as out:

        def tell(**line: Any) -> None:
            out.write(json.dumps(line) + "\n")
            out.flush()

        check = _set_up_device(setup)
        cases = cases_of(name, setup, prefix)
        gc.collect()
        gc.freeze()  # between cases the collector visits what they have made, and no imports
        tell(names=[case.name for case in cases])
        for index, case in enumerate(cases):
            if index < int(first):
                continue
            tell(begins=index)
            result = found_of(name, case, check)
            tell(found=result.plain())
            if result.outcome == "failed" and _is_device_lost(result.note):
                out.flush()
                os._exit(LOST)
        tell(ends=True)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)  # other processes (ranks, compilers) end with their pipes


if __name__ == "__main__":
    main(sys.argv[1:])
