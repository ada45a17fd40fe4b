"""Ranks join a job, agree on what they build before any group is made, and leave together.

* Join the job that a launcher has started, and leave it together.
* Checksums of tensors: two passes over their bits on their device, without a copy.
* `check_agreement`: compare what ranks build, and refuse if it differs. Ranks use the store of the
  job, which does not depend on the others' collectives: a rank that builds something else, or
  never comes, is noticed within seconds. The first rank writes a digest of every item; each rank
  compares its own. Only for items whose digests differ, ranks write their parts, and rank 0 names
  the differences.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import json
import os
import signal
import socket
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.job_refusals import FRESH_STORE, JOB, job_store
from schedlang.runtime import device as devices
from schedlang.runtime.comm import store_watch
from schedlang.runtime.comm import world as comm

TIMEOUT = timedelta(minutes=10)  # of a collective that other ranks do not join
_FOREVER = timedelta(hours=12)  # if the process that started the ranks decides what a hang is
_SETTLE = 0.1  # seconds at the end of a process in which gloo's threads can release their tensors
_PR_SET_PDEATHSIG = 1
_SILENCE = 5.0  # seconds after which a rank that waits says for what


def join_world(wait: float | None = None, met: Any = None) -> None:
    """Join the job that torchrun started, if there is one and this process has not joined yet.

    LOCAL_RANK chooses the device; the world has only that device's backend, so that groups can be
    split off it. `wait`: seconds within which all ranks must come, else Refusal S651; `met`: the
    store of the rendezvous, if it is not torch's own (see `rendezvous`). Raises Refusal S654 if the
    launcher's variables cannot be used.
    """
    _prepare_end()
    if dist.is_initialized() or not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return
    rank, world = read_job_variables()
    options: dict[str, Any] = {"timeout": TIMEOUT}
    store = rendezvous(wait) if wait is not None and met is None else met
    own_keys = not has_round_store() and _restarted_on_one_node()
    if store is not None and (own_keys or has_round_store()):
        if own_keys:  # else torch would find the addresses of the former ranks
            prefix = f"schedlang/round/{round_name()}"
            store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
        store.set_timeout(TIMEOUT)  # running ranks may take their time
        options |= {"store": store, "rank": rank, "world_size": world}
    device = devices.local_device()
    with _speak_while_waiting(rank, world, store is None):
        if devices.on_host(device):
            dist.init_process_group(comm.HOST_BACKEND, **options)
        else:
            kind = dist.get_default_backend_for_device(device)
            dist.init_process_group(kind, device_id=device, **options)
    comm.current_world().joined_here = True


@contextmanager
def _speak_while_waiting(rank: int, world: int, by_torch: bool) -> Iterator[None]:
    """Say on stderr what torch's own rendezvous waits for, if it waits: it is silent for minutes.

    Raises Refusal S654 for an address that rank 0 cannot have.
    """
    if world == 1 or not by_torch:
        yield
        return
    timer = threading.Timer(_SILENCE, _tell_what_is_awaited, (rank, world))
    timer.daemon = True
    timer.start()
    try:
        yield
    except dist.DistNetworkError as error:
        text = _one_line(error)
        if rank == 0 and "EADDRINUSE" in text:
            title = f"another program of this machine has the port {os.environ['MASTER_PORT']}"
            helps = ("set another MASTER_PORT, the same for all ranks", _VARIABLES_HELPS[0])
            raise _refusal(_verdict("S654", title, ("it is MASTER_PORT",), helps)) from error
        raise
    finally:
        timer.cancel()


def _tell_what_is_awaited(rank: int, world: int) -> None:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    what = "for the other ranks; if one never comes, see what it says"
    try:
        socket.getaddrinfo(host, port)
        if rank and not _answers(host, port):
            what = "for rank 0: nothing listens there"
        elif rank:
            what = "for rank 0 and the others; does another program have this port?"
    except OSError as error:
        what = f"and the name MASTER_ADDR={host} has no address: {error.strerror}"
    place = f"MASTER_ADDR:MASTER_PORT {host}:{port}"
    print(f"rank {rank} of {world} waits at {place} {what}", file=sys.stderr, flush=True)


def read_job_variables() -> tuple[int, int]:
    """Return RANK and WORLD_SIZE of this process, which its launcher has set.

    Raises Refusal S654 if RANK, WORLD_SIZE, MASTER_ADDR or MASTER_PORT is missing or not usable:
    torch would wait for minutes for a rank that the job does not have.
    """
    texts = {name: os.environ.get(name, "").strip() for name in _VARIABLES}
    numbers = {name: int(text) for name, text in texts.items() if text.isdecimal()}
    world = numbers.get("WORLD_SIZE", 0)
    usable = {
        "WORLD_SIZE": ("a number of ranks above 0", world > 0),
        "RANK": (f"a rank from 0 to {world - 1}", 0 <= numbers.get("RANK", -1) < world),
        "MASTER_ADDR": ("the host of rank 0", bool(texts["MASTER_ADDR"])),
        "MASTER_PORT": ("a port from 0 to 65535", 0 <= numbers.get("MASTER_PORT", -1) < 1 << 16),
    }
    for name, (meaning, fits) in usable.items():
        if not fits:
            value = f"is {texts[name]!r}" if name in os.environ else "is not set"
            title = f"the environment variable {name} {value}, and must be {meaning}"
            raise _refusal(_verdict("S654", title, (_VARIABLES_NOTE,), _VARIABLES_HELPS))
    return numbers["RANK"], world


_VARIABLES = ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")
_VARIABLES_NOTE = "this process has RANK and WORLD_SIZE, as a rank of a job has"
_VARIABLES_HELPS = (
    "start the ranks by `torchrun`, or set WORLD_SIZE, RANK, MASTER_ADDR and MASTER_PORT for each",
    "for a program on its own, unset RANK and WORLD_SIZE",
)


def join_locally(rank: int, size: int, path: str) -> None:
    """Join a job on this machine as one rank, by a rendezvous in a file, without a port."""
    from torch._C._distributed_c10d import FileStore

    store = FileStore(path, size)
    dist.init_process_group(
        comm.HOST_BACKEND, store=store, rank=rank, world_size=size, timeout=_FOREVER
    )


def leave_world() -> None:
    """Leave the job together: a rank that closes first could cut off messages in flight.

    The process group is destroyed now: torch caches the meshes of DTensors, and these hold the
    group.
    """
    if dist.is_initialized():
        comm.barrier()
        comm.forget_world()
        dist.destroy_process_group()


def clone_store() -> Any:
    """Return the store of the job with a connection of its own, for another thread."""
    store: Any = c10d._get_default_store()
    return store.clone()


@cache
def _prepare_end() -> None:
    """Make this process end when its launcher ends, and without aborts.

    On Linux, a rank is killed with the torchrun that started it: a killed agent ends no process,
    and its ranks would hold their devices and wait for each other. For other launchers this is not
    done: Linux reacts to the end of the thread that started this process, which is not known for
    them.

    At its end the process gives gloo's threads a moment in which they can take the interpreter's
    lock. A thread drops the tensors of a collective after it has woken the waiting rank; if it
    needs the interpreter for that while the interpreter is ending, Python ends the thread inside a
    C++ destructor, and the process aborts. The groups live as long as a Program holds them, so
    `destroy_process_group` does not join the threads.
    """
    atexit.register(time.sleep, _SETTLE)
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != 1:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


_COLUMNS = 1024  # sums over rows and over columns: a changed or moved word shows in one of them


def checksum(tensor: Tensor) -> str:
    """Return a text that is equal for tensors of the same dtype, shape and bits; "" without bits.

    The tensor's 64-bit words are arranged in rows; the sums of all rows and of all columns, modulo
    2**64, are hashed. Sums of integers do not depend on order, number of threads or device.
    """
    if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
        return ""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        digest = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=8)
        resolved = tensor.detach().resolve_conj().resolve_neg()
        row = resolved.contiguous().view(-1) if resolved.dim() else resolved.view(1)
        if row.storage_offset() * row.element_size() % 8:  # words must be aligned
            row = row.clone()
        flat = row.view(torch.uint8)  # in logical order; a view if the tensor is contiguous
        whole_bytes = flat.numel() // (8 * _COLUMNS) * (8 * _COLUMNS)
        if whole_bytes:
            words = flat[:whole_bytes].view(torch.int64).view(-1, _COLUMNS)
            for dim in (0, 1):
                digest.update(words.sum(dim).cpu().numpy().tobytes())
        digest.update(flat[whole_bytes:].cpu().numpy().tobytes())
    return digest.hexdigest()


WAIT = 20.0  # seconds for the ranks of a job to come to `build`
_MORE = 3.0  # additional seconds to wait for the verdict of the comparing rank
_LEAST, _MOST = 0.001, 0.2  # seconds between two reads of the store
_SHOWN = 3  # differing parts of an item that are shown


@dataclass(frozen=True)
class AgreementItem:
    """Something that must be equal on all ranks: its name, and its parts as text.

    partial   a rank has only some parts: parts that several ranks have are compared
    readable  the texts are readable; else a message only says that they differ
    """

    name: str
    parts: Mapping[str, str]
    partial: bool = False
    readable: bool = True
    helps: tuple[str, ...] = field(default=(), compare=False)


def check_agreement(items: Sequence[AgreementItem], wait: float = WAIT) -> None:
    """Raise the same Refusal on all ranks if an item differs (S650) or a rank is missing (S651).

    The first rank writes digests of its items, which the others compare with theirs; only for items
    that differ somewhere, the parts are exchanged. The first verdict counts. Does nothing in a
    world of one, or in a dry run of several ranks in one process.
    """
    if (store := shared_store()) is None:
        return
    local, key = comm.current_world(), _key_prefix(store)
    digests = {item.name: _digest(item) for item in items}
    first_digests = json.loads(store.compare_set(f"{key}/first", "", json.dumps(digests)))
    for name in (name for name, digest in first_digests.items() if digests.get(name) != digest):
        store.set(f"{key}/unlike/{name}", "1")
        store.set(f"{key}/unlike", "1")
    store.set(f"{key}/{local.rank}", "1")
    store.add(f"{key}/came", 1)
    # all ranks poll the store: few ranks may poll often, and then build without delay
    longest = min(_MOST, 2 * _LEAST * local.size)
    complete = poll_until(lambda: bool(store.add(f"{key}/came", 0) >= local.size), wait, longest)
    absent = [] if complete else [r for r in range(local.size) if not store.check([f"{key}/{r}"])]
    verdict = {} if complete else missing_ranks_verdict(absent, local.size, wait)
    _raise_verdict(store, f"{key}/verdict", verdict)
    if store.check([f"{key}/unlike"]):
        for name in (name for name in first_digests if store.check([f"{key}/unlike/{name}"])):
            item = next((item for item in items if item.name == name), AgreementItem(name, {}))
            _compare_parts(store, f"{key}/parts/{name}", item, wait)


def round_name() -> str:
    """Return a name of this round of the job, equal on all ranks, for keys in its store.

    "" if the round has a store of its own: torchrun counts restarts on each node separately, so
    that nodes which joined later have other numbers.
    """
    return "" if has_round_store() else os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _restarted_on_one_node() -> bool:
    """Return whether torchrun has restarted these ranks, and counts restarts on one node only."""
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return restarts != "0" and os.environ.get("GROUP_WORLD_SIZE") == "1"


def has_round_store() -> bool:
    """Return whether torchrun lets rank 0 keep a store for this round only."""
    return os.environ.get(FRESH_STORE) == "1" and JOB in os.environ


def rendezvous(wait: float) -> Any:
    """Wait until all ranks of this round of the job are there; return its store.

    Raises Refusal S651 if ranks that torchrun has started do not come: torch's own rendezvous would
    wait for minutes, and not name them. None: there are no other ranks, or torch's own rendezvous
    is used.
    """
    _prepare_end()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return None
    store = _store_of_round(world, wait) if has_round_store() else job_store()
    if store is None:
        return None
    if has_round_store() or devices.accelerator() is None:  # else the agent of its node watches it
        store_watch.watch_store(store.clone)
    key = f"schedlang/came/{round_name()}/{world}"
    count, rank = f"{key}/count", os.environ["RANK"]
    store.set(f"{key}/{rank}", "1")
    store.add(count, 1)
    siblings = store_watch.Siblings()
    if not poll_until(lambda: bool(store.add(count, 0) >= world or siblings.have_ended()), wait):
        refuse_missing(
            [peer for peer in range(world) if not store.check([f"{key}/{peer}"])], world, wait
        )
    if ended := [peer for peer in siblings.ended if not store.check([f"{key}/{peer}"])]:
        notes = ("torchrun ends the others if a rank fails, but not if it ends without an error",)
        title = f"{_ranks(ended)} ended before all ranks had called `build`"
        help_ = f"check what {_ranks(ended)} did: it must neither `sys.exit()` nor return before"
        raise _refusal(_verdict("S651", title, notes, (help_,)))
    return store


def refuse_missing(missing: Sequence[int], world: int, wait: float) -> NoReturn:
    """Raise Refusal S651 for ranks that have not come, or no longer answer."""
    raise _refusal(missing_ranks_verdict(missing, world, wait))


def _store_of_round(world: int, wait: float) -> Any:
    """Return the store that rank 0 keeps for this round."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_master = os.environ["RANK"] == "0"

    def made() -> Any:
        return dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            world,
            is_master=is_master,
            timeout=timedelta(seconds=wait),
            wait_for_workers=False,
            multi_tenant=True,
        )

    if is_master:
        return made()
    # for a dead machine torch tries one address after the other, each for the full timeout
    if not poll_until(lambda: _answers(host, port), wait):
        refuse_missing([0], world, wait)
    store_watch.watch_store(made)
    try:
        return made()
    except (RuntimeError, TimeoutError):
        refuse_missing([0], world, wait)


