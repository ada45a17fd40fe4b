"""Cells in processes of their own, so that one that hangs or eats all memory ends alone."""

from __future__ import annotations

import multiprocessing as mp
import os
import resource
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.zoo_models.cell import Verdict, judged

LIMIT = 300.0  # seconds of computing for a cell, those of making its model among them
SLEEPING = 10.0  # as many times as long may it take where others compute too
MEMORY = 8 << 30  # bytes of data of a process
NOT_TINY = "left out"
Job = tuple[str, list[str]]  # a model, and the meshes that are left to do


@dataclass
class Worker:
    """Judges one model after the other, each in a process of its own, whose memory goes with it."""

    kind: str = ""
    left: list[str] = field(default_factory=list)
    since: tuple[float, float] = (0.0, 0.0)
    process: Any = None
    pipe: Connection | None = None

    def give(self, kind: str, meshes: list[str]) -> None:
        """Let it judge a model."""
        self.end()
        mine, theirs = mp.Pipe()
        self.process = mp.get_context("fork").Process(target=_serve, args=(theirs,))
        self.process.start()
        theirs.close()
        self.pipe = mine
        self.kind, self.left, self.since = kind, list(meshes), self.clocks()
        self.pipe.send((kind, tuple(meshes)))

    def clocks(self) -> tuple[float, float]:
        """Seconds that it has computed, and those of a clock."""
        name = Path(f"/proc/{self.process.pid}/stat")
        fields = name.read_text().rpartition(")")[2].split() if name.exists() else []
        ticks = int(fields[11]) + int(fields[12]) if fields else 0
        return ticks / os.sysconf("SC_CLK_TCK"), time.monotonic()

    def end(self) -> None:
        """Nothing more of this process."""
        if self.process is not None and self.pipe is not None:
            self.process.kill()
            self.process.join()
            self.pipe.close()
        self.process = None

    def heard(self) -> Iterator[Verdict]:
        """What it has told; where it is gone or late, a verdict that says so."""
        assert self.pipe is not None
        try:
            while self.left and self.pipe.poll():
                verdict = self.pipe.recv()
                self.since = self.clocks()
                self.left.remove(verdict.mesh)
                yield verdict
            computed, passed = (now - then for now, then in zip(self.clocks(), self.since))
            if not self.left or (computed < LIMIT and passed < SLEEPING * LIMIT):
                return
            why = f"time: more than {LIMIT:g} s"
        except (EOFError, ConnectionResetError):
            self.process.join(5)
            why = f"the process ended (exit code {self.process.exitcode})"
        self.end()
        yield Verdict(self.kind, self.left.pop(0), "failed", why)


def verdicts(jobs: Sequence[Job], at_once: int = 1) -> Iterator[Verdict]:
    """The verdict of every cell, as they come."""
    waiting = [(kind, list(meshes)) for kind, meshes in jobs if meshes]
    workers = [Worker() for _ in range(at_once)]
    try:
        while waiting or any(worker.left for worker in workers):
            for worker in workers:
                if worker.left and worker.process is None:  # it ended: the rest in a new one
                    worker.give(worker.kind, worker.left)
                elif not worker.left and waiting:
                    worker.give(*waiting.pop(0))
            wait([w.pipe for w in workers if w.left and w.pipe is not None], timeout=1.0)
            for worker in workers:
                if worker.left and worker.process is not None:
                    yield from worker.heard()
    finally:
        for worker in workers:
            worker.end()


def _serve(pipe: Connection) -> None:
    """In the process: judge what is given."""
    import torch

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    while True:
        try:
            kind, meshes = pipe.recv()
        except EOFError:
            return
        for verdict in _judged(kind, meshes):
            pipe.send(verdict)


def _judged(kind: str, meshes: Sequence[str]) -> Iterator[Verdict]:
    from tests.zoo_models.cases import subject

    try:
        made = subject(kind)
    except Exception as error:
        told = f"{type(error).__name__}: {error}"[:300]
        yield from (Verdict(kind, mesh, NOT_TINY, told) for mesh in meshes)
        return
    yield from (judged(made, mesh) for mesh in meshes)
