"""docs/architecture.md shows the house as it stands."""

from tests.architecture_page import PAGE, floors, page, uses


def test_the_page_is_drawn_from_the_imports() -> None:
    """The page is what `python -m tests.architecture_page` draws."""
    assert PAGE.read_text() == page()


def test_imports_go_down() -> None:
    """No room uses one that stands above it, as this page reads imports (and import-linter too)."""
    height = {room: -place for place, floor in enumerate(floors()) for room in floor}
    wrong = [(a, b) for a, below in uses().items() for b in below if height[b] > height[a]]
    assert wrong == []
