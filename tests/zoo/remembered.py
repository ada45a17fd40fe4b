"""What this process has worked out and keeps: forgotten wherever a bug begins or ends.

A warm rank runs one program after the other.  Values that functions of schedlang remember by their
arguments (the runs of indices that a layout gives a rank) never change in a process whose code
never changes; a bug changes it, and what is remembered from before would stand for what it does.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from functools import _lru_cache_wrapper
from typing import Any

from schedlang.runtime.fusion import rewrite


def remembering() -> Iterator[Any]:
    """The functions of schedlang, as far as it is imported, that keep results by arguments."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "schedlang" or module is None:
            continue
        for value in list(vars(module).values()):
            if isinstance(value, _lru_cache_wrapper) and inspect.signature(value).parameters:
                yield value


def forget() -> None:
    """Let all of it be worked out anew; compiled regions, too."""
    for function in remembering():
        function.cache_clear()
    rewrite._regions.clear()
