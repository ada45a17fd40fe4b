"""The documentation site: every page is in the navigation, and mkdocs builds without warnings."""

import re
from pathlib import Path

import pytest

from tests import forks

ROOT = Path(__file__).parents[2]


def test_every_page_has_its_place() -> None:
    """The navigation names each file of docs/ once, and no other."""
    listed = re.findall(r"\b([\w]+\.md)\b", (ROOT / "mkdocs.yml").read_text().split("nav:")[1])
    generated = {"readme.md", "contributing.md", "changelog.md", "verbs.md", "codes.md"}
    assert sorted(listed) == sorted(
        {page.name for page in (ROOT / "docs").glob("*.md")} | generated
    )


def test_it_is_built(tmp_path: Path) -> None:
    """The strict build finds no dead link, and the reference pages have content."""
    pytest.importorskip("mkdocs")
    command = ("-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path))
    result = forks.run_interpreter(*command, cwd=ROOT)
    assert result.returncode == 0 and "WARNING" not in result.stderr, result.stderr
    assert "shard(style" in (tmp_path / "verbs" / "index.html").read_text()
    assert "S405" in (tmp_path / "codes" / "index.html").read_text()
