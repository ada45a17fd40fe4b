"""Verbs of a technique are known in its own tests only."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from schedlang.ir.primitive import scratch


@pytest.fixture(autouse=True)
def _alone(request: pytest.FixtureRequest) -> Iterator[None]:
    """Forget afterwards what the folder of a test has registered and imported."""
    known, path = set(sys.modules), list(sys.path)
    with scratch():
        yield
    sys.path[:] = path
    folder = str(Path(request.node.path).parent)
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(folder):
            del sys.modules[name]
