"""What the command line says beside its results: progress, files, versions, causes, widths."""

from __future__ import annotations

import io
import itertools
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import schedlang
from schedlang.cli import VERBS, app
from schedlang.diagnostics.codes import model
from schedlang.diagnostics.tables import format_table, wrap_text
from schedlang.verbs.progress import ProgressLine
from tests import forks

ROOT = Path(__file__).parents[2]
WRITES = ("svg", "html", "trace")
SCHEDULE = "schedule 1\n\nmesh(tp=2)\n\nlayers.*.up  shard(col, output=R, over=tp)\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model.py").write_text(model())
    (tmp_path / "x.sched").write_text(SCHEDULE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def until(ready: Callable[[], object], seconds: float = 60) -> None:
    """Wait for what a thread says."""
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "it has said nothing"
        time.sleep(0.02)


# -- progress ---------------------------------------------------------------------------------


def test_short_runs_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    """Where there is no terminal, nothing is said of what ends before the first line is due."""
    with ProgressLine(first=60) as said:
        said("the original")
    assert capsys.readouterr().err == ""


def test_plain_lines_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal each line is a whole one, with what runs and what is left of it."""
    with ProgressLine(first=0.05, every=0.05) as said:
        said("4 ranks", 0, 9)
        said("4 ranks", 3, 9)
        lines: list[str] = []
        until(lambda: lines.extend(capsys.readouterr().err.splitlines()) or len(lines) > 1)
    told = re.compile(r"s  4 ranks, step 3 of 9, about \d+ s left \.\.\.$")
    assert all(told.search(line) for line in lines) and "\r" not in "".join(lines)


def test_lines_without_a_stage_wait(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a stage begins a refusal is near: nothing is said for a while, then what is read."""
    monkeypatch.setattr("schedlang.verbs.progress.REFRESH", 0.02)
    with ProgressLine(first=0.01, every=0.02):
        time.sleep(0.2)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("schedlang.verbs.progress.UNNAMED", 0.05)
    with ProgressLine(first=0.01, every=0.02):
        until(lambda: "reading the model ..." in capsys.readouterr().err)


def test_nothing_is_left_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    """A quiet one says nothing at all; a failure inside ends the thread, too."""
    with pytest.raises(ZeroDivisionError), ProgressLine(quiet=True, first=0.0) as said:
        said("a stage")
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), ProgressLine(first=0.01) as said:
        raise ZeroDivisionError
    thread = said._thread
    assert thread is not None and not thread.is_alive()


def test_on_a_terminal_one_line_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line is written over, and taken away at the end."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr("schedlang.verbs.progress.REFRESH", 0.02)
    with ProgressLine() as said:
        said("the original")
        until(lambda: shown.getvalue().count("the original") > 1)
    assert "\n" not in shown.getvalue()
    assert shown.getvalue().endswith("\r\033[K")


def test_what_is_left_is_that_of_the_stage() -> None:
    """What is left is told from this stage's steps: not before the first, nor after the last."""
    said = ProgressLine(quiet=True)
    said("the original")
    assert "left" not in str(said) and "step" not in str(said)
    said("2 ranks", 0, 4)
    assert "step 0 of 4" in str(said) and "left" not in str(said)
    said.since -= 30
    said("2 ranks", 1, 4)
    assert "about 90 s left" in str(said)
    said("2 ranks", 4, 4)
    assert "left" not in str(said)


def test_ranks_tell_their_steps() -> None:
    """A proof says how many steps its ranks have, and each one that is done."""
    import torch
    from torch import nn

    from schedlang.passes.prove import prove
    from schedlang.passes.verify.proof_case import Case

    heard: list[tuple[str, int, int]] = []

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.up(x).square().mean()

    sch = schedlang.create_schedule(Net())
    sch.mesh(tp=2)
    sch["up"].shard("col", output="R", over="tp")
    case = Case(sch.plan(), ({"x": torch.randn(4, 4)},) * 3, None, None, 0, "none")

    def note(stage: str, done: int = 0, total: int = 0) -> None:
        heard.append((stage, done, total))

    assert prove(case, progress=note).ok
    steps = [(done, total) for stage, done, total in heard if stage == "2 ranks"]
    assert steps[0][0] == 0 and steps[-1][0] == steps[-1][1] >= 6
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)


# -- files, versions, causes ------------------------------------------------------------------


def test_the_version() -> None:
    """It is that of the package, before any verb."""
    done = forks.anew("-m", "schedlang", "--version", cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, f"schedlang {schedlang.__version__}\n")
    assert CliRunner().invoke(app, ["--version"]).stdout == done.stdout
    assert "--version" in CliRunner().invoke(app, ["--help"]).stdout


