"""Elastic jobs that lose and gain nodes: no sample is lost or repeated, and losses are equal."""

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
from tests.launching.elastic_nodes import (
    IsolatedNodes,
    Nodes,
    can_isolate,
    nodes,
    process_tree,
    read_lines,
    read_losses,
    samples_of_steps,
    wait_until,
)


def check_run(folder: Path, steps: int) -> None:
    """Compare samples and losses of every step with an uninterrupted run on one rank; each epoch
    uses every sample once."""
    order: list[list[int]] = []

    class Keeps(elastic_run.Seen):
        def on_step(self, trainer: object) -> None:
            order.append(sorted(self.numbers))
            self.numbers.clear()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(elastic_run, "Seen", Keeps)
        expected = elastic_run.train(None, steps, [], 0.0)
    observed = samples_of_steps(read_lines(folder))
    assert list(observed)[:steps] == list(range(1, steps + 1))
    assert list(observed.values())[:steps] == order
    epoch_steps = elastic_run.SAMPLES // elastic_run.ROWS
    for start in range(0, steps - epoch_steps + 1, epoch_steps):
        epoch = Counter(number for step in order[start : start + epoch_steps] for number in step)
        assert epoch == Counter(range(elastic_run.SAMPLES))
    loss_of = read_losses(folder)
    assert loss_of.keys() >= expected.losses.keys()
    for step, value in expected.losses.items():
        assert math.isclose(loss_of[step], value, rel_tol=1e-9), step


def test_a_node_is_lost_and_one_comes(tmp_path: Path) -> None:
    """Two nodes, one of which is killed within a step, go on as one, and with a new one as two."""
    with nodes(tmp_path, 12, 0, 4, 8) as job:
        for number in (1, 2):
            job.start(number)
        wait_until(lambda: count_ranks(job, 4, 2) == 2, job)
        job.kill(2)
        (tmp_path / "go.4").touch()
        wait_until(lambda: count_ranks(job, 8, 1) == 1, job)
        job.start(3)
        wait_until(lambda: count_ranks(job, 8, 2) == 2, job)
        (tmp_path / "go.8").touch()
        wait_until(lambda: count_ranks(job, 12, 2) == 2, job)
        for node in list(job.alive.values()):
            assert node.wait(600) == 0, job.said()
        job.alive.clear()
    check_run(tmp_path, 12)


def count_ranks(job: Nodes, step: int, ranks: int) -> int:
    """Count the ranks, in a round of so many, that have reported a step."""
    matching = [line for line in read_lines(job.folder) if (line.step, line.ranks) == (step, ranks)]
    newest = max((line.round for line in matching), default=0)
    return sum(line.round == newest for line in matching)


MEET = """
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


def start_meeting(plan: str) -> list[Any]:
    """Start two ranks that meet, with different restart counts of their nodes."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "job"}
    job = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCHELASTIC_MAX_RESTARTS": "9", **address}
    rank_names = {"RANK", "TORCHELASTIC_RESTART_COUNT"}
    environs = (
        dict.fromkeys(rank_names, str(rank)) | {"WORLD_SIZE": "2"} | job for rank in range(2)
    )
    return [
        forks.start_python("-c", MEET, plan, env={**os.environ, **variables})
        for variables in environs
    ]


MEETINGS = ("plans", "rank 1 stands still", "rank 0 stands still")
Meetings = dict[str, list[Any]]


@pytest.fixture(scope="module")
def meetings() -> Iterator[Meetings]:
    """Yield a job of each kind: they wait for seconds, so they run at the same time."""
    jobs = {plan: start_meeting(plan) for plan in MEETINGS}
    try:
        yield jobs
    finally:
        for rank in itertools.chain(*jobs.values()):
            rank.kill()
            rank.communicate()


@pytest.mark.parametrize("how", MEETINGS[:2])
def test_ranks_meet_before_they_join(how: str, meetings: Meetings) -> None:
    """A slow rank is waited for, and one that hangs is named."""
    output = meetings[how][0].communicate(timeout=600)[0].splitlines()
    last = "[0, 10]" if how == "plans" else "S651 rank 1 has not called `build` within 6 s"
    assert output == ["[0, 1] 0", last]


def test_the_first_rank_stands_still(meetings: Meetings) -> None:
    """Rank 0 hosts the store, which no longer answers: the other rank ends with a message, although
    its request has no timeout."""
    process = meetings["rank 0 stands still"][1]
    output, errors = process.communicate(timeout=600)
    assert output.splitlines() == ["[0, 1] 0"] and process.returncode == store_watch.EXIT_CODE, (
        errors
    )
    assert "S651" in errors and "has not answered for 4 s" in errors, errors


