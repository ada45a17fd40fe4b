"""Ranks that end at any moment, in any way: the job ends at once, with that rank's own error."""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import schedlang
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.launch.forkserver import BASE_MODULES, PROGRAM_MODULES
from schedlang.runtime.launch.pool import Pool, RankDied
from tests.launching.agents import runs

WAYS = {
    "SIGKILL": "killed by SIGKILL",
    "SIGSEGV": "killed by SIGSEGV",
    "abort": "killed by SIGABRT",
    "exit": "exit code 7",
    "raise": "KeyError: 'mine'",
}
MOMENTS = ("import", "loss", "optimizer", "forward", "backward", "update", "save", "after")
LAYOUTS = {"dp": 2, "tp": 2, "pp": 2, "dp pp": 4}
REFUSED = {("loss", "raise")}  # not the end of a rank


class Net(nn.Module):
    """Two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """What each adds; `y` is for the loss."""
        for block in self.blocks:
            x = x + block(x)
        return x


def _end(way: str, note: str) -> None:
    """Note when, and end."""
    Path(note).write_text(f"{time.monotonic()} {os.getpid()}")
    if way == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    elif way == "SIGSEGV":
        ctypes.string_at(0)
    elif way == "abort":
        os.abort()
    elif way == "exit":
        os._exit(7)
    raise KeyError("mine")


def _schedule(model: nn.Module, layout: str) -> Any:
    sch = schedlang.create_schedule(model)
    sch.mesh(**dict.fromkeys(layout.split(), 2))
    if "tp" in layout:
        sch["blocks.*.0"].shard("col", over="tp")
        sch["blocks.*.2"].shard("row", over="tp")
    if "pp" in layout:
        sch["blocks"].pipeline_split(over="pp")
    if "dp" in layout:
        sch.zero(stage=1, over="dp")
    if "pp" in layout:
        sch.pipeline(order="1F1B", micro=2)
    return sch


def _job(layout: str, moment: str, way: str, rank: int, folder: str) -> int:
    """Build, train, save; the rank ends on its way."""
    own, note = dist.get_rank() == rank, f"{folder}/note"
    now: list[str] = []

    def here(name: str) -> None:
        if own and name == moment and (name == "loss" or "built" in now or name == "optimizer"):
            _end(way, note)

    def loss(out: torch.Tensor, batch: Any) -> torch.Tensor:
        if own and moment == "loss":
            _end(way, note)
        value = F.mse_loss(out, batch["y"])
        if value.requires_grad and "built" in now:
            here("forward")
        return value

    def optimizer(named: Any) -> torch.optim.Optimizer:
        here("optimizer")
        made = torch.optim.AdamW(named, lr=1e-3)
        made.register_step_pre_hook(lambda *_: here("update"))
        return made

    if own and moment == "import":
        _end(way, note)
    torch.manual_seed(0)
    batch = {name: torch.randn(4, 4) for name in "xy"}
    program = _schedule(Net(), layout).build(batch=batch, loss=loss, optimizer=optimizer)
    now.append("built")

    def hooked(_module: nn.Module, _given: Any, out: Any) -> None:
        if isinstance(out, torch.Tensor) and out.requires_grad:
            out.register_hook(lambda grad: here("backward"))

    for module in program.assembly.module.modules():
        module.register_forward_hook(hooked)
    if own and moment == "forward":
        program.assembly.module.register_forward_pre_hook(lambda *_: here("forward"))
        for block in program.assembly.module.modules():
            block.register_forward_pre_hook(lambda *_: here("forward"))
    for _ in range(2):
        program.train_step(batch)
    if own and moment == "save":
        if way in ("SIGKILL", "exit"):  # in the middle of it
            threading.Timer(random.random() * 0.03, _end, (way, note)).start()
        else:
            _end(way, note)
    for number in range(20):
        program.save(f"{folder}/saved{number}")
    if own and moment == "after":
        _end(way, note)
    return program.step


def _killed(pool: Pool, layout: str, moment: str, way: str, rank: int, folder: Path) -> float:
    """Run such a job; checks what it says and what it leaves; the seconds that its end took."""
    with pytest.raises(RankDied) as info:
        pool.run(_job, LAYOUTS[layout], layout, moment, way, rank, str(folder))
    ended = time.monotonic()
    at, pid = (folder / "note").read_text().split()
    assert WAYS[way] in info.value.error, info.value.error
    assert info.value.rank == rank
    assert not runs(int(pid))
    assert not pool._ranks
    return ended - float(at)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Ranks of these tests alone."""
    with Pool(preload=(*BASE_MODULES, *PROGRAM_MODULES)) as pool:
        pool.run(int, 2)
        yield pool


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_rank_that_ends(pool: Pool, moment: str, tmp_path: Path) -> None:
    """Whenever it is; ways, ranks and layouts take turns."""
    place = MOMENTS.index(moment)
    way, layout = list(WAYS)[place % len(WAYS)], list(LAYOUTS)[place % 3]
    assert _killed(pool, layout, moment, way, place % 2, tmp_path) < 30


@pytest.mark.deep
def test_a_hundred_kills(pool: Pool, tmp_path: Path) -> None:
    """All moments, ways and layouts, on different ranks: within seconds, and nobody is left."""
    took: dict[str, list[float]] = {}
    cases = itertools.product(MOMENTS, WAYS, LAYOUTS)  # what `loss` raises at build is refused
    for number, (moment, way, layout) in enumerate(cases):
        if layout == "dp pp" and number % 3 or (moment, way) in REFUSED:
            continue
        rank = (number // len(LAYOUTS)) % LAYOUTS[layout]
        folder = tmp_path / str(number)
        folder.mkdir()
        seconds = _killed(pool, layout, moment, way, rank, folder)
        took.setdefault(moment, []).append(seconds)
        print(f"{moment}, {way}, rank {rank} of {layout}: {seconds:.2f} s", flush=True)
    count = sum(map(len, took.values()))
    worst = {moment: f"{max(seconds):.2f}" for moment, seconds in took.items()}
    print(f"{count} kills, 0 hangs; slowest end by moment, in seconds: {worst}")
    assert count >= 100
    assert max(itertools.chain(*took.values())) < 30


def test_the_others_are_told(pool: Pool, tmp_path: Path) -> None:
    """A rank that refuses alone is the one whose refusal is raised, not those that wait for it."""

    def body() -> None:

        def broken(named: Any) -> torch.optim.Optimizer:
            raise Refusal.of("S622", "this one alone")

        torch.manual_seed(0)
        make: Callable[..., Any] = broken if dist.get_rank() else lambda n: torch.optim.SGD(n, 0.1)
        batch = {"x": torch.ones(4, 4), "y": torch.ones(4, 4)}
        _schedule(Net(), "dp").build(
            batch=batch, loss=lambda out, batch: F.mse_loss(out, batch["y"]), optimizer=make
        )

    with pytest.raises(Refusal, match="this one alone"):
        pool.run(body, 2)
