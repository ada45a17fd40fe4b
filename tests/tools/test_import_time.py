"""Start-up time: which modules each command may import."""

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


def imported_modules(*args: object, code: int = 0) -> set[str]:
    """The modules that a command has imported when it ends."""
    result = forks.run_interpreter(
        "-S", "-c", CODE, *map(str, args), env={"PYTHONPATH": ":".join([str(ROOT), *sys.path])}
    )
    assert result.returncode == code, result.stderr
    modules = json.loads(result.stderr.splitlines()[-1])
    assert "schedlang.cli" in modules
    return set(modules)


def test_check_imports_what_the_file_needs(tmp_path: Path) -> None:
    """`check` imports only the primitives in the file; no option parser, no model code."""
    file = tmp_path / "a.sched"
    file.write_text(SCHEDULE)
    modules = imported_modules("check", file)
    assert not modules & (HEAVY | OPTIONS | MODEL), modules & (HEAVY | OPTIONS | MODEL)
    primitives_used = {name for name in modules if name.startswith("schedlang.primitives.")}
    assert primitives_used == {"schedlang.primitives.shard", "schedlang.primitives.verify"}


def test_a_refused_check_imports_no_more(tmp_path: Path) -> None:
    """A refused check does not import the pages of codes."""
    file = tmp_path / "a.sched"
    file.write_text(SCHEDULE.replace("(col", "((col"))
    modules = imported_modules("check", file, "--json", code=2)
    assert not modules & (HEAVY | OPTIONS | MODEL)


def test_a_verb_imports_itself_alone(tmp_path: Path) -> None:
    """A command imports no other command."""
    file = tmp_path / "a.sched"
    file.write_text(SCHEDULE)
    modules = imported_modules("fmt", "--check", file, code=1)
    verbs = {f"schedlang.verbs.{name}" for name in VERBS}
    assert modules & verbs == {"schedlang.verbs.fmt"} and not modules & HEAVY


def test_help_imports_nothing_heavy() -> None:
    """`--help` imports no command's dependencies."""
    assert not imported_modules("--help") & (
        HEAVY | {"lark", "schedlang.language.syntax", "schedlang.ir.primitive"}
    )


def test_each_primitive_has_the_file_of_its_name() -> None:
    """Every built-in primitive is defined in the file of its name, by which it is imported."""
    load_all()
    folder = Path(next(iter(primitives.__path__)))
    built_in = {
        name: kind.__module__
        for name, kind in registry().items()
        if kind.__module__.startswith("schedlang.primitives.")
    }
    assert built_in == {name: f"schedlang.primitives.{name}" for name in built_in}
    assert set(built_in) == {path.stem for path in folder.glob("*.py")} - {"__init__"}


@pytest.mark.parametrize("words", [(), ("--json",), ("--model", "m"), ("-h",), ("a", "--locked")])
def test_options_are_read_as_ever(words: tuple[str, ...]) -> None:
    """The quick path of `check` takes files and `--json`; other arguments use the full command
    line."""
    assert run_quick_check(words) is None


def test_answers_as_the_command_line_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The quick path prints and exits as the full one, for valid, wrong and missing files."""
    from typer.testing import CliRunner

    from schedlang.cli import app

    good, bad = tmp_path / "good.sched", tmp_path / "bad.sched"
    good.write_text(SCHEDULE)
    bad.write_text(SCHEDULE.replace("shard", "shrad"))
    absent = tmp_path / "absent.sched"
    for files in ([good], [bad], [bad, good], [absent], [good, good]):
        for options in ([], ["--json"]):
            args = [*map(str, files), *options]
            full = CliRunner().invoke(app, ["check", *args])
            code = run_quick_check(args)
            quick = capsys.readouterr()
            assert (code, quick.out, quick.err) == (full.exit_code, full.stdout, full.stderr)


def test_a_command_looks_once_at_what_it_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """In its own process imported objects are frozen for the garbage collector.

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


@pytest.mark.parametrize(
    ("keeps_frozen", "left", "count", "calls"),
    [
        (True, None, 9, []),
        (True, 3, 9, ["freeze"]),
        (False, None, 9, ["count"]),
        (False, None, 0, ["count", "freeze", "unfreeze"]),
    ],
)
def test_what_a_process_keeps_frozen_is_not_visited(
    monkeypatch: pytest.MonkeyPatch,
    keeps_frozen: bool,
    left: int | None,
    count: int,
    calls: list[str],
) -> None:
    """A dry run counts frozen objects only where nobody says that they stay, and lets none go; it
    leaves more of them only to an owner who counts how often."""
    from schedlang.runtime.dry_run import _collect_at_marks

    seen: list[str] = []

    def counted() -> int:
        seen.append("count")
        return count

    monkeypatch.setattr(ProcessState, "keeps_frozen", keeps_frozen)
    monkeypatch.setattr(ProcessState, "left_frozen", left)
    monkeypatch.setattr(gc, "get_freeze_count", counted)
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, lambda name=name: seen.append(name))
    with _collect_at_marks():
        assert not gc.isenabled()
    assert gc.isenabled() and seen == calls
    assert ProcessState.left_frozen == (None if left is None else left + 1)
