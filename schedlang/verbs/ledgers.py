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
        return next((op for op in reversed(self.ops) if op.waits and not op.beside), None)


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
    own = [path for path in files if _OURS.fullmatch(path.name)]
    if own:
        logs = [_read_record(path) for path in own]
    else:
        dumps = [(path, _DUMP.fullmatch(path.name)) for path in files]
        logs = _complete_lanes([_read_dump(path, int(match[1])) for path, match in dumps if match])
    if not logs:
        raise _refuse_empty(
            f"`{folder}` has neither records of ranks nor dumps of a flight recorder"
        )
    last = max(log.began for log in logs)
    logs = [log for log in logs if log.written >= last]  # older files are of an earlier job
    now = time.time() if any(log.live for log in logs) else max(log.written for log in logs)
    return Job({log.rank: log for log in logs}, max(log.world for log in logs), now)


def _refuse_empty(title: str) -> Refusal:
    helps = (
        "have ranks write records: `SCHEDLANG_RECORD=FOLDER torchrun ...`, on every rank",
        "or give the folder of the dumps: TORCH_FR_DUMP_TEMP_FILE names it",
    )
    return Refusal.of("S109", title, helps=helps)


# -- ours ------------------------------------------------------------------------------------------


def _read_record(path: Path) -> Ledger:
    try:
        record = json.loads(path.read_text())
        if record["version"] != VERSION:
            title = (
                f"`{path.name}` is a record of version {record['version']}, this reads {VERSION}"
            )
            raise Refusal.of("S109", title, helps=("read it with the version that wrote it",))
        live = json.loads(path.with_suffix(".now.json").read_text())
        values: dict[str, Any] = {
            "steps": tuple((int(n), float(a), float(b)) for n, a, b in record["steps"]),
            "lanes": {name: tuple(ranks) for name, ranks in record["lanes"].items()},
            "counts": {(a, b, _read_ends(ends)): n for a, b, ends, n in record["counts"]},
            "ops": tuple(_read_op(row) for row in record["ops"]),
            "where": tuple((a, b, c, n) for a, b, c, n in live["where"]),
            "stack": tuple(live["stack"]),
            **{name: live[name] for name in ("written", "over", "error")},
            **{name: record[name] for name in ("rank", "world", "host", "device", "began", "step")},
        }
        return Ledger(**values)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(path, error) from None


def _read_op(row: Sequence[Any]) -> Op:
    values = dict(zip((op_field.name for op_field in fields(Op)), row, strict=True))
    return Op(**{**values, "ends": _read_ends(values["ends"])})


def _read_ends(ends: Sequence[int] | None) -> tuple[int, int] | None:
    return None if ends is None else (ends[0], ends[1])


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
        dump = json.loads(data) if data[:1] == b"{" else _Plain(io.BytesIO(data)).load()
        config = dump.get("pg_config", {})
        lanes = {name: _parse_ranks(group["ranks"]) for name, group in config.items()}
        ops = [_read_entry(entry, lanes) for entry in dump["entries"]]
    except (OSError, ValueError, KeyError, TypeError, EOFError, pickle.UnpicklingError) as error:
        raise _damaged(path, error) from None
    counts: dict[tuple[str, str, tuple[int, int] | None], int] = {}
    for entry in ops:
        counts[entry.channel] = max(counts.get(entry.channel, 0), entry.number)
    world = max((len(ranks) for ranks in lanes.values()), default=0)
    moments = [entry.began for entry in ops] or [0.0]
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


def _complete_lanes(ledgers: Sequence[Ledger]) -> list[Ledger]:
    """Add to ledgers the ranks of groups that dumps do not contain: the ranks that have used the
    group."""
    used: dict[str, tuple[int, ...]] = {}
    for rank, lane in sorted({(ledger.rank, op.lane) for ledger in ledgers for op in ledger.ops}):
        used[lane] = (*used.get(lane, ()), rank)
    return [replace(ledger, lanes={**used, **ledger.lanes}) for ledger in ledgers]


def _parse_ranks(ranks: object) -> tuple[int, ...]:
    return tuple(ast.literal_eval(ranks) if isinstance(ranks, str) else ranks)  # type: ignore[arg-type]


def _read_entry(entry: Mapping[str, Any], lanes: Mapping[str, tuple[int, ...]]) -> Op:
    name, _, direction = str(entry["profiling_name"]).partition(":")[2].partition(" ")
    op = {**_NAMES, "recv": "receive"}.get(name, name.replace("_", "-"))
    lane, ends = entry["process_group"][0], None
    if entry.get("is_p2p"):  # "send 0->1": places in the group
        places = [int(index) for index in direction.split("->")]
        source, target = (lanes[lane][index] if lanes.get(lane) else index for index in places)
        ends = source, target
    number = int(entry["collective_seq_id" if ends is None else "p2p_seq_id"])
    size = max(_count_bytes(entry, side) for side in ("input", "output"))
    began, duration = entry["time_created_ns"] / 1e9, entry.get("duration_ms")
    waits = entry["state"] != "completed" and not entry.get("retired", False)
    ended = 0.0 if waits else began + (duration or 0.0) / 1e3
    frames = entry.get("frames") or ()
    user_frames = [frame for frame in frames if not _NOT_USERS.search(frame["filename"])]
    caller = f"{user_frames[0]['filename']}:{user_frames[0]['line']}" if user_frames else ""
    return Op(lane, number, op, caller, "", size, ends, False, waits, False, began, ended)


def _count_bytes(entry: Mapping[str, Any], side: str) -> int:
    total = 0
    for shape, kind in zip(entry.get(f"{side}_sizes", ()), entry.get(f"{side}_dtypes", ())):
        count = _WIDTHS.get(kind, 1)
        for length in shape:
            count *= length
        total += count
    return total
