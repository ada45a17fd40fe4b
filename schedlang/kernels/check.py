"""Is a kernel as right as the eager computation?  The tolerance rule, and a driver that runs it.

Both are compared with float64, never with each other: a kernel may be at most twice as wrong as
eager, or as wrong as its type's rounding, whichever is more.  Run as a module, this file reads
cases as JSON from standard input and writes the results as JSON: the interpreter and the compiler
of Triton cannot share a process, so `run_kernel_check` starts one of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# roundings that a right kernel may add up, in units of the type's spacing
_ROUNDINGS = {torch.bfloat16: 1.0, torch.float16: 1.0, torch.float32: 4.0}
_PEAK = 4.0  # largest element against eager's largest element


@dataclass(frozen=True)
class Comparison:
    """How far one tensor of a kernel lies from float64, relative to its norm, and how far it may.

    `peak` is the largest single difference over the largest element of the reference.
    """

    name: str
    error: float
    allowed: float
    peak: float
    peak_allowed: float
    ok: bool


@dataclass(frozen=True)
class Case:
    """One RMSNorm to run: shape of the input (last dim is normalised), type and form of the norm.

    The input is `scale` times standard normal; small scales expose eps.  `strided`: the elements of
    a row do not lie side by side.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    eps: float = 1e-6
    offset: float = 0.0
    rounding: str = "late"
    scale: float = 1.0
    seed: int = 0
    strided: bool = False


@dataclass(frozen=True)
class KernelCheck:
    """What came of a case: `backend` is "triton", "interpreter" or "reference" (kernel not run)."""

    case: Case
    backend: str
    comparisons: tuple[Comparison, ...]

    @property
    def ok(self) -> bool:
        """The kernel itself ran, and every tensor is within its bound."""
        return self.backend != "reference" and all(each.ok for each in self.comparisons)


def compare(
    name: str, out: Tensor, eager: Tensor, exact: Tensor, *, times: float = 2.0
) -> Comparison:
    """Judge `out` by its own type's rule; `eager` is of the same type, `exact` in float64.

    `times` is how much larger than eager's the error may be: 2 for one kernel, whose sums run in
    one order; more for a region, whose gradients pass through several (see passes/rounding.py).

    Elements that are not finite in `exact` must be the same kind of not finite in `out`.
    """
    assert exact.dtype == torch.float64, exact.dtype
    spacing = torch.finfo(out.dtype).eps * _ROUNDINGS[out.dtype]
    finite = exact.isfinite()
    strange = out.double()[~finite]
    same_kind = torch.equal(strange.nan_to_num(7.0), exact[~finite].nan_to_num(7.0))
    truth = exact[finite]
    norm = truth.norm().clamp_min(torch.finfo(torch.float64).tiny)
    top = truth.abs().max().clamp_min(torch.finfo(torch.float64).tiny) if truth.numel() else norm

    def distances(value: Tensor) -> tuple[float, float]:
        gap = value.double()[finite] - truth
        return (gap.norm() / norm).item(), (gap.abs().max() / top).item() if gap.numel() else 0.0

    error, peak = distances(out)
    eager_error, eager_peak = distances(eager)
    allowed = max(times * eager_error, spacing)
    peak_allowed = _PEAK * max(times / 2 * eager_peak, spacing)
    ok = same_kind and error <= allowed and peak <= peak_allowed  # NaN compares false
    return Comparison(name, error, allowed, peak, peak_allowed, ok)


def run_kernel_check(
    cases: Sequence[Case], *, device: str | None = None, timeout: float = 300.0
) -> list[KernelCheck]:
    """Run each case in a process of its own: on the GPU if there is one, else in the interpreter.

    Forward, gradient of the input and of the weight; outputs start as NaN, so that an element that
    is never written shows.  In the interpreter a row of a case costs well under a millisecond.
    Raises RuntimeError with the child's own words if the process fails.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    environment = dict(os.environ)
    environment.pop("TRITON_INTERPRET", None)
    if device == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    root = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [root, environment.get("PYTHONPATH", "")])
    )
    task = {"device": device, "cases": [asdict(case) for case in cases]}
    command = [sys.executable, "-m", "schedlang.kernels.check"]
    done = subprocess.run(
        command,
        input=json.dumps(task),
        capture_output=True,
        text=True,
        env=environment,
        timeout=timeout,
    )
    if done.returncode:
        raise RuntimeError(f"the check of the kernels failed:\n{done.stderr[-4000:]}")
    return [_decode(each) for each in json.loads(done.stdout.splitlines()[-1])]


def _decode(found: dict[str, Any]) -> KernelCheck:
    case = Case(**(found["case"] | {"shape": tuple(found["case"]["shape"])}))
    comparisons = tuple(Comparison(**each) for each in found["comparisons"])
    return KernelCheck(case, found["backend"], comparisons)


def check_case(case: Case, device: str) -> KernelCheck:
    """Run one case in this process, with whatever backend this process has."""
    from schedlang.kernels import rms_norm

    dtype = getattr(torch, case.dtype)
    generator = torch.Generator().manual_seed(case.seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    x = (draw(*case.shape) * case.scale).to(device, dtype)
    weight = (draw(case.shape[-1]) * 0.2 + 1.0).to(device, dtype)
    grad = draw(*case.shape).to(device, dtype)
    if case.strided:
        x, grad = x.mT.contiguous().mT, grad.mT.contiguous().mT
    before = rms_norm.runs()

    def results(call: Any, wide: bool) -> list[Tensor]:
        leaves = [(t.double() if wide else t.detach()).requires_grad_() for t in (x, weight)]
        y = call(*leaves, case.eps, case.offset, case.rounding)
        return [y.detach(), *torch.autograd.grad(y, leaves, grad.to(y.dtype))]

    kernel = results(rms_norm.rms_norm, False)
    ran = {name for name, count in rms_norm.runs().items() if count > before.get(name, 0)}
    eager, exact = results(rms_norm.reference, False), results(rms_norm.reference, True)
    names = ("output", "gradient of the input", "gradient of the weight")
    found = tuple(compare(*each) for each in zip(names, kernel, eager, exact, strict=True))
    return KernelCheck(case, ran.pop() if len(ran) == 1 else "reference", found)


def _main() -> None:
    task = json.load(sys.stdin)
    torch.use_deterministic_algorithms(True)  # torch.empty then gives NaN
    results = []
    for each in task["cases"]:
        case = Case(**(each | {"shape": tuple(each["shape"])}))
        results.append(asdict(check_case(case, task["device"])))
    print(json.dumps(results))


if __name__ == "__main__":
    _main()
