"""Nodes of an elastic job: a store that stays, and torchrun agents that start and end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests import forks

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("elastic_run.py")
STORE_PROGRAM = (
    "import sys, time; from torch.distributed import TCPStore; "
    "store = TCPStore(sys.argv[1], 0, is_master=True, wait_for_workers=False); "
    "print(store.port, flush=True); time.sleep(1e6)"
)
NODE_VARIABLE = "GROUP_OF_NODE"  # the variable by which a rank knows its node
RENDEZVOUS = "is_host=0,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"


def process_tree(pid: int) -> list[int]:
    """Return the ids of a process and of all its descendants."""
    pids = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            pids += [
                descendant
                for child in task.read_text().split()
                for descendant in process_tree(int(child))
            ]
    return pids


def is_running(pid: int) -> bool:
    """Tell whether a process is running; an orphan that nobody reaps counts as dead."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def command_of(pid: int) -> list[bytes]:
    """Return the command line of a process, in words."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return []


@dataclass
class Nodes:
    """The nodes of a job, by their numbers; `before` are words of each command, such as `nsenter`.

    address  of the store, and of a node by its number
    """

    folder: Path
    words: Sequence[str]
    address: Callable[[int], str] = lambda _: "127.0.0.1"
    before: Callable[[int], Sequence[str]] = lambda _: ()
    more: Mapping[str, str] = field(default_factory=dict)
    alive: dict[int, subprocess.Popen[bytes] | forks.Fork] = field(default_factory=dict)
    turn: int = 0  # of the job's name: torchrun closes one for good when an agent gives up
    _store: subprocess.Popen[str] | None = None
    _port: int = 0

    def store(self) -> None:
        """Start the store, where no node is."""
        command = [*self.before(0), sys.executable, "-c", STORE_PROGRAM, self.address(0)]
        self._store = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._store.stdout is not None
        self._port = int(self._store.stdout.readline())

    def start(self, number: int) -> None:
        """Start the agent of a node; if all nodes are on this machine, fork it and its ranks."""
        conf = ("--rdzv-backend", "c10d", "--rdzv-id", f"job{self.turn}", "--rdzv-conf", RENDEZVOUS)
        words = [
            *("-m", "torch.distributed.run", "--nnodes", "1:9"),
            *("--nproc-per-node", "1", "--max-restarts", "1000", *conf),
            *("--rdzv-endpoint", f"{self.address(0)}:{self._port}"),
            *("--local-addr", self.address(number), str(SCRIPT), str(self.folder), *self.words),
        ]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        environ = {
            **os.environ,
            "PYTHONPATH": path,
            NODE_VARIABLE: str(number),
            **variables,
            **self.more,
        }
        prefix = self.before(number)
        with (self.folder / f"node.{number}").open("ab") as log, open(os.devnull) as null:
            if not prefix and forks.FORKS.can(environ):
                fds = [null.fileno(), log.fileno(), log.fileno()]
                request = ("command", os.getcwd(), words)
                self.alive[number] = forks.FORKS.fork(request, environ, fds)
                return
            self.alive[number] = subprocess.Popen(
                [*prefix, sys.executable, *words],
                stdout=log,
                stderr=log,
                env=environ,
                start_new_session=True,
            )

    def ranks(self) -> set[int]:
        """Return the process ids of all ranks that run now."""
        pids = (pid for node in self.alive.values() for pid in process_tree(node.pid))
        return {pid for pid in pids if str(SCRIPT).encode() in command_of(pid)[1:4]}

    def gone(self) -> list[int]:
        """Forget the nodes whose agents have ended by themselves, and return their numbers."""
        ended = [number for number, node in self.alive.items() if node.poll() is not None]
        for number in ended:
            self.kill(number)
        return ended

    def anew(self) -> None:
        """Kill all nodes and begin the job again under another name, as a supervisor would.

        When a node disappears between joining a round and publishing its address, torchrun's agents
        give up and leave the name of the job closed.
        """
        for number in list(self.alive):
            self.kill(number)
        self.turn += 1

    def kill(self, number: int) -> None:
        """Kill all processes of a node at once."""
        node = self.alive.pop(number)
        pids = process_tree(node.pid)
        if isinstance(node, forks.Fork):  # a rank is no child of it, and has told whose it is
            written = (int(file.suffix[1:]) for file in self.folder.glob(f"rank.{number}.*"))
            pids += [pid for pid in written if command_of(pid) == command_of(node.pid)]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        node.wait()

    def end(self) -> None:
        """Kill all nodes and the store."""
        for number in list(self.alive):
            self.kill(number)
        if self._store is not None:
            self._store.kill()
            self._store.wait()

    def said(self) -> str:
        """Return what the agents and their ranks wrote."""
        logs = sorted(self.folder.glob("node.*"))
        return "\n".join(f"{log.name}:\n{log.read_text()[-6000:]}" for log in logs)


@contextlib.contextmanager
def nodes(folder: Path, *words: object) -> Iterator[Nodes]:
    """Yield the nodes of a job with a running store, all on this machine; end them after the
    block."""
    job = Nodes(folder, list(map(str, words)))
    try:
        job.store()
        yield job
    finally:
        job.end()


# -- nodes with their own network ------------------------------------------------------------------


def can_isolate() -> bool:
    """Tell whether users of this machine may create network namespaces."""
    words = ("unshare", "-rn", "ip", "link", "add", "br0", "type", "bridge")
    try:
        return subprocess.run(words, capture_output=True).returncode == 0
    except OSError:
        return False


WAIT_FOR_CABLE = (
    "until ip link show eth0 >/dev/null 2>&1; do sleep 0.05; done; ip link set lo up; "
    'ip addr add "$0"/24 dev eth0; ip link set eth0 up; exec "$@"'
)


@dataclass
class IsolatedNodes(Nodes):
    """Nodes in their own network and process namespaces, joined by a bridge (Linux, no rights
    needed).

    Killing a node closes all its connections; a node that is cut off sends nothing any more.
    """

    _home: subprocess.Popen[bytes] | None = None  # the process whose namespace has the bridge

    def __post_init__(self) -> None:
        self.address, self.before = (lambda number: f"10.77.0.{number + 1}"), self._inside
        self.more = {"GLOO_SOCKET_IFNAME": "eth0"}

    def store(self) -> None:
        """Create the bridge, and start the store on it."""
        self._home = subprocess.Popen(["unshare", "-rn", "sleep", "infinity"])
        wait_until(lambda: command_of(self._home.pid)[:1] == [b"sleep"], self)  # type: ignore[union-attr]
        # without an address it would take one of its cables, which the nodes have cached
        self.ip("link add br0 address 02:00:00:00:00:01 type bridge")
        self.ip(f"addr add {self.address(0)}/24 dev br0")
        for device in ("br0", "lo"):
            self.ip(f"link set {device} up")
        super().store()

    def start(self, number: int) -> None:
        """Start the agent of a node, and connect the node to the bridge."""
        super().start(number)
        node = self.alive[number].pid
        wait_until(
            lambda: len(process_tree(node)) > 1 and b"sh" in command_of(process_tree(node)[1])[:1],
            self,
        )
        shell = process_tree(node)[1]
        self.ip(f"link add v{number} type veth peer name eth0 netns {shell}")
        self.ip(f"link set v{number} master br0")
        self.ip(f"link set v{number} up")

    def cut(self, number: int) -> None:
        """Disconnect a node from the bridge: its processes go on alone."""
        with contextlib.suppress(subprocess.CalledProcessError):  # it has gone by itself
            self.ip(f"link set v{number} down")

    def end(self) -> None:
        """Kill all nodes, the store and the bridge."""
        super().end()
        if self._home is not None:
            self._home.kill()
            self._home.wait()

    def ip(self, words: str) -> None:
        """Run an `ip` command in the namespace of the bridge."""
        subprocess.run([*self._inside(0), "ip", *words.split()], check=True)

    def _inside(self, number: int) -> Sequence[str]:
        assert self._home is not None
        enter = ("nsenter", "-t", str(self._home.pid), "-U", "-n", "--preserve-credentials")
        isolate = ("unshare", "-n", "--pid", "--fork", "--kill-child=KILL")
        return (
            (*enter, *isolate, "sh", "-c", WAIT_FOR_CABLE, self.address(number))
            if number
            else enter
        )


# -- what the ranks wrote --------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """What one rank wrote about one step."""

    step: int
    round: int
    ranks: int
    pid: int
    numbers: tuple[int, ...]


def read_lines(folder: Path) -> list[Line]:
    """Read everything that ranks wrote so far, in complete lines."""
    entries = []
    for file in folder.glob("seen.*"):
        for text in file.read_text().splitlines(keepends=True):
            if text.endswith("\n"):
                *head, numbers = text.split()
                samples = () if numbers == "-" else tuple(map(int, numbers.split(",")))
                entries.append(Line(*map(int, head), samples))
    return entries


def wait_until(ready: Callable[[], bool], job: Nodes, seconds: float = 600.0) -> None:
    """Wait until `ready()` holds; fail after so many seconds."""
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, job.said()
        time.sleep(0.05)


def samples_of_steps(entries: Sequence[Line]) -> dict[int, list[int]]:
    """Return the samples of each step, as the last round that computed it used them."""
    rounds: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for line in entries:
        rounds[line.step][line.round] += line.numbers
    return {step: sorted(rounds[step][max(rounds[step])]) for step in sorted(rounds)}


def read_losses(folder: Path) -> dict[int, float]:
    """Return the loss of each step, as it was written last."""
    rows = [line.split() for line in (folder / "losses").read_text().splitlines()]
    return {int(step): float.fromhex(loss) for step, loss in rows}
