"""docs/comparison.md: made from tests, and every word about others has its source."""

import re

import pytest

from tests.comparison_page import OTHERS, PARTS, UNCHECKED, Line, docstring, page, told
from tests.coverage_page import DOCS, entries

SOURCES, LINES = told()


def test_the_page_is_made_of_its_data() -> None:
    """The page is what `python -m tests.comparison_page` writes, with all parts."""
    assert (DOCS / "comparison.md").read_text() == page()
    assert {one.part for one in LINES} == set(PARTS)


@pytest.mark.parametrize("one", LINES, ids=lambda one: one.name)
def test_what_is_ours_has_proof(one: Line) -> None:
    """A row is made of tests that exist, of entries of coverage, or of words of the README."""
    assert one.coverage or one.tests or one.readme
    assert set(one.coverage) <= {entry.key for entry in entries()}
    assert all(docstring(test) for test in one.tests)
    readme = " ".join((DOCS.parent / "README.md").read_text().replace("*", "").split())
    assert one.readme in readme


def test_what_is_theirs_has_a_source() -> None:
    """A claim about another system names what was read; a source that nobody names is not there."""
    used = set()
    for one in LINES:
        assert len(one.theirs) == len(OTHERS)
        assert any(key for _, key in one.theirs), one.name
        for said, key in one.theirs:
            assert bool(key) == (said != UNCHECKED), (one.name, said)
            used |= {key} - {""}
    assert used == set(SOURCES)
    form = r"https://\S+|[\w.-]+/[\w.-]+ [\w./-]+ \([0-9a-f]{7}\)"
    assert all(re.fullmatch(form, where) for where in SOURCES.values())


def test_it_is_fair() -> None:
    """What ours lacks comes first, and says so: GPUs, 8-bit floats, one search of all layouts."""
    first = [one for one in LINES if one.part == "ahead"]
    assert LINES[: len(first)] == first
    cells = " ".join(one.ours() for one in first)
    assert "Nothing has been run on a GPU" in cells and "not yet" in cells and "in part" in cells
