"""Hostile schedules and files: refused quickly, with a short message that leaks no content."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from schedlang.diagnostics.diagnostic import MAX_MESSAGES, Diagnostic, Label, Refusal
from schedlang.diagnostics.source import Source, Span, read_bytes, read_utf8
from schedlang.editors.server import find_problems
from schedlang.language.syntax import MAX_BYTES, parse, read
from schedlang.passes.elaborate import base_schedules
from schedlang.passes.elaborate.expand import expand
from schedlang.passes.elaborate.lint import lint
from schedlang.passes.elaborate.plan_record import read_record
from schedlang.pipeline.schedules import OrderError, read_table
from schedlang.schedule import Schedule, create_schedule
from schedlang.verbs.inputs import is_saved_plan
from tests import forks
from tests.refusals.mutants import check_and_plan

HEAD = "schedule 1\nmesh(dp=2)\n"


def refusal_of(text: str, name: str = "a.sched") -> Refusal:
    """Return the refusal of a text that is expanded without a model."""
    with pytest.raises(Refusal) as caught:
        expand(parse(Source(name, HEAD + text)), None)
    return caught.value


def codes_of(refusal: Refusal) -> set[str]:
    return {diagnostic.code for diagnostic in refusal.diagnostics}


# ---- many mistakes, and long ones ---------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "require 1 == " + "*".join(["9" * 20] * 3000),
        "h.*  shrad()\n" * 3000,
        "\n".join(f"knob step: int = {number}" for number in range(3000)),
        "\n".join(f"require {number} == x{number}" for number in range(3000)),
        "def f() {\n" + "  shrad()\n" * 3000 + "}\nf()\n",
    ],
)
def test_of_many_mistakes_some_are_shown(text: str) -> None:
    """Only the first hundred mistakes are shown, with a note that there are more."""
    refusal = refusal_of(text)
    assert len(refusal.diagnostics) == MAX_MESSAGES
    assert len(refusal.render()) < 60_000
    assert "there are more" in refusal.diagnostics[-1].notes[-1]
    assert not any(
        "there are more" in " ".join(diagnostic.notes) for diagnostic in refusal.diagnostics[:-1]
    )


def test_few_mistakes_are_all_shown() -> None:
    """A hundred mistakes are all shown, without a note."""
    refusal = refusal_of("h.*  shrad()\n" * MAX_MESSAGES)
    assert len(refusal.diagnostics) == MAX_MESSAGES and not refusal.diagnostics[-1].notes


def test_of_many_warnings_some_are_shown() -> None:
    """Warnings are limited in the same way."""
    file = parse(Source("a", HEAD + "".join(f"knob k{i}: int = 1\n" for i in range(500)) + "f()\n"))
    assert len(lint(file)) == MAX_MESSAGES


@pytest.mark.parametrize(
    "text",
    [
        "h.*  " + "x" * 200_000 + "()",
        "require " + "x" * 200_000 + " == 1",
        "h." + "x" * 200_000,
        "mesh(" + "a" * 200_000 + "=2)",
        'use "' + "x" * 3000 + '"',
        "x" * 200_000,
        "knob a: int = 1 in [" + "1, " * 5000 + "1]\nrequire a == [" + "2, " * 5000 + "1]",
        'require "' + "x" * 200_000 + '" == 1',
    ],
)
def test_of_a_long_text_the_part_that_matters_is_shown(text: str) -> None:
    """The size of a message does not grow with the word or line that it is about."""
    assert len(refusal_of(text).render()) < 8000
    assert all(
        len(str(problem.to_json())) < 8000 for problem in find_problems(HEAD + text, "a.sched")
    )


def test_a_long_line_is_shown_around_the_mark() -> None:
    """Marks stand under the words that they mark, wherever these are on a long line."""
    line = "  ".join(f"word{number}" for number in range(1000))
    source = Source("a", line)

    def at(word: str) -> Span:
        col = line.index(word) + 1
        return Span(source, 1, col, 1, col + len(word))

    for word in ("word0", "word3", "word17", "word500", "word998", "word999"):
        rendered = Diagnostic("S001", "t", Label(at(word)), (Label(at("word700"), "too"),)).render()
        rows = rendered.split("\n")
        marks = [i for i, row in enumerate(rows) if set(row[4:]) & set("^-")]
        for i, marked_word in zip(marks, sorted((word, "word700"), key=line.index)):
            mark = rows[i].removesuffix(" too")
            start = len(mark) - len(marked_word)
            assert rows[i - 1][start : len(mark)] == marked_word, rendered
        assert all(len(row) < 200 for row in rows)


def test_control_characters_are_not_printed() -> None:
    """Control characters are printed as one replacement sign, and marks stay in place."""
    refusal = refusal_of("# \x1b[2J\nh.\x1b[31m*  f()\n")
    rows = refusal.render().split("\n")
    assert "\x1b" not in refusal.render() and rows[3].index("\ufffd") == rows[4].index("^")


# ---- numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value, code",
    [
        ("*".join(["9" * 18] * 300), "S304"),
        ("9" * 18 + "GiB * " + "9" * 18 + "GiB", "S304"),
        ("1e308 * 1e308", "S304"),
        ("1.0 / 1e-300 / 1e-300", "S304"),
        ("9" * 5000 + "GiB", "S004"),
        ("1e400", "S004"),
        ("9" * 400 + ".5", "S004"),
        ("9" * 5000, "S004"),
    ],
)
def test_numbers_are_bounded(value: str, code: str) -> None:
    """Numbers above the limits are refused, and no message prints such a number."""
    for text in (
        f"require {value} == 1",
        f"mesh(tp={value})",
        f"knob k: float = {value}",
        f"h.*  checkpoint(group={value})",
    ):
        with pytest.raises(Refusal) as caught:
            expand(parse(Source("a.sched", f"schedule 1\n{text}\n")), None)
        refusal = caught.value
        assert code in codes_of(refusal), refusal
        assert len(refusal.render()) < 2000


@pytest.mark.parametrize(
    "ranks, order", [(10**6, "micro=4"), (2**14, "micro=65536"), (2**13, "micro=4, chunks=4")]
)
def test_a_pipeline_is_bounded(ranks: int, order: str) -> None:
    """Pipelines with too many stages or microbatches are refused (S304)."""
    name = "Interleaved1F1B" if "chunks" in order else "1F1B"
    rows = f'layers.2  pipeline_split(over=pp)\npipeline(order="{name}", {order})\n'
    outcome = check_and_plan(
        "a.sched", f"schedule 1 for Net\nmesh(pp={ranks})\n{rows}", costs=False
    )
    assert outcome.codes == ("S304",)


def test_large_numbers_are_fine() -> None:
    """Large numbers within the limits are accepted, and computed with."""
    text = HEAD + f"require {'9' * 17} * 9 != 4096TiB / 1e-9 - 1e300"
    assert expand(parse(Source("a", text)), None).plan is None  # there is no model
    with pytest.raises(Refusal):
        expand(parse(Source("a", text.replace("!=", "=="))), None)


# ---- growth -------------------------------------------------------------------------------------


def doubling_definitions(times: int) -> str:
    """Return definitions, each of which calls the previous one twice."""
    defs = ["def d0() {\n  checkpoint()\n}\n"]
    defs += [f"def d{i}() {{\n  d{i - 1}()\n  d{i - 1}()\n}}\n" for i in range(1, times)]
    return "".join(defs) + f"h.*  d{times - 1}()\n"


def test_doubling_definitions_end() -> None:
    """Definitions that double thirty times are refused (S116) at the first row over the limit."""
    refusal = refusal_of(doubling_definitions(30))
    assert [diagnostic.code for diagnostic in refusal.diagnostics] == ["S116"]
    assert f"more than {base_schedules.MAX_ROWS:,} rows" in refusal.render()
    assert refusal.diagnostic.also, "the calls that lead there are shown"
    expand(parse(Source("a", HEAD + doubling_definitions(10))), None)


def test_doubling_mistakes_end() -> None:
    """The same when each row is refused for another reason."""
    text = doubling_definitions(30).replace("checkpoint()", "checkpoint(nonsense)")
    assert len(refusal_of(text).diagnostics) <= MAX_MESSAGES


def test_long_chains_of_calls_end() -> None:
    """A thousand nested definitions are refused (S116), not an internal error."""
    defs = ["def d0() {\n  checkpoint()\n}\n"]
    defs += [f"def d{i}() {{\n  d{i - 1}()\n}}\n" for i in range(1, 1000)]
    assert codes_of(refusal_of("".join(defs) + "h.*  d999()\n")) == {"S116"}
    expand(
        parse(Source("a", HEAD + "".join(defs) + f"h.*  d{base_schedules.MAX_DEPTH - 2}()\n")), None
    )


def test_it_ends_with_a_model_too() -> None:
    """The same rows are refused with a model, and from Python."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(Refusal) as caught:
        Schedule(
            model, parse(Source("a", HEAD + doubling_definitions(30).replace("h.*", "0")))
        ).plan()
    assert "S116" in codes_of(caught.value) or len(caught.value.diagnostics) == MAX_MESSAGES


