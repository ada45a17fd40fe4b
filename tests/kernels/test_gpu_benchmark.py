"""The benchmark of GPUs, without one: what it finds wrong it tells, and it goes on."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.benchmarks.gpu import Told, right
from tests.benchmarks.gpu_kernels import TINY, Contest, checks, contests, work_of

META = replace(TINY, device="meta")


def raising(x: Tensor) -> Tensor:
    """A kernel that does not run."""
    raise RuntimeError("no such device")


@pytest.mark.parametrize(
    ("ours", "said"),
    [(lambda x: x * 2, ""), (lambda x: x * 2.1, "in its timed shapes"), (raising, "no such dev")],
)
def test_what_is_wrong_is_told(ours: object, said: str) -> None:
    """A wrong result and an error are each one fault; a right result is none."""
    told = Told()
    one = Contest("twice", {"ours": ours, "eager": lambda x: x * 2}, ((4, 8),))  # type: ignore[dict-item]
    share = right(one, TINY, told)
    assert (share is None) == (ours is raising)
    assert all(said in each for each in told.wrong) and bool(told.wrong) == bool(said)


def test_nothing_is_made_on_another_device() -> None:
    """Checks and contests run on tensors of one device, whichever: none is left on the CPU."""
    for case in checks(META):
        dtype = getattr(torch, case.dtype)
        normal = lambda *shape: torch.empty(shape, device="meta")  # noqa: E731
        for kernel in (True, False):
            leaves = {n: t.to(dtype).requires_grad_() for n, t in case.draw(normal).items()}
            assert case.run(leaves, kernel).is_meta
    for one in contests(META):
        for way in ("ours", "eager") if one.name != "grouped" else ():  # it reads its groups' ends
            assert all(grad.is_meta for grad in work_of(one, way, "meta")())  # type: ignore[attr-defined]


@pytest.mark.deep
def test_it_can_be_rehearsed() -> None:
    """All of it but the timing, by Triton's interpreter: every kernel, every way, three steps."""
    command = [sys.executable, "-m", "tests.benchmarks.gpu", "--rehearse"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rehearsed; 0 wrong" in done.stdout and "ours, compiled" in done.stdout
