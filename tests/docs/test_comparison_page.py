"""docs/comparison.md is up to date, and every claim about another system has its source."""

import re

import pytest

from tests.comparison_page import OTHERS, PARTS, UNCHECKED, Line, docstring, page, read_rows
from tests.coverage_page import DOCS, entries

SOURCES, LINES = read_rows()


def test_the_page_is_made_of_its_data() -> None:
    """The page equals the output of `python -m tests.comparison_page`, with all parts."""
    assert (DOCS / "comparison.md").read_text() == page()
    assert {line.part for line in LINES} == set(PARTS)


@pytest.mark.parametrize("one", LINES, ids=lambda one: one.name)
def test_what_is_ours_has_proof(one: Line) -> None:
    """Each row cites existing tests, coverage entries, or a sentence of the README."""
    assert one.coverage or one.tests or one.readme
    assert set(one.coverage) <= {entry.key for entry in entries()}
    assert all(docstring(test) for test in one.tests)
    readme = " ".join((DOCS.parent / "README.md").read_text().replace("*", "").split())
    assert one.readme in readme


def test_what_is_theirs_has_a_source() -> None:
    """A claim about another system cites what was read; every source is cited."""
    used = set()
    for line in LINES:
        assert len(line.theirs) == len(OTHERS)
        assert any(key for _, key in line.theirs), line.name
        for claim, key in line.theirs:
            assert bool(key) == (claim != UNCHECKED), (line.name, claim)
            used |= {key} - {""}
    assert used == set(SOURCES)
    pattern = r"https://\S+|[\w.-]+/[\w.-]+ [\w./-]+ \([0-9a-f]{7}\)"
    assert all(re.fullmatch(pattern, source) for source in SOURCES.values())


def test_it_is_fair() -> None:
    """What schedlang lacks comes first: GPUs, 8-bit floats, one search over all layouts."""
    ahead = [line for line in LINES if line.part == "ahead"]
    assert LINES[: len(ahead)] == ahead
    cells = " ".join(line.ours() for line in ahead)
    assert "Nothing has been run on a GPU" in cells and "not yet" in cells and "in part" in cells
