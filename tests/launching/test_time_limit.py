"""Time limits: a proof with a timeout ends wherever it loops, and reports where."""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import schedlang
from schedlang.runtime.launch.pool import Hang, Pool
from schedlang.runtime.launch.rank_job import THIS_PROCESS, current_limit, limit_time
from tests import forks

MODEL = """
import os, time, torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)
    def forward(self, x, y):
        spin("forward")
        out = self.b(self.a(x))
        spin("ranks")
        return {"loss": ((out - y) ** 2).mean()}

def spin(where):
    rank = "RANK" in os.environ
    if where == WHERE and rank == (where == "ranks"):
        while True:
            time.sleep(0.001)  # the processor is for other tests

def model():
    spin("model")
    return Net()

def batch(seed):
    spin("batch")
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(4, 4, generator=draw) for name in "xy"}
"""
SCHEDULE = """schedule 1 for Net

mesh(dp=2)

step "data" {
  zero(stage=1, over=dp)
  verify(train, steps=3)
}
"""


def return_one() -> int:
    return 1


def _spin() -> None:
    while True:
        time.sleep(0.001)  # the processor is for other tests


@pytest.fixture(scope="module")
def pool():
    """Yield ranks of these tests only."""
    with Pool() as pool:
        yield pool


def test_this_process() -> None:
    """A loop in this process is interrupted, even if it catches every exception; its stack is
    reported."""

    def stubborn() -> None:
        while True:
            try:
                _spin()
            except Exception:  # noqa: S112
                continue

    start = time.monotonic()
    pattern = r"not finished after 0\.5 s\nthis process:"
    with pytest.raises(Hang, match=pattern) as info, limit_time(0.5):
        stubborn()
    assert time.monotonic() - start < 10
    assert "in _spin" in info.value.stacks[THIS_PROCESS]
    assert current_limit() is None and signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_what_ends_in_time() -> None:
    """Afterwards there is no limit, and the caller's alarm handler is unchanged."""
    handler = signal.getsignal(signal.SIGALRM)
    with limit_time(30.0):
        assert current_limit() is not None
    assert signal.getsignal(signal.SIGALRM) is handler
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    with limit_time(None):
        assert current_limit() is None


def test_ranks(pool: Pool) -> None:
    """The current line of each rank is reported; the pool works afterwards."""
    pool.run(return_one, 2)  # start the ranks before the limit
    start = time.monotonic()
    with pytest.raises(Hang, match="not finished after 3 s") as info, limit_time(3.0):
        pool.run(_spin, 2)
    assert time.monotonic() - start < 120
    assert sorted(info.value.stacks) == [0, 1]
    assert all("in _spin" in stack for stack in info.value.stacks.values())
    assert pool.run(return_one, 2) == [1, 1]


def test_ranks_off_the_main_thread(pool: Pool) -> None:
    """Python cannot interrupt other threads; the ranks that they run have the limit too."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            with limit_time(2.0):
                pool.run(_spin, 1)
        except Hang as hang:
            errors.append(hang)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(600)
    assert "not finished after 2 s" in str(errors[0])


class EndlessForward(nn.Module):
    """A model whose forward never ends."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Loop forever."""
        _spin()
        return x


def test_verify_from_python() -> None:
    """The call ends, also if a function of batches loops."""
    sch = schedlang.create_schedule(EndlessForward())
    sch.mesh(dp=2)
    sch.zero(stage=0, over="dp")
    for batch in ({"x": torch.ones(2, 2)}, lambda seed: _spin()):
        with pytest.raises(Hang, match="not finished after 2 s"):
            schedlang.verify(sch, batch=batch, loss=lambda out, batch: out.sum(), timeout=2.0)


@pytest.mark.parametrize(
    "where",
    [
        "ranks",
        pytest.param("model", marks=pytest.mark.deep),
        pytest.param("batch", marks=pytest.mark.deep),
        pytest.param("forward", marks=pytest.mark.deep),
    ],
)
def test_verify_ends_wherever_it_loops(tmp_path: Path, where: str) -> None:
    """Exit code 3, the report names the loop, and no process is left."""
    (tmp_path / "model.py").write_text(MODEL.replace("WHERE", repr(where)))
    (tmp_path / "a.sched").write_text(SCHEDULE)
    arguments = ["-m", "schedlang.cli", "verify", tmp_path / "a.sched", "--json"]
    for seconds in ("8", "25", "100"):  # longer for a slow machine that has not reached the ranks
        process = forks.run(*arguments, "--timeout", seconds, timeout=600)
        assert process.returncode == 3, process.stderr
        report = json.loads(process.stdout)
        if where != "ranks" or "in spin" in report["error"]:
            break
    assert report["exit"] == 3 and f"not finished after {seconds} s" in report["error"]
    assert "in spin" in report["error"]
    assert ("rank 1:" in report["error"]) == (where == "ranks")
    assert "Traceback" not in process.stderr
