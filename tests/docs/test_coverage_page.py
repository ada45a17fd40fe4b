"""docs/coverage.md is up to date: every schedule on it can be planned, and every test exists."""

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
from tests.coverage_page import DOCS, FAMILIES, Entry, all_tests, entries, page


@cache
def load_model(path: Path) -> Any:
    """The model of a file, built once."""
    return load_model_file(str(path)).model()


def test_the_page_is_made_of_its_data() -> None:
    """The page equals the output of `python -m tests.coverage_page`."""
    assert (DOCS / "coverage.md").read_text() == page()
    assert {entry.key[:2] for entry in entries()} == set(FAMILIES)


PLANNED_ENTRIES = [pytest.param(one, id=one.key) for one in entries() if one.rows]


@pytest.mark.parametrize("one", PLANNED_ENTRIES)
def test_it_is_planned_as_printed(one: Entry) -> None:
    """The schedule of an entry can be planned on its model exactly as the page prints it."""
    file = parse(Source("coverage.toml", one.schedule))
    with isolated_registry():  # a technique brings its verb with its model
        assert Schedule(load_model(one.model), file, Settings()).plan().actions


def test_what_shows_it_is_there() -> None:
    """The test of every entry exists; an entry without a test says what is missing."""
    for entry in entries():
        if entry.test:
            assert entry.test in all_tests(), entry
        else:
            assert entry.left and not entry.rows, entry
