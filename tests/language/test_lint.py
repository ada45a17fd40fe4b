"""Warnings: what is told, what is not, and where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from schedlang.cli import app
from schedlang.diagnostics.codes import model
from schedlang.diagnostics.source import Source
from schedlang.language.syntax import parse
from schedlang.passes.elaborate.expand import expand
from schedlang.passes.elaborate.lint import lint
from schedlang.passes.elaborate.state import Settings

EMPTY = "layers.*.gate?  checkpoint()\n"
UNUSED = "knob micro: int = 2\n"


def told(text: str, **knobs: object) -> list[str]:
    """The codes of the warnings about a schedule without its header, without a model."""
    tree = parse(Source("x.sched", f"schedule 1\n\n{text}"))
    return [d.code for d in lint(tree, expand(tree, None, Settings(knobs)))]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(model())
    (tmp_path / "x.sched").write_text(f"schedule 1 for Net\n\n{UNUSED}\n{EMPTY}")
    return tmp_path / "x.sched"


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.mark.parametrize("verb, codes", [("check", ["W101"]), ("plan", ["W101", "W201"])])
def test_where_warnings_are_shown(file: Path, verb: str, codes: list[str]) -> None:
    """On standard error, never on standard output; with --json in the document; the exit is 0."""
    plain = run(verb, file)
    assert plain.exit_code == 0 and "warning[" not in plain.stdout
    assert all(f"warning[{code}]" in plain.stderr for code in codes)
    as_json = run(verb, file, "--json")
    found = json.loads(as_json.stdout)
    shown = found["diagnostics"] if verb == "check" else found["warnings"]
    assert [(one["code"], one["level"]) for one in shown] == [(code, "warning") for code in codes]
    assert "warning[" not in as_json.stderr


NOTHING = {
    "a knob that sizes": "knob tp: int = 2\nmesh(tp=tp)\n",
    "a knob of a bound": "knob n: int = 2\nlayers[:n]  checkpoint()\n",
    "a knob of a condition": "knob n: int = 2\nrequire n > 1\n",
    "a pattern by its text": 'pattern p(x) { gelu(x) * 2 }\nh  fuse("p")\n',
    "a library": "pattern p(x) { gelu(x) * 2 }\ndef d() {\n  checkpoint()\n}\n",
    "a view": "mesh(a=2, b=2)\nview c of (a, b)\nzero(stage=0, over=c)\n",
    "what another value makes true": "knob n: int = 2 in 1..8\nwhen n > 7 {\n"
    "  h  checkpoint()\n}\n",
    "what no domain bounds": "knob n: int = 2\nwhen n > 7 {\n  h  checkpoint()\n}\n",
    "what another mesh makes true": "knob n: int = 1 in [1, 2]\nmesh(tp=n)\nwhen tp > 1 {\n"
    "  h  checkpoint()\n}\n",
    "what a choice may be": "knob k: choice = a in [a, b]\nwhen k == b {\n  h  checkpoint()\n}\n",
    "what the model decides": "when model.config.n > 3 {\n  h  checkpoint()\n}\n",
    "an argument": "def d(seq: bool = false) {\n  when seq {\n    checkpoint()\n  }\n}\n"
    "h  d(seq=true)\n",
    "one rank that is said": "mesh(tp=1)\nh  shard(col, over=tp)\n",
    "one rank of one": "knob tp: int = 1 in [1]\nmesh(tp=tp)\nh  shard(col, over=tp)\n",
    "a usual tolerance": 'step "a" {\n  h  checkpoint()\n  verify(forward, rtol=1e-3)\n}\n',
}


@pytest.mark.parametrize("name", NOTHING)
def test_what_has_its_reason_is_not_warned_about(name: str) -> None:
    """Whatever is read by something, or may come true, is nobody's mistake."""
    assert told(NOTHING[name]) == []


def test_an_axis_that_was_set_to_one() -> None:
    """One rank by default is warned about, one rank by a setting is meant."""
    text = "knob tp: int = 1 in [1, 2]\nmesh(tp=tp)\nh  shard(col, over=tp)\n"
    assert told(text) == ["W401"] and told(text, tp=1) == [] and told(text, tp=2) == []


def test_empty_rows_of_a_scope(file: Path) -> None:
    """A `?` around a row counts; a slice that a knob empties, and a branch not taken, do not."""
    rows = "at layers.*.gate? {\n  checkpoint()\n}\n"
    file.write_text(f"schedule 1 for Net\n\n{rows}")
    assert "warning[W201]" in run("plan", file).stderr
    meant = "knob n: int = 0 in 0..4\nlayers[:n]  checkpoint()\n"
    meant += "when n > 2 {\n  x?  checkpoint()\n}\n"
    file.write_text(f"schedule 1 for Net\n\n{meant}")
    assert "warning" not in run("plan", file).stderr
