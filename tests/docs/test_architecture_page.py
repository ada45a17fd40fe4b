"""docs/architecture.md is up to date with the files and their imports."""

import re

from tests.architecture_page import PAGE, ROOT, excluded_folders, page


def test_the_page_is_drawn_from_the_files() -> None:
    """The page equals the output of `python -m tests.architecture_page`."""
    assert PAGE.read_text() == page()


def test_what_stands_apart_is_used_by_none() -> None:
    """No other folder imports the commands that import-linter leaves out."""
    assert excluded_folders()
    for folder in excluded_folders():
        name = re.escape(".".join(folder.relative_to(ROOT).parts))
        other_files = [
            path for path in (ROOT / "schedlang").rglob("*.py") if not path.is_relative_to(folder)
        ]
        imports = re.compile(rf"(from|import) {name}\b")
        assert not [path for path in other_files if imports.search(path.read_text())]
