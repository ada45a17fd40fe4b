"""docs/coverage.md, made from docs/coverage.toml: `python -m tests.coverage_page` writes it."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
FAMILIES = {
    "DP": "Data parallelism", "TP": "Tensor parallelism", "PP": "Pipelines", "SP": "Long sequences",
    "EP": "Experts", "ME": "Memory and precision", "AU": "Planners", "CO": "Communication",
    "KE": "Kernels and compilers", "FW": "Frameworks and recipes", "RE": "Resilience",
    "OT": "Others",
}  # fmt: skip
HEAD = """# Coverage

What schedlang means to do: every system and technique of the field, as rows of one file. Each line
has the rows that say it and a test that shows it; what is left is said, and `not yet` where nothing
is there. `python -m tests.coverage_page` makes the page from `docs/coverage.toml`; the tests read
every row and look for every test.

"""


@dataclass(frozen=True)
class Entry:
    """One system: its rows, what its step relaxes, the test that shows it, what is left."""

    key: str
    name: str
    does: str
    rows: tuple[str, ...] = ()
    relax: str = ""
    test: str = ""
    left: str = ""

    @property
    def state(self) -> str:
        """shown, in part or not yet."""
        return "not yet" if not self.test else "in part" if self.left else "shown"


def entries() -> list[Entry]:
    """All of them, in the file's order."""
    told = tomllib.loads((DOCS / "coverage.toml").read_text())
    return [Entry(key, **{**one, "rows": tuple(one.get("rows", ()))}) for key, one in told.items()]


def page() -> str:
    """The text of docs/coverage.md."""
    every = entries()
    counted = {state: sum(one.state == state for one in every) for state in
               ("shown", "in part", "not yet")}  # fmt: skip
    text = HEAD + ", ".join(f"{number} {state}" for state, number in counted.items())
    text += f", of {len(every)}.\n"
    for family, title in FAMILIES.items():
        text += f"\n## {title}\n\n| | does | rows | shown by | left |\n|---|---|---|---|---|\n"
        text += "".join(_line(one) for one in every if one.key[:2] == family)
    return text


def _line(one: Entry) -> str:
    rows = "<br>".join(f"`{' '.join(row.split())}`" for row in one.rows).replace("|", "\\|")
    rows += f"<br>under `relax({one.relax})`" if one.relax else ""
    test = f"`{one.test.partition('::')[2]}`" if one.test else "not yet"
    return f"| {one.name} | {one.does} | {rows} | {test} | {one.left} |\n"


if __name__ == "__main__":
    (DOCS / "coverage.md").write_text(page())
