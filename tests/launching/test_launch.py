"""Jobs on local ranks (`Pool`): results, failures, and what remains of them."""

import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.launch.pool import Hang, Pool, RankDied, modules_of, report_progress
from tests import forks
from tests.launching.elastic_nodes import is_running

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pool():
    """One pool for all tests: each also shows that the pool survives the one before."""
    with Pool() as pool:
        yield pool


def have_ended(pids: list[int]) -> bool:
    """Tell whether all these processes end within a minute."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if not any(is_running(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def sum_ranks() -> float:
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x)
    return x.item()


def test_worlds_of_different_sizes_share_ranks(pool: Pool) -> None:
    """The same processes run jobs of 2, 3, 1 and 3 ranks, with results in rank order."""
    pids = {}
    for world in (2, 3, 1, 3):
        assert pool.run(sum_ranks, world) == [world * (world - 1) / 2] * world
        pids[world] = pool.run(os.getpid, world)
    assert pids[3][:2] == pids[2] and pids[3][:1] == pids[1]
    assert len({*pids[3], os.getpid()}) == 4


def test_closures_and_local_classes_travel(pool: Pool) -> None:
    """A model of a local class, captured by a closure, is returned changed."""

    class Local(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))

    model = Local()

    def grown(by: float) -> torch.nn.Module:
        with torch.no_grad():
            model.weight.mul_(by + dist.get_rank())
        return model

    model0, model1 = pool.run(grown, 2, 3.0)
    assert model0.weight.tolist() == [3, 3] and model1.weight.tolist() == [4, 4]
    assert model.weight.tolist() == [1, 1]


def test_progress_is_told(pool: Pool) -> None:
    """Messages arrive with their rank, in order; outside of a rank `report_progress` does
    nothing."""
    messages: list[tuple[int, object]] = []

    def work() -> None:
        report_progress("one")
        report_progress({"two": 2})

    pool.run(work, 2, on_progress=lambda rank, message: messages.append((rank, message)))
    assert [message for rank, message in messages if rank == 1] == ["one", {"two": 2}]
    assert {rank for rank, _ in messages} == {0, 1}
    report_progress("nobody")


def test_this_process_works_while_the_ranks_do(pool: Pool, tmp_path: Path) -> None:
    """Ranks wait for `meanwhile`, which runs before any of their messages is handled."""
    events: list[object] = []
    sign = str(tmp_path / "sign")

    def work() -> None:
        report_progress("begun")
        while not os.path.exists(sign):
            time.sleep(0.01)

    def meanwhile() -> None:
        events.append("here")
        Path(sign).touch()

    pool.run(work, 2, on_progress=lambda rank, message: events.append(message), meanwhile=meanwhile)
    assert events == ["here", "begun", "begun"]


def test_what_is_done_with_progress_is_no_hang(pool: Pool, tmp_path: Path) -> None:
    """Time spent in `on_progress` does not count as waiting of the ranks."""
    heard = tmp_path / "heard"

    def work() -> None:
        report_progress("begun")
        while not heard.exists():
            time.sleep(0.05)
        time.sleep(0.8)

    def listens(rank: int, what: object) -> None:
        time.sleep(1.9)
        heard.touch()

    pool.run(work, 1, hang_after=2.2, on_progress=listens)


def test_an_error_meanwhile_ends_the_ranks(pool: Pool) -> None:
    """It precedes the errors of ranks, does not wait for them, and the next job works."""

    def work() -> None:
        if dist.get_rank():
            raise KeyError("spoiled")
        time.sleep(600)

    def meanwhile() -> None:
        time.sleep(0.5)
        raise ValueError("not like this")

    pids = pool.run(os.getpid, 2)
    with pytest.raises(ValueError, match="not like this"):
        pool.run(work, 2, meanwhile=meanwhile)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert pool.run(sum_ranks, 2) == [1, 1]


def test_nothing_of_a_job_is_left_in_its_folder(pool: Pool) -> None:
    """Arguments and results are files, of any size, until they are read."""
    large = torch.arange(1 << 20)
    earlier = {path.name for path in pool._scratch.iterdir()}
    assert all(map(large.equal, pool.run(lambda: large, 2)))
    remaining = {path.name for path in pool._scratch.iterdir() if path.suffix != ".store"}
    assert remaining <= earlier | {"rank0.log", "rank1.log"}


def job_store() -> str:
    store: Any = c10d._get_default_store()
    return store.underlying_store.path


def test_a_rank_that_leaves_finds_the_folder_of_its_store(pool: Pool) -> None:
    """After its result has arrived, a leaving rank opens the store's file once more.

    If the folder were gone it would try as long as a collective may take, and the next job would
    wait.
    """
    store = Path(pool.run(job_store, 2)[0])
    assert store.parent.is_dir() and store.parent == pool._scratch
    pool.run(sum_ranks, 2)  # both have left the former job
    end = time.monotonic() + 10  # threads of gloo may hold the store for a moment
    while store.exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert not store.exists()


def test_an_exception_ends_the_job_with_its_own_traceback(pool: Pool) -> None:
    """The rank that raised is named, although others see a broken connection or wait."""

    def work() -> None:
        if dist.get_rank() == 1:
            raise KeyError("spoiled")
        dist.all_reduce(torch.ones(1))

    with pytest.raises(RankDied) as info:
        pool.run(work, 3)
    assert info.value.rank == 1 and "KeyError: 'spoiled'" in info.value.error
    assert isinstance(info.value.cause, KeyError) and "onnection" not in str(info.value)
    assert __file__ in info.value.error and 'raise KeyError("spoiled")' in info.value.error
    assert pool.run(sum_ranks, 2) == [1, 1]


def test_a_refusal_is_raised_as_such(pool: Pool) -> None:
    """A refusal on all ranks is raised, not reported as a death."""

    def work() -> None:
        raise Refusal.of("S999", "not like this")

    with pytest.raises(Refusal, match="not like this"):
        pool.run(work, 2)


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (lambda: os._exit(7), "exit code 7"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "SIGSEGV"),
        (lambda: sys.exit("enough"), "SystemExit: enough"),
    ],
    ids=["exit", "segfault", "sys.exit"],
)
def test_a_death_is_told_as_it_was(pool: Pool, end, words: str) -> None:
    """A rank that ends without a message is named with its exit code or signal, in time."""

    def work() -> None:
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 2:
            end()
        dist.all_reduce(torch.ones(1))

    with pytest.raises(RankDied) as info:
        pool.run(work, 3, timeout=600)
    assert info.value.rank == 2 and words in info.value.error


def test_a_death_between_two_jobs_hurts_neither(pool: Pool) -> None:
    """A rank that ends after its result is replaced for the next job."""

    def late() -> int:
        threading.Timer(3.0, os._exit, [1]).start()  # when the job has ended
        return os.getpid()

    pids = pool.run(late, 2)
    assert have_ended(pids)
    assert pool.run(sum_ranks, 2) == [1, 1]


def test_a_result_that_cannot_travel_is_an_error(pool: Pool) -> None:
    """The rank reports that its result cannot be pickled."""
    with pytest.raises(RankDied, match="pickle"):
        pool.run(lambda: (i for i in range(3)), 1)


def test_a_mismatched_collective_is_a_hang(pool: Pool) -> None:
    """Ranks that wait for each other are detected, each with its current line, and are ended."""

    def stuck() -> None:
        report_progress(os.getpid())
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1))
        else:
            dist.recv(torch.ones(1), 0)

    pids: list[int] = []
    with pytest.raises(Hang, match="no rank made progress") as info:
        pool.run(stuck, 2, hang_after=2, on_progress=lambda rank, pid: pids.append(pid))
    assert "all_reduce" in info.value.stacks[0] and "recv" in info.value.stacks[1]
    assert len(pids) == 2 and have_ended(pids)


def test_work_is_no_hang(pool: Pool) -> None:
    """CPU time of a rank or its child counts as progress, also without any message."""

    def work(code: str) -> str:
        if dist.get_rank() == 0:  # the other rank only waits
            subprocess.run([sys.executable, "-c", code], check=True)
        dist.barrier()
        if dist.get_rank() == 1:
            exec(code)
        dist.barrier()
        return "done"

    code = "import time\nend = time.time() + 2.5\nwhile time.time() < end: pass"
    assert pool.run(work, 2, code, hang_after=1.5) == ["done"] * 2


def test_an_import_is_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports of the server before it forks do not count as waiting of ranks."""
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(3.5)\n")
    monkeypatch.setitem(sys.modules, "slow_to_import", types.ModuleType("slow_to_import"))
    with Pool(files={"slow_to_import": tmp_path / "slow.py"}) as pool:
        assert pool.run(lambda name: time.sleep(0.2) or name, 1, "slow_to_import", hang_after=2)


