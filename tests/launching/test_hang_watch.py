"""The hang watch under torchrun: a job without progress on any rank ends, others do not."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from schedlang.runtime.checkpointing.background import BackgroundSave
from schedlang.runtime.comm import store_watch
from schedlang.runtime.comm import world as comm
from schedlang.runtime.launch import hang_watch, rank_job
from schedlang.runtime.launch.hang_watch import HangWatch, waits_for_ranks
from tests import forks

ROOT = Path(__file__).parents[2]

SCRIPT = '''
"""A loop of one's own, in which rank 1 is away for a while, and then never comes back."""

import os
import sys
import time

import torch
from torch import nn

import schedlang
from schedlang.runtime.launch import hang_watch

hang_watch.HANG_AFTER = 4.0
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
batch = {"input": torch.randn(4, 8)}
sch = schedlang.create_schedule(model)
sch.mesh(tp=2)
sch["0"].shard("col", over="tp")
sch["1"].shard("row", over="tp")
program = sch.build(batch=batch, loss=lambda output, batch: output.pow(2).mean())
away = os.environ["RANK"] == "1"


def never_comes_back():
    time.sleep(1000)


for step in range(3):
    if away and step == 1:
        time.sleep(8)  # outside of a step: reading data, say
    if away and step == 2:
        program.module[0].register_forward_hook(lambda *given: never_comes_back())
    program.train_step(batch)
    os.write(1, f"made step {step}\\n".encode())  # in one piece, beside the other rank

'''


def run_torchrun(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a job of two ranks."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return forks.run(*start, *arguments, cwd=ROOT, timeout=300, env=environ)


def test_a_script_of_ones_own(tmp_path: Path) -> None:
    """A rank that is away between two steps is waited for; one that hangs in a step ends the job,
    with each rank's line reported once."""
    (tmp_path / "train.py").write_text(SCRIPT)
    process = run_torchrun(tmp_path / "train.py")
    assert process.returncode, process.stderr
    assert process.stdout.count("made step 1") == 2 and "made step 2" not in process.stdout
    assert process.stderr.count("no rank made progress for 4 s") == 1, process.stderr
    rank0_part, _, rank1_part = process.stderr.partition("rank 1:\n")
    assert "rank 0:\n" in rank0_part and "distributed_c10d.py" in rank0_part
    assert "in never_comes_back" in rank1_part.splitlines()[0], process.stderr
    assert "exitcode  : 3" in process.stderr


def test_a_rank_that_never_comes(tmp_path: Path) -> None:
    """A rank that torchrun started, but that neither calls `build` nor joins the job, is named by
    the others, which do not wait for minutes."""
    (tmp_path / "train.py").write_text(
        "import os, time\nif os.environ['RANK'] == '1':\n    time.sleep(1000)\n"
        + SCRIPT.replace("sch.build(", "sch.build(wait=3, ")
    )
    process = run_torchrun(tmp_path / "train.py")
    assert (
        process.returncode
        and process.stderr.count("error[S651]: rank 1 has not called `build`") == 1
    )
    assert "within 3 s" in process.stderr


MODEL = '''
"""A model that waits for ever on one rank, in its third step."""

import os
import time

import torch
from torch import nn

from schedlang.runtime.launch import hang_watch

hang_watch.HANG_AFTER = 4.0
calls = 0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        global calls
        calls += 1
        if os.environ.get("RANK") == "1" and calls > 30:
            time.sleep(1000)
        return self.down(torch.relu(self.up(x)))


def model():
    return Net()