def _answers(host: str, port: int) -> bool:
    """Return whether a server listens at an address."""
    try:
        with socket.create_connection((host, port), timeout=_MORE):
            return True
    except OSError:
        return False


def report_failure(error: Exception) -> None:
    """Give the verdict that this rank cannot build, with the reason, unless all ranks raise it."""
    if (store := shared_store()) is not None and not getattr(error, _AGREED, False):
        reason = error.diagnostic.title if isinstance(error, Refusal) else _one_line(error)
        local, key = comm.current_world(), _key_prefix(store)
        message = f"rank {local.rank} cannot build its part"
        notes = [f"rank {local.rank} says: {reason}"]
        refusal = _verdict("S650", message, notes, ()) | {"refuses": local.rank}
        store.compare_set(f"{key}/verdict", "", json.dumps(refusal))
        store.add(f"{key}/came", local.size)  # no rank has to wait for more ranks


_AGREED = "_schedlang_agreed"  # marks an error that all ranks raise
CONSEQUENCE = "consequence"  # marks an error that another rank has caused


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def shared_store() -> Any:
    """Return the store of the job; None if there is no other rank to agree with.

    Private: torch has no public access to the store that it made for the job.
    """
    if comm.current_world().size == 1 or dist.get_backend() == "fake":
        return None
    return c10d._get_default_store()


