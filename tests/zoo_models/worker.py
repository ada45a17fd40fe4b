"""Worker processes for cells, so that a hang or too much memory affects only one cell."""

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

from tests.zoo_models.cell import Verdict, judge_cell

LIMIT = 300.0  # CPU seconds per cell, including building its model
WALL_FACTOR = 10.0  # wall-clock limit as a multiple of LIMIT, as other processes compute too
MEMORY = 8 << 30  # bytes of data of a process
NOT_TINY = "left out"
Job = tuple[str, list[str]]  # a model, and the meshes still to judge


@dataclass
class Worker:
    """Judges models one after the other, each in a new process, which frees its memory."""

    kind: str = ""
    left: list[str] = field(default_factory=list)
    since: tuple[float, float] = (0.0, 0.0)
    process: Any = None
    pipe: Connection | None = None

    def give(self, kind: str, meshes: list[str]) -> None:
        """Start judging a model."""
        self.end()
        parent_pipe, child_pipe = mp.Pipe()
        self.process = mp.get_context("fork").Process(target=_serve, args=(child_pipe,))
        self.process.start()
        child_pipe.close()
        self.pipe = parent_pipe
        self.kind, self.left, self.since = kind, list(meshes), self.clocks()
        self.pipe.send((kind, tuple(meshes)))

    def clocks(self) -> tuple[float, float]:
        """Return CPU seconds of the process, and wall-clock seconds."""
        name = Path(f"/proc/{self.process.pid}/stat")
        fields = name.read_text().rpartition(")")[2].split() if name.exists() else []
        ticks = int(fields[11]) + int(fields[12]) if fields else 0
        return ticks / os.sysconf("SC_CLK_TCK"), time.monotonic()

    def end(self) -> None:
        """Kill the process."""
        if self.process is not None and self.pipe is not None:
            self.process.kill()
            self.process.join()
            self.pipe.close()
        self.process = None

    def heard(self) -> Iterator[Verdict]:
        """Yield finished verdicts; if the process died or is too slow, a failed one."""
        assert self.pipe is not None
        try:
            while self.left and self.pipe.poll():
                verdict = self.pipe.recv()
                self.since = self.clocks()
                self.left.remove(verdict.mesh)
                yield verdict
            computed, elapsed = (
                current - earlier for current, earlier in zip(self.clocks(), self.since)
            )
            if not self.left or (computed < LIMIT and elapsed < WALL_FACTOR * LIMIT):
                return
            reason = f"time: more than {LIMIT:g} s"
        except (EOFError, ConnectionResetError):
            self.process.join(5)
            reason = f"the process ended (exit code {self.process.exitcode})"
        self.end()
        yield Verdict(self.kind, self.left.pop(0), "failed", reason)


def verdicts(jobs: Sequence[Job], at_once: int = 1) -> Iterator[Verdict]:
    """Yield the verdicts of all cells as they finish."""
    queue_ = [(kind, list(meshes)) for kind, meshes in jobs if meshes]
    workers = [Worker() for _ in range(at_once)]
    try:
        while queue_ or any(worker.left for worker in workers):
            for worker in workers:
                if worker.left and worker.process is None:  # ended: a new process
                    worker.give(worker.kind, worker.left)
                elif not worker.left and queue_:
                    worker.give(*queue_.pop(0))
            wait([w.pipe for w in workers if w.left and w.pipe is not None], timeout=1.0)
            for worker in workers:
                if worker.left and worker.process is not None:
                    yield from worker.heard()
    finally:
        for worker in workers:
            worker.end()


def _serve(pipe: Connection) -> None:
    """Main loop of the process: judge the received models."""
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
    from tests.zoo_models.cases import make_subject

    try:
        subject_ = make_subject(kind)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"[:300]
        yield from (Verdict(kind, mesh, NOT_TINY, reason) for mesh in meshes)
        return
    yield from (judge_cell(subject_, mesh) for mesh in meshes)
