"""Verbs of a technique are known in its own tests only."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from schedlang.ir.primitive import scratch


@pytest.fixture(autouse=True)
def _alone(request: pytest.FixtureRequest) -> Iterator[None]:
    """Import what is in the folder of a test anew, and forget afterwards what it has registered."""
    path = list(sys.path)
    for file in Path(request.node.path).parent.glob("*.py"):
        if not file.stem.startswith("test_"):
            sys.modules.pop(file.stem, None)
    with scratch():
        yield
    sys.path[:] = path
