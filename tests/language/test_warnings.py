"""Warnings of `check` and `plan`: which schedules get one, and where it is printed."""

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


def warning_codes(text: str, **knobs: object) -> list[str]:
    """The codes of the warnings for a schedule body, without a model."""
    tree = parse(Source("x.sched", f"schedule 1\n\n{text}"))
    return [d.code for d in lint(tree, expand(tree, None, Settings(knobs)))]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(model())
    (tmp_path / "x.sched").write_text(f"schedule 1 for Net\n\n{UNUSED}\n{EMPTY}")
    return tmp_path / "x.sched"


def run_cli(*args: object) -> Result:
    """Run a command of schedlang."""
    return CliRunner().invoke(app, [str(arg) for arg in args])


@pytest.mark.parametrize("verb, codes", [("check", ["W101"]), ("plan", ["W101", "W201"])])
def test_where_warnings_are_shown(file: Path, verb: str, codes: list[str]) -> None:
    """Warnings go to standard error, or into the JSON document; the exit code stays 0."""
    as_text = run_cli(verb, file)
    assert as_text.exit_code == 0 and "warning[" not in as_text.stdout
    assert all(f"warning[{code}]" in as_text.stderr for code in codes)
    as_json = run_cli(verb, file, "--json")
    record = json.loads(as_json.stdout)
    warnings = record["diagnostics"] if verb == "check" else record["warnings"]
    assert [(warning["code"], warning["level"]) for warning in warnings] == [
        (code, "warning") for code in codes
    ]
    assert "warning[" not in as_json.stderr


NO_WARNING = {
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


@pytest.mark.parametrize("name", NO_WARNING)
def test_what_has_its_reason_is_not_warned_about(name: str) -> None:
    """What is used somewhere, or may become true, gives no warning."""
    assert warning_codes(NO_WARNING[name]) == []


def test_an_axis_that_was_set_to_one() -> None:
    """An axis of one rank by default is warned about, but not one that was set to 1."""
    text = "knob tp: int = 1 in [1, 2]\nmesh(tp=tp)\nh  shard(col, over=tp)\n"
    assert (
        warning_codes(text) == ["W401"]
        and warning_codes(text, tp=1) == []
        and warning_codes(text, tp=2) == []
    )


def test_empty_rows_of_a_scope(file: Path) -> None:
    """A `?` that matches nothing is warned about; an empty slice by a knob or a false branch is
    not."""
    rows = "at layers.*.gate? {\n  checkpoint()\n}\n"
    file.write_text(f"schedule 1 for Net\n\n{rows}")
    assert "warning[W201]" in run_cli("plan", file).stderr
    body = "knob n: int = 0 in 0..4\nlayers[:n]  checkpoint()\n"
    body += "when n > 2 {\n  x?  checkpoint()\n}\n"
    file.write_text(f"schedule 1 for Net\n\n{body}")
    assert "warning" not in run_cli("plan", file).stderr
