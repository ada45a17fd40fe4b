"""Numbers of hooks: torch counts them by process, and modules bring theirs along.

A hook of a module that was sent here, or loaded whole, is replaced by one that is added under the
same number.
"""

from __future__ import annotations

import sys


def next_hook_number() -> int:
    """Tell the number of this process's next hook: 0 where torch is not imported, which stays so.

    Importing it starts threads (those of numpy's linear algebra), and a process with threads is not
    forked from.
    """
    hooks = sys.modules.get("torch.utils.hooks")
    return hooks.RemovableHandle.next_id if hooks else 0


def number_hooks_from(least: int) -> None:
    """Give hooks that are added from now on numbers of at least this one."""
    from torch.utils.hooks import RemovableHandle

    RemovableHandle.next_id = max(RemovableHandle.next_id, least)
