"""Two names on the disk exchanged: in one move where the system can, else in three.

Linux (`renameat2`) and macOS (`renamex_np`) can, on most of their file systems; Python does not
offer it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from pathlib import Path

_HERE = -100  # AT_FDCWD: paths are seen from the working folder
_EXCHANGE = 2  # RENAME_EXCHANGE; macOS' RENAME_SWAP has the same number
# a file system, or a kernel, that cannot
_NONE = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.EXDEV}


def exchange(one: Path, other: Path, between: Path) -> None:
    """Each gets the name of the other.  Raises OSError; then both have their own.

    Where it takes three moves, the other one has the name `between` meanwhile.
    """
    if _at_once(one, other):
        return
    other.rename(between)
    try:
        one.rename(other)
    except OSError:
        between.rename(other)
        raise
    between.rename(one)


def _at_once(one: Path, other: Path) -> bool:
    """Exchange them in one move; False where that cannot be done here."""
    names = os.fsencode(one), os.fsencode(other)
    library = ctypes.CDLL(None, use_errno=True)
    try:
        if sys.platform == "darwin":
            failed = library.renamex_np(*names, _EXCHANGE)
        else:
            failed = library.renameat2(_HERE, names[0], _HERE, names[1], _EXCHANGE)
    except AttributeError:  # a C library of before, or another system
        return False
    if failed and (number := ctypes.get_errno()) not in _NONE:
        raise OSError(number, os.strerror(number), str(one), None, str(other))
    return not failed