def test_an_endless_loop_ends_by_the_timeout(pool: Pool) -> None:
    """An endless computation is ended by the given limit."""

    def work() -> None:
        while True:
            pass

    with pytest.raises(Hang, match="not finished"):
        pool.run(work, 1, timeout=1)


def test_files_get_the_names_they_have_here(pool: Pool, tmp_path: Path) -> None:
    """A class of a module loaded from a file under another name can be sent."""
    path = tmp_path / "model.py"
    path.write_text("class Thing:\n    value = 3\n")
    from schedlang.runtime.launch.forkserver import load_files

    load_files({"made_up_model": str(path)})
    pool.files["made_up_model"] = str(path)
    loaded_class = sys.modules["made_up_model"].Thing
    assert pool.run(lambda x: x.value, 1, loaded_class) == [3]


SCRIPT = """
import os, sys, time, signal
from schedlang.runtime.launch.pool import Pool, report_progress, shared_pool
import torch.distributed as dist, torch

class Own:
    pass

def work(kind):
    report_progress((os.getpid(), os.getppid()))
    if kind != "ends" :
        time.sleep(1000)
    return Own(), dist.get_world_size()

print("once")
kind = sys.argv[1]
seen = lambda rank, pids: print("pids", *pids, flush=True)
results = shared_pool().run(work, 2, kind, on_progress=seen, hang_after=1000)
assert isinstance(results[0][0], Own) and results[1][1] == 2
print("fine")
"""


