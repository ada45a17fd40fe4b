"""Jobs that lose nodes and gain some: no sample is lost or doubled, and losses stay."""

from __future__ import annotations

import itertools
import math
import os
import random
import signal
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from schedlang.runtime.comm import store_watch
from tests import forks
from tests.launching import elastic_run
from tests.launching.agents import (
    Apart,
    Nodes,
    apart_can,
    lines,
    losses,
    nodes,
    samples_of_steps,
    tree,
    until,
)


def check(folder: Path, steps: int) -> None:
    """Every step has the samples and the loss of an undisturbed run on one rank; of each epoch
    every sample was seen once."""
    order: list[list[int]] = []

    class Keeps(elastic_run.Seen):
        def on_step(self, trainer: object) -> None:
            order.append(sorted(self.numbers))
            self.numbers.clear()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(elastic_run, "Seen", Keeps)
        whole = elastic_run.trained(None, steps, [], 0.0)
    seen = samples_of_steps(lines(folder))
    assert list(seen)[:steps] == list(range(1, steps + 1))
    assert list(seen.values())[:steps] == order
    each = elastic_run.SAMPLES // elastic_run.ROWS
    for first in range(0, steps - each + 1, each):
        epoch = Counter(number for step in order[first : first + each] for number in step)
        assert epoch == Counter(range(elastic_run.SAMPLES))
    found = losses(folder)
    assert found.keys() >= whole.losses.keys()
    for step, value in whole.losses.items():
        assert math.isclose(found[step], value, rel_tol=1e-9), step


def test_a_node_is_lost_and_one_comes(tmp_path: Path) -> None:
    """Two nodes, of which one is killed within a step, go on as one, and with a new one as two."""
    with nodes(tmp_path, 12, 0, 4, 8) as job:
        for number in (1, 2):
            job.start(number)
        until(lambda: _at(job, 4, 2) == 2, job)
        job.kill(2)
        (tmp_path / "go.4").touch()
        until(lambda: _at(job, 8, 1) == 1, job)
        job.start(3)
        until(lambda: _at(job, 8, 2) == 2, job)
        (tmp_path / "go.8").touch()
        until(lambda: _at(job, 12, 2) == 2, job)
        for one in list(job.alive.values()):
            assert one.wait(600) == 0, job.said()
        job.alive.clear()
    check(tmp_path, 12)


def _at(job: Nodes, step: int, ranks: int) -> int:
    """How many ranks of a job of so many have told of a step."""
    told = [line for line in lines(job.folder) if (line.step, line.ranks) == (step, ranks)]
    last = max((line.round for line in told), default=0)
    return sum(line.round == last for line in told)


MEETS = """
import os, signal, sys, time
from schedlang import Refusal, elastic
from schedlang.runtime.comm import store_watch
elastic.ARRIVAL_TIMEOUT, elastic._CHECK_INTERVAL, store_watch.LOST_AFTER = 6.0, 1.0, 4.0
met = elastic.Rendezvous()
print(met.gather_values(met.rank), met.from_first_rank(met.rank), flush=True)
if sys.argv[1] == f"rank {met.rank} stands still":
    time.sleep(2)  # until the other one, too, has its answers: rank 0 keeps them
    os.kill(os.getpid(), signal.SIGSTOP)
if met.rank == 1:
    time.sleep(9)  # it plans, and says that it is there
try:
    print(met.gather_values(10 * met.rank), flush=True)
except Refusal as refusal:
    print(refusal.diagnostic.code, refusal.diagnostic.title, flush=True)
os._exit(0)
"""


