"""Messages fit lines of 80 columns; names, rows and quoted source are never broken for it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import schedlang
from schedlang.diagnostics.codes import codes_with_examples, example

EXAMPLES = Path(schedlang.__file__).parent / "diagnostics" / "code_texts" / "examples"
TITLE = re.compile(r"^(?:error|warning)\[[SW]\d+\]: .*(?:\n {10,}.*)*$", re.MULTILINE)
SHORT = ("S428", "S510", "S619", "S625", "S668", "S935")
# what may be longer than a line: quoted source, the marks below it, paths, and what is to be pasted
QUOTED = re.compile(r" *\d+ \| .*| *\| +[-^]+| *(?:-->|:::) \S+| {6}\S.*")
UNBROKEN = re.compile(r"(?: *= (?:note|help): | +\| +| +)(?:`[^`]*`|\S)+")


@pytest.mark.parametrize("code", SHORT)
def test_a_title_fits(code: str) -> None:
    """With the names of its example it has at most 80 columns, and one line."""
    titles = TITLE.findall((EXAMPLES / f"{code}.txt").read_text())
    assert titles and max(map(len, titles)) <= 80, titles


def test_no_line_is_longer_than_a_page() -> None:
    """In a file as on a terminal no line has more than 80 columns, but for what is quoted whole."""
    long = [
        line
        for code in codes_with_examples()
        for shown in [example(code)]
        if shown is not None
        for line in shown.message.split("\n")
        if len(line) > 80 and not QUOTED.fullmatch(line) and not UNBROKEN.fullmatch(line)
    ]
    assert not long, "\n".join(long)
