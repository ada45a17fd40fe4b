"""Write docs/comparison.md from docs/comparison.toml: `python -m tests.comparison_page`.

The cells about schedlang are not in that file: they come from docstrings of tests, from the states
of entries of docs/coverage.toml, and from the README.
"""

from __future__ import annotations

import ast
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.coverage_page import DOCS, entries

TESTS = Path(__file__).parent
OTHERS = {
    "torchtitan": "torchtitan",
    "transformers": "transformers",
    "deepspeed": "DeepSpeed",
    "megatron": "Megatron-LM",
    "slapo": "Slapo",
}
PARTS = {
    "ahead": (
        "Where they are ahead",
        "These cells do not show years of use on clusters, which "
        "count more than most of the cells.",
    ),
    "technique": ("Techniques", "Available techniques, and the models that they apply to."),
    "expected": ("What users expect", "Properties that are not techniques."),
}
UNCHECKED = "not checked"


@dataclass(frozen=True)
class Line:
    """One row: its part of the page, the sources of our cell, and the other systems' cells."""

    part: str
    name: str
    coverage: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    readme: str = ""
    theirs: tuple[tuple[str, str], ...] = ()  # words and the key of a source, as in OTHERS

    def ours(self) -> str:
        """The text of the cell about schedlang."""
        by_key = {entry.key: entry for entry in entries()}
        parts = [f"{self.readme.rstrip('.')} (README)"] if self.readme else []
        for entry in (by_key[key] for key in self.coverage):
            test = f", `{entry.test.partition('::')[2]}`" if entry.test else ""
            missing = f": {entry.left}" if entry.left else ""
            parts.append(f"{entry.name}: {entry.state}{test}{missing if entry.test else ''}")
        parts += [f"{docstring(test)} `{test.partition('::')[2]}`" for test in self.tests]
        return "<br>".join(parts)


def read_rows() -> tuple[dict[str, str], list[Line]]:
    """Read the sources by key, and all rows."""
    data = tomllib.loads((DOCS / "comparison.toml").read_text())
    return data["sources"], [_parse_row(fields) for fields in data["row"]]


def _parse_row(fields: dict[str, Any]) -> Line:
    pairs = [fields.pop(name, (UNCHECKED, "")) for name in OTHERS]
    lists = {
        key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()
    }
    return Line(**lists, theirs=tuple((str(a), str(b)) for a, b in pairs))


def docstring(test: str) -> str:
    """The property that a test states, given as file::name."""
    file, _, name = test.partition("::")
    path = next(path for path in TESTS.rglob(Path(file).name) if str(path).endswith(file))
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
    raise KeyError(test)


HEAD = """# Comparison with other systems

Compare schedlang with five systems that train large models. A cell about schedlang states the
property of a test, or the state of an entry of [coverage](coverage.md). A cell about another system
ends with the number of its source. *Not checked* means that no source was read: neither yes nor no.

In short: most of these systems train on clusters of GPUs, and schedlang has not been run on a GPU.
In schedlang, techniques are rows of one file beside an unmodified model, and a laptop compares the
result with the model before training costs money. If you must train a large model today, use one of
the others.

`python -m tests.comparison_page` writes this page from `docs/comparison.toml`.
"""


def page() -> str:
    """The text of docs/comparison.md."""
    sources, lines = read_rows()
    numbers = {key: number for number, key in enumerate(sources, 1)}
    text = HEAD
    for part, (heading, introduction) in PARTS.items():
        text += (
            f"\n## {heading}\n\n{introduction}\n\n| | schedlang | {' | '.join(OTHERS.values())} |\n"
        )
        text += "|---|---|" + "---|" * len(OTHERS) + "\n"
        for row in (line for line in lines if line.part == part):
            cells = [
                f"{text_cell} [{numbers[key]}]" if key else text_cell
                for text_cell, key in row.theirs
            ]
            text += f"| {row.name} | {row.ours()} | {' | '.join(cells)} |\n"
    text += "\n## Sources\n\n"
    return text + "".join(f"{numbers[key]}. {source}\n" for key, source in sources.items())


if __name__ == "__main__":
    (DOCS / "comparison.md").write_text(page())
