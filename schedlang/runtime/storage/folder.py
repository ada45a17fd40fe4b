"""A folder that is replaced whole or not at all, by all ranks of a job."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from schedlang.diagnostic import Diagnostic, Refusal
from schedlang.runtime.collectives import comm
from schedlang.runtime.storage.exchange import exchange
from schedlang.runtime.storage.lock import Held, locked

T = TypeVar("T")
SAVING, REPLACED = ".saving", ".replaced"  # endings of what lies beside the folder meanwhile


def together(
    step: Callable[[], T], told: Callable[[BaseException], Diagnostic],
    failures: tuple[type[BaseException], ...] = (OSError,),
) -> T:  # fmt: skip
    """The step's result; if it fails on any rank, the same Refusal on all of them."""
    refusal, value = None, None
    try:
        value = step()
    except Refusal as error:
        refusal = error
    except failures as error:
        refusal = Refusal(told(error))
    if comm.anywhere(refusal is not None):
        raise next(found for found in comm.distinct(refusal) if found is not None)
    return value  # type: ignore[return-value]


def fill_folder(
    rank: int, begin: Callable[[], Path], fill: Callable[[Path], None],
    publish: Callable[[Path], None], told: Callable[[BaseException], Diagnostic],
) -> None:  # fmt: skip
    """Let all ranks fill a new folder; rank 0 makes it, and gives it its name when it is whole.

    Raises the same Refusal on all ranks; then the new folder is gone again.
    """
    beside: Path | None = None

    def on_first(step: Callable[[], T]) -> T | None:
        return together(step if rank == 0 else lambda: None, told)

    try:
        beside = comm.told_by(0, on_first(begin))
        assert beside is not None
        there: Path = beside
        together(lambda: _see(there), told)
        fill(there)
        on_first(lambda: publish(there))
    except BaseException:
        if rank == 0 and beside is not None:
            shutil.rmtree(beside, ignore_errors=True)
        raise


def replace_folder(
    target: Path, rank: int, fill: Callable[[Path], None], *, marks: Sequence[str],
    told: Callable[[BaseException], Diagnostic], failures: tuple[type[BaseException], ...],
) -> None:  # fmt: skip
    """Let all ranks fill a new folder, then put it in the target's place.

    What stood there before stays, under its own name, until the new one is on the disk; one of
    `marks` is a file that such a folder has.  Nobody else replaces it meanwhile.  Raises the same
    Refusal on all ranks, leaving everything as it was.
    """
    with ExitStack() as held:
        fill_folder(
            rank, lambda: _begin(target, marks, held),
            lambda beside: together(lambda: fill(beside), told, failures),
            lambda beside: _publish(target, beside), told,
        )  # fmt: skip


def beside_of(target: Path, ending: str) -> Path:
    """A new name beside the target, by which what is not in its place yet, or no more, is known."""
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}{ending}")


def leftovers(target: Path, ending: str) -> list[Path]:
    """What jobs that died have left beside the target."""
    ours = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}{re.escape(ending)}")
    return [path for path in target.parent.iterdir() if ours.fullmatch(path.name)]


def _begin(target: Path, marks: Sequence[str], held: ExitStack) -> Path:
    """Make the new folder, alone; what replacements that died have left is swept away."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        held.enter_context(locked(target.with_name(f".{target.name}.lock"), stays=False))
    except Held as other:
        raise Refusal(other.told(target)) from None
    if not os.path.lexists(target):  # one that took three moves has died after the first
        former = [path for path in leftovers(target, REPLACED) if path.is_dir()]
        if former:
            max(former, key=lambda path: path.stat().st_mtime_ns).rename(target)
    if target.exists() and not _replaceable(target, marks):
        raise Refusal(
            Diagnostic(
                "S632", f"`{target}` exists, and is not a checkpoint",
                notes=("only a checkpoint or an empty folder may be replaced",),
                helps=("give the path of another folder",),
            )
        )  # fmt: skip
    _sweep(target)
    beside = beside_of(target, SAVING)
    beside.mkdir()
    return beside


def _sweep(target: Path) -> None:
    for ending in (SAVING, REPLACED):
        for left in leftovers(target, ending):
            shutil.rmtree(left, ignore_errors=True)


def _replaceable(target: Path, marks: Sequence[str]) -> bool:
    found = target.is_dir() and any((target / mark).is_file() for mark in marks)
    return found or (target.is_dir() and not any(target.iterdir()))


def _see(beside: Path) -> None:
    if not beside.is_dir():
        raise Refusal(
            Diagnostic(
                "S631", f"not all ranks see `{beside.parent}`",
                notes=("each rank writes its shards into this folder",),
                helps=("give a path on a file system that all nodes share",),
            )
        )  # fmt: skip


def _publish(target: Path, beside: Path) -> None:
    """Put the new folder, once it is on the disk, in the old one's place, which then goes."""
    settle(beside)
    former = target.exists()
    if former:
        exchange(beside, target, beside_of(target, REPLACED))
    else:
        beside.rename(target)
    try:
        sync(target.parent)
    except BaseException:  # and back
        if former:
            exchange(beside, target, beside_of(target, REPLACED))
        else:
            target.rename(beside)
        raise
    _sweep(target)


def settle(folder: Path) -> None:
    """All files below a folder, and their names, reach the disk."""
    for inner, _, names in os.walk(folder):
        for name in (*names, "."):
            sync(Path(inner, name))


def sync(path: Path) -> None:
    """What is in a file, or the names that are in a folder, reach the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
