"""Numbers of hooks: torch counts them per process, and unpickled modules keep their own.

A hook of a received or loaded module would be replaced by a new hook with the same number.
"""

from __future__ import annotations

import sys


def next_hook_number() -> int:
    """Return the number of this process's next hook: 0 if torch is not imported, and do not import
    it.

    Importing torch starts threads (those of numpy's linear algebra), and a process with threads
    must not be forked.
    """
    hooks = sys.modules.get("torch.utils.hooks")
    return hooks.RemovableHandle.next_id if hooks else 0


def number_hooks_from(minimum: int) -> None:
    """Number the hooks that are added from now on from at least `minimum`."""
    from torch.utils.hooks import RemovableHandle

    RemovableHandle.next_id = max(RemovableHandle.next_id, minimum)
