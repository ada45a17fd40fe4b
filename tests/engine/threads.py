"""A pool of threads that act as ranks; replaces the pool of processes."""

from __future__ import annotations

import ctypes
import os
import pickle
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.launch import forkserver
from schedlang.runtime.launch.rank_job import Hang, RankDied
from tests.engine import globals as per_rank
from tests.engine.baton import Aborted, Baton, Deadlock
from tests.engine.exchange import Exchange
from tests.engine.faults import NONE, Faults
from tests.engine.isolate import pack_job, unpack_job
from tests.engine.private import acting_rank, current_rank, many_ranks

__runs_ranks__ = True  # as forkserver
_POLL_SECONDS = 0.25  # seconds between two looks at the ranks
_IDLE_SHARE = 1 / 30  # CPU share of one core below which the running rank counts as idle
_GRACE_SECONDS = 10.0  # seconds for the other ranks to end once one has failed

Task = Callable[[], None]


class Threads:
    """As `runtime.launch.pool.Pool`, but in this process: a rank that dies ends the tests.

    Ranks share modules and so the globals of user code; arguments and the runtime's state are
    private to each rank.
    """

    one_process = True  # patches of this process apply to every rank

    def __init__(self, faults: Faults = NONE) -> None:
        self.faults = faults
        self._workers: list[queue.SimpleQueue[Task | None]] = []
        self._lock = threading.Lock()
        self.switches = 0  # of the baton, in the last run

    def close(self) -> None:
        """Let the threads end."""
        for worker in self._workers:
            worker.put(None)
        self._workers = []

    def import_files(self, files: Mapping[str, Any], *, here: bool = False) -> None:
        """Do nothing: threads share the modules that this process has imported."""

    def __enter__(self) -> Threads:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(
        self,
        fn: Callable[..., Any],
        world: int,
        *args: Any,
        timeout: float | None = None,
        hang_after: float = 30.0,
        on_progress: Callable[[int, Any], None] | None = None,
        environ: Mapping[str, str] | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> list[Any]:
        """Call `fn(*args)` on ranks 0..world-1 and return their results by rank.

        As `Pool.run`, with the same errors: mismatched collectives raise RankDied caused by a
        Mismatch, a deadlock raises Hang at once.
        """
        assert current_rank() < 0, "a rank cannot start ranks"
        if meanwhile is not None:  # beside the ranks it would share globals with them
            meanwhile()
        progress_events = list[tuple[int, Any]]()
        with self._lock, _restored_globals(world, environ), many_ranks() as store:
            job = _Job(world, pack_job(fn, args), self.faults, store)
            while len(self._workers) < world:
                self._workers.append(_worker(len(self._workers)))
            for rank in range(world):
                self._workers[rank].put(lambda rank=rank: job.work(rank))  # type: ignore[misc]
            try:
                job.watch(
                    timeout,
                    hang_after,
                    lambda rank, message: progress_events.append((rank, message)),
                )
            except BaseException:
                self.close()  # some threads may be stuck; the next run starts new ones
                raise
            self.switches = job.baton.switches
        if on_progress is not None:  # beside the ranks it would share globals with them, too
            for event in progress_events:
                on_progress(*event)
        return [job.results[rank] for rank in range(world)]


def _worker(number: int) -> queue.SimpleQueue[Task | None]:
    tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()

    def serve() -> None:
        while (task := tasks.get()) is not None:
            task()
            del task  # frees all objects of the run

    threading.Thread(target=serve, name=f"rank {number}", daemon=True).start()
    return tasks


class _Job:
    """One job: ranks report progress in `_events`, the caller of `run` reads it."""

    def __init__(self, world: int, blob: bytes, faults: Faults, store: Any) -> None:
        self.world, self._blob, self._store = world, blob, store
        states = [per_rank.initial_state(rank) for rank in range(world)]
        self.baton = Baton(states, per_rank.save, per_rank.restore, faults.order)
        self.exchange = Exchange(self.baton, faults)
        self.results: dict[int, Any] = {}
        self._accounts: dict[int, str] = {}
        self._events: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
        self._threads: dict[int, int] = {}
        self._ended: set[int] = set()

    def work(self, rank: int) -> None:
        """Run one rank on its thread, from its first turn to its end."""
        self._threads[rank] = threading.get_ident()
        try:
            self.baton.enter(rank)
            with acting_rank(rank, self.world, self.exchange, self._store):
                fn, args = unpack_job(self._blob)
                self.results[rank] = fn(*args)
        except Aborted:
            pass
        except BaseException as error:
            self._accounts[rank] = "".join(traceback.format_exception(error))
            self.baton.fail(rank, error)
        finally:
            self._ended.add(rank)
            self.baton.leave(rank)
            self._events.put(None)

    def tell(self, message: object = None) -> None:
        """Report progress of the current rank."""
        self._events.put((current_rank(), pickle.loads(pickle.dumps(message))))

    def watch(
        self,
        timeout: float | None,
        hang_after: float,
        on_progress: Callable[[int, Any], None] | None,
    ) -> None:
        """Wait until all ranks have ended; raise the error of the job, if any."""
        forkserver.Outbox.tell = self.tell
        try:
            self.baton.begin()
            self._listen(timeout, hang_after, on_progress)
        except BaseException as error:
            self._give_up(error)
            raise
        finally:
            forkserver.Outbox.tell = None
        if self.baton.failure is not None:
            self._raise(*self.baton.failure)
        if unfinished := self.exchange.unfinished():
            raise RankDied(0, "the ranks ended with this under way:\n" + "\n".join(unfinished))

    def _give_up(self, error: BaseException) -> None:
        """End ranks that wait or run Python code."""
        self.baton.end(error)
        for rank, ident in self._threads.items():
            if rank not in self._ended:
                kind = ctypes.py_object(Aborted)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), kind)

    def _raise(self, rank: int, error: BaseException) -> None:
        if isinstance(error, Refusal):
            raise error
        if isinstance(error, Deadlock):
            raise Hang(str(error), {})
        raise RankDied(rank, self._accounts[rank], error)

    def _listen(
        self,
        timeout: float | None,
        hang_after: float,
        on_progress: Callable[[int, Any], None] | None,
    ) -> None:
        start = last_progress = time.monotonic()
        cpu_start, switches = time.process_time(), self.baton.switches
        while len(self._ended) < self.world:
            try:
                event = self._events.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                event = None
            if event is not None and on_progress is not None:
                on_progress(*event)
            time_now = time.monotonic()
            if self.baton.failure is not None and time_now - last_progress > _GRACE_SECONDS:
                self._give_up(self.baton.failure[1])
                return
            if timeout is not None and time_now - start > timeout:
                raise Hang(f"not finished after {timeout:g} s", self._stacks())
            cpu = time.process_time() - cpu_start
            if event or switches != self.baton.switches or cpu >= _IDLE_SHARE * hang_after:
                last_progress, cpu_start, switches = (
                    time_now,
                    time.process_time(),
                    self.baton.switches,
                )
            elif time_now - last_progress > hang_after:
                raise Hang(f"no rank made progress for {hang_after:g} s", self._stacks())
        while not self._events.empty():
            if (event := self._events.get()) is not None and on_progress is not None:
                on_progress(*event)

    def _stacks(self) -> dict[int, str]:
        frames = sys._current_frames()
        waits = self.baton.waiting()
        return {
            rank: f"waits for {waits[rank]}"
            if rank in waits
            else "".join(traceback.format_stack(frames[ident])[-8:])
            for rank, ident in sorted(self._threads.items())
            if rank not in self._ended and ident in frames
        }


@contextmanager
def _restored_globals(world: int, environ: Mapping[str, str] | None) -> Iterator[None]:
    """Set the environment of ranks; restore process-wide state and environment at exit."""
    state, variables = per_rank.save(), dict(os.environ)
    os.environ.update(environ or {})
    os.environ.update(WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    try:
        yield
    finally:
        per_rank.restore(state)
        for name in {*os.environ} - {*variables}:
            del os.environ[name]
        os.environ.update(variables)
