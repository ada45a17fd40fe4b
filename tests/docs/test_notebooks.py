"""The notebooks run from their first cell to their last, and what they show can be shown."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))


def shown(code: str, names: dict[str, Any], place: str) -> str:
    """Run a cell as a notebook does; what it would show of the value of its last line."""
    tree = ast.parse(code)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, place, "exec"), names)
    if last is None:
        return ""
    value = eval(compile(ast.Expression(last.value), place, "eval"), names)  # type: ignore[attr-defined]
    return "" if value is None else str(getattr(value, "_repr_html_", lambda: repr(value))())


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_it_runs(file: Path) -> None:
    """Every cell, in order; pictures are SVG, the report says that all is equal."""
    cells = json.loads(file.read_text())["cells"]
    names: dict[str, Any] = {"__name__": "__main__"}
    found = [
        shown("".join(cell["source"]), names, f"{file.stem}[{place}]")
        for place, cell in enumerate(cells)
        if cell["cell_type"] == "code"
    ]
    assert any("<svg" in text for text in found)
    assert all(len(text) < 300_000 for text in found)
    if "report" in names:
        assert "PASS" in found[-1]


def test_cells_are_empty_of_results() -> None:
    """What is kept is what was written: no results, no counts of runs."""
    for file in NOTEBOOKS:
        for cell in json.loads(file.read_text())["cells"]:
            assert not cell.get("outputs") and cell.get("execution_count") is None
