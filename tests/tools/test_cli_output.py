"""Output of the command line besides results: progress, written files, version, causes, widths."""

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
OUTPUT_OPTIONS = ("svg", "html", "trace")
SCHEDULE = "schedule 1\n\nmesh(tp=2)\n\nlayers.*.up  shard(col, output=R, over=tp)\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model and a schedule, which becomes the current one."""
    (tmp_path / "model.py").write_text(model())
    (tmp_path / "x.sched").write_text(SCHEDULE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def wait_until(ready: Callable[[], object], seconds: float = 60) -> None:
    """Wait until a thread has printed something."""
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, "it has said nothing"
        time.sleep(0.02)


# -- progress ---------------------------------------------------------------------------------


def test_short_runs_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal nothing is printed before the first line is due."""
    with ProgressLine(first=60) as progress:
        progress("the original")
    assert capsys.readouterr().err == ""


def test_plain_lines_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal each line is complete, with the stage, its step and the time left."""
    with ProgressLine(first=0.05, every=0.05) as progress:
        progress("4 ranks", 0, 9)
        progress("4 ranks", 3, 9)
        lines: list[str] = []
        wait_until(lambda: lines.extend(capsys.readouterr().err.splitlines()) or len(lines) > 1)
    pattern = re.compile(r"s  4 ranks, step 3 of 9, about \d+ s left \.\.\.$")
    assert all(pattern.search(line) for line in lines) and "\r" not in "".join(lines)


def test_lines_without_a_stage_wait(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first stage nothing is printed for a while, then what is being read."""
    monkeypatch.setattr("schedlang.verbs.progress.REFRESH", 0.02)
    with ProgressLine(first=0.01, every=0.02):
        time.sleep(0.2)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("schedlang.verbs.progress.UNNAMED", 0.05)
    with ProgressLine(first=0.01, every=0.02):
        wait_until(lambda: "reading the model ..." in capsys.readouterr().err)


def test_nothing_is_left_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    """A quiet progress line prints nothing; an exception also ends its thread."""
    with pytest.raises(ZeroDivisionError), ProgressLine(quiet=True, first=0.0) as progress:
        progress("a stage")
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), ProgressLine(first=0.01) as progress:
        raise ZeroDivisionError
    thread = progress._thread
    assert thread is not None and not thread.is_alive()


def test_on_a_terminal_one_line_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal one line is overwritten, and removed at the end."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("schedlang.verbs.progress.REFRESH", 0.02)
    with ProgressLine() as progress:
        progress("the original")
        wait_until(lambda: terminal.getvalue().count("the original") > 1)
    assert "\n" not in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\033[K")


def test_what_is_left_is_that_of_the_stage() -> None:
    """The time left is estimated from this stage's steps, after the first and before the last."""
    progress = ProgressLine(quiet=True)
    progress("the original")
    assert "left" not in str(progress) and "step" not in str(progress)
    progress("2 ranks", 0, 4)
    assert "step 0 of 4" in str(progress) and "left" not in str(progress)
    progress.since -= 30
    progress("2 ranks", 1, 4)
    assert "about 90 s left" in str(progress)
    progress("2 ranks", 4, 4)
    assert "left" not in str(progress)


def test_ranks_tell_their_steps() -> None:
    """A proof reports the number of steps of its ranks, and each finished step."""
    import torch
    from torch import nn

    from schedlang.passes.prove import prove
    from schedlang.passes.verify.proof_case import Case

    notes: list[tuple[str, int, int]] = []

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
        notes.append((stage, done, total))

    assert prove(case, progress=note).ok
    steps = [(done, total) for stage, done, total in notes if stage == "2 ranks"]
    assert steps[0][0] == 0 and steps[-1][0] == steps[-1][1] >= 6
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)


# -- files, versions, causes ------------------------------------------------------------------


def test_the_version() -> None:
    """`--version` prints the package's version."""
    result = forks.run_interpreter("-m", "schedlang", "--version", cwd=ROOT)
    assert (result.returncode, result.stdout) == (0, f"schedlang {schedlang.__version__}\n")
    assert CliRunner().invoke(app, ["--version"]).stdout == result.stdout
    assert "--version" in CliRunner().invoke(app, ["--help"]).stdout


def test_what_is_written_is_said(folder: Path) -> None:
    """Each written file is named on standard error; standard output does not change."""
    without = CliRunner().invoke(app, ["plan", "x.sched"])
    options = ["--svg", "a.svg", "--html", "b.html", "--out", "p.json"]
    result = CliRunner().invoke(app, ["plan", "x.sched", *options])
    assert result.stdout == without.stdout
    for name in options[1::2]:
        assert f"wrote {name}\n" in result.stderr and (folder / name).exists()
    assert "wrote" not in without.stderr


@pytest.mark.parametrize(
    "words",
    [
        *(
            [verb, "x.sched", f"--{option}"]
            for verb in ("plan", "simulate")
            for option in OUTPUT_OPTIONS
        ),
        ["plan", "x.sched", "--out"],
        ["verify", "x.sched", "--html"],
        ["diff", "x.sched", "x.sched", "--html"],
        ["run", "x.sched", "--timeline"],
    ],
)
def test_a_folder_that_is_not_there(folder: Path, words: list[str]) -> None:
    """A missing output folder is refused before any work, with the `mkdir` to type."""
    result = CliRunner().invoke(app, [*words, "nowhere/a.svg"])
    assert result.exit_code == 2 and "error[S109]" in result.stderr, result.output
    message = " ".join(result.stderr.split())
    assert "there is no folder `nowhere`" in message and "`mkdir -p nowhere`" in message
    assert not result.stdout and not (folder / "nowhere").exists()


def test_the_cause_of_an_import_error(folder: Path) -> None:
    """All exceptions of a chain are reported with their lines, `from` or not."""
    (folder / "low.py").write_text(
        "try:\n    import no_such_module\nexcept ImportError as e:\n"
        "    raise RuntimeError('low needs it') from e\n"
    )
    (folder / "model.py").write_text(
        "import sys\nsys.path.insert(0, '.')\ntry:\n    import low\nexcept RuntimeError:\n"
        "    raise ValueError('there is no model')\n"
    )
    result = CliRunner().invoke(app, ["plan", "x.sched"])
    assert result.exit_code == 2
    notes = [line for line in result.stderr.splitlines() if "= note:" in line]
    assert [line.split("note: ")[1] for line in notes] == [
        "ValueError: there is no model",
        "model.py:6: raise ValueError('there is no model')",
        "while handling RuntimeError: low needs it",
        "low.py:4: raise RuntimeError('low needs it') from e",
        "caused by ModuleNotFoundError: No module named 'no_such_module'",
        "low.py:2: import no_such_module",
    ]


def test_a_tree_of_some_levels(folder: Path) -> None:
    """`--depth` limits the tree, which still counts the parameters below."""
    full, one_level, no_levels = (
        CliRunner().invoke(app, ["tree", "model.py", *options]).stdout
        for options in ([], ["--depth", "1"], ["--depth", "0"])
    )
    assert len(no_levels.splitlines()) == 1 and "parameters" in no_levels
    assert len(no_levels.splitlines()) < len(one_level.splitlines()) < len(full.splitlines())
    assert all("├─" not in line.lstrip("├└")[2:] for line in one_level.splitlines())


# -- widths -----------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, 80, 100])
def test_wide_tables_come_in_parts(width: int) -> None:
    """A wide table is printed in parts that fit; every cell is complete, once."""
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
    """A name longer than the line is not broken."""
    name = "transformer.h.11.attn.c_attn.weight" * 2
    lines = wrap_text(f"not checked: {name} was not run", 50, " ")
    assert any(name in line for line in lines) and len(lines) > 1


@pytest.mark.parametrize("width", [80, 100])
def test_plan_and_tree_fit(folder: Path, width: int) -> None:
    """Every line of a plan and a tree fits the width, with the same words."""
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
    view = make_view(sch.plan(), account(sch.plan(), batch, memory=True))
    unlimited, limited = format_view(view), format_view(view, width=width)
    assert max(map(len, limited.splitlines())) <= width
    assert max(map(len, unlimited.splitlines())) > width or width == 100
    assert set(unlimited.split()) == set(limited.split())
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
    """On a terminal of 80 columns every line fits, with all words of the unlimited output; only
    timelines are cut."""
    texts = {"knobs": KNOBS, "stages": STAGES, "broken": BROKEN}
    for name, text in texts.items():
        (folder / f"{name}.sched").write_text(text)
    unlimited = CliRunner().invoke(app, words)
    assert unlimited.exit_code in (0, 2), unlimited.output
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    stream = sys.modules[CliRunner.__module__]._NamedTextIOWrapper
    monkeypatch.setattr(stream, "isatty", lambda self: True)
    limited = CliRunner().invoke(app, words)
    assert limited.exit_code == unlimited.exit_code, limited.output
    for full, narrow in ((unlimited.stdout, limited.stdout), (unlimited.stderr, limited.stderr)):
        lines = [
            output_line
            for output_line in narrow.rpartition("\r")[2].splitlines()
            if not _is_single_line(output_line)
        ]
        assert all(len(line) <= 80 for line in lines), max(lines, key=len)
        assert _words_of(full) <= _words_of(narrow), _words_of(full) - _words_of(narrow)


@pytest.mark.parametrize("verb", VERBS)
def test_help_fills_its_lines(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Help paragraphs are broken at the terminal's width, and nowhere before."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    output = CliRunner().invoke(app, [verb, "--help"]).output.partition("\u256d")[0]
    lines = [line.strip() for line in output.splitlines()]
    for line, following in itertools.pairwise(lines):
        assert not line or not following or len(f" {line} {following.split()[0]}") > 78, (
            line,
            following,
        )


def _is_single_line(line: str) -> bool:
    """Whether a line is a command or source, which must not be broken."""
    return line.startswith("next: ") or " | " in line


def _words_of(text: str) -> set[str]:
    """The words of an output, without times."""
    lines = [line for line in text.splitlines() if not line.startswith(("rank ", "planned in"))]
    words = (word for line in lines for word in line.split() if "tried in" not in line)
    return {word for word in words if not re.fullmatch(r"[\d.]+", word)}  # seconds vary
