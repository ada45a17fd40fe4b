"""Ranks as warm threads of this process: a pool to be used in place of a pool of processes."""

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
from tests.engine.isolate import packed, unpacked
from tests.engine.private import being, here, many_ranks

__runs_ranks__ = True  # as forkserver
_TICK = 0.25  # seconds between two looks at the ranks
_SLEEPING = 1 / 30  # of one core: below this the rank that computes only waits
_GRACE = 10.0  # seconds for the other ranks to end once one has failed

Task = Callable[[], None]


class Threads:
    """As `runtime.launch.pool.Pool`, in this process; what a rank loses, the tests lose.

    The ranks share modules, and with them what user code keeps in globals; arguments and all that
    the runtime holds are each rank's own.
    """

    one_process = True  # what is patched here is patched on every rank

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
        """Do nothing: what this process has imported, its threads have."""

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

        As `Pool.run`, with the same errors; a collective that ranks do not mean alike is RankDied
        with a Mismatch as its cause, one that can never come about is Hang at once.
        """
        assert here() < 0, "a rank cannot start ranks"
        if meanwhile is not None:  # beside the ranks it would share globals with them
            meanwhile()
        told = list[tuple[int, Any]]()
        with self._lock, _own_globals(world, environ), many_ranks() as store:
            run = _Run(world, packed(fn, args), self.faults, store)
            while len(self._workers) < world:
                self._workers.append(_worker(len(self._workers)))
            for rank in range(world):
                self._workers[rank].put(lambda rank=rank: run.work(rank))  # type: ignore[misc]
            try:
                run.watch(timeout, hang_after, lambda rank, what: told.append((rank, what)))
            except BaseException:
                self.close()  # some may be stuck; the next run has new ones
                raise
            self.switches = run.baton.switches
        if on_progress is not None:  # beside the ranks it would share globals with them, too
            for one in told:
                on_progress(*one)
        return [run.results[rank] for rank in range(world)]


def _worker(number: int) -> queue.SimpleQueue[Task | None]:
    tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()

    def serve() -> None:
        while (task := tasks.get()) is not None:
            task()
            del task  # and with it all that the run held

    threading.Thread(target=serve, name=f"rank {number}", daemon=True).start()
    return tasks


class _Run:
    """One job: its ranks tell what they do in `_events`, the caller of `run` listens."""

    def __init__(self, world: int, blob: bytes, faults: Faults, store: Any) -> None:
        self.world, self._blob, self._store = world, blob, store
        states = [per_rank.fresh(rank) for rank in range(world)]
        self.baton = Baton(states, per_rank.save, per_rank.restore, faults.order)
        self.exchange = Exchange(self.baton, faults)
        self.results: dict[int, Any] = {}
        self._accounts: dict[int, str] = {}
        self._events: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
        self._threads: dict[int, int] = {}
        self._ended: set[int] = set()

    def work(self, rank: int) -> None:
        """On its thread: one rank from its first turn to its end."""
        self._threads[rank] = threading.get_ident()
        try:
            self.baton.enter(rank)
            with being(rank, self.world, self.exchange, self._store):
                fn, args = unpacked(self._blob)
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
        """`progress` of the rank that computes."""
        self._events.put((here(), pickle.loads(pickle.dumps(message))))

    def watch(
        self,
        timeout: float | None,
        hang_after: float,
        on_progress: Callable[[int, Any], None] | None,
    ) -> None:
        """Until all ranks have ended; raises what went wrong."""
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
        if left := self.exchange.unfinished():
            raise RankDied(0, "the ranks ended with this under way:\n" + "\n".join(left))

    def _give_up(self, error: BaseException) -> None:
        """End what can be ended: ranks that wait, and those that run Python."""
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
        start = moved = time.monotonic()
        spent, switches = time.process_time(), self.baton.switches
        while len(self._ended) < self.world:
            try:
                event = self._events.get(timeout=_TICK)
            except queue.Empty:
                event = None
            if event is not None and on_progress is not None:
                on_progress(*event)
            now = time.monotonic()
            if self.baton.failure is not None and now - moved > _GRACE:
                self._give_up(self.baton.failure[1])
                return
            if timeout is not None and now - start > timeout:
                raise Hang(f"not finished after {timeout:g} s", self._stacks())
            cpu = time.process_time() - spent
            if event or switches != self.baton.switches or cpu >= _SLEEPING * hang_after:
                moved, spent, switches = now, time.process_time(), self.baton.switches
            elif now - moved > hang_after:
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
def _own_globals(world: int, environ: Mapping[str, str] | None) -> Iterator[None]:
    """The caller has the globals of the process again afterwards, as they were."""
    before, variables = per_rank.save(), dict(os.environ)
    os.environ.update(environ or {})
    os.environ.update(WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    try:
        yield
    finally:
        per_rank.restore(before)
        for name in {*os.environ} - {*variables}:
            del os.environ[name]
        os.environ.update(variables)