def test_a_store_that_takes_connections_and_says_nothing() -> None:
    """As one whose machine is cut off while a rank connects: that wait has no timeout either."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        code = "from schedlang.runtime.comm import agreement, store_watch\n"
        code += "store_watch.LOST_AFTER = 4.0\n"
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(silent.getsockname()[1])}
        job = {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "job"}
        environ = {**os.environ, **address, **job, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        process = forks.run("-c", f"{code}agreement.rendezvous(20.0)", env=environ, timeout=600)
    assert process.returncode == store_watch.EXIT_CODE, process.stderr
    assert "S651" in process.stderr and "has not answered for 4 s" in process.stderr


def test_a_store_counts_as_lost_by_time_in_which_this_process_ran(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that was stopped itself asks again before it ends; another one ends once."""
    clock, ends = [0.0], list[float]()
    monkeypatch.setattr(store_watch, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    watch = store_watch.StoreWatch(object, 25.0, ends.append)
    for second in (*range(1, 20), *range(100, 106)):  # stopped for 80 s
        clock[0] = float(second)
        watch.check()
    assert not ends and not watch.ended.is_set()
    clock[0] = 107.0
    watch.check()
    assert ends == [25.0] and watch.ended.is_set()


MINUTES = float(os.environ.get("SCHEDLANG_ELASTIC_MINUTES", "3"))
MAX_NODES = 4  # nodes at once
END_SECONDS = 60.0  # seconds in which the other ranks end, also in a round that just begins


@pytest.mark.deep
@pytest.mark.skipif(not can_isolate(), reason="needs unprivileged network namespaces, and `ip`")
def test_nodes_come_and_go_at_random(tmp_path: Path) -> None:
    """Nodes with their own networks are killed, cut off, stopped and added for minutes: no sample
    is lost or repeated, and every loss is that of an uninterrupted run."""
    draw = random.Random(int(os.environ.get("SCHEDLANG_ELASTIC_SEED", "1")))
    job = IsolatedNodes(tmp_path, [str(10**6), "0.1"])
    end_seconds: dict[str, list[float]] = defaultdict(list)
    try:
        job.store()
        job.start(1)
        job.start(2)
        wait_until(lambda: bool(read_lines(tmp_path)), job)
        begin, number = time.monotonic(), 2
        while time.monotonic() - begin < 60 * MINUTES:
            time.sleep(draw.uniform(1, 25))
            if gone := job.gone():
                print(f"{time.monotonic() - begin:.0f} s: agents of {gone} gave up", flush=True)
                job.anew()
            act = draw.choice(["add", "kill", "kill", "cut", "stop"])
            if act == "add" or len(job.alive) < 2:
                if len(job.alive) < MAX_NODES:
                    job.start(number := number + 1)
                continue
            node = draw.choice(sorted(job.alive))
            end_seconds[act] += (ended := lose_node(job, act, node))
            note = f"{time.monotonic() - begin:.0f} s: {act} {node}, ended after {ended}"
            print(f"{note}, {len(job.alive)} nodes left", flush=True)
        last = last_step(tmp_path)
        if job.gone() or not job.alive:
            job.anew()
            job.start(number + 1)
        wait_until(lambda: last_step(tmp_path) > last + 1, job, 300)  # the job goes on
    finally:
        job.end()
    rounds = {(line.round, line.ranks) for line in read_lines(tmp_path)}
    steps = last_step(tmp_path) - 1  # the last may have been reported by some ranks only
    print(f"{steps} steps in {len(rounds)} rounds of {Counter(n for _, n in sorted(rounds))} ranks")
    print(
        {
            act: f"{len(s)} times, slowest end {max(s, default=0):.1f} s"
            for act, s in end_seconds.items()
        }
    )
    check_run(tmp_path, steps)
    assert all(seconds < END_SECONDS for ended in end_seconds.values() for seconds in ended)


def lose_node(job: IsolatedNodes, act: str, node: int) -> list[float]:
    """Lose a node in some way: return the seconds until all other ranks have ended, if any ran."""
    all_ranks = job.ranks()
    node_ranks = {pid for pid in all_ranks if pid in process_tree(job.alive[node].pid)}
    start = time.monotonic()
    if act == "kill":
        job.kill(node)
    elif act == "cut":
        job.cut(node)
    else:
        for pid in node_ranks:
            os.kill(pid, signal.SIGSTOP)
    survivors = all_ranks - node_ranks
    end = start + 90
    while survivors & job.ranks() and time.monotonic() < end:
        time.sleep(0.02)
    seconds = time.monotonic() - start
    if act == "cut":
        job.kill(node)  # as a cluster manager would
    return [seconds] if survivors and node_ranks else []


def last_step(folder: Path) -> int:
    return max((line.step for line in read_lines(folder)), default=0)