def poll_until(ready: Callable[[], bool], seconds: float, longest: float = _MOST) -> bool:
    """Poll until `ready` returns True, at last every `longest` seconds; return False after the time
    limit."""
    end, pause = time.monotonic() + seconds, _LEAST
    while not ready():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(pause * 1.5, longest)
    return True


def _key_prefix(store: Any) -> str:
    """Return the prefix of the keys of this rank's next agreement."""
    current = comm.current_world()
    job_ranks = "".join(f"{job_rank}," for job_rank in current.ranks_in_job)
    return f"schedlang/{job_ranks}{store.add(f'schedlang/{job_ranks}turn/{current.rank}', 1)}"


def _raise_verdict(store: Any, key: str, proposed: Mapping[str, Any]) -> None:
    """Write a verdict, unless there is one; raise the refusal of the verdict that counts."""
    verdict = json.loads(store.compare_set(key, "", json.dumps(proposed)))
    if verdict:
        refusal = _refusal(verdict)
        setattr(refusal, _AGREED, True)
        if verdict["code"] == "S651" or "refuses" in verdict:  # the cause is elsewhere
            setattr(refusal, CONSEQUENCE, True)
        raise refusal


def _compare_parts(store: Any, prefix: str, item: AgreementItem, wait: float) -> None:
    """Write this rank's parts of an item; rank 0 compares, and all ranks raise its verdict."""
    rank, verdict, proposed = comm.current_world().rank, f"{prefix}/verdict", dict[str, Any]()
    keys = [f"{prefix}/{peer}" for peer in range(comm.current_world().size)]
    store.set(keys[rank], zlib.compress(json.dumps(dict(item.parts)).encode(), 1))
    awaited = keys if rank == 0 else [verdict]
    if not poll_until(lambda: bool(store.check(awaited)), wait if rank == 0 else wait + _MORE):
        proposed = _verdict("S651", "another rank has ended while the ranks met", (), ())
    elif rank == 0:
        all_parts = _read(store, keys)
        if not item.partial or _has_conflict({id(parts): parts for parts in all_parts}.values()):
            message, notes = describe_differences(item, dict(enumerate(all_parts)))
            proposed = _verdict("S650", message, notes, item.helps)
    _raise_verdict(store, verdict, proposed)


