"""A folder of checkpoints: one folder for each that was saved, and a file that names the last.

    saved/latest             the names of all, the last first, each with the id of its save
    saved/step-00000012/     a checkpoint; nothing in it is ever changed

What is being written, or taken away, lies beside them under a name with a dot, until it is swept.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal, kind_of
from schedlang.runtime.checkpointing.boxes import check_files
from schedlang.runtime.checkpointing.index import DCPS, MINE, Index, Unreadable, read_index
from schedlang.runtime.storage.folder import (
    LOCK,
    REPLACED,
    SAVING,
    LockHeld,
    beside_of,
    fill_folder,
    leftovers,
    locked,
    sync,
)

LATEST = "latest"
_STEP = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_LINE = re.compile(rf"({_STEP.pattern}) ([0-9a-f]{{16}})")
_PARTS = re.compile(rf"\.{_STEP.pattern}\.[0-9a-f]{{8}}({re.escape(SAVING)}|{re.escape(REPLACED)})")
_FORMER = re.compile(r"__\d+_\d+\.distcp|\.metadata")  # a checkpoint that lies in the folder itself


def last_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The last whole checkpoint of a folder that `program.save` wrote into; None: there is none.

    Whole means that its index is as it was written and each file is there, of that save and of its
    length; the checksums of what is in them are looked at when it is loaded.  An older one is given
    where the last is damaged.
    """
    return last_whole(resolved(folder))


def last_whole(target: Path, but: Path | None = None) -> Path | None:
    """The last whole checkpoint of a folder, another one than `but`."""
    try:
        target = _home(target)
        every = [target / name for name in _names(target)] or [target]
    except OSError:  # not a folder, or not ours to read
        return None
    return next((one for one in every if one != but and _whole(one)), None)


def resolved(path: str | os.PathLike[str]) -> Path:
    """The folder itself, also where the path is a link to it; refuses what is no path (S618)."""
    if not isinstance(path, str | os.PathLike):  # an int would be an open file
        title = f"state lies at a path, not at {kind_of(path)}"
        raise Refusal.of("S618", title, helps=('name a folder: `"saved"`',))
    return Path(os.path.realpath(path))


def to_load(target: Path) -> tuple[Path, str | None]:
    """The checkpoint that a folder names as its last, and the id of that save where it tells.

    A folder that is a checkpoint itself is the one.  Raises Unreadable or OSError.
    """
    target = _home(target)
    if (target / LATEST).is_file():
        name, id_ = _pointer(target)[0]
        return target / name, id_
    if target.is_dir() and not _is_one(target) and (names := _names(target)):
        return target / names[0], None
    return target, None


def _is_one(folder: Path) -> bool:
    """Return whether a folder is a checkpoint itself, and no folder of several."""
    return any((folder / name).is_file() for name in (MINE, DCPS))


def _home(target: Path) -> Path:
    """The folder, or where it has nothing what a save of before has left between two renames."""
    has = target.is_dir() and (
        (target / LATEST).is_file() or _is_one(target) or bool(_names(target))
    )
    if has or not target.parent.is_dir():
        return target
    left = [path for path in leftovers(target, REPLACED) if path.is_dir()]
    return max(left, key=lambda path: path.stat().st_mtime_ns, default=target)


def save_step(
    target: Path,
    id_: str,
    step: int,
    rank: int,
    keep: int | None,
    fill: Callable[[Path], None],
    diagnose: Callable[[BaseException], Diagnostic],
) -> None:
    """Let all ranks fill a new checkpoint, and name it as the last when all of it is on the disk.

    Of the older ones `keep - 1` stay.  Raises the same Refusal on all ranks; then no file of an
    older checkpoint has been touched.
    """
    with ExitStack() as held:
        fill_folder(
            rank,
            lambda: _begin(target, step, held),
            fill,
            lambda beside: _publish(target, beside, step, id_, keep),
            diagnose,
        )


def _begin(target: Path, step: int, held: ExitStack) -> Path:
    """Make the new folder, alone; what saves that died have left is swept away."""
    if (target / MINE).is_file():
        raise Refusal.of(
            "S632",
            f"`{target}` is a complete checkpoint, and is not changed",
            helps=("save into its parent folder, or into a new one",),
        )
    if target.exists() and not _ours(target):
        raise Refusal.of(
            "S632",
            f"`{target}` exists, and is not a folder of checkpoints",
            notes=("a checkpoint is saved into a folder of checkpoints, or into an empty folder",),
            helps=("give the path of another folder",),
        )
    target.mkdir(parents=True, exist_ok=True)
    try:
        held.enter_context(locked(target / LOCK))
    except LockHeld as other:
        raise Refusal(other.diagnostic(target)) from None
    _sweep(target)
    beside = beside_of(target / _name(step, 0), SAVING)
    beside.mkdir()
    return beside


