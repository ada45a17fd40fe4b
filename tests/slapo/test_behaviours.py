"""Slapo's acceptance suite: each of its tests has one here, and says if ours differs."""

import re
from pathlib import Path

from tests.slapo.behaviours import behaviours
from tests.slapo.page import PAGE, page

TESTS = Path(__file__).parent.parent


def test_each_is_shown() -> None:
    """The test that is named exists; behaviours are told once."""
    known = {path.name: path.read_text() for path in TESTS.rglob("test_*.py")}
    for one in behaviours():
        file, _, name = one.ours.partition("::")
        assert re.search(rf"^def {name}\(", known[Path(file).name], re.M), one
    assert len({one.theirs for one in behaviours()}) == len(behaviours())


def test_the_page_is_made_of_them() -> None:
    """docs/slapo.md is what `python -m tests.slapo.page` writes."""
    assert PAGE.read_text() == page()