def test_what_is_written_is_said(folder: Path) -> None:
    """Each file that an option names is named on standard error; standard output stays as it is."""
    plain = CliRunner().invoke(app, ["plan", "x.sched"])
    words = ["--svg", "a.svg", "--html", "b.html", "--out", "p.json"]
    done = CliRunner().invoke(app, ["plan", "x.sched", *words])
    assert done.stdout == plain.stdout
    for name in words[1::2]:
        assert f"wrote {name}\n" in done.stderr and (folder / name).exists()
    assert "wrote" not in plain.stderr


@pytest.mark.parametrize(
    "words",
    [
        *([verb, "x.sched", f"--{option}"] for verb in ("plan", "simulate") for option in WRITES),
        ["plan", "x.sched", "--out"],
        ["verify", "x.sched", "--html"],
        ["diff", "x.sched", "x.sched", "--html"],
        ["run", "x.sched", "--timeline"],
    ],
)
def test_a_folder_that_is_not_there(folder: Path, words: list[str]) -> None:
    """What could not be written is refused before any work, with what makes the folder."""
    done = CliRunner().invoke(app, [*words, "nowhere/a.svg"])
    assert done.exit_code == 2 and "error[S109]" in done.stderr, done.output
    said = " ".join(done.stderr.split())
    assert "there is no folder `nowhere`" in said and "`mkdir -p nowhere`" in said
    assert not done.stdout and not (folder / "nowhere").exists()


def test_the_cause_of_an_import_error(folder: Path) -> None:
    """All exceptions of a chain are told with their lines, whichever way they are linked."""
    (folder / "low.py").write_text(
        "try:\n    import no_such_module\nexcept ImportError as e:\n"
        "    raise RuntimeError('low needs it') from e\n"
    )
    (folder / "model.py").write_text(
        "import sys\nsys.path.insert(0, '.')\ntry:\n    import low\nexcept RuntimeError:\n"
        "    raise ValueError('there is no model')\n"
    )
    done = CliRunner().invoke(app, ["plan", "x.sched"])
    assert done.exit_code == 2
    said = [line for line in done.stderr.splitlines() if "= note:" in line]
    assert [line.split("note: ")[1] for line in said] == [
        "ValueError: there is no model",
        "model.py:6: raise ValueError('there is no model')",
        "while handling RuntimeError: low needs it",
        "low.py:4: raise RuntimeError('low needs it') from e",
        "caused by ModuleNotFoundError: No module named 'no_such_module'",
        "low.py:2: import no_such_module",
    ]


def test_a_tree_of_some_levels(folder: Path) -> None:
    """`--depth` leaves out what lies below, and says how many parameters are there."""
    whole, one, none = (
        CliRunner().invoke(app, ["tree", "model.py", *words]).stdout
        for words in ([], ["--depth", "1"], ["--depth", "0"])
    )
    assert len(none.splitlines()) == 1 and "parameters" in none
    assert len(none.splitlines()) < len(one.splitlines()) < len(whole.splitlines())
    assert all("├─" not in line.lstrip("├└")[2:] for line in one.splitlines())


# -- widths -----------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, 80, 100])
def test_wide_tables_come_in_parts(width: int) -> None:
    """Each part has the first columns and fits; every cell stands in it whole, and once."""
    head = ("rank", *(f"a column {n}" for n in range(12)))
    rows = [head, *((f"pp={k}", *(f"{k}.{n} KiB" for n in range(12))) for k in range(2))]
    lines = list(format_table(rows, width))
    assert max(map(len, lines)) <= width
    assert sum(line.split()[0] == "pp=0" for line in lines) == len(lines) // 3
    for row in rows:
        for cell in row[1:]:
            assert sum(f"  {cell}  " in f"{line}  " for line in lines) == 1, cell
    assert len(list(format_table(rows))) == 3


def test_words_are_never_cut() -> None:
    """A name that is longer than the line stands on it whole."""
    name = "transformer.h.11.attn.c_attn.weight" * 2
    lines = wrap_text(f"not checked: {name} was not run", 50, " ")
    assert any(name in line for line in lines) and len(lines) > 1


