"""docs/comparison.md, made from docs/comparison.toml: `python -m tests.comparison_page` writes it.

What it says of schedlang is not written there: it is what a test's docstring says, or the state of
an entry of docs/coverage.toml, or a sentence of the README.
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
    """One row: where it stands, what ours is made of, and what others say, each with its source."""

    part: str
    name: str
    coverage: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    readme: str = ""
    theirs: tuple[tuple[str, str], ...] = ()  # words and the key of a source, as in OTHERS

    def ours(self) -> str:
        """The cell of schedlang."""
        known = {one.key: one for one in entries()}
        said = [f"{self.readme.rstrip('.')} (README)"] if self.readme else []
        for one in (known[key] for key in self.coverage):
            test = f", `{one.test.partition('::')[2]}`" if one.test else ""
            left = f": {one.left}" if one.left else ""
            said.append(f"{one.name}: {one.state}{test}{left if one.test else ''}")
        said += [f"{docstring(test)} `{test.partition('::')[2]}`" for test in self.tests]
        return "<br>".join(said)


def told() -> tuple[dict[str, str], list[Line]]:
    """The sources by key, and all rows."""
    data = tomllib.loads((DOCS / "comparison.toml").read_text())
    return data["sources"], [_line(one) for one in data["row"]]


def _line(one: dict[str, Any]) -> Line:
    pairs = [one.pop(name, (UNCHECKED, "")) for name in OTHERS]
    lists = {key: tuple(value) if isinstance(value, list) else value for key, value in one.items()}
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
    sources, lines = told()
    numbers = {key: place for place, key in enumerate(sources, 1)}
    text = HEAD
    for part, (title, words) in PARTS.items():
        text += f"\n## {title}\n\n{words}\n\n| | schedlang | {' | '.join(OTHERS.values())} |\n"
        text += "|---|---|" + "---|" * len(OTHERS) + "\n"
        for one in (line for line in lines if line.part == part):
            cells = [f"{said} [{numbers[key]}]" if key else said for said, key in one.theirs]
            text += f"| {one.name} | {one.ours()} | {' | '.join(cells)} |\n"
    text += "\n## Sources\n\n"
    return text + "".join(f"{numbers[key]}. {where}\n" for key, where in sources.items())


if __name__ == "__main__":
    (DOCS / "comparison.md").write_text(page())
