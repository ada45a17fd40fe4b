"""What tests of the house and its pages share: files read once as syntax, and given back."""

from collections.abc import Iterator

import pytest

from tests import figures


@pytest.fixture(scope="module", autouse=True)
def _forget() -> Iterator[None]:
    """Give the syntax of all files back: the garbage collector would look at it ever again."""
    yield
    figures.parsed.cache_clear()
