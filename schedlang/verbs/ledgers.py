"""Ledgers of ranks, read from our records or from dumps of torch's flight recorder."""

from __future__ import annotations

import ast
import io
import json
import pickle
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from schedlang.diagnostics.diagnostic import Refusal

VERSION = 1
_OURS, _DUMP = re.compile(r"rank(\d+)\.json"), re.compile(r".*?(\d+)(\.json|\.pkl|\.pickle)?")


@dataclass(frozen=True)
class Op:
    """A collective or a message of one rank; see `schedlang.runtime.launch.rank_record`."""

    lane: str
    number: int
    op: str
    whose: str = ""
    row: str = ""
    size: int = 0
    ends: tuple[int, int] | None = None
    backward: bool = False
    waits: bool = False
    beside: bool = False
    began: float = 0.0
    ended: float = 0.0

    @property
    def channel(self) -> tuple[str, str, tuple[int, int] | None]:
        """The key by which the operation is counted."""
        return self.lane, "" if self.ends is None else self.op, self.ends


@dataclass(frozen=True)
class Ledger:
    """The record of one rank. `steps`: (number, seconds since the last one, seconds of them
    waiting).

    where   where the rank was seen at work: module, line, row, how often
    """

    rank: int
    world: int
    host: str
    device: str
    began: float
    written: float
    over: bool
    error: str
    step: int
    steps: tuple[tuple[int, float, float], ...]
    lanes: Mapping[str, tuple[int, ...]]
    counts: Mapping[tuple[str, str, tuple[int, int] | None], int]
    ops: tuple[Op, ...]
    where: tuple[tuple[str, str, str, int], ...]
    stack: tuple[str, ...]
    live: bool = True  # rewritten while the rank runs

    @property
    def waits(self) -> Op | None:
        """The operation of the rank's main work in which the rank waits now; None: it does not
        wait."""
        return next((one for one in reversed(self.ops) if one.waits and not one.beside), None)


@dataclass(frozen=True)
class Job:
    """The ledgers of a job by rank, and the time of reading, in seconds since the epoch."""

    ledgers: Mapping[int, Ledger]
    world: int
    now: float


def read_job(folder: Path) -> Job:
    """Read the last job that wrote into a folder; refuses S109 a folder without records or
    dumps."""
    if not folder.is_dir():
        raise _refuse_empty(f"`{folder}` is no folder")
    files = sorted(path for path in folder.iterdir() if path.is_file())
    ours = [path for path in files if _OURS.fullmatch(path.name)]
    if ours:
        found = [_read_record(path) for path in ours]
    else:
        dumps = [(path, _DUMP.fullmatch(path.name)) for path in files]
        found = _complete_lanes([_read_dump(path, int(match[1])) for path, match in dumps if match])
    if not found:
        raise _refuse_empty(
            f"`{folder}` has neither records of ranks nor dumps of a flight recorder"
        )
    last = max(one.began for one in found)
    found = [one for one in found if one.written >= last]  # older files are of an earlier job
    now = time.time() if any(one.live for one in found) else max(one.written for one in found)
    return Job({one.rank: one for one in found}, max(one.world for one in found), now)


def _refuse_empty(title: str) -> Refusal:
    helps = (
        "have ranks write records: `SCHEDLANG_RECORD=FOLDER torchrun ...`, on every rank",
        "or give the folder of the dumps: TORCH_FR_DUMP_TEMP_FILE names it",
    )
    return Refusal.of("S109", title, helps=helps)


# -- ours ------------------------------------------------------------------------------------------


def _read_record(path: Path) -> Ledger:
    try:
        found = json.loads(path.read_text())
        if found["version"] != VERSION:
            title = f"`{path.name}` is a record of version {found['version']}, this reads {VERSION}"
            raise Refusal.of("S109", title, helps=("read it with the version that wrote it",))
        now = json.loads(path.with_suffix(".now.json").read_text())
        made: dict[str, Any] = {
            "steps": tuple((int(n), float(a), float(b)) for n, a, b in found["steps"]),
            "lanes": {name: tuple(ranks) for name, ranks in found["lanes"].items()},
            "counts": {(a, b, _read_ends(ends)): n for a, b, ends, n in found["counts"]},
            "ops": tuple(_read_op(row) for row in found["ops"]),
            "where": tuple((a, b, c, n) for a, b, c, n in now["where"]),
            "stack": tuple(now["stack"]),
            **{name: now[name] for name in ("written", "over", "error")},
            **{name: found[name] for name in ("rank", "world", "host", "device", "began", "step")},
        }
        return Ledger(**made)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(path, error) from None


