"""Ranks that end at any moment, in any way: the job ends at once, with that rank's error."""

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
from tests.launching.elastic_nodes import is_running

ENDINGS = {
    "SIGKILL": "killed by SIGKILL",
    "SIGSEGV": "killed by SIGSEGV",
    "abort": "killed by SIGABRT",
    "exit": "exit code 7",
    "raise": "KeyError: 'mine'",
}
MOMENTS = ("import", "loss", "optimizer", "forward", "backward", "update", "save", "after")
LAYOUTS = {"dp": 2, "tp": 2, "pp": 2, "dp pp": 4}
REFUSED = {("loss", "raise")}  # a refusal, not the end of a rank


class Net(nn.Module):
    """Two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the sum of both blocks; only the loss reads `y`."""
        for block in self.blocks:
            x = x + block(x)
        return x


def end_process(way: str, note: str) -> None:
    """Write the time, and end this process."""
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


def run_job(layout: str, moment: str, way: str, rank: int, folder: str) -> int:
    """Build, train, save; the rank ends at the given moment."""
    is_victim, note = dist.get_rank() == rank, f"{folder}/note"
    reached: list[str] = []

    def here(name: str) -> None:
        if (
            is_victim
            and name == moment
            and (name == "loss" or "built" in reached or name == "optimizer")
        ):
            end_process(way, note)

    def loss(out: torch.Tensor, batch: Any) -> torch.Tensor:
        if is_victim and moment == "loss":
            end_process(way, note)
        value = F.mse_loss(out, batch["y"])
        if value.requires_grad and "built" in reached:
            here("forward")
        return value

    def optimizer(named: Any) -> torch.optim.Optimizer:
        here("optimizer")
        stepper = torch.optim.AdamW(named, lr=1e-3)
        stepper.register_step_pre_hook(lambda *_: here("update"))
        return stepper

    if is_victim and moment == "import":
        end_process(way, note)
    torch.manual_seed(0)
    batch = {name: torch.randn(4, 4) for name in "xy"}
    program = _schedule(Net(), layout).build(batch=batch, loss=loss, optimizer=optimizer)
    reached.append("built")

    def hooked(_module: nn.Module, _given: Any, out: Any) -> None:
        if isinstance(out, torch.Tensor) and out.requires_grad:
            out.register_hook(lambda grad: here("backward"))

    for module in program.assembly.module.modules():
        module.register_forward_hook(hooked)
    if is_victim and moment == "forward":
        program.assembly.module.register_forward_pre_hook(lambda *_: here("forward"))
        for block in program.assembly.module.modules():
            block.register_forward_pre_hook(lambda *_: here("forward"))
    for _ in range(2):
        program.train_step(batch)
    if is_victim and moment == "save":
        if way in ("SIGKILL", "exit"):  # during the save
            threading.Timer(random.random() * 0.03, end_process, (way, note)).start()
        else:
            end_process(way, note)
    for number in range(20):
        program.save(f"{folder}/saved{number}")
    if is_victim and moment == "after":
        end_process(way, note)
    return program.step


def kill_and_time(pool: Pool, layout: str, moment: str, way: str, rank: int, folder: Path) -> float:
    """Run such a job, check its message and what it leaves: return the seconds until its end."""
    with pytest.raises(RankDied) as info:
        pool.run(run_job, LAYOUTS[layout], layout, moment, way, rank, str(folder))
    ended = time.monotonic()
    end_time, pid = (folder / "note").read_text().split()
    assert ENDINGS[way] in info.value.error, info.value.error
    assert info.value.rank == rank
    assert not is_running(int(pid))
    assert not pool._ranks
    return ended - float(end_time)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Yield ranks of these tests only."""
    with Pool(preload=(*BASE_MODULES, *PROGRAM_MODULES)) as pool:
        pool.run(int, 2)
        yield pool


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_rank_that_ends(pool: Pool, moment: str, tmp_path: Path) -> None:
    """At each moment; endings, ranks and layouts take turns."""
    index = MOMENTS.index(moment)
    ending, layout = list(ENDINGS)[index % len(ENDINGS)], list(LAYOUTS)[index % 3]
    assert kill_and_time(pool, layout, moment, ending, index % 2, tmp_path) < 30


@pytest.mark.deep
def test_a_hundred_kills(pool: Pool, tmp_path: Path) -> None:
    """All moments, endings and layouts, on different ranks: the job ends in seconds, and no process
    is left."""
    seconds_of: dict[str, list[float]] = {}
    cases = itertools.product(MOMENTS, ENDINGS, LAYOUTS)  # what `loss` raises at build is refused
    for number, (moment, ending, layout) in enumerate(cases):
        if layout == "dp pp" and number % 3 or (moment, ending) in REFUSED:
            continue
        rank = (number // len(LAYOUTS)) % LAYOUTS[layout]
        folder = tmp_path / str(number)
        folder.mkdir()
        seconds = kill_and_time(pool, layout, moment, ending, rank, folder)
        seconds_of.setdefault(moment, []).append(seconds)
        print(f"{moment}, {ending}, rank {rank} of {layout}: {seconds:.2f} s", flush=True)
    count = sum(map(len, seconds_of.values()))
    worst = {moment: f"{max(seconds):.2f}" for moment, seconds in seconds_of.items()}
    print(f"{count} kills, 0 hangs; slowest end by moment, in seconds: {worst}")
    assert count >= 100
    assert max(itertools.chain(*seconds_of.values())) < 30


def test_the_others_are_told(pool: Pool, tmp_path: Path) -> None:
    """The refusal of one rank is raised, not the errors of those that wait for it."""

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
