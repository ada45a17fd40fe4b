"""Clear caches of this process whenever a bug is injected or removed.

A warm rank runs many programs.  schedlang functions cache results by arguments, which is valid as
long as code does not change; an injected bug changes code, so a cached result from before it would
hide its effect.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from functools import _lru_cache_wrapper
from typing import Any

from schedlang.runtime.fusion import rewrite


def cached_functions() -> Iterator[Any]:
    """Yield all imported schedlang functions that cache results by arguments."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "schedlang" or module is None:
            continue
        for value in list(vars(module).values()):
            if isinstance(value, _lru_cache_wrapper) and inspect.signature(value).parameters:
                yield value


def clear_caches() -> None:
    """Clear all cached results and compiled regions."""
    for function in cached_functions():
        function.cache_clear()
    rewrite._regions.clear()
