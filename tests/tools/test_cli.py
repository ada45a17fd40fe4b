"""The commands fmt, check and explain: results, exit codes, JSON, and what they must not import."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from schedlang.cli import VERBS, app, main
from schedlang.diagnostics import codes
from schedlang.garbage_collection import ProcessState
from schedlang.ir.primitive import load_all, registry
from tests import forks
from tests.samples import SAMPLES

ROOT = Path(__file__).parents[2]
GPT2 = SAMPLES["gpt2_tp.sched"]


def run_cli(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "x.sched"
    path.write_text(GPT2.replace("shard(row, over=tp)", "shard( row,over=tp )"))
    return path


def test_fmt_rewrites_in_place(file: Path) -> None:
    """`fmt` writes the canonical form and keeps the file's mode; a second run changes nothing."""
    file.chmod(0o640)
    assert run_cli("fmt", "--check", file).exit_code == 1
    assert file.read_text() != GPT2
    result = run_cli("fmt", file)
    assert result.exit_code == 0 and "formatted" in result.output
    assert file.read_text() == GPT2 and file.stat().st_mode & 0o777 == 0o640
    assert [path.name for path in file.parent.iterdir()] == ["x.sched"]
    second = run_cli("fmt", "--check", file)
    assert second.exit_code == 0 and second.output == ""


def test_fmt_writes_through_links_and_normal_line_ends(file: Path) -> None:
    """A link stays a link; Windows line ends are a difference."""
    file.write_bytes(GPT2.replace("\n", "\r\n").encode())
    link = file.parent / "link.sched"
    link.symlink_to(file.name)
    assert run_cli("fmt", link).exit_code == 0
    assert link.is_symlink() and file.read_bytes() == GPT2.encode()


def test_fmt_is_all_or_nothing(file: Path) -> None:
    """One unreadable file keeps all others from being written."""
    before = file.read_text()
    bad = file.parent / "bad.sched"
    bad.write_text("schedule 1\nstep {\n")
    result = run_cli("fmt", file, bad, file.parent / "none.sched")
    assert result.exit_code == 2 and file.read_text() == before
    assert "bad.sched:2" in result.stderr and "no such file" in result.stderr


def test_check(file: Path) -> None:
    """`check` accepts the sample and legal settings, and refuses wrong ones."""
    assert run_cli("check", file).exit_code == 0
    assert run_cli("check", file, "--knob", "tp=4").exit_code == 0
    assert run_cli("check", file, "--mesh", "tp=4").exit_code == 0
    result = run_cli("check", file, "--knob", "tp=3")
    assert result.exit_code == 2 and "`tp` cannot be 3" in result.stderr and result.stdout == ""
    for option in (["--knob", "tp"], ["--mesh", "tp=x"], ["--knob", "pt=2"], ["--mesh", "pt=2"]):
        assert run_cli("check", file, *option).exit_code == 2


def test_check_reports_every_mistake(file: Path) -> None:
    """All independent mistakes of all files are reported at once, as JSON too."""
    file.write_text(GPT2.replace("shard(row", "shard(rows").replace("pad(", "pat("))
    result = run_cli("check", file, "--json")
    assert result.exit_code == 2
    record = json.loads(result.stdout)
    assert record["exit"] == 2
    assert [d["code"] for d in record["diagnostics"]] == ["S301", "S303", "S303"]
    assert record["diagnostics"][0]["at"]["line"] == 11


def test_check_warns(file: Path) -> None:
    """Unused knobs and definitions, and unverified steps, give warnings and exit 0."""
    file.write_text(
        "schedule 1\nknob a: int = 1\ndef d() {\n  checkpoint()\n}\n"
        'step "s" {\n  h  checkpoint()\n}\n'
    )
    result = run_cli("check", file)
    assert result.exit_code == 0
    for fragment in ("`a` is never used", "`d` is never called", "`s` is never verified"):
        assert fragment in result.stderr
    record = json.loads(run_cli("check", file, "--json").stdout)
    assert [d["code"] for d in record["diagnostics"]] == ["W101", "W102", "W701"]


def test_explain() -> None:
    """`explain` has a page for each primitive and code; a misspelling gets a suggestion."""
    assert run_cli("explain", "shard").output.startswith("shard(")
    assert run_cli("explain", "s402").output.startswith("S402: ")
    assert json.loads(run_cli("explain", "S402", "--json").output)["code"] == "S402"
    assert json.loads(run_cli("explain", "shard", "--json").output)["name"] == "shard"
    assert "checkpoint" in run_cli("explain").output
    slip = run_cli("explain", "shrad")
    assert slip.exit_code == 2 and "did you mean `shard`?" in slip.stderr


def test_every_primitive_has_a_page() -> None:
    """Every registered primitive can be explained."""
    load_all()
    for name in registry():
        assert run_cli("explain", name).exit_code == 0
        json.loads(run_cli("explain", name, "--json").output)


