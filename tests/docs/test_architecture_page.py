"""docs/architecture.md shows the house as it stands."""

import re

from tests.architecture_page import PAGE, ROOT, apart, page


def test_the_page_is_drawn_from_the_files() -> None:
    """The page is what `python -m tests.architecture_page` draws."""
    assert PAGE.read_text() == page()


def test_what_stands_apart_is_used_by_none() -> None:
    """No room imports a command that import-linter leaves out."""
    assert apart()
    for folder in apart():
        name = re.escape(".".join(folder.relative_to(ROOT).parts))
        others = [
            path for path in (ROOT / "schedlang").rglob("*.py") if not path.is_relative_to(folder)
        ]
        named = re.compile(rf"(from|import) {name}\b")
        assert not [path for path in others if named.search(path.read_text())]