@pytest.mark.parametrize("width", [80, 100])
def test_plan_and_tree_fit(folder: Path, width: int) -> None:
    """Every line of a plan and of a tree fits the terminal; the same names stand in it."""
    from schedlang.diagnostics.codes import model as text_of
    from schedlang.ir.model import ModelFacts
    from schedlang.passes.simulate.account import account
    from schedlang.viz import tree
    from schedlang.viz.show import format_view, make_view

    names: dict[str, object] = {}
    exec(text_of(), names)
    net, batch = names["model"](), names["batch"](0)  # type: ignore[operator]
    sch = schedlang.create_schedule(net)
    sch.mesh(dp=2, tp=2)
    sch["layers.*.up"].shard("col", over="tp")
    sch["layers.*.down"].shard("row", over="tp")
    sch["layers.*"].checkpoint(save=["attention", "linear"])
    sch.zero(stage=1, over="dp")
    shown = make_view(sch.plan(), account(sch.plan(), batch, memory=True))
    free, tight = format_view(shown), format_view(shown, width=width)
    assert max(map(len, tight.splitlines())) <= width
    assert max(map(len, free.splitlines())) > width or width == 100
    assert set(free.split()) == set(tight.split())
    root = tree.tree(ModelFacts(net))
    narrow = tree.format_tree(root, width=50)
    assert set(narrow.split()) >= {"Net", "up", "down"}
    assert set(narrow.replace("│", "").split()) == set(
        tree.format_tree(root).replace("│", "").split()
    )


# -- a terminal of 80 columns ------------------------------------------------------------------

KNOBS = """schedule 1

mesh(dp=dp, tp=tp)

knob dp: int = 1 in [1, 2, 4]
knob tp: int = 2 in [1, 2]
knob a_knob_with_a_long_name_that_says_what_it_is_for: bool = false
knob another_knob_with_a_name_that_is_just_as_long_as_that: bool = false

step "a step" {
  layers.*.up    shard(col, over=tp)
  layers.*.down  shard(row, over=tp)
}

step "data" {
  zero(stage=1, over=dp)
}
"""
STAGES = """schedule 1

mesh(pp=2)

step "stages" {
  layers  pipeline_split(over=pp)
  pipeline(order="Interleaved1F1B", micro=16, chunks=2)
}
"""
BROKEN = """schedule 1

mesh(tp=2)

layers.*.a_module_that_is_not_there_and_has_a_name_of_its_own  shard(col, over=tp)
"""


@pytest.mark.parametrize(
    "words",
    [
        ["tune", "knobs.sched", "--gpus", "4", "--on", "h100"],
        ["tune", "model.py", "--gpus", "2", "--on", "h100"],
        ["diff", "knobs.sched", "stages.sched"],
        ["simulate", "stages.sched"],
        ["simulate", "--order", "1F1B", "--ranks", "12", "--micro", "40"],
        ["ci", "x.sched", "broken.sched", "--static"],
        ["plan", "broken.sched"],
        ["check", "broken.sched", "--model", "model.py"],
    ],
    ids=" ".join,
)
def test_eighty_columns(folder: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    """What is written to a terminal fits; all words of what is written elsewhere stand in it whole,
    but for a timeline, which is as long as there is room for."""
    texts = {"knobs": KNOBS, "stages": STAGES, "broken": BROKEN}
    for name, text in texts.items():
        (folder / f"{name}.sched").write_text(text)
    free = CliRunner().invoke(app, words)
    assert free.exit_code in (0, 2), free.output
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    stream = sys.modules[CliRunner.__module__]._NamedTextIOWrapper
    monkeypatch.setattr(stream, "isatty", lambda self: True)
    tight = CliRunner().invoke(app, words)
    assert tight.exit_code == free.exit_code, tight.output
    for wide, narrow in ((free.stdout, tight.stdout), (free.stderr, tight.stderr)):
        said = [one for one in narrow.rpartition("\r")[2].splitlines() if not _pasted(one)]
        assert all(len(line) <= 80 for line in said), max(said, key=len)
        assert _words(wide) <= _words(narrow), _words(wide) - _words(narrow)


@pytest.mark.parametrize("verb", VERBS)
def test_help_fills_its_lines(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A paragraph of a verb's help is broken where the terminal ends, and nowhere before."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    said = CliRunner().invoke(app, [verb, "--help"]).output.partition("\u256d")[0]
    lines = [line.strip() for line in said.splitlines()]
    for line, after in itertools.pairwise(lines):
        assert not line or not after or len(f" {line} {after.split()[0]}") > 78, (line, after)


def _pasted(line: str) -> bool:
    """Is it a command, or a line of a schedule, that has to be one line?"""
    return line.startswith("next: ") or " | " in line


def _words(text: str) -> set[str]:
    lines = [line for line in text.splitlines() if not line.startswith(("rank ", "planned in"))]
    words = (word for line in lines for word in line.split() if "tried in" not in line)
    return {word for word in words if not re.fullmatch(r"[\d.]+", word)}  # seconds vary
