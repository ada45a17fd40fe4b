"""docs/coverage.md, made from docs/coverage.toml: `python -m tests.coverage_page` writes it."""

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
        """shown, in part or not yet."""
        return "not yet" if not self.test else "in part" if self.left else "shown"

    @property
    def model(self) -> Path:
        """The file that defines the model."""
        named = TESTS.parent / self.on
        return named if named.suffix else TESTS.parent / "examples" / self.on / "model.py"

    @property
    def schedule(self) -> str:
        """The text of a schedule file: what the page prints, and nothing else."""
        lines = ["schedule 1", *([self.patterns] if self.patterns else [])]
        lines += [f"mesh({self.mesh})"] if self.mesh else []
        relax = f" relax({self.relax})" if self.relax else ""
        return "\n".join([*lines, f'step "rows"{relax} {{', *self.rows, "}", ""])


def entries() -> list[Entry]:
    """All of them, in the file's order."""
    told = tomllib.loads((DOCS / "coverage.toml").read_text())
    return [Entry(key, **{**one, "rows": tuple(one.get("rows", ()))}) for key, one in told.items()]


@cache
def found_tests() -> dict[str, bool]:
    """Every test function, as file::name, and whether only the deep tier runs it."""
    found = {}
    techniques = (TESTS.parent / "examples" / "techniques").rglob("test_*.py")
    for path in (*TESTS.rglob("test_*.py"), *techniques):
        tree = ast.parse(path.read_text())
        lines = [ast.unparse(one) for one in tree.body if isinstance(one, ast.Assign)]
        whole = any(line.startswith("pytestmark =") and "mark.deep" in line for line in lines)
        for one in tree.body:
            if isinstance(one, ast.FunctionDef) and one.name.startswith("test_"):
                own = [ast.unparse(mark) for mark in one.decorator_list]
                deep = whole or "pytest.mark.deep" in own
                found[f"{path.name}::{one.name}"] = deep
    return found


def page() -> str:
    """The text of docs/coverage.md."""
    every = entries()
    counted = {
        state: sum(one.state == state for one in every) for state in ("shown", "in part", "not yet")
    }
    text = HEAD + ", ".join(f"{number} {state}" for state, number in counted.items())
    text += f", of {len(every)}.\n"
    for family, title in FAMILIES.items():
        text += f"\n## {title}\n\n| | does | schedule | test | missing or different |\n"
        text += "|---|---|---|---|---|\n"
        text += "".join(_line(one) for one in every if one.key[:2] == family)
    return text


def _line(one: Entry) -> str:
    above = [one.patterns] if one.patterns else []
    above += [f"mesh({one.mesh})"] if one.mesh else []
    lines = [" ".join(row.split()) for row in (*above, *one.rows)]
    rows = "<br>".join(f"`{line}`" for line in lines).replace("|", "\\|")
    rows += f"<br>under `relax({one.relax})`" if one.relax else ""
    rows += f"<br>on `{one.on}`" if one.rows and one.on != "llama" else ""
    test = f"`{one.test.partition('::')[2]}`" if one.test else "not yet"
    test += " (deep)" if found_tests().get(one.test) else ""
    return f"| {one.name} | {one.does} | {rows} | {test} | {one.left} |\n"


if __name__ == "__main__":
    (DOCS / "coverage.md").write_text(page())
