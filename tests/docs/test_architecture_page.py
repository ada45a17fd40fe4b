"""docs/architecture.md shows the house as it stands."""

import re

from tests.architecture_page import PAGE, ROOT, apart, floors, page, uses


def test_the_page_is_drawn_from_the_imports() -> None:
    """The page is what `python -m tests.architecture_page` draws."""
    assert PAGE.read_text() == page()


def test_imports_go_down() -> None:
    """No room uses one that stands above it, as this page reads imports (and import-linter too)."""
    height = {room: -place for place, floor in enumerate(floors()) for room in floor}
    wrong = [(a, b) for a, below in uses().items() for b in below if height[b] > height[a]]
    assert wrong == []


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
