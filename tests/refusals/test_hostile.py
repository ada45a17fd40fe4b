"""Hostile texts: each is refused in a short time, in a few words, and nothing else is shown."""

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
from tests.refusals.mutants import played

HEAD = "schedule 1\nmesh(dp=2)\n"


def refused(text: str, name: str = "a.sched") -> Refusal:
    """What is said of a text without a model."""
    with pytest.raises(Refusal) as caught:
        expand(parse(Source(name, HEAD + text)), None)
    return caught.value


def codes(refusal: Refusal) -> set[str]:
    return {one.code for one in refusal.diagnostics}


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
    """However many there are, and however long their line: the first hundred, and that is said."""
    refusal = refused(text)
    assert len(refusal.diagnostics) == MAX_MESSAGES
    assert len(refusal.render()) < 60_000
    assert "there are more" in refusal.diagnostics[-1].notes[-1]
    assert not any("there are more" in " ".join(one.notes) for one in refusal.diagnostics[:-1])


def test_few_mistakes_are_all_shown() -> None:
    """A hundred are shown as they are."""
    refusal = refused("h.*  shrad()\n" * MAX_MESSAGES)
    assert len(refusal.diagnostics) == MAX_MESSAGES and not refusal.diagnostics[-1].notes


def test_of_many_warnings_some_are_shown() -> None:
    """So it is with what is only warned of."""
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
    """A message does not grow with the word or the line that it is about; nor do its findings."""
    assert len(refused(text).render()) < 8000
    assert all(len(str(one.to_json())) < 8000 for one in find_problems(HEAD + text, "a.sched"))


def test_a_long_line_is_shown_around_the_mark() -> None:
    """The mark stands under what it is about, wherever on its line that is; others, too."""
    line = "  ".join(f"word{number}" for number in range(1000))
    source = Source("a", line)

    def at(word: str) -> Span:
        col = line.index(word) + 1
        return Span(source, 1, col, 1, col + len(word))

    for word in ("word0", "word3", "word17", "word500", "word998", "word999"):
        made = Diagnostic("S001", "t", Label(at(word)), (Label(at("word700"), "too"),)).render()
        rows = made.split("\n")
        marks = [i for i, row in enumerate(rows) if set(row[4:]) & set("^-")]
        for i, sought in zip(marks, sorted((word, "word700"), key=line.index)):
            mark = rows[i].removesuffix(" too")
            begin = len(mark) - len(sought)
            assert rows[i - 1][begin : len(mark)] == sought, made
        assert all(len(row) < 200 for row in rows)


def test_control_characters_are_not_printed() -> None:
    """What a terminal would obey is shown as one sign, and the mark stands where it should."""
    refusal = refused("# \x1b[2J\nh.\x1b[31m*  f()\n")
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
    """No number of a schedule is larger than what can be said; no message shows one that is."""
    for text in (
        f"require {value} == 1",
        f"mesh(tp={value})",
        f"knob k: float = {value}",
        f"h.*  checkpoint(group={value})",
    ):
        with pytest.raises(Refusal) as caught:
            expand(parse(Source("a.sched", f"schedule 1\n{text}\n")), None)
        refusal = caught.value
        assert code in codes(refusal), refusal
        assert len(refusal.render()) < 2000


@pytest.mark.parametrize(
    "ranks, order", [(10**6, "micro=4"), (2**14, "micro=65536"), (2**13, "micro=4, chunks=4")]
)
def test_a_pipeline_is_bounded(ranks: int, order: str) -> None:
    """An order is not laid out on more stages, or for more microbatches, than anybody plans."""
    name = "Interleaved1F1B" if "chunks" in order else "1F1B"
    rows = f'layers.2  pipeline_split(over=pp)\npipeline(order="{name}", {order})\n'
    seen = played("a.sched", f"schedule 1 for Net\nmesh(pp={ranks})\n{rows}", costs=False)
    assert seen.codes == ("S304",)


def test_large_numbers_are_fine() -> None:
    """What a schedule has reason to say is said."""
    expand(
        parse(
            Source(
                "a",
                HEAD + f"require {'9' * 17} * 9 > 4096TiB / 1e-9 - 1e300\n"[:-1].replace(">", "!="),
            )
        ),
        None,
    )


# ---- what grows ---------------------------------------------------------------------------------


