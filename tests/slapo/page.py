"""docs/slapo.md: from Slapo to schedlang; `python -m tests.slapo.page` writes it."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.slapo.behaviours import behaviours, calls

HERE = Path(__file__).parent
PAGE = HERE.parent.parent / "docs" / "slapo.md"
MARK = "<!-- the rest is written by python -m tests.slapo.page -->\n"


def _first_line(node: ast.FunctionDef) -> str:
    return (ast.get_docstring(node) or "").split("\n")[0]


def page_text() -> str:
    """The text of docs/slapo.md: the written part, and below the mark what the tests say."""
    all_tests = behaviours()
    unchanged = sum(not behaviour.differs for behaviour in all_tests)
    text = PAGE.read_text().partition(MARK)[0] + MARK + "\n## Its calls, as rows\n\n"
    text += "| Slapo | schedlang | shown by | why |\n|---|---|---|---|\n"
    for call in calls():
        code = [*(f"`{row}`" for row in call.rows), *([f"`{call.python}`"] if call.python else [])]
        test = f"`{call.test.partition('::')[2]}`" if call.test else "not yet"
        cells = (f"`{call.theirs}`", "<br>".join(code) or "-", test, call.why)
        text += "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
    text += "\n## Its tests, restated\n\n"
    text += (
        f"{unchanged} of {len(all_tests)} hold unchanged. The last column explains each"
        " difference.\n\n"
    )
    text += "| Slapo tests | here | ours differs |\n|---|---|---|\n"
    for behaviour in all_tests:
        text += (
            f"| {behaviour.theirs} | `{behaviour.ours.partition('::')[2]}` |"
            f" {behaviour.differs} |\n"
        )
    text += "\n## Its silent mistakes\n\n"
    text += "Slapo computes wrong results here without an error. schedlang is right or refuses; "
    text += "each line is a test.\n\n"
    tree = ast.parse((HERE / "test_silent_bugs.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_s"):
            numbers = [part.upper() for part in node.name.split("_") if part[1:].isdigit()]
            text += f"* {', '.join(numbers)}: {_first_line(node)}\n"
    return text


if __name__ == "__main__":
    PAGE.write_text(page_text())
