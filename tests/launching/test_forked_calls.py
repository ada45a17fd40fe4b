"""Calls side by side in forks of a process: their results, and what happens if a fork fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from schedlang.cli import app
from schedlang.runtime.launch import forked_calls
from schedlang.runtime.launch.forked_calls import CallsAhead, call_side_by_side

ROOT = Path(__file__).parents[2]
HERE = os.getpid()


@pytest.fixture(autouse=True)
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow a fork of the process of the tests, whose threads these functions do not need."""
    monkeypatch.setattr(forked_calls, "can_fork", lambda: True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})


def numbered(number: int) -> tuple[int, int]:
    """Return a number, and the process that ran this."""
    return number, os.getpid()


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_results_are_in_order(count: int) -> None:
    """All results are there in the order of the calls, from few processes; this one is the first.

    Large results do not block a fork.
    """
    results = call_side_by_side([partial(numbered, number) for number in range(count)])
    assert [number for number, _ in results] == [*range(count)]
    assert results[0][1] == HERE
    assert len({process for _, process in results}) == min(count, forked_calls.MAX_PROCESSES)
    large: list[Callable[[], bytes]] = [lambda: bytes(1 << 22)] * 2
    assert call_side_by_side(large) == [bytes(1 << 22)] * 2


def test_a_fork_that_fails_or_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls are made here: by an error in it, its death, a result that cannot be sent, time."""

    def in_forks(action: Callable[[], object]) -> int:
        if os.getpid() != HERE:
            action()
        return os.getpid()

    monkeypatch.setattr(forked_calls, "PATIENCE", 0.2)
    end, late = partial(os._exit, 1), partial(time.sleep, 60)
    actions: list[Callable[[], object]] = [lambda: 1 / 0, end, late]
    for action in actions:
        calls: list[Callable[[], int]] = [os.getpid, partial(in_forks, action)]
        assert call_side_by_side(calls) == [HERE, HERE]
    functions: list[Callable[[], Callable[[], int]]] = [lambda: os.getpid, lambda: lambda: 1]
    assert call_side_by_side(functions)[1]() == 1  # a function of this test cannot be sent


def test_calls_ahead_meet() -> None:
    """A fork makes the calls from the last one on, and both processes make each at most once but
    for the one at which they meet."""
    calls = CallsAhead([partial(slowly, number) for number in range(8)])
    try:
        results = [calls(index) for index in range(8)]
    finally:
        calls.end()
    assert [number for number, _ in results] == [*range(8)]
    assert results[0][1] == HERE != results[7][1]
    here = [process == HERE for _, process in results]
    assert here == sorted(here, reverse=True) and 1 <= sum(here) < 8


def slowly(number: int) -> tuple[int, int]:
    """Return as `numbered`, after a while."""
    time.sleep(0.05)
    return numbered(number)


def test_calls_ahead_of_a_fork_that_fails_or_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls of such a fork are made here, and errors are raised here."""

    def in_forks(action: Callable[[], object]) -> int:
        if os.getpid() != HERE:
            action()
        return os.getpid()

    monkeypatch.setattr(forked_calls, "PATIENCE", 0.2)
    actions: list[Callable[[], object]] = [
        lambda: 1 / 0,
        partial(os._exit, 1),
        partial(time.sleep, 60),
    ]
    for action in actions:
        calls = CallsAhead([os.getpid, partial(in_forks, action)])
        assert [calls(0), calls(1)] == [HERE, HERE]
        calls.end()
    unsent: CallsAhead[object] = CallsAhead([lambda: os.getpid, lambda: lambda: 1])
    assert callable(unsent(1)) and unsent(0) is os.getpid
    failing = CallsAhead([os.getpid, lambda: 1 // 0])
    with pytest.raises(ZeroDivisionError):
        failing(1)


def test_no_process_can_be_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """All calls are made here where the system forks no process."""

    def fail() -> int:
        raise OSError

    monkeypatch.setattr(os, "fork", fail)
    assert call_side_by_side([os.getpid, os.getpid]) == [HERE, HERE]
    calls = CallsAhead([os.getpid, os.getpid])
    assert [calls(0), calls(1)] == [HERE, HERE]


def test_errors_are_raised_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of a call, in a fork or here, is raised, and no fork is left."""
    forks, fork = list[int](), os.fork

    def noted_fork() -> int:
        forks.append(fork())
        return forks[-1]

    def fail() -> int:
        raise LookupError

    def wait() -> int:
        time.sleep(60)
        return 0

    monkeypatch.setattr(os, "fork", noted_fork)
    for functions in ([os.getpid, fail], [fail, wait]):
        with pytest.raises(LookupError):
            call_side_by_side(functions)
        with pytest.raises(ChildProcessError):
            os.waitpid(forks[-1], os.WNOHANG)


PLAN = """
import os
import sys
from schedlang.verbs.inputs import use_one_thread

use_one_thread()  # as the verb does, before anything imports numpy
from schedlang.passes.simulate import simulated_ranks
from schedlang.runtime.launch import forked_calls

simulated_ranks.MANY_MODULES = 0
os.sched_getaffinity = lambda pid: {0, 1}
count = forked_calls._Fork.results
def results(self, deadline):
    given = count(self, deadline)
    print("fork", given is not None, file=sys.stderr)
    return given
forked_calls._Fork.results = results
from schedlang.cli import main
main()
"""


def test_a_plan_with_forks() -> None:
    """`plan` simulates the kinds of ranks of a large model in forks, and says the same."""
    file = "examples/llama/3d.sched"
    expected = CliRunner().invoke(app, ["plan", str(ROOT / file), "--json"]).stdout
    threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")  # the verb sets them
    process = subprocess.run(
        [sys.executable, "-c", PLAN, "plan", str(ROOT / file), "--json"],
        env={**{k: v for k, v in os.environ.items() if k not in threads}, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout) == json.loads(expected)
    assert "fork True" in process.stderr and "fork False" not in process.stderr
