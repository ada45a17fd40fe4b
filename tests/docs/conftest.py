"""Fixtures for tests of the repository's files: the cache of parsed files is emptied."""

from collections.abc import Iterator

import pytest

from tests import figures


@pytest.fixture(scope="module", autouse=True)
def _forget() -> Iterator[None]:
    """Empty the cache of parsed files, which the garbage collector would otherwise scan again and
    again."""
    yield
    figures.parsed.cache_clear()
