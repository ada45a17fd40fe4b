"""A folder of checkpoints: one folder for each checkpoint, and a file that names the last.

    saved/latest             the names of all, the last first, each with the id of its save
    saved/step-00000012/     a checkpoint; nothing in it is ever changed

A folder that is being written or removed has a temporary name with a dot.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal, kind_of
from schedlang.runtime.checkpointing.boxes import check_files
from schedlang.runtime.checkpointing.index import (
    CONTENTS,
    DCP_INDEX_FILE,
    INDEX_FILE,
    Index,
    Unreadable,
    read_index,
)
from schedlang.runtime.storage.folder import (
    LOCK,
    REPLACED,
    SAVING,
    LockHeld,
    fill_folder,
    leftovers,
    lock_file,
    sync,
    temporary_name,
)

LATEST = "latest"
_STEP = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_LINE = re.compile(rf"({_STEP.pattern}) ([0-9a-f]{{16}})")
_PARTS = re.compile(rf"\.{_STEP.pattern}\.[0-9a-f]{{8}}({re.escape(SAVING)}|{re.escape(REPLACED)})")
_DEEPSPEED = re.compile(r".*mp_rank_\d+_(optim|model)_states\.pt")
_FORMER = re.compile(r"__\d+_\d+\.distcp|\.metadata")  # files of a checkpoint in the folder itself


def last_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """Return the last complete checkpoint of a folder of `program.save`; None if there is none.

    Complete means that its index is undamaged and each file exists, of that save and of its length;
    the checksums of contents are checked by a load. If the last one is damaged, an older one is
    returned.
    """
    return last_complete(resolve_folder(folder))


def last_complete(target: Path, skip: Path | None = None) -> Path | None:
    """Return the last complete checkpoint of a folder, except `skip`."""
    try:
        target = _actual_folder(target)
        folders = [target / name for name in _names(target)] or [target]
    except OSError:  # not a folder, or not readable
        return None
    return next((folder for folder in folders if folder != skip and _is_complete(folder)), None)


def resolve_folder(path: str | os.PathLike[str]) -> Path:
    """Return the real path of a folder, with links resolved; refuse a value that is no path
    (S618)."""
    if not isinstance(path, str | os.PathLike):  # an int would be an open file
        message = f"the place of saved state must be a path, not {kind_of(path)}"
        raise Refusal.of("S618", message, helps=('name a folder: `"saved"`',))
    return Path(os.path.realpath(path))


def find_checkpoint(target: Path) -> tuple[Path, str | None]:
    """Return the last checkpoint of a folder, and the id of its save if `latest` names it.

    A folder that is a checkpoint itself is returned. Raises Unreadable or OSError.
    """
    target = _actual_folder(target)
    if (target / LATEST).is_file():
        name, id_ = _read_latest(target)[0]
        return target / name, id_
    if target.is_dir() and not _is_checkpoint_itself(target) and (names := _names(target)):
        return target / names[0], None
    return target, None


def _is_checkpoint_itself(folder: Path) -> bool:
    """Return whether a folder is one checkpoint, not a folder of several."""
    return any((folder / name).is_file() for name in (INDEX_FILE, DCP_INDEX_FILE))


def _actual_folder(target: Path) -> Path:
    """Return the folder, or, if it is empty, what an older save has left between two renames."""
    has_checkpoints = target.is_dir() and (
        (target / LATEST).is_file() or _is_checkpoint_itself(target) or bool(_names(target))
    )
    if has_checkpoints or not target.parent.is_dir():
        return target
    replaced = [path for path in leftovers(target, REPLACED) if path.is_dir()]
    return max(replaced, key=lambda path: path.stat().st_mtime_ns, default=target)


def save_step(
    target: Path,
    id_: str,
    step: int,
    rank: int,
    keep: int | None,
    fill: Callable[[Path], None],
    diagnose: Callable[[BaseException], Diagnostic],
) -> None:
    """Let all ranks fill a new checkpoint, and name it as the last when it is completely on the
    disk.

    `keep - 1` older ones stay. Raises the same Refusal on all ranks; then no file of an older
    checkpoint has been touched.
    """
    with ExitStack() as locks:
        fill_folder(
            rank,
            lambda: _make_folder(target, step, locks),
            fill,
            lambda temporary: _publish(target, temporary, step, id_, keep),
            diagnose,
        )


def _make_folder(target: Path, step: int, locks: ExitStack) -> Path:
    """Lock the folder, remove leftovers of dead saves, and create the new folder."""
    if (target / INDEX_FILE).is_file():
        raise Refusal.of(
            "S632",
            f"`{target}` is a complete checkpoint, and is not changed",
            helps=("save into its parent folder, or into a new one",),
        )
    if target.exists() and not _can_hold_checkpoints(target):
        raise Refusal.of(
            "S632",
            f"`{target}` exists, and is not a folder of checkpoints",
            notes=(
                "a checkpoint is saved into a folder of checkpoints, or into an empty folder",
                "checkpoints of other programs are left alone",
            ),
            helps=("give the path of another folder",),
        )
    target.mkdir(parents=True, exist_ok=True)
    try:
        locks.enter_context(lock_file(target / LOCK))
    except LockHeld as held_lock:
        raise Refusal(held_lock.diagnostic(target)) from None
    _remove_leftovers(target)
    temporary = temporary_name(target / _name(step, 0), SAVING)
    temporary.mkdir()
    return temporary


def _publish(target: Path, temporary: Path, step: int, id_: str, keep: int | None) -> None:
    """Rename the new folder, and then name it as the last: each by one atomic move."""
    previous = [line for line in _latest_lines(target) if (target / line[0]).is_dir()]
    unlisted = [(name, "0" * 16) for name in _names(target) if name not in dict(previous)]
    name = next(n for k in range(1 << 30) if not os.path.lexists(target / (n := _name(step, k))))
    sync(temporary)
    temporary.rename(target / name)
    lines = [(name, id_), *unlisted, *previous]
    try:
        sync(target)
        sync(target.parent)
        _write_lines(target, lines)
    except BaseException:
        if [latest for latest, _ in _latest_lines(target)[:1]] != [name]:
            (target / name).rename(temporary)  # `fill_folder` removes it
        raise
    for old_name, _ in lines[keep:] if keep is not None else ():
        _remove(target / old_name)
    _remove_former(target)


def _name(step: int, k: int) -> str:
    """Return the name of a step's checkpoint, or of its `k`-th repetition."""
    return f"step-{step:08d}" + (f".{k}" if k else "")


