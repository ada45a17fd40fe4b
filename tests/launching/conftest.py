"""Ranks as users start them: the server that they are forked from is a new interpreter."""

import pytest

from schedlang.runtime.launch.pool import Pool
from tests import forks


@pytest.fixture(autouse=True)
def _as_users_start_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but what the server imports by itself is there."""
    monkeypatch.setattr(Pool, "_executed", staticmethod(forks.EXECUTED))