def batch(seed):
    return {"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))}


def loss(output, batch):
    return output.pow(2).mean()
'''

SCHEDULE = """schedule 1 for Net

mesh(tp=2)

step "rows" {
  up    shard(col, over=tp)
  down  shard(row, over=tp)
}
"""


@pytest.mark.deep
def test_run_under_torchrun(tmp_path: Path) -> None:
    """`schedlang run` ends equally."""
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "net.sched").write_text(SCHEDULE)
    process = run_torchrun("-m", "schedlang", "run", tmp_path / "net.sched", "--steps", 1000)
    assert process.returncode and process.stderr.count("no rank made progress for 4 s") == 1, (
        process.stderr
    )
    assert "model.py" in process.stderr.partition("rank 1:\n")[2].splitlines()[0], process.stderr


# -- two ranks in one process ----------------------------------------------------------------------


def make_watches(hang_after: float) -> tuple[list[HangWatch], list[Any]]:
    store, ends = dist.HashStore(), []
    return [
        HangWatch(store, k, 2, hang_after, lambda text: ends.append(text)) for k in (0, 1)
    ], ends


def stop_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process use no more CPU time, as seen by the watch."""
    monkeypatch.setattr(HangWatch, "usage", lambda self: (1.0, 1.0, 1))


def test_who_asks_first_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both watches detect it at once: one asks, the other answers, and one reports."""
    monkeypatch.setattr(hang_watch, "_ANSWER", 0.2)
    stop_cpu_time(monkeypatch)
    (watch, other), ends = make_watches(hang_after=0.05)
    with waits_for_ranks():
        time.sleep(0.1)
        other.check()
        watch.check()
    assert len(ends) == 2 and [text is not None for text in ends].count(True) == 2
    message, other_message = (
        ends  # one thread runs both watches: the first could not report, so the other did
    )
    assert message == other_message and message.startswith(
        "no rank made progress for 0.05 s\nrank 0:\n  no answer"
    )
    assert "test_hang_watch.py" in message.partition("rank 1:\n")[2]


def test_one_that_is_outside_gets_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two steps a script may do anything; inside of a step it waits for others."""
    stop_cpu_time(monkeypatch)
    (watch, other), ends = make_watches(hang_after=30.0)
    for _ in range(3):
        watch.check()
    assert watch.beats == 3 and not ends
    with waits_for_ranks():
        other.check()  # it sees the others' progress
        assert other.beats == 3 and not ends and not other.makes_progress()


def test_one_in_a_collective_of_its_script_waits_for_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank whose data have ended stands in a barrier, while the others begin another step."""
    stop_cpu_time(monkeypatch)
    (watch, _), _ = make_watches(hang_after=30.0)
    got_on: list[bool] = []

    class Group:
        def barrier(self, opts: Any) -> Any:
            got_on.append(watch.makes_progress())

    monkeypatch.setattr(distributed_c10d, "_rank_not_in_group", lambda group: False)
    dist.barrier(Group(), async_op=True)  # type: ignore[arg-type]
    assert got_on == [False] and watch.makes_progress()


def test_one_that_waits_for_a_save_waits_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A main thread that waits for a blocked save makes no progress, also at process exit."""
    stop_cpu_time(monkeypatch)
    (watch, _), _ = make_watches(hang_after=30.0)
    got_on: list[bool] = []
    limits: list[float | None] = []

    class Writes:
        def join(self, timeout: float | None = None) -> None:
            got_on.append(watch.makes_progress())
            limits.append(timeout)

    saving = BackgroundSave()
    monkeypatch.delattr(sys, "last_value", raising=False)
    for wait in (saving.finish, saving._at_exit):
        saving.thread = Writes()  # type: ignore[assignment]
        wait()
    assert got_on == [False, False] and limits == [None, None]
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    saving.thread = Writes()  # type: ignore[assignment]
    saving._at_exit()  # an error ends this process, and other ranks may have ended
    assert not any(got_on) and sum(limit or 60.0 for limit in limits[2:]) <= 5


def test_one_that_works_gets_on() -> None:
    """CPU time counts as progress, and so does a debugger."""
    (one, _), ends = make_watches(hang_after=0.6)
    with waits_for_ranks():
        assert not one.makes_progress()
        end = time.process_time() + 0.3
        while time.process_time() < end:
            pass
        assert one.makes_progress()
        one.spent = None
        names = {"__name__": "pdb", "one": one}
        exec("def asks():\n    return one.makes_progress()", names)
        asks: Any = names["asks"]
        assert asks()


def test_those_that_look_are_not_those_that_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a loaded machine a watcher thread mostly waits for a processor, which says nothing of its
    rank; a main thread that waits for a processor is working."""
    for thread in ("1", "2"):
        (tmp_path / str(os.getpid()) / "task" / thread).mkdir(parents=True)

    cpu_time = {1: 1.0, 2: 1.0}

    def queued(thread: int, seconds: float) -> None:
        file = tmp_path / str(os.getpid()) / "task" / str(thread) / "schedstat"
        file.write_text(f"{int(cpu_time[thread] * 1e9)} {int(seconds * 1e9)} 1\n")

    monkeypatch.setattr(rank_job, "_PROC", tmp_path)
    monkeypatch.setattr(hang_watch, "cpu_seconds", lambda _: sum(cpu_time.values()))
    monkeypatch.setattr(hang_watch, "_disk_bytes", lambda: 0)
    monkeypatch.setattr(store_watch, "WATCHERS", {2})
    (watch, _), _ = make_watches(hang_after=30.0)
    queued(1, 5.0)
    queued(2, 5.0)
    with waits_for_ranks():
        assert not watch.makes_progress()
        cpu_time[2] = 9.0
        queued(2, 34.0)
        assert not watch.makes_progress()
        queued(1, 34.0)
        assert watch.makes_progress()
        watch.spent = None
        assert not watch.makes_progress()
        cpu_time[1] = 9.0
        assert watch.makes_progress()


def test_a_heart_looks_in_a_thread_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Watcher threads, also the store's, register themselves as not counted."""
    monkeypatch.setattr(store_watch, "WATCHERS", set())
    (watch, _), _ = make_watches(hang_after=30.0)
    store: Any = dist.HashStore  # type: ignore[attr-defined]
    store_thread = store_watch.StoreWatch(store, 25.0, lambda _: None)
    for watcher in (watch, store_thread):
        watcher.ended.set()
    for target in (watch.run, store_thread.poll_store, store_thread.check_repeatedly):
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
        assert thread.native_id in store_watch.WATCHERS


def test_a_job_that_is_played_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """An elastic job simulates steps before its ranks exist; the real job is watched, once."""
    begun: list[Any] = []
    store: Any = dist.HashStore  # type: ignore[attr-defined]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setattr(hang_watch, "_watched", False)
    monkeypatch.setattr(hang_watch, "clone_store", store)
    monkeypatch.setattr(store_watch, "_watching", True)
    monkeypatch.setattr(atexit, "register", lambda *args: begun.append(args))
    for backend in ("fake", "gloo", "gloo"):
        world = comm.World(size=2, backends={"cpu": backend})
        monkeypatch.setattr(comm, "job_world", lambda world=world: world)
        hang_watch.watch_ranks()
        assert len(begun) == int(backend == "gloo")
    stop, thread = begun[0]
    assert thread.is_alive()
    stop(thread)
    assert not thread.is_alive()


def test_what_passed_while_all_was_stopped() -> None:
    """A suspended machine, or a job stopped as a whole, is no hang."""
    (watch, _), ends = make_watches(hang_after=30.0)
    with waits_for_ranks():
        watch.check()
        watch.moved -= 100
        watch.looked -= 100  # as if the machine had been suspended
        watch.check()
    assert not ends
