"""One message for a refusal under torchrun: the first rank to raise it prints it, without
traceback."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import cache
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

from schedlang.diagnostics.tables import message_columns

if TYPE_CHECKING:
    from socket import socket

    from schedlang.diagnostics.diagnostic import Refusal

JOB = "TORCHELASTIC_RUN_ID"  # set by torchrun
FRESH_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"  # "1": each round has its own store
STORE_TIMEOUT = 5.0  # seconds to wait for the store, and for the printing rank


def is_in_job() -> bool:
    """Return whether torchrun has started this process with others."""
    return JOB in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


@cache
def install_hook() -> None:
    """Install an excepthook by which only one rank prints an uncaught refusal; other errors as
    before.

    Called when the first refusal is raised, so that a job without one is not affected.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        from schedlang.diagnostics.diagnostic import Refusal

        if isinstance(error, Refusal):
            print_once(error)
        else:
            before(kind, error, trace)

    sys.excepthook = hook


def print_once(refusal: Refusal) -> None:
    """Print a refusal unless another rank has; return when it is printed, as an exit ends all
    ranks.

    If torchrun keeps no store for the job, one rank of each node prints it.
    """
    from datetime import timedelta

    store, key = job_store(), _key(refusal)
    claim = _NodeClaim(key) if store is None else None
    if claim is not None:
        is_first = claim.is_first
    else:
        is_first = store.add(f"{key}/count", 1) == 1
    if is_first:
        message = refusal.render(message_columns(sys.stderr))
        print(f"rank {os.environ.get('RANK', '0')}: {message}", file=sys.stderr, flush=True)
        if claim is not None:
            claim.release()
        else:
            store.set(f"{key}/told", "1")
    elif store is not None:
        with suppress(Exception):  # the first rank to exit makes torchrun end the others
            store.wait([f"{key}/told"], timedelta(seconds=STORE_TIMEOUT))


class _NodeClaim:
    """The claim of one rank of a node to print a message; others wait until it is printed.

    It is a name of a local socket, which no file system keeps: it ends with its process, so that a
    rank that comes later prints again. Off Linux there are no such names: every rank prints.
    """

    _held: ClassVar[list[socket]] = []  # until the process ends

    def __init__(self, key: str) -> None:
        """Claim; if another rank has, wait until it has printed or is gone, at most 5 s."""
        import hashlib
        import time

        launcher = f"{os.environ.get(JOB)}/{os.environ.get('GROUP_RANK')}/{os.getppid()}"
        digest = hashlib.blake2b(f"{launcher}/{key}".encode(), digest_size=16).hexdigest()
        self._address, self.is_first = f"\0schedlang-{digest}", True
        if sys.platform != "linux":
            return
        end = time.monotonic() + STORE_TIMEOUT
        while not self._bind() and time.monotonic() < end:
            self.is_first = False
            if self._is_released():
                return
            time.sleep(0.02)

    def release(self) -> None:
        """Let the other ranks of the node go on: the message is printed."""
        for claim in self._held[-1:]:
            claim.listen(1024)

    def _bind(self) -> bool:
        import socket

        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(self._address)
        except OSError:
            claim.close()
            return False
        self._held.append(claim)
        return True

    def _is_released(self) -> bool:
        import socket

        with socket.socket(socket.AF_UNIX) as asking:
            return asking.connect_ex(self._address) == 0


def _key(refusal: Refusal) -> str:
    """Return a key of a refusal's content without places, as ranks may have different paths."""
    import hashlib

    content = repr([(d.code, d.title) for d in refusal.diagnostics]).encode()
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"schedlang/refused/{attempt}/{hashlib.blake2b(content, digest_size=8).hexdigest()}"


def job_store() -> Any:
    """Return the store that torchrun holds for the job; None if it is not available."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    with suppress(Exception):
        from datetime import timedelta

        from torch import distributed as dist

        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        wait = timedelta(seconds=STORE_TIMEOUT)
        return dist.TCPStore(host, port, is_master=False, timeout=wait)  # type: ignore[attr-defined]
    return None
