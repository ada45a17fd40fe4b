"""The verbs fmt, check and explain: results, exit codes, JSON, and what they do not import."""

import json
import re
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


def call(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "x.sched"
    path.write_text(GPT2.replace("shard(row, over=tp)", "shard( row,over=tp )"))
    return path


def test_fmt_rewrites_in_place(file: Path) -> None:
    """fmt writes the canonical form, keeps the file's mode, and then has nothing to do."""
    file.chmod(0o640)
    assert call("fmt", "--check", file).exit_code == 1
    assert file.read_text() != GPT2
    done = call("fmt", file)
    assert done.exit_code == 0 and "formatted" in done.output
    assert file.read_text() == GPT2 and file.stat().st_mode & 0o777 == 0o640
    assert [path.name for path in file.parent.iterdir()] == ["x.sched"]
    again = call("fmt", "--check", file)
    assert again.exit_code == 0 and again.output == ""


def test_fmt_writes_through_links_and_normal_line_ends(file: Path) -> None:
    """A link stays a link; line ends of another system are a difference."""
    file.write_bytes(GPT2.replace("\n", "\r\n").encode())
    link = file.parent / "link.sched"
    link.symlink_to(file.name)
    assert call("fmt", link).exit_code == 0
    assert link.is_symlink() and file.read_bytes() == GPT2.encode()


def test_fmt_is_all_or_nothing(file: Path) -> None:
    """One file that cannot be read keeps all others from being written."""
    before = file.read_text()
    bad = file.parent / "bad.sched"
    bad.write_text("schedule 1\nstep {\n")
    result = call("fmt", file, bad, file.parent / "none.sched")
    assert result.exit_code == 2 and file.read_text() == before
    assert "bad.sched:2" in result.stderr and "no such file" in result.stderr


def test_check(file: Path) -> None:
    """check holds for the sample, knows settings, and refuses with places."""
    assert call("check", file).exit_code == 0
    assert call("check", file, "--knob", "tp=4").exit_code == 0
    assert call("check", file, "--mesh", "tp=4").exit_code == 0
    wrong = call("check", file, "--knob", "tp=3")
    assert wrong.exit_code == 2 and "`tp` cannot be 3" in wrong.stderr and wrong.stdout == ""
    for option in (["--knob", "tp"], ["--mesh", "tp=x"], ["--knob", "pt=2"], ["--mesh", "pt=2"]):
        assert call("check", file, *option).exit_code == 2


def test_check_reports_every_mistake(file: Path) -> None:
    """All independent mistakes of all files come at once, also as JSON."""
    file.write_text(GPT2.replace("shard(row", "shard(rows").replace("pad(", "pat("))
    result = call("check", file, "--json")
    assert result.exit_code == 2
    found = json.loads(result.stdout)
    assert found["exit"] == 2
    assert [d["code"] for d in found["diagnostics"]] == ["S301", "S303", "S303"]
    assert found["diagnostics"][0]["at"]["line"] == 11


def test_check_warns(file: Path) -> None:
    """What is declared and not used, or never verified, is said and refuses nothing."""
    file.write_text(
        "schedule 1\nknob a: int = 1\ndef d() {\n  checkpoint()\n}\n"
        'step "s" {\n  h  checkpoint()\n}\n'
    )
    result = call("check", file)
    assert result.exit_code == 0
    for said in ("`a` is never used", "`d` is never called", "`s` is never verified"):
        assert said in result.stderr
    found = json.loads(call("check", file, "--json").stdout)
    assert [d["code"] for d in found["diagnostics"]] == ["W101", "W102", "W701"]


def test_explain() -> None:
    """Primitives and codes have a page each; a slip gets a guess."""
    assert call("explain", "shard").output.startswith("shard(")
    assert call("explain", "s402").output.startswith("S402: ")
    assert json.loads(call("explain", "S402", "--json").output)["code"] == "S402"
    assert json.loads(call("explain", "shard", "--json").output)["name"] == "shard"
    assert "checkpoint" in call("explain").output
    slip = call("explain", "shrad")
    assert slip.exit_code == 2 and "did you mean `shard`?" in slip.stderr


def test_every_primitive_has_a_page() -> None:
    """Whatever is registered can be explained."""
    load_all()
    for name in registry():
        assert call("explain", name).exit_code == 0
        json.loads(call("explain", name, "--json").output)


def test_usage_errors_are_refusals() -> None:
    """A verb or an option that does not exist ends with 2, no verb shows the help."""
    assert call("nonsense").exit_code == 2
    assert call("check", "--nonsense").exit_code == 2
    assert "check" in call("--help").output


@pytest.mark.parametrize("words", [("plan", "--bogus"), ("plan",), ("bogus",)])
def test_usage_errors_are_json_where_it_is_asked_for(
    words: tuple[str, ...], monkeypatch: Any, capsys: Any
) -> None:
    """What is wrong with the words of a command is a diagnostic, too (S109)."""
    monkeypatch.setattr(sys, "argv", ["schedlang", *words, "--json"])
    monkeypatch.setattr(ProcessState, "own", False)  # as it was, after `main`
    with pytest.raises(SystemExit) as ended:
        main()
    told = json.loads(capsys.readouterr().out)
    assert ended.value.code == told["exit"] == 2
    assert told["diagnostics"][0]["code"] == "S109" and told["diagnostics"][0]["helps"]


def test_our_own_errors_are_not_results(file: Path, monkeypatch: Any) -> None:
    """An error of ours ends with 3: unchecked is never reported as passed."""
    import schedlang.language.printer

    monkeypatch.setattr(schedlang.language.printer, "fmt", lambda source: 1 / 0)
    result = call("fmt", file, "--json")
    assert result.exit_code == 3 and json.loads(result.stdout)["exit"] == 3


@pytest.mark.parametrize(
    "args", [["--help"], ["fmt", "FILE"], ["check", "FILE"], ["explain", "shard"]]
)
def test_torch_is_not_imported(file: Path, args: list[str]) -> None:
    """These verbs run without torch, and without what is as slow to import."""
    code = (
        "import sys\n"
        "from schedlang.cli import app\n"
        "try: app()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "heavy = {'torch', 'numpy', 'triton', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    given = [str(file) if arg == "FILE" else arg for arg in args]
    done = forks.anew("-c", code, *given, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def named_codes() -> set[str]:
    """Every code that some file names, the list of them left out."""
    files = [p for d in ("schedlang", "passes", "primitives") for p in (ROOT / d).rglob("*.py")]
    lists = [p for p in files if p.name == "codes.py" or p.parent.name == "code_texts"]
    texts = (p.read_text() for p in files if p not in lists)
    return {code for text in texts for code in re.findall(r'"([SW]\d{3})"', text)}


def test_every_code_is_documented() -> None:
    """A code that some file raises has an entry, so that `explain` knows it."""
    assert named_codes() - set(codes.CODES) - set(codes.WARNINGS) == set()


def test_every_documented_code_is_raised() -> None:
    """The list of codes tells of no message that nothing can say, and each has a family."""
    assert set(codes.CODES) | set(codes.WARNINGS) == named_codes()
    assert all(code[1] in codes.FAMILIES for code in codes.CODES)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_breaks_no_line_inside_what_one_types(
    verb: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every verb's help at usual widths: what stands in marks of code stands on one line."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERMINAL_WIDTH", str(width))
    told = call(*filter(None, [verb]), "--help").output
    lines = told.splitlines()
    assert "Usage" in told and max(map(len, lines)) <= width
    assert not [line for line in lines if line.count("`") % 2], told
    assert "...}..." not in told
