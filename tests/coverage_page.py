"""Write docs/coverage.md from docs/coverage.toml: `python -m tests.coverage_page`."""

from __future__ import annotations

import ast
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
DOCS = TESTS.parent / "docs"
FAMILIES = {
    "DP": "Data parallelism",
    "TP": "Tensor parallelism",
    "PP": "Pipelines",
    "SP": "Long sequences",
    "EP": "Experts",
    "ME": "Memory and precision",
    "AU": "Planners",
    "CO": "Communication",
    "KE": "Kernels and compilers",
    "FW": "Frameworks and recipes",
    "RE": "Resilience",
    "OT": "Others",
}
HEAD = """# Coverage

Look up a system or technique of the field, and find the rows that express it. Each line has these
rows, on a mesh and a model (of `examples/`; Llama if none is named), and a test. The last column
says what is missing or different. `not yet` means that nothing exists yet.

The tests plan every schedule on its model as printed, and check that every test exists. CI runs all
these tests, except those marked *deep*, which run by name (`pytest -m deep`). `python -m
tests.coverage_page` writes the page from `docs/coverage.toml`.

"""


@dataclass(frozen=True)
class Entry:
    """One system: its schedule, the model to plan it on, the test that shows it, what is left.

    on        a folder of `examples`, or a file with `model()`
    patterns  lines above the mesh
    """

    key: str
    name: str
    does: str
    mesh: str = ""
    on: str = "llama"
    patterns: str = ""
    rows: tuple[str, ...] = ()
    relax: str = ""
    test: str = ""
    left: str = ""

    @property
    def state(self) -> str:
        """`shown`, `in part` or `not yet`."""
        return "not yet" if not self.test else "in part" if self.left else "shown"

    @property
    def model(self) -> Path:
        """The file that defines the model."""
        path = TESTS.parent / self.on
        return path if path.suffix else TESTS.parent / "examples" / self.on / "model.py"

    @property
    def schedule(self) -> str:
        """The text of a schedule file: what the page prints, and nothing else."""
        lines = ["schedule 1", *([self.patterns] if self.patterns else [])]
        lines += [f"mesh({self.mesh})"] if self.mesh else []
        relax = f" relax({self.relax})" if self.relax else ""
        return "\n".join([*lines, f'step "rows"{relax} {{', *self.rows, "}", ""])


def entries() -> list[Entry]:
    """Read all entries, in the file's order."""
    data = tomllib.loads((DOCS / "coverage.toml").read_text())
    return [
        Entry(key, **{**fields, "rows": tuple(fields.get("rows", ()))})
        for key, fields in data.items()
    ]


@cache
def all_tests() -> dict[str, bool]:
    """Every test function, as file::name, and whether only the deep tier runs it."""
    tests = {}
    techniques = (TESTS.parent / "examples" / "techniques").rglob("test_*.py")
    for path in (*TESTS.rglob("test_*.py"), *techniques):
        tree = ast.parse(path.read_text())
        lines = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Assign)]
        all_deep = any(line.startswith("pytestmark =") and "mark.deep" in line for line in lines)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                marks = [ast.unparse(mark) for mark in node.decorator_list]
                deep = all_deep or "pytest.mark.deep" in marks
                tests[f"{path.name}::{node.name}"] = deep
    return tests


def page() -> str:
    """The text of docs/coverage.md."""
    all_entries = entries()
    counted = {
        state: sum(entry.state == state for entry in all_entries)
        for state in ("shown", "in part", "not yet")
    }
    text = HEAD + ", ".join(f"{number} {state}" for state, number in counted.items())
    text += f", of {len(all_entries)}.\n"
    for family, heading in FAMILIES.items():
        text += f"\n## {heading}\n\n| | does | schedule | test | missing or different |\n"
        text += "|---|---|---|---|---|\n"
        text += "".join(_format_line(entry) for entry in all_entries if entry.key[:2] == family)
    return text


def _format_line(entry: Entry) -> str:
    header = [entry.patterns] if entry.patterns else []
    header += [f"mesh({entry.mesh})"] if entry.mesh else []
    lines = [" ".join(row.split()) for row in (*header, *entry.rows)]
    rows = "<br>".join(f"`{line}`" for line in lines).replace("|", "\\|")
    rows += f"<br>under `relax({entry.relax})`" if entry.relax else ""
    rows += f"<br>on `{entry.on}`" if entry.rows and entry.on != "llama" else ""
    test = f"`{entry.test.partition('::')[2]}`" if entry.test else "not yet"
    test += " (deep)" if all_tests().get(entry.test) else ""
    return f"| {entry.name} | {entry.does} | {rows} | {test} | {entry.left} |\n"


if __name__ == "__main__":
    (DOCS / "coverage.md").write_text(page())
