"""The book: every page has its place, and mkdocs builds it without a warning."""

import re
from pathlib import Path

import pytest

from tests import forks

ROOT = Path(__file__).parents[2]


def test_every_page_has_its_place() -> None:
    """The navigation names each file of docs/ once, and nothing that is not there."""
    named = re.findall(r"\b([\w]+\.md)\b", (ROOT / "mkdocs.yml").read_text().split("nav:")[1])
    made = {"readme.md", "contributing.md", "changelog.md", "verbs.md", "codes.md"}
    assert sorted(named) == sorted({page.name for page in (ROOT / "docs").glob("*.md")} | made)


def test_it_is_built(tmp_path: Path) -> None:
    """Strictly: no dead link between pages, no page of the reference empty."""
    pytest.importorskip("mkdocs")
    words = ("-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path))
    done = forks.anew(*words, cwd=ROOT)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    assert "shard(style" in (tmp_path / "verbs" / "index.html").read_text()
    assert "S405" in (tmp_path / "codes" / "index.html").read_text()
