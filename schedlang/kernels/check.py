"""The accuracy check of kernels against eager computation: the tolerance rule, and its driver.

Both are compared with float64, never with each other: the error of a kernel may be at most twice
that of eager mode, or the rounding of its dtype, whichever is larger. Run as a module, this file
reads lists of cases from standard input, one JSON line each, and writes their results likewise: the
interpreter and the compiler of Triton cannot be used in one process, so `run_kernel_check` starts
another.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor

from schedlang.kernels.kernel_device import DEVICE_TYPE, backend_runs, environment, has_gpu

# roundings that a correct kernel may accumulate, in units of the dtype's spacing
_ROUNDINGS = {torch.bfloat16: 1.0, torch.float16: 1.0, torch.float32: 4.0}
_PEAK = 4.0  # factor for the largest element, relative to eager's largest element


@dataclass(frozen=True)
class Comparison:
    """The distance of a kernel's tensor from float64, relative to the norm, and its bound.

    `peak` is the largest single difference, relative to the largest element of the reference.
    """

    name: str
    error: float
    allowed: float
    peak: float
    peak_allowed: float
    ok: bool


@dataclass(frozen=True)
class Case:
    """A test case of a kernel, with plain values only; each kernel's module has a subclass.

    shape    shape of the first tensor
    dtype    dtype of all floating tensors
    strided  the elements of a row are not adjacent in memory
    """

    kernel: ClassVar[str]  # name of the module
    shape: tuple[int, ...]
    dtype: str = "float32"
    seed: int = field(default=0, kw_only=True)
    strided: bool = field(default=False, kw_only=True)

    @abstractmethod
    def draw(self, normal: Callable[..., Tensor]) -> dict[str, Tensor]:
        """Return the differentiated tensors, in float32; `normal(*shape)` draws random numbers."""

    @abstractmethod
    def run(self, tensors: dict[str, Tensor], kernel: bool) -> Tensor:
        """Run the kernel, or its reference, on the tensors in their own dtype."""


@dataclass(frozen=True)
class KernelCheck:
    """The result of a case; `backend` "reference" means that the kernel itself did not run."""

    case: Case
    backend: str
    comparisons: tuple[Comparison, ...]

    @property
    def ok(self) -> bool:
        """Whether the kernel itself ran, and every tensor is within its bound."""
        return self.backend != "reference" and all(comparison.ok for comparison in self.comparisons)


def compare_tensor(
    name: str, out: Tensor, eager: Tensor, exact: Tensor, *, times: float = 2.0
) -> Comparison:
    """Compare `out` by the rule of its dtype; `eager` has the same dtype, `exact` is in float64.

    `times` is the allowed ratio to eager's error: 2 for one kernel, whose sums have one order; more
    for a region, whose gradients pass through several sums (`passes.verify`).

    Elements that are not finite in `exact` must be the same (NaN, inf, -inf) in `out`.
    """
    assert exact.dtype == torch.float64, exact.dtype
    spacing = torch.finfo(out.dtype).eps * _ROUNDINGS[out.dtype]
    finite = exact.isfinite()
    nonfinite = out.double()[~finite]
    same_kind = torch.equal(nonfinite.nan_to_num(7.0), exact[~finite].nan_to_num(7.0))
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
    ok = same_kind and error <= allowed and peak <= peak_allowed  # false for NaN
    return Comparison(name, error, allowed, peak, peak_allowed, ok)


def run_kernel_check(
    cases: Sequence[Case], *, device: str | None = None, timeout: float = 300.0
) -> list[KernelCheck]:
    """Run each case in another process: on the GPU if there is one, else interpreted.

    Checks forward and all gradients; outputs start as NaN, so that elements that are never written
    are found. In the interpreter a row of a case costs well under a millisecond. Raises
    RuntimeError with the process's own output if it fails, or takes longer than `timeout` seconds.
    """
    device = device or (DEVICE_TYPE if has_gpu() else "cpu")
    task = {"device": device, "cases": [_encode(case) for case in cases]}
    key = os.getpid(), device
    worker = _idle.pop(key, None) or _Worker(device)
    answer = worker.ask(json.dumps(task), timeout)
    if device == "cpu":  # a process with a GPU would hold memory there
        _idle[key] = worker
    else:
        worker.end()
    return [_decode(result) for result in json.loads(answer)]


class _Worker:
    """A process that checks kernels until this process ends: its imports take seconds."""

    def __init__(self, device: str) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "schedlang.kernels.check"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment(device == "cpu"),
        )
        atexit.register(self.end)

    def ask(self, task: str, timeout: float) -> str:
        """Send a line, and return the answer; the process is ended if there is none."""
        assert self._process.stdin is not None and self._process.stdout is not None
        limit = threading.Timer(timeout, self._process.kill)
        limit.start()
        answer = ""
        try:
            with contextlib.suppress(BrokenPipeError):
                print(task, file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
        finally:
            limit.cancel()
            if not answer:
                self.end()
        if not answer:
            self._errors.seek(0)
            message = self._errors.read()[-4000:] or f"no answer within {timeout:g} s"
            raise RuntimeError(f"the check of the kernels failed:\n{message}")
        return answer

    def end(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.communicate()
        atexit.unregister(self.end)


# (pid, device) -> worker; by pid, because a fork must not use it
_idle: dict[tuple[int, str], _Worker] = {}


def _encode(case: Case) -> dict[str, Any]:
    return {"kernel": case.kernel, "fields": asdict(case)}


def _decode_case(record: dict[str, Any]) -> Case:
    fields = record["fields"] | {"shape": tuple(record["fields"]["shape"])}
    module = import_module(f"schedlang.kernels.{record['kernel']}")
    if "form" in fields:
        fields["form"] = module.Form(**fields["form"])
    case: Case = module.Case(**fields)
    return case


def _decode(record: dict[str, Any]) -> KernelCheck:
    comparisons = tuple(Comparison(**comparison) for comparison in record["comparisons"])
    return KernelCheck(_decode_case(record["case"]), record["backend"], comparisons)


def check_case(case: Case, device: str) -> KernelCheck:
    """Run one case in this process, with the backend of this process."""
    dtype = getattr(torch, case.dtype)
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def strided(tensor: Tensor) -> Tensor:
        return tensor.mT.contiguous().mT if case.strided and tensor.ndim > 1 else tensor

    inputs = {name: strided(t.to(device, dtype)) for name, t in case.draw(normal).items()}
    grads: list[Tensor] = []
    before = backend_runs()

    def results(kernel: bool, in_double: bool) -> list[Tensor]:
        leaves = {
            name: (t.double() if in_double else t.detach()).requires_grad_()
            for name, t in inputs.items()
        }
        y = case.run(leaves, kernel)
        if not grads:
            grads.append(strided(normal(*y.shape).to(device, y.dtype)))
        gradients = torch.autograd.grad(y, list(leaves.values()), grads[0].to(y.dtype))
        return [y.detach(), *gradients]

    kernel = results(True, False)
    used = {name for name, count in backend_runs().items() if count > before.get(name, 0)}
    eager, exact = results(False, False), results(False, True)
    names = ("output", *(f"gradient of the {name}" for name in inputs))
    result = tuple(
        compare_tensor(*values) for values in zip(names, kernel, eager, exact, strict=True)
    )
    return KernelCheck(case, used.pop() if len(used) == 1 else "reference", result)


def _main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # output of kernels must not mix with the answers
    # makes torch.empty give NaN; functions without a deterministic form on a GPU still run
    torch.use_deterministic_algorithms(True, warn_only=True)
    for line in sys.stdin:
        task = json.loads(line)
        results = []
        for case in task["cases"]:
            check = check_case(_decode_case(case), task["device"])
            comparisons = [asdict(comparison) for comparison in check.comparisons]
            results.append({"case": case, "backend": check.backend, "comparisons": comparisons})
        print(json.dumps(results), file=answers, flush=True)


if __name__ == "__main__":
    _main()
