"""Verbs of a technique are known in its own tests only."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from schedlang.ir.primitive import isolated_registry


@pytest.fixture(autouse=True)
def _alone(request: pytest.FixtureRequest) -> Iterator[None]:
    """Import what is in the folder of a test anew, and forget afterwards what it has registered."""
    path, folder = list(sys.path), Path(request.node.path).parent
    modules = {file.stem for file in folder.glob("*.py") if not file.stem.startswith("test_")}
    _forget(modules)
    with isolated_registry():
        yield
    _forget(modules)  # who imports one of them later gets its verb
    sys.path[:] = path


def _forget(names: set[str]) -> None:
    for name in names:
        sys.modules.pop(name, None)