def doubling(times: int) -> str:
    """Definitions each of which calls the one before it twice."""
    defs = ["def d0() {\n  checkpoint()\n}\n"]
    defs += [f"def d{i}() {{\n  d{i - 1}()\n  d{i - 1}()\n}}\n" for i in range(1, times)]
    return "".join(defs) + f"h.*  d{times - 1}()\n"


def test_doubling_definitions_end() -> None:
    """Definitions that double thirty times are refused (S116) at the row that is one too many."""
    refusal = refused(doubling(30))
    assert [one.code for one in refusal.diagnostics] == ["S116"]
    assert f"more than {base_schedules.MAX_ROWS:,} rows" in refusal.render()
    assert refusal.diagnostic.also, "the calls that lead there are shown"
    expand(parse(Source("a", HEAD + doubling(10))), None)


def test_doubling_mistakes_end() -> None:
    """Also where each of the rows is refused for another reason."""
    text = doubling(30).replace("checkpoint()", "checkpoint(nonsense)")
    assert len(refused(text).diagnostics) <= MAX_MESSAGES


def test_long_chains_of_calls_end() -> None:
    """A thousand definitions, each calling the one before it, are no error of ours."""
    defs = ["def d0() {\n  checkpoint()\n}\n"]
    defs += [f"def d{i}() {{\n  d{i - 1}()\n}}\n" for i in range(1, 1000)]
    assert codes(refused("".join(defs) + "h.*  d999()\n")) == {"S116"}
    expand(
        parse(Source("a", HEAD + "".join(defs) + f"h.*  d{base_schedules.MAX_DEPTH - 2}()\n")), None
    )


def test_it_ends_with_a_model_too() -> None:
    """With a model the same rows are refused, from Python as from a file."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(Refusal) as caught:
        Schedule(model, parse(Source("a", HEAD + doubling(30).replace("h.*", "0")))).plan()
    assert "S116" in codes(caught.value) or len(caught.value.diagnostics) == MAX_MESSAGES


def _uses(folder: Path, files: int) -> Path:
    """Files each of which uses the one before it twice."""
    for number in range(files):
        used = "".join(f'use "u{number - 1}.sched" as {name}\n' for name in "ab" if number)
        (folder / f"u{number}.sched").write_text(f"schedule 1\n{used}def d() {{\n  verify()\n}}\n")
    return folder / f"u{files - 1}.sched"


def test_doubling_files_end(tmp_path: Path) -> None:
    """Files that use others twice are refused (S116), too, and few of them are not."""
    with pytest.raises(Refusal) as caught:
        expand(parse(read(_uses(tmp_path, 30))), None)
    assert "S116" in codes(caught.value)
    expand(parse(read(_uses(tmp_path, 4))), None)


def test_used_files_are_counted_from_python_too(tmp_path: Path) -> None:
    """A `use` that is called ends like one that is written."""
    sch = create_schedule(nn.Linear(2, 2))
    with pytest.raises(Refusal) as caught:
        sch.use(str(_uses(tmp_path, 30)), "lib")
    assert "S116" in codes(caught.value)


def test_alternatives_are_bounded() -> None:
    """A segment that stands for a billion names is refused without looking for them."""
    assert codes(refused("h." + "{a,b}" * 30 + "?  checkpoint()\n")) == {"S004"}
    assert codes(refused("h." + "{" + ",".join("x" * 1001) + "}  checkpoint()\n")) == {"S004"}
    parse(Source("a", HEAD + "h." + "{a,b}" * 9 + "?  checkpoint()\n"))


def test_globs_do_not_backtrack() -> None:
    """Many stars on a long name are matched at once, and as one star after the other."""
    long = "a" * 60
    sch = create_schedule(nn.ModuleDict({long: nn.Linear(1, 1), "ab_ba": nn.Linear(1, 1)}))
    with pytest.raises(Refusal):
        _ = sch["*a" * 25 + "*b"].modules
    wanted = {
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
    assert {glob: len(sch[f"{glob}?"].modules) for glob in wanted} == wanted


# ---- files that are none ------------------------------------------------------------------------


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)


def _large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


def _zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [_pipe, _socket, _large, _zeros])
def test_what_is_no_file_of_text_is_not_waited_for(
    make: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe, a socket, a device and a file of a terabyte are refused at once, named or used."""
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "x.sched")
    with pytest.raises(Refusal) as caught:
        read("x.sched")
    assert codes(caught.value) == {"S000"}
    (tmp_path / "a.sched").write_text('schedule 1\nuse "x.sched"\n')
    with pytest.raises(Refusal) as caught:
        expand(parse(read("a.sched")), None)
    assert codes(caught.value) == {"S000"}
    if make is not _large:
        with pytest.raises(Refusal) as caught:
            read_record(tmp_path / "x.sched")
        assert codes(caught.value) == {"S907"} and not is_saved_plan(tmp_path / "x.sched")


