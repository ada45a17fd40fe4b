"""Messages fit 80 columns; names, rows and quoted source are never broken."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import schedlang
from schedlang.diagnostics.codes import codes_with_examples, example

EXAMPLES = Path(schedlang.__file__).parent / "diagnostics" / "code_texts" / "examples"
TITLE = re.compile(r"^(?:error|warning)\[[SW]\d+\]: .*(?:\n {10,}.*)*$", re.MULTILINE)
SHORT_TITLES = ("S428", "S510", "S619", "S625", "S668", "S935")
# may be longer: quoted source, its marks, paths, and text to be pasted
QUOTED = re.compile(r" *\d+ \| .*| *\| +[-^]+| *(?:-->|:::) \S+| {6}\S.*")
UNBROKEN = re.compile(r"(?: *= (?:note|help): | +\| +| +)(?:`[^`]*`|\S)+")


@pytest.mark.parametrize("code", SHORT_TITLES)
def test_a_title_fits(code: str) -> None:
    """The title of each listed example is one line of at most 80 columns."""
    titles = TITLE.findall((EXAMPLES / f"{code}.txt").read_text())
    assert titles and max(map(len, titles)) <= 80, titles


def test_no_line_is_longer_than_a_page() -> None:
    """No line of a message has more than 80 columns, except quoted text."""
    long_lines = [
        line
        for code in codes_with_examples()
        for code_example in [example(code)]
        if code_example is not None
        for line in code_example.message.split("\n")
        if len(line) > 80 and not QUOTED.fullmatch(line) and not UNBROKEN.fullmatch(line)
    ]
    assert not long_lines, "\n".join(long_lines)