def test_usage_errors_are_refusals() -> None:
    """An unknown command or option exits 2."""
    assert run_cli("nonsense").exit_code == 2
    assert run_cli("check", "--nonsense").exit_code == 2
    assert "check" in run_cli("--help").output


@pytest.mark.parametrize("words", [("plan", "--bogus"), ("plan",), ("bogus",)])
def test_usage_errors_are_json_where_it_is_asked_for(
    words: tuple[str, ...], monkeypatch: Any, capsys: Any
) -> None:
    """With `--json` a usage error is a diagnostic, too (S109)."""
    monkeypatch.setattr(sys, "argv", ["schedlang", *words, "--json"])
    monkeypatch.setattr(ProcessState, "own", False)  # as it was, after `main`
    with pytest.raises(SystemExit) as ended:
        main()
    record = json.loads(capsys.readouterr().out)
    assert ended.value.code == record["exit"] == 2
    assert record["diagnostics"][0]["code"] == "S109" and record["diagnostics"][0]["helps"]


def test_our_own_errors_are_not_results(file: Path, monkeypatch: Any) -> None:
    """An internal error exits 3, so that it never counts as passed."""
    import schedlang.language.printer

    monkeypatch.setattr(schedlang.language.printer, "fmt", lambda source: 1 / 0)
    result = run_cli("fmt", file, "--json")
    assert result.exit_code == 3 and json.loads(result.stdout)["exit"] == 3


@pytest.mark.parametrize(
    "args", [["--help"], ["fmt", "FILE"], ["check", "FILE"], ["explain", "shard"]]
)
def test_torch_is_not_imported(file: Path, args: list[str]) -> None:
    """These commands import neither torch nor other slow packages."""
    code = (
        "import sys\n"
        "from schedlang.cli import app\n"
        "try: app()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "heavy = {'torch', 'numpy', 'triton', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    arguments = [str(file) if arg == "FILE" else arg for arg in args]
    result = forks.run_interpreter("-c", code, *arguments, cwd=ROOT)
    assert result.returncode == 0, result.stderr


OUTPUTS = {
    "closed": ("exec >&- 2>&-; exec", {}, b""),
    "no UTF-8": (
        "exec",
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        "…".encode(),
    ),
    "as the user says": ("exec", {"PYTHONIOENCODING": "ascii"}, rb"\u2026"),
}


@pytest.mark.parametrize("output", OUTPUTS)
def test_every_verb_can_write(output: str) -> None:
    """A verb ends as ever where its streams are closed, or where their encoding lacks its signs:
    files and pipes get UTF-8, unless the user sets another encoding."""
    shell, environ, expected = OUTPUTS[output]
    code = (
        "import sys\n"
        "from schedlang import cli\n"
        "cli.make_app = lambda verbs: lambda: print('\\u2026', sys.stderr.isatty())\n"
        "cli.main()\n"
    )
    command = ["sh", "-c", f'{shell} "$0" "$@"', sys.executable, "-c", code]
    result = subprocess.run(command, cwd=ROOT, env={**os.environ, **environ}, capture_output=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(expected) and not result.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("args", [["check", "FILE"], ["check", "no.sched", "--json"], ["--help"]])
def test_an_output_that_is_full(file: Path, args: list[str], unbuffered: str) -> None:
    """A full disk is named, without a traceback, and is not taken for a verdict."""
    arguments = [str(file) if arg == "FILE" else arg for arg in args]
    environ = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-c", "from schedlang import cli; cli.main()", *arguments]
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(
            command, cwd=ROOT, env=environ, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert result.returncode == 3, result.stderr
    assert result.stderr == "error: the output cannot be written: No space left on device\n"


def codes_in_files() -> set[str]:
    """Every code that some file uses, without the lists of codes themselves."""
    files = [p for d in ("schedlang", "passes", "primitives") for p in (ROOT / d).rglob("*.py")]
    lists = [p for p in files if p.name == "codes.py" or p.parent.name == "code_texts"]
    texts = (p.read_text() for p in files if p not in lists)
    return {code for text in texts for code in re.findall(r'"([SW]\d{3})"', text)}


def test_every_code_is_documented() -> None:
    """Every code that a file uses has an entry for `explain`."""
    assert codes_in_files() - set(codes.CODES) - set(codes.WARNINGS) == set()


def test_every_documented_code_is_raised() -> None:
    """Every documented code is used somewhere, and belongs to a family."""
    assert set(codes.CODES) | set(codes.WARNINGS) == codes_in_files()
    assert all(code[1] in codes.FAMILIES for code in codes.CODES)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_breaks_no_line_inside_what_one_types(
    verb: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every command's help, text in backquotes is never broken over lines."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", width)  # read when it is imported
    output = run_cli(*filter(None, [verb]), "--help").output
    lines = output.splitlines()
    assert "Usage" in output and max(map(len, lines)) <= width
    assert not [line for line in lines if line.count("`") % 2], output
    assert "...}..." not in output
