"""Cells in processes of their own, so that one that hangs or eats all memory ends alone."""

from __future__ import annotations

import multiprocessing as mp
import resource
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.zoo_models.cell import Verdict, judged

LIMIT = 120.0  # seconds of a cell
MEMORY = 8 << 30  # bytes of data of a process
NOT_TINY = "left out"


@dataclass
class Job:
    """One model and the meshes that are left to do."""

    kind: str
    meshes: list[str]
    process: Any = None
    pipe: Connection | None = None
    since: float = 0.0

    def start(self) -> None:
        """Fork a process for what is left."""
        mine, theirs = mp.get_context("fork").Pipe()
        target, args = _serve, (self.kind, tuple(self.meshes), theirs)
        self.process = mp.get_context("fork").Process(target=target, args=args, daemon=True)
        self.process.start()
        theirs.close()
        self.pipe, self.since = mine, time.monotonic()

    def end(self) -> None:
        """Nothing more of this process."""
        self.process.kill()
        self.process.join()
        assert self.pipe is not None
        self.pipe.close()


def verdicts(jobs: Sequence[tuple[str, Sequence[str]]], at_once: int = 1) -> Iterator[Verdict]:
    """The verdict of every cell, as they come."""
    waiting = [Job(kind, list(meshes)) for kind, meshes in jobs if meshes]
    running: list[Job] = []
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                running.append(waiting.pop(0))
                running[-1].start()
            wait([job.pipe for job in running if job.pipe is not None], timeout=1.0)
            for job in list(running):
                yield from _heard(job)
                if not job.meshes:
                    job.end()
                    running.remove(job)
    finally:
        for job in running:
            job.end()


def _heard(job: Job) -> Iterator[Verdict]:
    """What a process has told; one that is gone or late costs its cell, and starts again."""
    assert job.pipe is not None
    try:
        while job.meshes and job.pipe.poll():
            verdict = job.pipe.recv()
            job.since = time.monotonic()
            job.meshes.remove(verdict.mesh)
            yield verdict
        late, why = time.monotonic() - job.since > LIMIT, f"time: more than {LIMIT:g} s"
    except EOFError:
        late, why = True, f"the process ended ({_ended(job)})"
    if late and job.meshes:
        job.end()
        yield Verdict(job.kind, job.meshes.pop(0), "failed", why)
        if job.meshes:
            job.start()


def _ended(job: Job) -> str:
    job.process.join(5)
    return f"exit code {job.process.exitcode}"


def _serve(kind: str, meshes: Sequence[str], pipe: Connection) -> None:
    """In the process: make the model, and judge it on every mesh."""
    import torch

    from tests.zoo_models.cases import subject

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    try:
        made = subject(kind)
    except Exception as error:
        for mesh in meshes:
            pipe.send(Verdict(kind, mesh, NOT_TINY, f"{type(error).__name__}: {error}"[:300]))
        return
    for mesh in meshes:
        pipe.send(judged(made, mesh))
