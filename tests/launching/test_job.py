"""Failures of a job: which of several is the cause, and how it is reported."""

import pickle
import signal
import socket
from pathlib import Path

import pytest

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.launch import forkserver
from schedlang.runtime.launch.pool import Pool
from schedlang.runtime.launch.rank_job import (
    RankDied,
    RankJob,
    RankProcess,
    describe_end,
    raise_failure,
    unpickle_error,
)
from tests.engine import Threads


def failed_job(*failures) -> RankJob:
    job = RankJob(4, None)
    for failure in failures:
        job.fail(*failure)
    job.first_failure -= 60  # the time to wait for a cause is over
    return job


@pytest.mark.parametrize(
    "failures",
    [
        [(2, 0, "connection reset"), (1, 3, "cause")],
        [(1, 0, "consequence of a death"), (0, 3, "cause"), (2, 1, "reset")],
        [(1, 3, "cause")],
        [(2, 3, "cause")],
    ],
)
def test_the_cause_is_told(failures) -> None:
    """A death precedes an exception, an exception precedes a broken connection."""
    with pytest.raises(RankDied, match="cause") as info:
        raise_failure(failed_job(*failures))
    assert info.value.rank == 3


def test_a_consequence_waits_for_its_cause() -> None:
    """A broken connection alone is not reported at once; without failures nothing is."""
    job = RankJob(2, None)
    raise_failure(job)
    job.fail(2, 0, "connection reset")
    raise_failure(job)
    job.fail(0, 1, "killed")
    with pytest.raises(RankDied, match="killed"):
        raise_failure(job)


def test_a_refusal_stays_one() -> None:
    """The refusal that a rank raised is raised itself."""
    refusal = Refusal.of("S999", "not like this")
    with pytest.raises(Refusal):
        raise_failure(failed_job((1, 0, "text", refusal)))
    assert isinstance(unpickle_error(pickle.dumps(refusal)), Refusal)
    assert unpickle_error(b"") is None and unpickle_error(b"broken") is None


def test_an_account_has_the_last_words(tmp_path: Path) -> None:
    """The signal by name or the exit code, and the end of stderr."""
    log = tmp_path / "log"
    log.write_text("\n".join(f"line {i}" for i in range(50)))
    assert describe_end(-signal.SIGSEGV, log).startswith("killed by SIGSEGV\nline 30")
    assert describe_end(3, tmp_path / "none") == "ended with exit code 3"


def test_messages_arrive_whole(tmp_path: Path) -> None:
    """However the bytes are split, each message arrives once, and the end is detected."""
    receiver, sender = socket.socketpair()
    rank = RankProcess(0, receiver, tmp_path / "log")
    data = b""
    for message in ("one", {"two": [2] * 1000}):
        body = pickle.dumps(message)
        data += forkserver.HEADER.pack(len(body)) + body
    messages = []
    for piece in (data[:3], data[3:30], data[30:]):
        sender.sendall(piece)
        messages += rank.read()
    sender.close()
    assert messages == ["one", {"two": [2] * 1000}]
    assert rank.open and rank.read() == [] and not rank.open
    receiver.close()


GLOO_ABORT = (
    "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  28 vs 4"
)
THREAD = (
    'Thread 0x00007f76a54106c0 (most recent call first):\n  File "threading.py", line 982 in run'
)
CURRENT_CALLS = (
    '(most recent call first):\n  File "mine.py", line 7 in mine\n  File "launch/forkserver.py"'
)


@pytest.mark.parametrize("threads", [0, 40])
@pytest.mark.parametrize("current", ["Current thread 0x1 ", "Thread 0x1 "])
def test_the_cause_of_an_abort_stands_first(tmp_path: Path, threads: int, current: str) -> None:
    """Of all threads in a dump only the relevant one is shown."""
    log = tmp_path / "log"
    dump = "\n\n".join(
        [THREAD] * threads + [f"{current}{CURRENT_CALLS}", "Extension modules: numpy"]
    )
    log.write_text(f"{GLOO_ABORT}\nFatal Python error: Aborted\n\n{dump}\n")
    assert describe_end(-6, log).splitlines() == [
        "killed by SIGABRT",
        *GLOO_ABORT.splitlines(),
        "Fatal Python error: Aborted",
        '  File "mine.py", line 7 in mine',
    ]


def test_the_users_call_under_many_of_libraries(tmp_path: Path) -> None:
    """The innermost call is shown, and those of the user."""
    log, library = (
        tmp_path / "log",
        '  File "/x/site-packages/torch/overrides.py", line 1 in handle',
    )
    calls = "\n".join([*[library] * 30, '  File "mine.py", line 7 in mine', library])
    dump = f"Current thread 0x1 (most recent call first):\n{calls}\n"
    log.write_text(f"{GLOO_ABORT}\nFatal Python error: Aborted\n\n{dump}")
    lines = describe_end(-6, log).splitlines()
    assert lines[-2:] == [library, '  File "mine.py", line 7 in mine']
    assert "Aborted" in lines[-3]


def test_last_words(tmp_path: Path) -> None:
    """The end of what a process wrote; if it wrote nothing, how it ended."""
    log = tmp_path / "log"
    assert describe_end(-9, log) == "killed by SIGKILL"
    log.write_text("\n".join(map(str, range(100))))
    assert describe_end(3, log).splitlines() == [
        "ended with exit code 3",
        *map(str, range(80, 100)),
    ]


class Unsent:
    """Can be copied in a process, but not pickled, as a compiled function."""

    def __reduce__(self) -> str:
        raise TypeError("cannot pickle 'Unsent' object")


def test_what_cannot_be_sent_is_refused(pool: Pool, threads: Threads) -> None:
    """Both engines name the object that cannot be pickled, and run the next job."""
    for ranks in (pool, threads):
        with pytest.raises(Refusal, match="cannot be sent to its ranks") as caught:
            ranks.run(repr, 1, Unsent())
        assert "cannot pickle 'Unsent'" in caught.value.diagnostic.notes[0]
        assert ranks.run(repr, 1, 3) == ["3"]