def _doubling_files(folder: Path, files: int) -> Path:
    """Write files, each of which uses the previous one twice; return the last."""
    for number in range(files):
        used = "".join(f'use "u{number - 1}.sched" as {name}\n' for name in "ab" if number)
        (folder / f"u{number}.sched").write_text(f"schedule 1\n{used}def d() {{\n  verify()\n}}\n")
    return folder / f"u{files - 1}.sched"


def test_doubling_files_end(tmp_path: Path) -> None:
    """Files that use others twice are refused (S116); a few such files are accepted."""
    with pytest.raises(Refusal) as caught:
        expand(parse(read(_doubling_files(tmp_path, 30))), None)
    assert "S116" in codes_of(caught.value)
    expand(parse(read(_doubling_files(tmp_path, 4))), None)


def test_used_files_are_counted_from_python_too(tmp_path: Path) -> None:
    """A `use` from Python is limited like one in a file."""
    sch = create_schedule(nn.Linear(2, 2))
    with pytest.raises(Refusal) as caught:
        sch.use(str(_doubling_files(tmp_path, 30)), "lib")
    assert "S116" in codes_of(caught.value)


def test_alternatives_are_bounded() -> None:
    """A segment with a billion alternatives is refused without expanding it."""
    assert codes_of(refusal_of("h." + "{a,b}" * 30 + "?  checkpoint()\n")) == {"S004"}
    assert codes_of(refusal_of("h." + "{" + ",".join("x" * 1001) + "}  checkpoint()\n")) == {"S004"}
    parse(Source("a", HEAD + "h." + "{a,b}" * 9 + "?  checkpoint()\n"))