def _publish(target: Path, beside: Path, step: int, id_: str, keep: int | None) -> None:
    """Give the new folder its name, and then name it as the last: each in one move on the disk."""
    known = [line for line in _lines(target) if (target / line[0]).is_dir()]
    others = [(name, "0" * 16) for name in _names(target) if name not in dict(known)]
    name = next(n for k in range(1 << 30) if not os.path.lexists(target / (n := _name(step, k))))
    sync(beside)
    beside.rename(target / name)
    lines = [(name, id_), *others, *known]
    try:
        sync(target)
        sync(target.parent)
        _write_lines(target, lines)
    except BaseException:
        if [found for found, _ in _lines(target)[:1]] != [name]:
            (target / name).rename(beside)  # which goes, as it would have before
        raise
    for old, _ in lines[keep:] if keep is not None else ():
        _remove(target / old)
    _remove_former(target)


def _name(step: int, k: int) -> str:
    """The name of a step's checkpoint; of its `k`-th repetition."""
    return f"step-{step:08d}" + (f".{k}" if k else "")


def _ours(target: Path) -> bool:
    """Return whether checkpoints may be saved in a folder: it holds some, or is empty."""
    marks = (LATEST, LOCK, DCPS)
    return target.is_dir() and (
        any((target / mark).is_file() for mark in marks) or not any(target.iterdir())
    )


# -- the file that names the last ------------------------------------------------------------------


def _pointer(target: Path) -> list[tuple[str, str]]:
    """The lines of `latest`, the last checkpoint first.  Raises Unreadable or OSError."""
    if not (target / LATEST).is_file():
        raise Unreadable(f"`{LATEST}` is missing")
    with (target / LATEST).open("rb") as file:
        text = file.read(1 << 20).decode(errors="replace")
    found = [_LINE.fullmatch(line) for line in text.splitlines()]
    if not found or not text.endswith("\n") or not all(found):
        raise Unreadable(f"`{LATEST}` is damaged")
    return [(match[1], match[match.re.groups]) for match in found if match]


def _lines(target: Path) -> list[tuple[str, str]]:
    """The same, and nothing where there are none."""
    try:
        return _pointer(target)
    except (OSError, Unreadable):
        return []


def _write_lines(target: Path, lines: list[tuple[str, str]]) -> None:
    made = target / f".{LATEST}.{secrets.token_hex(4)}{SAVING}"
    try:
        with made.open("x") as file:
            file.write("".join(f"{name} {id_}\n" for name, id_ in lines))
            file.flush()
            os.fsync(file.fileno())
        os.replace(made, target / LATEST)
    except BaseException:
        made.unlink(missing_ok=True)
        raise
    sync(target)


def _names(target: Path) -> list[str]:
    """The names of the checkpoints in a folder: as `latest` tells, others by their steps."""
    there = {path.name: _STEP.fullmatch(path.name) for path in target.iterdir() if path.is_dir()}
    listed = [name for name, _ in _lines(target) if name in there]
    more = {n: (int(m[1]), int(m[2] or 0)) for n, m in there.items() if m and n not in listed}
    new = sorted(more, key=more.__getitem__, reverse=True)
    return listed + new


def _whole(folder: Path) -> bool:
    try:
        check_files(folder, read_index(folder))
    except (OSError, Unreadable):
        return False
    return True


def checked_index(folder: Path, id_: str | None) -> Index:
    """The index of a checkpoint, of the save that `latest` names.  Raises Unreadable, OSError."""
    index = read_index(folder)
    if id_ is not None and index.id != id_ != "0" * 16:
        raise Unreadable(f"it is of save `{index.id}`, but `{LATEST}` names `{id_}`")
    return index


# -- what goes -------------------------------------------------------------------------------------


def _sweep(target: Path) -> None:
    """Remove what saves that died have left; under the lock nobody else is at work here."""
    made = re.compile(rf"\.{LATEST}\.[0-9a-f]{{8}}{re.escape(SAVING)}")
    for path in list(target.iterdir()):
        if _PARTS.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
        elif made.fullmatch(path.name):
            path.unlink(missing_ok=True)


def _remove(folder: Path) -> None:
    """Take a checkpoint away: its name in one move, so that what is left is never taken for one."""
    gone = beside_of(folder, REPLACED)
    try:
        folder.rename(gone)
    except OSError:
        return  # it is older than the ones that are kept; the next save tries again
    shutil.rmtree(gone, ignore_errors=True) if not gone.is_symlink() else gone.unlink()


def _remove_former(target: Path) -> None:
    """A checkpoint of before, which lay in the folder itself, and what its saves have left."""
    for path in list(target.iterdir()):
        if _FORMER.fullmatch(path.name):
            path.unlink(missing_ok=True)
    for ending in (SAVING, REPLACED):
        for left in leftovers(target, ending):
            shutil.rmtree(left, ignore_errors=True)


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a checkpoint of `save`, or a folder of such."""
    return any((Path(path) / name).exists() for name in (LATEST, MINE))


def is_dcps(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a folder that torch.distributed.checkpoint has written."""
    return (Path(path) / DCPS).is_file() and not is_checkpoint(path)