def meeting(how: str) -> list[Any]:
    """Two ranks that meet, whatever number of restarts their nodes count."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "job"}
    job = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCHELASTIC_MAX_RESTARTS": "9", **place}
    of = {"RANK", "TORCHELASTIC_RESTART_COUNT"}
    environs = (dict.fromkeys(of, str(rank)) | {"WORLD_SIZE": "2"} | job for rank in range(2))
    return [forks.begin("-c", MEETS, how, env={**os.environ, **one}) for one in environs]


HOW = ("plans", "rank 1 stands still", "rank 0 stands still")
Meetings = dict[str, list[Any]]


@pytest.fixture(scope="module")
def meetings() -> Iterator[Meetings]:
    """A job of each kind: they wait for seconds, so they wait together."""
    jobs = {how: meeting(how) for how in HOW}
    try:
        yield jobs
    finally:
        for rank in itertools.chain(*jobs.values()):
            rank.kill()
            rank.communicate()


@pytest.mark.parametrize("how", HOW[:2])
def test_ranks_meet_before_they_join(how: str, meetings: Meetings) -> None:
    """One that takes long is awaited, and one that stands still is named."""
    told = meetings[how][0].communicate(timeout=600)[0].splitlines()
    last = "[0, 10]" if how == "plans" else "S651 rank 1 has not called `build` within 6 s"
    assert told == ["[0, 1] 0", last]


def test_the_first_rank_stands_still(meetings: Meetings) -> None:
    """It keeps the store of the round, which answers nobody any more: the other ends, and says
    so, although it waits for that answer without an end."""
    other = meetings["rank 0 stands still"][1]
    told, said = other.communicate(timeout=600)
    assert told.splitlines() == ["[0, 1] 0"] and other.returncode == store_watch.EXIT_CODE, said
    assert "S651" in said and "has not answered for 4 s" in said, said


def test_a_store_that_takes_connections_and_says_nothing() -> None:
    """As one whose machine is cut off while a rank connects: that waits without an end, too."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        code = "from schedlang.runtime.comm import agreement, store_watch\n"
        code += "store_watch.LOST_AFTER = 4.0\n"
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(silent.getsockname()[1])}
        job = {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "job"}
        environ = {**os.environ, **place, **job, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        done = forks.run("-c", f"{code}agreement.rendezvous(20.0)", env=environ, timeout=600)
    assert done.returncode == store_watch.EXIT_CODE, done.stderr
    assert "S651" in done.stderr and "has not answered for 4 s" in done.stderr


def test_a_store_counts_as_lost_by_time_in_which_this_process_ran(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that was stopped itself asks again before it ends; one that was not ends once."""
    now, ends = [0.0], list[float]()
    monkeypatch.setattr(store_watch, "time", SimpleNamespace(monotonic=lambda: now[0]))
    found = store_watch.StoreWatch(object, 25.0, ends.append)
    for at in (*range(1, 20), *range(100, 106)):  # stopped for 80 s
        now[0] = float(at)
        found.check()
    assert not ends and not found.ended.is_set()
    now[0] = 107.0
    found.check()
    assert ends == [25.0] and found.ended.is_set()


MINUTES = float(os.environ.get("SCHEDLANG_ELASTIC_MINUTES", "3"))
MOST = 4  # nodes at once
ENDS = 60.0  # seconds in which the ranks of the others end, also of a round that just begins


@pytest.mark.deep
@pytest.mark.skipif(not apart_can(), reason="needs unprivileged network namespaces, and `ip`")
def test_nodes_come_and_go_at_random(tmp_path: Path) -> None:
    """Nodes with networks of their own are killed, cut off, stopped and added for minutes: no
    sample is lost or doubled, and every loss is that of an undisturbed run."""
    draw = random.Random(int(os.environ.get("SCHEDLANG_ELASTIC_SEED", "1")))
    job = Apart(tmp_path, [str(10**6), "0.1"])
    took: dict[str, list[float]] = defaultdict(list)
    try:
        job.store()
        job.start(1)
        job.start(2)
        until(lambda: bool(lines(tmp_path)), job)
        begin, number = time.monotonic(), 2
        while time.monotonic() - begin < 60 * MINUTES:
            time.sleep(draw.uniform(1, 25))
            if gone := job.gone():
                print(f"{time.monotonic() - begin:.0f} s: agents of {gone} gave up", flush=True)
                job.anew()
            act = draw.choice(["add", "kill", "kill", "cut", "stop"])
            if act == "add" or len(job.alive) < 2:
                if len(job.alive) < MOST:
                    job.start(number := number + 1)
                continue
            whom = draw.choice(sorted(job.alive))
            took[act] += (ended := _lost(job, act, whom))
            note = f"{time.monotonic() - begin:.0f} s: {act} {whom}, ended after {ended}"
            print(f"{note}, {len(job.alive)} nodes left", flush=True)
        last = _last(tmp_path)
        if job.gone() or not job.alive:
            job.anew()
            job.start(number + 1)
        until(lambda: _last(tmp_path) > last + 1, job, 300)  # it goes on
    finally:
        job.end()
    rounds = {(line.round, line.ranks) for line in lines(tmp_path)}
    steps = _last(tmp_path) - 1  # the last may have been told by some ranks only
    print(f"{steps} steps in {len(rounds)} rounds of {Counter(n for _, n in sorted(rounds))} ranks")
    print(
        {act: f"{len(s)} times, slowest end {max(s, default=0):.1f} s" for act, s in took.items()}
    )
    check(tmp_path, steps)
    assert all(seconds < ENDS for ended in took.values() for seconds in ended)


def _lost(job: Apart, act: str, whom: int) -> list[float]:
    """Lose a node in some way; the seconds until all ranks of the others have ended, if any ran."""
    theirs = job.ranks()
    ours = {pid for pid in theirs if pid in tree(job.alive[whom].pid)}
    start = time.monotonic()
    if act == "kill":
        job.kill(whom)
    elif act == "cut":
        job.cut(whom)
    else:
        for pid in ours:
            os.kill(pid, signal.SIGSTOP)
    others = theirs - ours
    end = start + 90
    while others & job.ranks() and time.monotonic() < end:
        time.sleep(0.02)
    seconds = time.monotonic() - start
    if act == "cut":
        job.kill(whom)  # as whoever looks after a cluster would
    return [seconds] if others and ours else []


def _last(folder: Path) -> int:
    return max((line.step for line in lines(folder)), default=0)