def test_globs_do_not_backtrack() -> None:
    """Globs with many stars are matched fast and correctly."""
    long_name = "a" * 60
    sch = create_schedule(nn.ModuleDict({long_name: nn.Linear(1, 1), "ab_ba": nn.Linear(1, 1)}))
    with pytest.raises(Refusal):
        _ = sch["*a" * 25 + "*b"].modules
    expected = {
        "*a" * 25: 1,
        "a*b*a": 1,
        "*b*b*": 1,
        "*_*": 1,
        "a*": 2,
        "*a*_*a": 1,
        "ab*ba": 1,
        "ab*bba": 0,
        "*": 2,
    }
    assert {glob: len(sch[f"{glob}?"].modules) for glob in expected} == expected


# ---- not regular files --------------------------------------------------------------------------


def _make_pipe(path: Path) -> None:
    os.mkfifo(path)


def _make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as unix_socket:
        unix_socket.bind(path.name)


def _make_large_file(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


def _link_zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [_make_pipe, _make_socket, _make_large_file, _link_zeros])
def test_what_is_no_file_of_text_is_not_waited_for(
    make: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pipes, sockets, devices and huge files are refused at once, named or used."""
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "x.sched")
    with pytest.raises(Refusal) as caught:
        read("x.sched")
    assert codes_of(caught.value) == {"S000"}
    (tmp_path / "a.sched").write_text('schedule 1\nuse "x.sched"\n')
    with pytest.raises(Refusal) as caught:
        expand(parse(read("a.sched")), None)
    assert codes_of(caught.value) == {"S000"}
    if make is not _make_large_file:
        with pytest.raises(Refusal) as caught:
            read_record(tmp_path / "x.sched")
        assert codes_of(caught.value) == {"S907"} and not is_saved_plan(tmp_path / "x.sched")


def test_commands_do_not_hang(tmp_path: Path) -> None:
    """No command that reads a schedule blocks on a pipe."""
    _make_pipe(tmp_path / "x.sched")
    for arguments in (["check"], ["fmt"], ["check", "--json"], ["plan"], ["diff", "x.sched"]):
        environ = {**os.environ, "PYTHONPATH": str(Path.cwd())}
        result = forks.run(
            "-m", "schedlang", *arguments, "x.sched", cwd=tmp_path, timeout=600, env=environ
        )
        assert result.returncode == 2 and "not a regular file" in result.stdout + result.stderr, (
            arguments
        )


def test_sizes_of_files(tmp_path: Path) -> None:
    """A file up to the size limit is read, one byte more is refused with the limit."""
    file = tmp_path / "a.sched"
    text = "schedule 1\n"
    file.write_text(text + "#" * (MAX_BYTES - len(text)))
    assert len(read_bytes(file, MAX_BYTES)) == len(read(file).text) == MAX_BYTES
    file.write_text(text + "#" * (MAX_BYTES - len(text) + 1))
    with pytest.raises(Refusal) as caught:
        read(file)
    assert "more than 1 MiB" in caught.value.diagnostic.title  # wrapped where the path is long
    file.write_bytes(b"a\r\nb\n")
    assert read_utf8(file) == "a\nb\n"


SECRET = "root:$6$rounds=5000$secret:19000:0:99999:7:::\n"


@pytest.mark.parametrize(
    "text",
    [
        SECRET,
        f"# {SECRET}{SECRET}",
        "",
        f"schedule\n{SECRET}",
        f"\n\n schedulers {SECRET}",
        "{" + SECRET + "}",
    ],
)
def test_a_used_file_that_is_no_schedule_is_not_quoted(tmp_path: Path, text: str) -> None:
    """A schedule cannot be used to read the content of other files."""
    (tmp_path / "shadow").write_text(text)
    for used in ('use "shadow"', 'use "shadow" as s', 'use "shadow" (tp=2)'):
        refusal = refusal_of(used, str(tmp_path / "a.sched"))
        assert codes_of(refusal) == {"S003"} and "`shadow` is not a schedule" in refusal.render()
        assert "root:" not in refusal.render() + str(
            [diagnostic.to_json() for diagnostic in refusal.diagnostics]
        )


def test_a_used_schedule_is_quoted(tmp_path: Path) -> None:
    """A used file that begins as a schedule is quoted with its mistake."""
    (tmp_path / "b.sched").write_text("# a library\n\n  # of ours\nschedule 1\nmehs(tp=2)\n")
    refusal = refusal_of('use "b.sched"', str(tmp_path / "a.sched"))
    assert "5 | mehs(tp=2)" in refusal.render()


@pytest.mark.parametrize("cell", ["root:$6$secret:19000:0:99999:7:::", "0F" + "9" * 5000, "9" * 99])
def test_a_table_that_is_none_is_not_quoted(cell: str) -> None:
    """A bad cell of an order's table is named by place, and quoted only if it looks like one."""
    with pytest.raises(OrderError, match="line 2, column 5: what stands there is no operation"):
        read_table(f"0F0\n0B0,{cell}\n")
    with pytest.raises(OrderError, match="`0FF0` is no operation"):
        read_table("0FF0\n")


# ---- random -------------------------------------------------------------------------------------

BOMBS = [
    *("9" * 30, "1e999", "9" * 5000, "9" * 18, "-" * 60 + "1", "1TiB*1TiB", "1e308*1e308", "1/3"),
    *("(" * 60, "[" * 47 + "1" + "]" * 47, "not " * 60, "[" + "1," * 900 + "1]", "2 // 1e-308"),
    *("{a,b}" * 30, "**" + ".**" * 20, "h" + ".*" * 200, "*" * 300, "[0:999999999999999999]"),
    *("[::-1]", "x.y.z" * 300, "where " + "a.b" * 99 + " == 1", "relax(" + "a," * 99 + "a)"),
    *("\x00", "\x1b[2J", "\u2028", "\r", "\ufeff", "é" * 500, '"' + "x" * 5000 + '"'),
    *("`" + "y" * 500 + "`", "\n" * 500, "#" * 5000, "def d() {\n d()\n}\n"),
    *('use "/etc/hostname"\n', 'use "."\n', 'use "/dev/zero" as z\n'),
    "knob z: int = 1 in 1..999999999999999999\n",
    "mesh(" + ",".join(f"a{i}=2" for i in range(300)) + ")\n",
]


def explosive_schedule(rng: random.Random) -> str:
    """Return a schedule with large, deep or odd fragments in random places."""
    rows = [
        "h.*  shard(col, over=dp)",
        "zero(stage=0, over=dp)",
        "require dp == 2",
        doubling_definitions(18),
        'step "s" {\n  h.*  checkpoint(group=2)\n}',
        "knob k: int = 2 in 1..4",
        "at h.* where index > 1 {\n  checkpoint()\n}",
        "expect peak_memory < 2GiB",
    ]
    text = HEAD + "\n".join(rng.choices(rows, k=rng.randrange(1, 7))) + "\n"
    for _ in range(rng.randrange(1, 5)):
        index = rng.choice([i for i, char in enumerate(text) if char in " ()=,\n"])
        text = text[:index] + rng.choice(BOMBS) + text[index + rng.randrange(2) :]
    return text


def _check_bounded(text: str) -> None:
    """Check that a text is planned, or refused with a short message."""
    model = nn.ModuleDict({"h": nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))})
    for stage in (lambda f: expand(f, None), lambda f: Schedule(model, f).plan(), lint):
        try:
            stage(parse(Source("a.sched", text)))
        except Refusal as refusal:
            assert len(refusal.render()) < 300_000, text
    assert all(isinstance(problem, Diagnostic) for problem in find_problems(text, "a.sched"))


def test_what_explodes_is_refused() -> None:
    """Random sizes, depths and odd characters end in a refusal or a plan."""
    rng = random.Random(5)
    for _ in range(60):
        _check_bounded(explosive_schedule(rng))


@pytest.mark.parametrize("text", [f"knob n: int = {'1' * 200_000}x", "." * 200_000])
def test_a_long_line_is_refused_in_its_own_time(text: str) -> None:
    """The help for a line is found in one pass: in minutes, if each place in it began another."""
    with pytest.raises(Refusal, match="S003"):
        parse(Source("a.sched", f"schedule 1\n\n{text}\n"))


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(4))
def test_much_that_explodes_is_refused(seed: int) -> None:
    """The same for many more random texts."""
    rng = random.Random(100 + seed)
    for _ in range(1000):
        _check_bounded(explosive_schedule(rng))