def _read(store: Any, keys: Sequence[str]) -> list[Any]:
    """Read values in one request; equal values are decoded once."""
    packed = [bytes(data_bytes) for data_bytes in store.multi_get(list(keys))]
    decoded = {data: json.loads(zlib.decompress(data)) for data in dict.fromkeys(packed)}
    return [decoded[data] for data in packed]


def missing_ranks_verdict(missing: Sequence[int], world: int, wait: float) -> dict[str, Any]:
    """Describe the refusal (S651) for ranks that have not come within `wait` seconds."""
    verb, do = ("has", "does") if len(missing) == 1 else ("have", "do")
    return _verdict(
        "S651",
        f"{_ranks(missing)} {verb} not called `build` within {wait:g} s",
        [f"this job has {world} ranks, and all of them must call `build`"],
        [
            f"check what {_ranks(missing)} {do}: `build` must not stand under `if rank == 0`",
            "if ranks load for longer, wait longer: `sch.build(wait=300, ...)`",
        ],
    )


def _verdict(code: str, message: str, notes: Iterable[str], helps: Iterable[str]) -> dict[str, Any]:
    return {"code": code, "title": message, "notes": list(notes), "helps": list(helps)}


def _refusal(verdict: Mapping[str, Any]) -> Refusal:
    notes, helps = tuple(verdict["notes"]), tuple(verdict["helps"])
    return Refusal.of(verdict["code"], verdict["title"], notes=notes, helps=helps)


