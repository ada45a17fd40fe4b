"""Nodes of an elastic job: a store that stays, and agents of torchrun that come and go."""

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
RUN = Path(__file__).with_name("elastic_run.py")
STORE = (
    "import sys, time; from torch.distributed import TCPStore; "
    "store = TCPStore(sys.argv[1], 0, is_master=True, wait_for_workers=False); "
    "print(store.port, flush=True); time.sleep(1e6)"
)
NODE = "GROUP_OF_NODE"  # the variable by which a rank knows its node
CONF = "is_host=0,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"


def tree(pid: int) -> list[int]:
    """A process and all that it has started."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [one for child in task.read_text().split() for one in tree(int(child))]
    return found


def runs(pid: int) -> bool:
    """Whether a process does: an orphan that nobody reaps is dead all the same."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def _words(pid: int) -> list[bytes]:
    """The command of a process."""
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
        command = [*self.before(0), sys.executable, "-c", STORE, self.address(0)]
        self._store = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._store.stdout is not None
        self._port = int(self._store.stdout.readline())

    def start(self, number: int) -> None:
        """Start the agent of a node; where all are on this machine, it and its ranks are forked."""
        conf = ("--rdzv-backend", "c10d", "--rdzv-id", f"job{self.turn}", "--rdzv-conf", CONF)
        words = [
            *("-m", "torch.distributed.run", "--nnodes", "1:9"),
            *("--nproc-per-node", "1", "--max-restarts", "1000", *conf),
            *("--rdzv-endpoint", f"{self.address(0)}:{self._port}"),
            *("--local-addr", self.address(number), str(RUN), str(self.folder), *self.words),
        ]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        fresh = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        environ = {**os.environ, "PYTHONPATH": path, NODE: str(number), **fresh, **self.more}
        before = self.before(number)
        with (self.folder / f"node.{number}").open("ab") as log, open(os.devnull) as nothing:
            if not before and forks.FORKS.can(environ):
                fds = [nothing.fileno(), log.fileno(), log.fileno()]
                what = ("command", os.getcwd(), words)
                self.alive[number] = forks.FORKS.fork(what, environ, fds)
                return
            self.alive[number] = subprocess.Popen(
                [*before, sys.executable, *words],
                stdout=log,
                stderr=log,
                env=environ,
                start_new_session=True,
            )

    def ranks(self) -> set[int]:
        """The processes of all ranks that there are now."""
        every = (pid for node in self.alive.values() for pid in tree(node.pid))
        return {pid for pid in every if str(RUN).encode() in _words(pid)[1:4]}

    def gone(self) -> list[int]:
        """Forget the nodes whose agents have ended by themselves."""
        found = [number for number, node in self.alive.items() if node.poll() is not None]
        for number in found:
            self.kill(number)
        return found

    def anew(self) -> None:
        """Take all away, and begin the job under another name, as whoever looks after it would.

        torchrun's agents give up where a node goes between joining a round and telling its address,
        and leave the name of the job closed.
        """
        for number in list(self.alive):
            self.kill(number)
        self.turn += 1

    def kill(self, number: int) -> None:
        """Take a node away, all its processes at once."""
        node = self.alive.pop(number)
        every = tree(node.pid)
        if isinstance(node, forks.Fork):  # a rank is no child of it, and has told whose it is
            told = (int(file.suffix[1:]) for file in self.folder.glob(f"rank.{number}.*"))
            every += [pid for pid in told if _words(pid) == _words(node.pid)]
        for pid in every:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        node.wait()

    def end(self) -> None:
        """Take all away, and the store."""
        for number in list(self.alive):
            self.kill(number)
        if self._store is not None:
            self._store.kill()
            self._store.wait()

    def said(self) -> str:
        """What the agents and their ranks wrote."""
        logs = sorted(self.folder.glob("node.*"))
        return "\n".join(f"{log.name}:\n{log.read_text()[-6000:]}" for log in logs)


@contextlib.contextmanager
def nodes(folder: Path, *words: object) -> Iterator[Nodes]:
    """Nodes of a job whose store is there, until the end of the block: all on this machine."""
    made = Nodes(folder, list(map(str, words)))
    try:
        made.store()
        yield made
    finally:
        made.end()


