"""Ranks start as for users: the server that forks them is a new interpreter."""

import pytest

from schedlang.runtime.launch.pool import Pool
from tests import forks


@pytest.fixture(autouse=True)
def _as_users_start_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the server have only the modules that it imports by itself."""
    monkeypatch.setattr(Pool, "_executed", staticmethod(forks.EXECUTED))