def _can_hold_checkpoints(target: Path) -> bool:
    """Return whether checkpoints may be saved in a folder: it holds some of `save`, or is empty.

    Other programs have a file `latest` (DeepSpeed) or `.metadata` (torch), too: theirs stay.
    """
    return target.is_dir() and (
        (target / LOCK).is_file()
        or bool(_latest_lines(target))
        or any((target / name / INDEX_FILE).is_file() for name in _names(target))
        or _holds_former(target)
        or not any(target.iterdir())
    )


def _holds_former(target: Path) -> bool:
    """Return whether the files of a folder are a checkpoint of `save` in the former format."""
    try:
        return (target / DCP_INDEX_FILE).is_file() and (
            ".".join(CONTENTS) in read_index(target).values
        )
    except (OSError, Unreadable):
        return False


# -- the file that names the last ------------------------------------------------------------------


def _read_latest(target: Path) -> list[tuple[str, str]]:
    """Return the lines of `latest`, the last checkpoint first. Raises Unreadable or OSError."""
    if not (target / LATEST).is_file():
        raise Unreadable(f"`{LATEST}` is missing")
    with (target / LATEST).open("rb") as file:
        text = file.read(1 << 20).decode(errors="replace")
    matches = [_LINE.fullmatch(line) for line in text.splitlines()]
    if not matches or not text.endswith("\n") or not all(matches):
        raise Unreadable(f"`{LATEST}` is damaged")
    return [(match[1], match[match.re.groups]) for match in matches if match]


def _latest_lines(target: Path) -> list[tuple[str, str]]:
    """Return the lines of `latest`; empty if it cannot be read."""
    try:
        return _read_latest(target)
    except (OSError, Unreadable):
        return []


def _write_lines(target: Path, lines: list[tuple[str, str]]) -> None:
    temporary = target / f".{LATEST}.{secrets.token_hex(4)}{SAVING}"
    try:
        with temporary.open("x") as file:
            file.write("".join(f"{name} {id_}\n" for name, id_ in lines))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target / LATEST)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(target)


def _names(target: Path) -> list[str]:
    """Return the names of the checkpoints in a folder: in the order of `latest`, others by step."""
    matches = {path.name: _STEP.fullmatch(path.name) for path in target.iterdir() if path.is_dir()}
    listed = [name for name, _ in _latest_lines(target) if name in matches]
    unlisted = {n: (int(m[1]), int(m[2] or 0)) for n, m in matches.items() if m and n not in listed}
    newest_first = sorted(unlisted, key=unlisted.__getitem__, reverse=True)
    return listed + newest_first