# -- nodes with a network of their own -------------------------------------------------------------


def apart_can() -> bool:
    """Whether this machine lets its users have networks of their own."""
    words = ("unshare", "-rn", "ip", "link", "add", "br0", "type", "bridge")
    try:
        return subprocess.run(words, capture_output=True).returncode == 0
    except OSError:
        return False


_WAITS = (
    "until ip link show eth0 >/dev/null 2>&1; do sleep 0.05; done; ip link set lo up; "
    'ip addr add "$0"/24 dev eth0; ip link set eth0 up; exec "$@"'
)


@dataclass
class Apart(Nodes):
    """Nodes in network and process namespaces of their own, on a bridge: Linux, no rights needed.

    What is killed goes with all its connections; what is cut off sends nothing any more.
    """

    _home: subprocess.Popen[bytes] | None = None  # whose namespace has the bridge

    def __post_init__(self) -> None:
        self.address, self.before = (lambda number: f"10.77.0.{number + 1}"), self._inside
        self.more = {"GLOO_SOCKET_IFNAME": "eth0"}

    def store(self) -> None:
        """Make the bridge, and start the store on it."""
        self._home = subprocess.Popen(["unshare", "-rn", "sleep", "infinity"])
        until(lambda: _words(self._home.pid)[:1] == [b"sleep"], self)  # type: ignore[union-attr]
        # of itself it would take over addresses of cables, and nodes would ask for the former
        self.ip("link add br0 address 02:00:00:00:00:01 type bridge")
        self.ip(f"addr add {self.address(0)}/24 dev br0")
        for one in ("br0", "lo"):
            self.ip(f"link set {one} up")
        super().store()

    def start(self, number: int) -> None:
        """Start the agent of a node, and lay its cable."""
        super().start(number)
        node = self.alive[number].pid
        until(lambda: len(tree(node)) > 1 and b"sh" in _words(tree(node)[1])[:1], self)
        at = tree(node)[1]
        self.ip(f"link add v{number} type veth peer name eth0 netns {at}")
        self.ip(f"link set v{number} master br0")
        self.ip(f"link set v{number} up")

    def cut(self, number: int) -> None:
        """Cut the cable of a node: it goes on alone."""
        with contextlib.suppress(subprocess.CalledProcessError):  # it has gone by itself
            self.ip(f"link set v{number} down")

    def end(self) -> None:
        """Take all away."""
        super().end()
        if self._home is not None:
            self._home.kill()
            self._home.wait()

    def ip(self, words: str) -> None:
        """Change the network."""
        subprocess.run([*self._inside(0), "ip", *words.split()], check=True)

    def _inside(self, number: int) -> Sequence[str]:
        assert self._home is not None
        home = ("nsenter", "-t", str(self._home.pid), "-U", "-n", "--preserve-credentials")
        own = ("unshare", "-n", "--pid", "--fork", "--kill-child=KILL")
        return (*home, *own, "sh", "-c", _WAITS, self.address(number)) if number else home


# -- what the ranks told ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """What one rank told of one step."""

    step: int
    round: int
    ranks: int
    pid: int
    numbers: tuple[int, ...]


def lines(folder: Path) -> list[Line]:
    """All that was told so far, in whole lines."""
    found = []
    for file in folder.glob("seen.*"):
        for text in file.read_text().splitlines(keepends=True):
            if text.endswith("\n"):
                *four, numbers = text.split()
                seen = () if numbers == "-" else tuple(map(int, numbers.split(",")))
                found.append(Line(*map(int, four), seen))
    return found


def until(ready: Callable[[], bool], job: Nodes, seconds: float = 600.0) -> None:
    """Wait for something that a job does."""
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, job.said()
        time.sleep(0.05)


def samples_of_steps(told: Sequence[Line]) -> dict[int, list[int]]:
    """The samples of each step, as they were seen in the last round that made it."""
    rounds: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for line in told:
        rounds[line.step][line.round] += line.numbers
    return {step: sorted(rounds[step][max(rounds[step])]) for step in sorted(rounds)}


def losses(folder: Path) -> dict[int, float]:
    """The loss of each step, as it was told last."""
    rows = [line.split() for line in (folder / "losses").read_text().splitlines()]
    return {int(step): float.fromhex(loss) for step, loss in rows}
