"""Numbers of hooks: torch counts them by process, and modules bring theirs along.

A hook of a module that was sent here, or loaded whole, is replaced by one that is added under the
same number.
"""

from __future__ import annotations

from torch.utils.hooks import RemovableHandle


def number_hooks_from(least: int) -> None:
    """Give hooks that are added from now on numbers of at least this one."""
    RemovableHandle.next_id = max(RemovableHandle.next_id, least)
