"""docs/coverage.md: every schedule on it is planned as printed, and every test is there."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from schedlang.diagnostics.source import Source
from schedlang.ir.modelfile import load_model_file
from schedlang.ir.primitive import isolated_registry
from schedlang.language.syntax import parse
from schedlang.passes.elaborate.state import Settings
from schedlang.schedule import Schedule
from tests.coverage_page import DOCS, FAMILIES, Entry, entries, found_tests, page


@cache
def model(path: Path) -> Any:
    """The model of a file, built once."""
    return load_model_file(str(path)).model()


def test_the_page_is_made_of_its_data() -> None:
    """The page is what `python -m tests.coverage_page` writes."""
    assert (DOCS / "coverage.md").read_text() == page()
    assert {one.key[:2] for one in entries()} == set(FAMILIES)


SAID = [pytest.param(one, id=one.key) for one in entries() if one.rows]


@pytest.mark.parametrize("one", SAID)
def test_it_is_planned_as_printed(one: Entry) -> None:
    """The schedule of an entry plans on its model; nothing is added to what the page prints."""
    file = parse(Source("coverage.toml", one.schedule))
    with isolated_registry():  # a technique brings its verb with its model
        assert Schedule(model(one.model), file, Settings()).plan().actions


def test_what_shows_it_is_there() -> None:
    """The test of every entry exists; who has no test says what is missing, and has no rows."""
    for one in entries():
        if one.test:
            assert one.test in found_tests(), one
        else:
            assert one.left and not one.rows, one
