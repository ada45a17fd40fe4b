"""What a command does not import: how fast it starts is what it leaves alone."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import pytest

from schedlang import primitives
from schedlang.cli import VERBS
from schedlang.garbage_collection import ProcessState, without_collector
from schedlang.ir.primitive import load_all, registry
from schedlang.verbs.quick_check import run_quick_check
from tests import forks

ROOT = Path(__file__).parents[2]
SCHEDULE = """schedule 1
mesh(tp=2)
step "s" {
  a.b  shard(col, over=tp)
  verify(forward)
}
"""
CODE = """
import json, sys
from schedlang.cli import main
sys.argv = ["schedlang", *sys.argv[1:]]
try:
    main()
finally:
    print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""
HEAVY = {
    "torch",
    "numpy",
    "schedlang.diagnostics.code_texts",
    "schedlang.runtime",
    "schedlang.diagnostics.codes",
}
OPTIONS = {"typer", "click", "rich", "pydantic"}
MODEL = {"schedlang.language.selector", "schedlang.ir.modelfile", "importlib.metadata"}


def imported(*words: object, code: int = 0) -> set[str]:
    """The modules that a command has imported when it ends."""
    done = forks.anew(
        "-S", "-c", CODE, *map(str, words), env={"PYTHONPATH": ":".join([str(ROOT), *sys.path])}
    )
    assert done.returncode == code, done.stderr
    found = json.loads(done.stderr.splitlines()[-1])
    assert "schedlang.cli" in found
    return set(found)


def test_check_imports_what_the_file_needs(tmp_path: Path) -> None:
    """Neither options' packages nor what only a model needs; of the primitives those in rows."""
    file = tmp_path / "a.sched"
    file.write_text(SCHEDULE)
    found = imported("check", file)
    assert not found & (HEAVY | OPTIONS | MODEL), found & (HEAVY | OPTIONS | MODEL)
    named = {name for name in found if name.startswith("schedlang.primitives.")}
    assert named == {"schedlang.primitives.shard", "schedlang.primitives.verify"}


def test_a_refused_check_imports_no_more(tmp_path: Path) -> None:
    """What is wrong is said without the pages of all codes."""
    file = tmp_path / "a.sched"
    file.write_text(SCHEDULE.replace("(col", "((col"))
    found = imported("check", file, "--json", code=2)
    assert not found & (HEAVY | OPTIONS | MODEL)


def test_a_verb_imports_itself_alone(tmp_path: Path) -> None:
    """The command line of one verb knows none of the others."""
    file = tmp_path / "a.sched"
    file.write_text(SCHEDULE)
    found = imported("fmt", "--check", file, code=1)
    verbs = {f"schedlang.verbs.{name}" for name in VERBS}
    assert found & verbs == {"schedlang.verbs.fmt"} and not found & HEAVY


def test_help_imports_nothing_heavy() -> None:
    """The list of verbs is made from them, and from nothing that they do."""
    assert not imported("--help") & (
        HEAVY | {"lark", "schedlang.language.syntax", "schedlang.ir.primitive"}
    )


def test_each_primitive_has_the_file_of_its_name() -> None:
    """A row's verb is found by its name, so every one of ours is defined in its own file."""
    load_all()
    folder = Path(next(iter(primitives.__path__)))
    ours = {
        name: kind.__module__
        for name, kind in registry().items()
        if kind.__module__.startswith("schedlang.primitives.")
    }
    assert ours == {name: f"schedlang.primitives.{name}" for name in ours}
    assert set(ours) == {path.stem for path in folder.glob("*.py")} - {"__init__"}


@pytest.mark.parametrize("words", [(), ("--json",), ("--model", "m"), ("-h",), ("a", "--locked")])
def test_options_are_read_as_ever(words: tuple[str, ...]) -> None:
    """Only files and `--json` are answered at once; all else goes through the command line."""
    assert run_quick_check(words) is None


def test_answers_as_the_command_line_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The short way says what the long way says: of good files, bad ones, and with `--json`."""
    from typer.testing import CliRunner

    from schedlang.cli import app

    good, bad = tmp_path / "good.sched", tmp_path / "bad.sched"
    good.write_text(SCHEDULE)
    bad.write_text(SCHEDULE.replace("shard", "shrad"))
    absent = tmp_path / "absent.sched"
    for files in ([good], [bad], [bad, good], [absent], [good, good]):
        for options in ([], ["--json"]):
            words = [*map(str, files), *options]
            long = CliRunner().invoke(app, ["check", *words])
            code = run_quick_check(words)
            short = capsys.readouterr()
            assert (code, short.out, short.err) == (long.exit_code, long.stdout, long.stderr)


def test_a_command_looks_once_at_what_it_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own; elsewhere garbage is left to whoever made it.

    Calls are counted: what else was frozen in this process may be let go at any time.
    """
    frozen: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(gc.isenabled()))
    with without_collector(imports=True):
        assert not gc.isenabled()
    monkeypatch.setattr(ProcessState, "own", True)
    with without_collector():
        pass
    assert gc.isenabled() and not frozen
    with without_collector(imports=True):
        pass
    assert gc.isenabled() and frozen == [False]