def test_commands_do_not_hang(tmp_path: Path) -> None:
    """No verb that reads a schedule waits for somebody to write into a pipe."""
    _pipe(tmp_path / "x.sched")
    for words in (["check"], ["fmt"], ["check", "--json"], ["plan"], ["diff", "x.sched"]):
        environ = {**os.environ, "PYTHONPATH": str(Path.cwd())}
        done = forks.run(
            "-m", "schedlang", *words, "x.sched", cwd=tmp_path, timeout=600, env=environ
        )
        assert done.returncode == 2 and "not a regular file" in done.stdout + done.stderr, words


def test_sizes_of_files(tmp_path: Path) -> None:
    """A file up to the limit is read whole, one byte more is refused with the limit."""
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
    """Who may write a schedule does not learn by it what other files say."""
    (tmp_path / "shadow").write_text(text)
    for used in ('use "shadow"', 'use "shadow" as s', 'use "shadow" (tp=2)'):
        refusal = refused(used, str(tmp_path / "a.sched"))
        assert codes(refusal) == {"S003"} and "`shadow` is not a schedule" in refusal.render()
        assert "root:" not in refusal.render() + str([one.to_json() for one in refusal.diagnostics])


def test_a_used_schedule_is_quoted(tmp_path: Path) -> None:
    """What begins as a schedule, after comments and blank lines, is shown with its mistake."""
    (tmp_path / "b.sched").write_text("# a library\n\n  # of ours\nschedule 1\nmehs(tp=2)\n")
    refusal = refused('use "b.sched"', str(tmp_path / "a.sched"))
    assert "5 | mehs(tp=2)" in refusal.render()


@pytest.mark.parametrize("cell", ["root:$6$secret:19000:0:99999:7:::", "0F" + "9" * 5000, "9" * 99])
def test_a_table_that_is_none_is_not_quoted(cell: str) -> None:
    """An order's table names the place of what is no operation, and shows it if it is like one."""
    with pytest.raises(OrderError, match="line 2, column 5: what stands there is no operation"):
        read_table(f"0F0\n0B0,{cell}\n")
    with pytest.raises(OrderError, match="`0FF0` is no operation"):
        read_table("0FF0\n")


# ---- by chance ----------------------------------------------------------------------------------

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


def exploding(chance: random.Random) -> str:
    """A schedule with what is large, deep or odd in random places."""
    rows = [
        "h.*  shard(col, over=dp)",
        "zero(stage=0, over=dp)",
        "require dp == 2",
        doubling(18),
        'step "s" {\n  h.*  checkpoint(group=2)\n}',
        "knob k: int = 2 in 1..4",
        "at h.* where index > 1 {\n  checkpoint()\n}",
        "expect peak_memory < 2GiB",
    ]
    text = HEAD + "\n".join(chance.choices(rows, k=chance.randrange(1, 7))) + "\n"
    for _ in range(chance.randrange(1, 5)):
        place = chance.choice([i for i, char in enumerate(text) if char in " ()=,\n"])
        text = text[:place] + chance.choice(BOMBS) + text[place + chance.randrange(2) :]
    return text


def _endures(text: str) -> None:
    """A text is read, printed, checked and planned, or refused in a few words."""
    model = nn.ModuleDict({"h": nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))})
    for work in (lambda f: expand(f, None), lambda f: Schedule(model, f).plan(), lint):
        try:
            work(parse(Source("a.sched", text)))
        except Refusal as refusal:
            assert len(refusal.render()) < 300_000, text
    assert all(isinstance(one, Diagnostic) for one in find_problems(text, "a.sched"))


def test_what_explodes_is_refused() -> None:
    """Sizes, depths and odd characters anywhere end in a refusal or a plan."""
    chance = random.Random(5)
    for _ in range(60):
        _endures(exploding(chance))


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(4))
def test_much_that_explodes_is_refused(seed: int) -> None:
    """The same for many more."""
    chance = random.Random(100 + seed)
    for _ in range(1000):
        _endures(exploding(chance))
