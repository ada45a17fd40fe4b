"""Notebooks run from the first to the last cell, and their results can be shown."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))


def run_cell(code: str, names: dict[str, Any], label: str) -> str:
    """Run a cell as a notebook does, and return what it would show."""
    tree = ast.parse(code)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, label, "exec"), names)
    if last is None:
        return ""
    value = eval(compile(ast.Expression(last.value), label, "eval"), names)  # type: ignore[attr-defined]
    return "" if value is None else str(getattr(value, "_repr_html_", lambda: repr(value))())


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_it_runs(file: Path) -> None:
    """Every cell runs, in order; pictures are SVG, and the report passes."""
    cells = json.loads(file.read_text())["cells"]
    names: dict[str, Any] = {"__name__": "__main__"}
    outputs = [
        run_cell("".join(cell["source"]), names, f"{file.stem}[{index}]")
        for index, cell in enumerate(cells)
        if cell["cell_type"] == "code"
    ]
    assert any("<svg" in text for text in outputs)
    assert all(len(text) < 300_000 for text in outputs)
    if "report" in names:
        assert "PASS" in outputs[-1]


def test_cells_are_empty_of_results() -> None:
    """Notebooks are stored without results and execution counts."""
    for file in NOTEBOOKS:
        for cell in json.loads(file.read_text())["cells"]:
            assert not cell.get("outputs") and cell.get("execution_count") is None
