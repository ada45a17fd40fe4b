"""Which cases of a long list the ordinary tests run; the others run with `-m deep`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def thinned(cases: Iterable[Any], keep: int = 2) -> list[Any]:
    """Every `keep`-th case as it is, the others marked deep."""
    found = []
    for place, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        found.append(case if place % keep == 0 else pytest.param(*values, marks=pytest.mark.deep))
    return found