def _read_op(row: Sequence[Any]) -> Op:
    made = dict(zip((one.name for one in fields(Op)), row, strict=True))
    return Op(**{**made, "ends": _read_ends(made["ends"])})


def _read_ends(given: Sequence[int] | None) -> tuple[int, int] | None:
    return None if given is None else (given[0], given[1])


def _damaged(path: Path, error: Exception) -> Refusal:
    title = f"`{path.name}` cannot be read: {type(error).__name__}: {error}"
    return Refusal.of("S109", title, helps=("leave it out of the folder",))


# -- torch's flight recorder -----------------------------------------------------------------------

_NAMES = {
    "_allgather_base": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base": "reduce-scatter",
}
_NOT_USERS = re.compile(r"site-packages|/lib/python|schedlang/")
_WIDTHS = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2}


class _Plain(pickle.Unpickler):
    """Unpickles plain values only: anyone may have written the dump."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _read_dump(path: Path, rank: int) -> Ledger:
    """Read a dump of torch's flight recorder; calling lines stand for the names of modules."""
    try:
        data = path.read_bytes()
        found = json.loads(data) if data[:1] == b"{" else _Plain(io.BytesIO(data)).load()
        config = found.get("pg_config", {})
        lanes = {name: _parse_ranks(group["ranks"]) for name, group in config.items()}
        ops = [_read_entry(one, lanes) for one in found["entries"]]
    except (OSError, ValueError, KeyError, TypeError, EOFError, pickle.UnpicklingError) as error:
        raise _damaged(path, error) from None
    counts: dict[tuple[str, str, tuple[int, int] | None], int] = {}
    for one in ops:
        counts[one.channel] = max(counts.get(one.channel, 0), one.number)
    world = max((len(ranks) for ranks in lanes.values()), default=0)
    moments = [one.began for one in ops] or [0.0]
    return Ledger(
        rank=rank,
        world=max(world, rank + 1),
        host="",
        device="",
        began=moments[0],
        written=path.stat().st_mtime,
        over=False,
        error="",
        step=-1,
        steps=(),
        lanes={name: ranks for name, ranks in lanes.items() if ranks},
        counts=counts,
        ops=tuple(ops),
        where=(),
        stack=(),
        live=False,
    )


def _complete_lanes(found: Sequence[Ledger]) -> list[Ledger]:
    """Add to ledgers the ranks of groups that dumps do not contain: the ranks that have used the
    group."""
    used: dict[str, tuple[int, ...]] = {}
    for rank, lane in sorted({(one.rank, op.lane) for one in found for op in one.ops}):
        used[lane] = (*used.get(lane, ()), rank)
    return [replace(one, lanes={**used, **one.lanes}) for one in found]


def _parse_ranks(told: object) -> tuple[int, ...]:
    return tuple(ast.literal_eval(told) if isinstance(told, str) else told)  # type: ignore[arg-type]


def _read_entry(one: Mapping[str, Any], lanes: Mapping[str, tuple[int, ...]]) -> Op:
    name, _, way = str(one["profiling_name"]).partition(":")[2].partition(" ")
    op = {**_NAMES, "recv": "receive"}.get(name, name.replace("_", "-"))
    lane, ends = one["process_group"][0], None
    if one.get("is_p2p"):  # "send 0->1": places in the group
        places = [int(place) for place in way.split("->")]
        source, target = (lanes[lane][place] if lanes.get(lane) else place for place in places)
        ends = source, target
    number = int(one["collective_seq_id" if ends is None else "p2p_seq_id"])
    size = max(_count_bytes(one, side) for side in ("input", "output"))
    began, took = one["time_created_ns"] / 1e9, one.get("duration_ms")
    waits = one["state"] != "completed" and not one.get("retired", False)
    ended = 0.0 if waits else began + (took or 0.0) / 1e3
    frames = one.get("frames") or ()
    own = [f for f in frames if not _NOT_USERS.search(f["filename"])]
    whose = f"{own[0]['filename']}:{own[0]['line']}" if own else ""
    return Op(lane, number, op, whose, "", size, ends, False, waits, False, began, ended)


def _count_bytes(one: Mapping[str, Any], side: str) -> int:
    total = 0
    for shape, kind in zip(one.get(f"{side}_sizes", ()), one.get(f"{side}_dtypes", ())):
        count = _WIDTHS.get(kind, 1)
        for length in shape:
            count *= length
        total += count
    return total