@pytest.mark.parametrize("kind", ["ends", "interrupted", "killed"])
def test_nothing_is_left_behind(kind: str, tmp_path: Path) -> None:
    """However a script ends, its ranks, server and files are removed; `__main__` is not rerun."""
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(scratch)}
    script = subprocess.Popen(
        [sys.executable, str(path), kind],
        stdout=subprocess.PIPE,
        text=True,
        env=environ,
        # a job in the background of a shell is born deaf to SIGINT
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert script.stdout is not None
    lines = [script.stdout.readline().split() for _ in range(3)]
    pids = [int(pid) for line in lines[1:] for pid in line[1:]]
    if kind != "ends":
        script.send_signal(signal.SIGINT if kind == "interrupted" else signal.SIGKILL)
    output = script.stdout.read()  # ends when the last process that could write has ended
    script.wait(600)
    assert lines[0] == ["once"] and "once" not in output
    assert (script.returncode == 0 and "fine" in output) == (kind == "ends")
    assert len(set(pids)) == 3 and have_ended(pids)
    assert not list(scratch.iterdir())


def test_a_dead_server_is_replaced() -> None:
    """If the server is killed its ranks end too, the job reports it, and the next one works."""
    with Pool() as pool:
        pids = pool.run(os.getpid, 2)
        pool._server.kill()
        assert have_ended(pids)
        assert pool.run(sum_ranks, 2) == [1, 1]

        def kill_it() -> None:
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(100)

        with pytest.raises(RankDied, match="fork server"):
            pool.run(kill_it, 2)
        assert pool.run(sum_ranks, 2) == [1, 1]


def environ_unbounded() -> dict[str, str]:
    """Return an environment in which libraries start as many threads as they like."""
    variables = {
        name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")
    }
    return {**variables, "PYTHONPATH": str(ROOT)}


FORKS = """
import colorsys, os, signal, sys, threading, time
from schedlang.runtime.launch.pool import Pool, RankDied

def seen():
    import colorsys, late
    return getattr(colorsys, "MARK", None), late.PID, os.getpid(), os.getsid(0)

if __name__ == "__main__":
    colorsys.MARK = "of the parent"
    if sys.argv[1] == "threads":
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    with Pool(forked=True) as pool:
        pool.import_files({"late": sys.argv[2]})
        found = pool.run(seen, 2)
        assert len({pid for _, pid, *_ in found}) == 1, "the file was imported by each rank"
        assert all(own == session for *_, own, session in found), found
        print(found[0][0], flush=True)
        pool._server.kill()
        while pool._server.poll() is None:
            time.sleep(0.01)
        assert pool._server.poll() == -signal.SIGKILL
        print(pool.run(seen, 1)[0][0], [own for *_, own, _ in found], flush=True)
        last = pool._server
    assert last.poll() is not None, "the server is still there"
    print("closed", last.poll(), flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a server is an interpreter always")
@pytest.mark.parametrize("kind", ["alone", "threads"])
def test_a_server_forked_from_a_command(tmp_path: Path, kind: str) -> None:
    """The server has the command's imports; beside another thread it is a new interpreter, and so
    is the next one.

    Both load files later, are told of their end, and are reaped.
    """
    (tmp_path / "late.py").write_text("import os\nPID = os.getpid()\n")
    (tmp_path / "script.py").write_text(FORKS)
    process = forks.run_interpreter(
        tmp_path / "script.py", kind, tmp_path / "late.py", env=environ_unbounded(), timeout=600
    )
    first_line, second_line, last_line = process.stdout.splitlines() or ("", "", process.stderr)
    assert first_line == ("of the parent" if kind == "alone" else "None"), process.stderr
    assert second_line.startswith("None ["), process.stderr
    assert have_ended([int(pid) for pid in second_line[6:-1].split(",")])
    assert last_line == "closed 0", process.stderr


VERIFIES = """
import sys
from schedlang.cli import main
from schedlang.runtime.launch.pool import Pool

def import_files(self, files, *, here):
    print(type(self._server).__name__, flush=True)
    sys.exit(0)

Pool.import_files = import_files
sys.argv = ["schedlang", "verify", sys.argv[1]]
main()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a server is an interpreter always")
def test_the_server_of_verify_is_forked(tmp_path: Path) -> None:
    """The command's imports start no thread, also where nothing limits their number."""
    (tmp_path / "script.py").write_text(VERIFIES)
    schedule = Path(__file__).parents[2] / "examples/custom/2d.sched"
    process = forks.run_interpreter(
        tmp_path / "script.py", schedule, env=environ_unbounded(), timeout=600
    )
    assert process.stdout == "ForkedServer\n", (process.stdout, process.stderr)


FORKS_AGAIN = """
import os, sys, threading, time
from schedlang.runtime.launch.forkserver import load_files
from schedlang.runtime.launch.pool import Pool

def seen():
    import late
    return late.PID

if __name__ == "__main__":
    with Pool(forked=True) as pool:
        first = pool._server
        load_files({"late": sys.argv[2]})
        if sys.argv[1] == "threads":
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        pool.import_files({"late": sys.argv[2]}, here=True)
        (found,) = set(pool.run(seen, 2))
        print(found == os.getpid(), first is pool._server, pool._scratch.is_dir(), flush=True)
        scratch = pool._scratch
    print(scratch.exists(), flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a server is an interpreter always")
@pytest.mark.parametrize("kind", ["alone", "threads"])
def test_a_server_forked_again_has_the_files_of_its_parent(tmp_path: Path, kind: str) -> None:
    """A file that the command has imported since is imported once; if that import left a thread,
    the first server stays and imports it itself."""
    (tmp_path / "late.py").write_text("import os\nPID = os.getpid()\n")
    (tmp_path / "script.py").write_text(FORKS_AGAIN)
    process = forks.run_interpreter(
        tmp_path / "script.py", kind, tmp_path / "late.py", env=environ_unbounded(), timeout=600
    )
    is_alone = kind == "alone"
    assert process.stdout.splitlines() == [f"{is_alone} {not is_alone} True", "False"], (
        process.stderr
    )


def test_what_the_first_job_names_is_imported_once(tmp_path: Path) -> None:
    """The server imports a module that the pickled job names, before it forks the ranks."""
    (tmp_path / "slow_to_import.py").write_text(
        "import os\nPID = os.getpid()\ndef pid(): return PID\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        import slow_to_import

        assert "slow_to_import" in modules_of(pickle.dumps(slow_to_import.pid))
        with Pool(files={"slow_to_import": tmp_path / "slow_to_import.py"}) as pool:
            assert len(set(pool.run(slow_to_import.pid, 3))) == 1
    finally:
        sys.path.remove(str(tmp_path))
        del sys.modules["slow_to_import"]


STARTS_RANKS = """
from schedlang.runtime.launch.pool import Pool

def task() -> int:
    return 1

pool = Pool()
result = pool.run(task, 1)
"""


@pytest.mark.parametrize("load", ["model file", "preloaded"])
def test_a_file_that_starts_ranks_is_not_loaded_by_them(tmp_path: Path, load: str) -> None:
    """A file that starts ranks on import is refused, with what to write instead; processes do not
    start each other endlessly."""
    from schedlang.ir.modelfile import load_model_file

    file = tmp_path / "model.py"
    file.write_text(STARTS_RANKS)
    with pytest.raises(Refusal) as refused:
        if load == "model file":
            load_model_file(str(file))
        else:
            with Pool(files={"started_by_ranks": file}) as pool:
                pool.run(model_loaded, 1)
    assert refused.value.diagnostics[0].code == "S905"
    assert '__name__ == "__main__"' in refused.value.diagnostics[0].helps[0]


def model_loaded() -> int:
    import started_by_ranks  # type: ignore[import-not-found]

    return int(started_by_ranks.result)
