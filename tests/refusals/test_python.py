"""Refusals in Python: at the user's line, from a script, a notebook's cell and a function."""

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


def _net() -> Any:
    names: dict[str, Any] = {}
    exec(model(), names)
    return names["model"]()


def test_a_script(tmp_path: Path) -> None:
    """A script that ends in a refusal prints the message with its own line, last of all."""
    (tmp_path / "model.py").write_text(model())
    head = "import schedlang\nfrom model import model\n\nnet = model()\n"
    (tmp_path / "x.py").write_text(head + CELL)
    done = forks.anew("x.py", cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": ""})
    assert done.returncode == 1
    shown = done.stderr[done.stderr.index("error[S402]") :]
    assert ' --> x.py:7:1\n  |\n7 | sch["layers.*.up"].shard("col", over="tp")\n  | ^^^^' in shown


def test_a_cell_of_a_notebook() -> None:
    """A cell has a made-up file name and lines in linecache, as IPython keeps them."""
    name = "<ipython-input-3-0a1b2c>"
    linecache.cache[name] = (len(CELL), None, CELL.splitlines(True), name)
    with pytest.raises(Refusal) as caught:
        exec(compile(CELL, name, "exec"), {"schedlang": schedlang, "net": _net()})
    assert f'{name}:3:1\n  |\n3 | sch["layers.*.up"].shard(' in caught.value.render()


def test_code_without_lines() -> None:
    """Text that was never anywhere is refused at its line, which cannot be shown."""
    with pytest.raises(Refusal) as caught:
        exec(compile(CELL, "<string>", "exec"), {"schedlang": schedlang, "net": _net()})
    assert " --> <string>:3:1" in caught.value.render()


PLACES = {
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


@pytest.mark.parametrize("name", PLACES)
def test_every_refusal_has_a_line(tmp_path: Path, name: str) -> None:
    """Whatever is refused of a schedule in Python stands at the line that asked for it."""
    path = tmp_path / "mine.py"
    path.write_text(
        textwrap.dedent(f"""\
        import schedlang


        def apply(net):
            sch = schedlang.create_schedule(net)
            {PLACES[name]}
        """)
    )
    names: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    with pytest.raises(Refusal) as caught:
        names["apply"](_net())
    found = caught.value.diagnostic.primary.span
    assert (found.source.name, found.line) == (str(path), 6), caught.value.render()