def _is_complete(folder: Path) -> bool:
    try:
        check_files(folder, read_index(folder))
    except (OSError, Unreadable):
        return False
    return True


def checked_index(folder: Path, id_: str | None) -> Index:
    """Return the index of a checkpoint, of the save in `latest`. Raises Unreadable, OSError."""
    index = read_index(folder)
    if id_ is not None and index.id != id_ != "0" * 16:
        raise Unreadable(f"it is of save `{index.id}`, but `{LATEST}` names `{id_}`")
    return index


# -- removal ---------------------------------------------------------------------------------------


def _remove_leftovers(target: Path) -> None:
    """Remove leftovers of dead saves; the lock excludes other jobs."""
    pattern = re.compile(rf"\.{LATEST}\.[0-9a-f]{{8}}{re.escape(SAVING)}")
    for path in list(target.iterdir()):
        if _PARTS.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
        elif pattern.fullmatch(path.name):
            path.unlink(missing_ok=True)


def _remove(folder: Path) -> None:
    """Remove a checkpoint: rename it first, so that a partial folder is never taken for one."""
    removed = temporary_name(folder, REPLACED)
    try:
        folder.rename(removed)
    except OSError:
        return  # the next save tries again
    shutil.rmtree(removed, ignore_errors=True) if not removed.is_symlink() else removed.unlink()


def _remove_former(target: Path) -> None:
    """Remove a checkpoint of the former format, in the folder itself, and leftovers of its
    saves."""
    if _holds_former(target):  # the index last: without it, the others could be anyone's
        for path in sorted(target.iterdir(), key=lambda path: path.name == DCP_INDEX_FILE):
            if _FORMER.fullmatch(path.name):
                path.unlink(missing_ok=True)
    for ending in (SAVING, REPLACED):
        for leftover in leftovers(target, ending):
            shutil.rmtree(leftover, ignore_errors=True)


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a checkpoint of `save`, or a folder of such."""
    named = any((Path(path) / name).exists() for name in (LATEST, INDEX_FILE))
    return named and find_deepspeed(path) is None


def is_dcp_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a folder that torch.distributed.checkpoint has written."""
    return (Path(path) / DCP_INDEX_FILE).is_file() and not is_checkpoint(path)


def is_any_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a checkpoint of `save`, or of a program that `transfer` reads."""
    return is_checkpoint(path) or is_dcp_checkpoint(path) or find_deepspeed(path) is not None


# -- folders of other programs ---------------------------------------------------------------------


def is_of_others(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a folder of torch.distributed.checkpoint or of DeepSpeed that `save`
    did not write."""
    if is_dcp_checkpoint(path):
        return not _holds_former(Path(path))
    return find_deepspeed(path) is not None


def find_deepspeed(path: str | os.PathLike[str]) -> Path | None:
    """Return the last checkpoint of DeepSpeed in a folder, or the folder if it is one; else
    None."""
    folder = Path(path)
    with suppress(OSError, ValueError):  # a damaged name
        if (folder / LATEST).is_file():
            with (folder / LATEST).open("rb") as file:
                tag = file.read(1 << 10).decode(errors="replace").strip()
            if Path(tag).name != tag:
                return None
            folder = folder / tag
        if any(_DEEPSPEED.fullmatch(entry.name) for entry in folder.iterdir()):
            return folder
    return None


def convert_helps(path: Path) -> tuple[str, ...]:
    """Return how weights are taken from a folder that another program has written; empty if
    unknown."""
    try:
        names = [entry.name for entry in path.iterdir()] if path.is_dir() else [path.name]
    except OSError:
        return ()
    if "zero_to_fp32.py" in names or any(name.startswith("zero_pp_rank_") for name in names):
        return (
            "it is of DeepSpeed: `schedlang.transfer(folder, program)` reads what ZeRO has written",
            "or in it, `python zero_to_fp32.py . weights` writes full weights, and "
            "`schedlang.transfer(state, program)` takes what `torch.load` reads of these",
        )
    if "latest_checkpointed_iteration.txt" in names:
        return (
            "it is of Megatron: convert it with Megatron's tools to the names and files of the "
            "model, for `save_pretrained` or as a `state_dict`",
            "and `schedlang.transfer(weights, program)` reads these",
        )
    if files := sorted(name for name in names if name.endswith((".bin", ".pt", ".pth"))):
        return (
            f'read it with torch: `state = torch.load("{files[0]}", mmap=True)`',
            "and `schedlang.transfer(state, program)` takes a `state_dict`",
        )
    return ()
