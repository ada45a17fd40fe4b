"""One message for a refusal under torchrun: the first rank to raise it prints it, without
traceback."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import cache
from types import TracebackType
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.tables import message_columns

if TYPE_CHECKING:
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
    ranks."""
    from datetime import timedelta

    store, key = job_store(), _key(refusal)
    if store is None:
        is_first = os.environ.get("RANK", "0") == "0"
    else:
        is_first = store.add(f"{key}/count", 1) == 1
    if is_first:
        message = refusal.render(message_columns(sys.stderr))
        print(f"rank {os.environ.get('RANK', '0')}: {message}", file=sys.stderr, flush=True)
        if store is not None:
            store.set(f"{key}/told", "1")
    elif store is not None:
        with suppress(Exception):  # the first rank to exit makes torchrun end the others
            store.wait([f"{key}/told"], timedelta(seconds=STORE_TIMEOUT))


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
