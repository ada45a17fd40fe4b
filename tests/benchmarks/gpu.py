"""Kernels and training steps on a GPU: python -m tests.benchmarks.gpu [--quick] [--out FILE]

Checks every kernel against float64 by the rule of kernels/check.py, times each forward and backward
beside eager, torch.compile and Liger (where it is installed), then steps of Llama with the shapes
of 1B and of 8B (fewer layers), untouched, compiled, patched by Liger, and with our kernels.  Prints
ratios (theirs / ours: above 1 we are faster) and one line of JSON.  What fails is told, and the
rest goes on.  Without CUDA it says so; `--rehearse` does all of it but the timing on a CPU, on tiny
shapes and by Triton's interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from schedlang.kernels.check import run_kernel_check
from schedlang.kernels.device import INTERPRETED, triton
from tests.benchmarks import gpu_kernels, gpu_steps
from tests.benchmarks.gpu_kernels import Contest, Sizes, checks, contests, judged, work_of
from tests.benchmarks.gpu_timing import cleared, median, peak_of


class Told:
    """Prints what comes of each part, and counts what is wrong or has failed."""

    def __init__(self) -> None:
        self.wrong: list[str] = []

    def attempt(self, what: str, run: Callable[[], Any]) -> Any:
        """The part's result; None where it raises, and the others go on."""
        try:
            return run()
        except Exception as error:  # a kernel of anybody's, on a device that nobody has tried
            first = str(error).strip().split("\n")[0]
            self.fault(f"{what}: {type(error).__name__}: {first}")
            return None

    def fault(self, what: str) -> None:
        """Note something wrong."""
        self.wrong.append(what)
        print(f"WRONG  {what}", flush=True)


def check(sizes: Sizes, told: Told) -> int:
    """Every kernel against float64 in a process of its own; how many cases were run."""
    cases = checks(sizes)
    found = told.attempt("checks", lambda: run_kernel_check(cases, device=sizes.device)) or []
    for one in found:
        if not one.ok:
            told.fault(str(one))
    print(f"checked {len(found)} of {len(cases)} cases", flush=True)
    return len(found)


def right(one: Contest, sizes: Sizes, told: Told) -> float | None:
    """How much of what is allowed our error takes, at worst; None where it could not be told."""
    found = told.attempt(f"{one.name} against float64", lambda: judged(one, sizes.device))
    for each in found or ():
        if not each.ok:
            told.fault(f"{one.name}, in its timed shapes: {each}")
    cleared(sizes.device)
    return None if found is None else max(each.error / each.allowed for each in found)


def contest(one: Contest, sizes: Sizes, times: int, told: Told) -> dict[str, Any]:
    """Seconds and bytes of each way, and the ratios to ours."""
    seconds: dict[str, float] = {}
    peak: dict[str, int] = {}
    share = right(one, sizes, told)
    for way in one.ways:

        def measured(way: str = way) -> None:
            work = work_of(one, way, sizes.device)
            seconds[way] = median(work, times)
            before = torch.cuda.memory_allocated()
            peak[way] = peak_of(work) - before

        told.attempt(f"{one.name}, {way}", measured)
        cleared(sizes.device)
    ours = seconds.get("ours")
    ratios = {n: s / ours for n, s in seconds.items() if n != "ours"} if ours else {}
    said = "  ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
    print(f"{one.name:26} {(ours or 0) * 1e6:10.1f} us   {said}", flush=True)
    return {"kernel": one.name, "shapes": one.shapes, "seconds": seconds, "peak": peak,
            "ratios": ratios, "flops": one.flops / ours if ours else None,
            "error_of_allowed": share}  # fmt: skip


def steps(shapes: tuple[gpu_steps.Shape, ...], backend: str, times: int, told: Told) -> Any:
    """Training steps, way by way: Liger's patch, which stays, is the last."""
    found: dict[str, dict[str, dict[str, float]]] = {shape.name: {} for shape in shapes}
    for way in gpu_steps.WAYS:
        for shape in shapes:

            def measured(way: str = way, shape: gpu_steps.Shape = shape) -> dict[str, float]:
                return gpu_steps.timed(gpu_steps.made(shape, way, "cuda", backend), times)

            if way == "liger" and gpu_kernels.liger_of("liger_rms_norm") is None:
                continue
            seen = told.attempt(f"{shape.name}, {way}", measured)
            cleared("cuda")
            if seen is not None:
                found[shape.name][way] = seen
    for name, ways in found.items():
        for way, seen in ways.items():
            ratio = seen["seconds"] / ways["ours"]["seconds"] if "ours" in ways else float("nan")
            print(f"{name:22} {way:16} {seen['tokens_per_second']:10.0f} tokens/s  "
                  f"{seen['peak_gib']:6.1f} GiB  MFU {seen.get('mfu', 0):.1%}  {ratio:.2f}",
                  flush=True)  # fmt: skip
    return found


def _ran(one: Contest, way: str, sizes: Sizes, told: Told) -> bool:
    """Whether a way can be run once."""
    made = told.attempt(f"{one.name}, {way}", lambda: work_of(one, way, sizes.device)())
    return made is not None


def rehearse(told: Told) -> None:
    """All but the timing, on a CPU."""
    sizes = gpu_kernels.TINY
    check(sizes, told)
    for one in contests(sizes):
        share = right(one, sizes, told)
        ran = [way for way in one.ways if _ran(one, way, sizes, told)]
        used = "not judged" if share is None else f"{share:.2f} of the allowed error"
        print(f"{one.name:26} {used}; ran {', '.join(ran)}", flush=True)
    losses = told.attempt(
        "steps", lambda: gpu_steps.rehearsed(gpu_steps.TINY, "cpu", sizes.backend)
    )
    for name, ways in (losses or {}).items():
        said = ", ".join(f"{way} {loss:.4f}" for way, loss in ways.items())
        print(f"{name:26} losses {said}", flush=True)
    print(f"rehearsed; {len(told.wrong)} wrong; nothing was timed")


def interpreted() -> int:
    """The same command in a process where Triton interprets its kernels."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "tests.benchmarks.gpu", "--rehearse"]
    return subprocess.run(command, env=environment).returncode


def main() -> int:
    """Check, time, print; 1 where something is wrong, 3 where there is no CUDA."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gpu", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small shapes: does it run at all?")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, without times")
    parser.add_argument("--out", help="write the JSON there as well")
    asked = parser.parse_args()
    told = Told()
    if asked.rehearse:
        if triton is not None and not INTERPRETED:
            return interpreted()
        rehearse(told)
        return 1 if told.wrong else 0
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was checked and nothing was timed (see --rehearse)")
        return 3
    sizes = gpu_kernels.QUICK if asked.quick else gpu_kernels.FULL
    shapes = gpu_steps.QUICK if asked.quick else gpu_steps.FULL
    checked = check(sizes, told)
    found = [contest(one, sizes, 5 if asked.quick else 30, told) for one in contests(sizes)]
    trained = steps(shapes, sizes.backend, 3 if asked.quick else 10, told)
    made = json.dumps({
        "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "triton": getattr(triton, "__version__", None), "date": time.strftime("%Y-%m-%d"),
        "checked": checked, "wrong": told.wrong, "kernels": found, "steps": trained,
    })  # fmt: skip
    print(made)
    if asked.out:
        with open(asked.out, "w") as file:
            file.write(made + "\n")
    return 1 if told.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
