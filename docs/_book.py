"""Pages that mkdocs adds to the book: the files above docs/, and the program's own reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
ABOVE = {
    "README.md": "readme.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}


def on_files(files: Files, config: Any) -> Files:
    """Add README and its kin, a page of all verbs of schedules, and one of all codes."""
    made = {page: (ROOT / name).read_text() for name, page in ABOVE.items()}
    made |= {"verbs.md": verbs(), "codes.md": codes()}
    for page, text in made.items():
        text = text.replace("](docs/", "](")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, **more: Any) -> str:
    """Links to files above docs/ lead to their pages in the book."""
    for name, page in ABOVE.items():
        markdown = markdown.replace(f"](../{name})", f"]({page})")
    return markdown


def verbs() -> str:
    """What `explain` says of every primitive."""
    from schedlang.ir.primitive import load_all, registry
    from schedlang.language import manual

    load_all()
    pages = [
        f"## {name}\n\n```text\n{manual.explain(kind)}```\n"
        for name, kind in sorted(registry().items())
    ]
    return "# Verbs\n\n" + "\n".join(pages)


def codes() -> str:
    """What `explain` says of every code."""
    from schedlang.diagnostics.codes import CODES, explain

    pages = [f"## {code}\n\n```text\n{explain(code).rstrip()}\n```\n" for code in CODES]
    return "# Messages\n\n" + "\n".join(pages)
