"""Refusals in Python name the user's line: in a script, a notebook cell and a function."""

from __future__ import annotations

import linecache
import textwrap
from pathlib import Path
from typing import Any

import pytest

import schedlang
from schedlang.diagnostics.codes import model
from schedlang.diagnostics.diagnostic import Refusal
from tests import forks

ROOT = Path(__file__).parents[2]
CELL = """\
sch = schedlang.create_schedule(net)
sch.mesh(tp=3)
sch["layers.*.up"].shard("col", over="tp")
"""


def _example_model() -> Any:
    namespace: dict[str, Any] = {}
    exec(model(), namespace)
    return namespace["model"]()


def test_a_script(tmp_path: Path) -> None:
    """A script that ends in a refusal prints the message with its own line, last of all."""
    (tmp_path / "model.py").write_text(model())
    head = "import schedlang\nfrom model import model\n\nnet = model()\n"
    (tmp_path / "x.py").write_text(head + CELL)
    result = forks.run_interpreter("x.py", cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": ""})
    assert result.returncode == 1
    message = result.stderr[result.stderr.index("error[S402]") :]
    assert ' --> x.py:7:1\n  |\n7 | sch["layers.*.up"].shard("col", over="tp")\n  | ^^^^' in message


def test_a_cell_of_a_notebook() -> None:
    """A notebook cell has a generated file name and its lines in linecache, as in IPython."""
    name = "<ipython-input-3-0a1b2c>"
    linecache.cache[name] = (len(CELL), None, CELL.splitlines(True), name)
    with pytest.raises(Refusal) as caught:
        exec(compile(CELL, name, "exec"), {"schedlang": schedlang, "net": _example_model()})
    assert f'{name}:3:1\n  |\n3 | sch["layers.*.up"].shard(' in caught.value.render()


def test_code_without_lines() -> None:
    """Code without a file is refused with its line number, but no quoted line."""
    with pytest.raises(Refusal) as caught:
        exec(compile(CELL, "<string>", "exec"), {"schedlang": schedlang, "net": _example_model()})
    assert " --> <string>:3:1" in caught.value.render()


MISTAKES = {
    "a selector": 'sch["layer.*"].checkpoint()',
    "a verb": 'sch["layers.*"].chekpoint()',
    "an argument": 'sch["layers.*"].checkpoint(sav=1)',
    "a declaration": "sch.mesh(tp=0)",
    "a condition": 'sch.require("1 > 2")',
    "a setting": "sch.set(tp=3)",
    "a step": "sch.undo(to='nothing')",
    "a module": "sch.why('layers.9')",
    "what is built": "sch.build(clip=-1)",
    "the job": "sch.mesh(dp=2); sch.zero(stage=0, over='dp'); sch.build()",
}


@pytest.mark.parametrize("name", MISTAKES)
def test_every_refusal_has_a_line(tmp_path: Path, name: str) -> None:
    """Every refusal of a Python schedule points at the line that caused it."""
    path = tmp_path / "mine.py"
    path.write_text(
        textwrap.dedent(f"""\
        import schedlang


        def apply(net):
            sch = schedlang.create_schedule(net)
            {MISTAKES[name]}
        """)
    )
    namespace: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    with pytest.raises(Refusal) as caught:
        namespace["apply"](_example_model())
    span = caught.value.diagnostic.primary.span
    assert (span.source.name, span.line) == (str(path), 6), caught.value.render()
