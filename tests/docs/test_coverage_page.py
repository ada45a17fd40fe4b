"""docs/coverage.md: every row is one of the language, and every test is there."""

import re
from pathlib import Path

import pytest

from schedlang.passes.reading.expand import expand
from schedlang.source import Source
from schedlang.syntax import parse
from tests.coverage_page import DOCS, FAMILIES, Entry, entries, page

AXES = ("dp", "pp", "tp", "cp", "ep", "sp", "r", "c", "d", "x", "y", "z")
TESTS = Path(__file__).parents[1]


def test_the_page_is_made_of_its_data() -> None:
    """The page is what `python -m tests.coverage_page` writes."""
    assert (DOCS / "coverage.md").read_text() == page()
    assert {one.key[:2] for one in entries()} == set(FAMILIES)


@pytest.mark.parametrize("one", [e for e in entries() if e.rows], ids=lambda e: e.key)
def test_rows_are_accepted(one: Entry) -> None:
    """What `check` reads of a row, it accepts: verbs, arguments, axes, names."""
    relax = f" relax({one.relax})" if one.relax else ""
    patterns = "pattern bias_gelu(x, b) { gelu(x + b) }\n"
    text = f"schedule 1\n{patterns}mesh({', '.join(f'{axis}=2' for axis in AXES)})\n"
    text += f'step "s"{relax} {{\n' + "".join(f"  {row}\n" for row in one.rows) + "}\n"
    expand(parse(Source("coverage.toml", text)), None)


def test_what_shows_it_is_there() -> None:
    """The test of every entry exists; who has no test says what is missing, and has no rows."""
    known = {path.name: path.read_text() for path in TESTS.rglob("test_*.py")}
    for one in entries():
        if one.test:
            file, _, name = one.test.partition("::")
            assert re.search(rf"^def {name}\(", known[file], re.M), one
        else:
            assert one.left and not one.rows, one
