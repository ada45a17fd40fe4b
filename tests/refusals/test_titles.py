"""Titles of messages fit a line of 80 columns, with names as in the examples."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import schedlang

EXAMPLES = Path(schedlang.__file__).parent / "code_texts" / "examples"
TITLE = re.compile(r"^(?:error|warning)\[[SW]\d+\]: .*$", re.MULTILINE)
SHORT = ("S428", "S510", "S619", "S625", "S668", "S935")


@pytest.mark.parametrize("code", SHORT)
def test_a_title_fits(code: str) -> None:
    """With the names of its example it has at most 80 columns."""
    titles = TITLE.findall((EXAMPLES / f"{code}.txt").read_text())
    assert titles and max(map(len, titles)) <= 80, titles