# -- held by some --------------------------------------------------------------------------------


def _digest(item: AgreementItem) -> str:
    text = json.dumps(sorted(item.parts.items()))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _has_conflict(parts_of_ranks: Iterable[Mapping[str, str]]) -> bool:
    """Return whether two ranks have different values of one part."""
    seen: dict[str, str] = {}
    return any(
        seen.setdefault(name, text) != text
        for part in parts_of_ranks
        for name, text in part.items()
    )


# -- in words ------------------------------------------------------------------------------------


def describe_differences(
    item: AgreementItem, parts_of_ranks: Mapping[int, Mapping[str, str]]
) -> tuple[str, list[str]]:
    """Return a title that names ranks and item, and a note for each of the first differing parts.

    The majority is assumed to be right; of two equally large groups the one with the lowest rank.
    """
    names = list(dict.fromkeys(name for parts in parts_of_ranks.values() for name in parts))
    notes, odd_counts = [], Counter[int]()
    for name in names:
        values = {
            rank: parts.get(name)
            for rank, parts in parts_of_ranks.items()
            if name in parts or not item.partial
        }
        if len(set(values.values())) < 2:
            continue
        usual = _majority_value(values)
        odd_ranks = [rank for rank, text in values.items() if text != usual]
        odd_counts.update(odd_ranks)
        notes.append(_difference_note(item, name, values, odd_ranks, usual))
    if not notes:
        return f"ranks have different {item.name}", []
    differing = sorted(odd_counts)
    verb = "has" if len(differing) == 1 else "have"
    hidden = len(notes) - _SHOWN
    rest_note = [f"and {hidden} more of {len(names)}"] * (hidden > 0)
    return f"{_ranks(differing)} {verb} {_different_text(item.name)}", [*notes[:_SHOWN], *rest_note]


def _majority_value(values: Mapping[int, str | None]) -> str | None:
    counts = Counter(values.values())
    largest = max(counts.values())
    return next(text for _, text in sorted(values.items()) if counts[text] == largest)


def _difference_note(
    item: AgreementItem,
    name: str,
    values: Mapping[int, str | None],
    odd: Sequence[int],
    usual: str | None,
) -> str:
    subject = f"`{name}`" if name else "it"
    if not item.readable and usual is not None and values[odd[0]] is not None:
        return (
            f"{subject} differs on {_ranks(odd)} from that of {_ranks(_ranks_with(values, usual))}"
        )
    texts = [f"{_value_text(values[odd[0]])} on {_ranks(_ranks_with(values, values[odd[0]]))}"]
    texts.append(f"{_value_text(usual)} on {_ranks(_ranks_with(values, usual))}")
    return f"{subject} is {', '.join(texts)}"


def _value_text(text: str | None) -> str:
    return "nothing" if text is None else text if len(text) <= 120 else f"{text[:117]}..."


def _ranks_with(values: Mapping[int, str | None], text: str | None) -> list[int]:
    return [rank for rank, value in values.items() if value == text]


def _ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text: `rank 3`, `ranks 1, 2 and 5`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    texts = [str(rank) for rank in ranks[:8]]
    if len(ranks) > len(texts):
        return f"ranks {', '.join(texts)} and {len(ranks) - len(texts)} more"
    return f"ranks {', '.join(texts[:-1])} and {texts[-1]}"


def _different_text(name: str) -> str:
    plural = name.endswith("s") or name.split()[0].endswith("s")
    return f"different {name}" if plural else f"a different {name}"
