"""The parser: accepted programs, spans of nodes, and the messages for syntax errors."""

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import NOWHERE, Source
from schedlang.language import grammar
from schedlang.language import nodes as n
from schedlang.language.grammar import parser
from schedlang.language.printer import to_text
from schedlang.language.syntax import parse, parse_expr, parse_path, read
from tests.samples import SAMPLES
from tests.strategies import with_damage

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))

GPT2 = SAMPLES["gpt2_tp.sched"]


def parse_refusal(text: str) -> Refusal:
    """The refusal of a text."""
    with pytest.raises(Refusal) as caught:
        parse(Source("gpt2.sched", text))
    return caught.value


def edit_refusal(old: str, new: str) -> str:
    """The message for the GPT-2 sample with one text replaced."""
    assert old in GPT2
    return parse_refusal(GPT2.replace(old, new, 1)).render()


def test_grammar_is_strict_lalr() -> None:
    """The grammar has no conflict that would be resolved silently."""
    parser(strict=True)


def test_the_parser_that_is_kept_reads_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parser gives the same tree when it is built, cached, rebuilt from a damaged cache, or not
    cached."""
    cache = tmp_path / "grammar.lark"

    def tree(path: Path, from_grammar: bool = True) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(grammar, "_cache_path", lambda: str(path))
            if not from_grammar:
                patch.setattr("lark.lark.load_grammar", None)
            return grammar.parser.__wrapped__().parse(GPT2, start="start")

    expected = tree(cache)
    assert tree(cache, from_grammar=False) == expected
    content = cache.read_bytes()
    for part in (content[: len(content) // 2], b"", b"\x80" * 100):
        cache.write_bytes(part)
        assert tree(cache) == tree(cache, from_grammar=False) == expected
    assert tree(tmp_path / "missing" / "grammar.lark") == expected


def test_where_the_parser_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser is cached beside the bytecode; nowhere if Python writes no bytecode."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    cache = Path(str(grammar._cache_path()))
    assert cache.parent == Path(grammar.__file__).parent / "__pycache__"
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert grammar._cache_path() is False


def test_nodes_know_their_place() -> None:
    """A node's span is its own text; equality ignores spans."""
    file = parse(Source("x", GPT2))
    step = file.items[-1]
    assert isinstance(step, n.Step) and step.span.line == 10
    rule = step.block.body[0]
    assert isinstance(rule, n.Rule)
    line = GPT2.split("\n")[rule.call.span.line - 1]
    assert line[rule.call.span.col - 1 : rule.call.span.end_col - 1] == "pad(vocab, multiple=128)"
    shifted = parse(Source("y", "\n\n" + GPT2))
    assert shifted == file and shifted.items[-1].span != step.span


def test_a_mesh_lies_on_a_machine_or_on_a_file_of_one() -> None:
    """`on` takes a device name or a quoted file, and both print as they were read."""
    for written, on in (("a100x4", "a100x4"), ('"my machine.toml"', "my machine.toml")):
        text = f"schedule 1\n\nmesh(dp=2) on {written}\n"
        file = parse(Source("my.sched", text))
        assert [mesh.on for mesh in file.items if isinstance(mesh, n.Mesh)] == [on]
        assert to_text(file) == text


def test_index_is_a_child() -> None:
    """`layers[3]` and `layers.3` are the same selector."""
    assert parse_path("a.layers[3].b", NOWHERE) == parse_path("a.layers.3.b", NOWHERE)
    assert parse_path("a.layers[-1]", NOWHERE) != parse_path("a.layers.1", NOWHERE)


def test_keywords_are_only_reserved_where_they_matter() -> None:
    """Modules named like a keyword can be written after a dot or in backquotes."""
    assert parse_path("a.step.view", NOWHERE).segs[1].text == "step"
    parse(Source("x", 'schedule 1\nstep "s" {\n  `at`.in  checkpoint()\n}\n'))


def test_interval_of_integers() -> None:
    """`4..64` is an interval, not two floats."""
    knob = parse(Source("x", "schedule 1\nknob m: int = 16 in 4..64\n")).items[0]
    assert isinstance(knob, n.Knob)
    assert knob.domain == n.Interval(n.Lit("4"), n.Lit("64"))


def test_python_strings_blame_the_string() -> None:
    """A mistake in a selector given as a Python string is shown inside the string."""
    with pytest.raises(Refusal) as caught:
        parse_path("h.*..attn", NOWHERE)
    assert "1 | h.*..attn" in caught.value.render()
    with pytest.raises(Refusal):
        parse_expr("a +", NOWHERE)


def test_unclosed_parenthesis() -> None:
    """The open bracket is marked, not the line after it."""
    text = edit_refusal(
        "    mlp.c_fc     shard(col, over=tp)", "    mlp.c_fc     shard(col, over=tp"
    )
    assert (
        text
        == """\
error[S002]: this `(` is never closed
  --> gpt2.sched:16:23
   |
16 |     mlp.c_fc     shard(col, over=tp
   |                       ^ opened here
17 |     mlp.c_proj   shard(row, over=tp)
   |     --- expected `)` or `,` before this
   |
   = help: close it: `mlp.c_fc     shard(col, over=tp)`"""
    )


@pytest.mark.parametrize("keep", [30, 120, 400, 500, 640, 720])
def test_truncated_file(keep: int) -> None:
    """A truncated file is refused wherever it was cut."""
    cut = GPT2[: len(GPT2) * keep // 760]
    try:
        parse(Source("x", cut))
    except Refusal as refusal:
        assert refusal.diagnostic.code in ("S001", "S002", "S003")
    else:
        assert "step" not in cut


def test_closed_brackets_are_not_blamed() -> None:
    """Of two brackets the unclosed one is marked, though the parser's stack has the other."""
    text = parse_refusal("schedule 1\nmesh(dp * size(2)\nh.*  checkpoint()\n").render()
    assert "this `(` is never closed\n --> gpt2.sched:2:5\n" in text


def test_unclosed_block() -> None:
    """A missing brace shows where the block began and where the file ends."""
    text = parse_refusal(GPT2.rstrip()[:-2]).render()
    assert (
        text
        == """\
error[S002]: this `{` is never closed
  --> gpt2.sched:10:24
   |
10 | step "tensor parallel" {
   |                        ^ opened here
...
20 |   verify(forward, backward)
   |                            - end of the file; expected `}`
   |
   = help: close it with `}` on its own line"""
    )


def test_a_block_before_another_step() -> None:
    """A `step` at the margin shows that the block above it was not closed."""
    step = 'step "{}" {{\n  a  checkpoint()\n'
    text = parse_refusal("schedule 1\n" + step.format("a") + step.format("b") + "}\n").render()
    assert "this `{` is never closed\n --> gpt2.sched:2:10\n" in text
    assert '4 | step "b" {\n  | ---- expected `}` before this\n' in text


def test_python_is_no_schedule() -> None:
    """A Python file given as a schedule: the message says which commands take one."""
    with pytest.raises(Refusal) as caught:
        parse(Source("program.py", "import torch\n"))
    helps = " ".join(caught.value.diagnostic.helps)
    assert "schedlang init model.py" in helps and "--against program.py" in helps


def test_colon_between_selector_and_primitive() -> None:
    """A colon after the selector is refused with the text to write."""
    assert (
        edit_refusal("    mlp.c_fc     shard(", "    mlp.c_fc:    shard(")
        == """\
error[S004]: a selector and its primitive are separated by a space
  --> gpt2.sched:16:5
   |
16 |     mlp.c_fc:    shard(col, over=tp)
   |     ^^^^^^^^^^^^^^^^^^ `:` selects modules by their class
   |
   = help: write `mlp.c_fc  shard(...)`"""
    )


def test_row_without_primitive() -> None:
    """A row without a primitive is refused with an example of one."""
    assert (
        edit_refusal("    mlp.c_fc     shard(col, over=tp)", "    mlp.c_fc")
        == """\
error[S003]: expected `(`, `.` or `:`, found the end of the line
  --> gpt2.sched:16:13
   |
16 |     mlp.c_fc
   |             ^ the primitive is missing
   |
   = help: add a primitive: `mlp.c_fc  checkpoint()`"""
    )


@pytest.mark.parametrize(
    "text, code, said",
    [
        ("schedule 2\n", "S006", "edition 2"),
        ("schedule 1\nknob step: int = 1\n", "S007", "`step` is a keyword of the language"),
        ("schedule 1\nmesh(model=2)\n", "S007", "`model`"),
        ("schedule 1\ndef at(x) { shard() }\n", "S00", ""),
        ("schedule 1\nview of of (a, b)\n", "S00", ""),
        ('schedule 1\nstep "a" {\n  h.*(1)\n}\n', "S004", "the primitive is missing"),
        ("mesh(tp=2)\n", "S003", "schedule 1"),
        ("", "S003", "schedule 1"),
        ('schedule 1\nstop "x" {\n}\n', "S003", "did you mean `step`"),
        ("schedule 1\nknbo tp: int = 2\n", "S003", "did you mean `knob`"),
        ('schedule 1\nstep "a {\n}\n', "S001", "never closed"),
        ("schedule 1\nstep 'a' {\n}\n", "S001", "double quotes"),
        ("schedule 1\nmesh(tp=2;)\n", "S001", "unexpected character `;`"),
        ("schedule 1\nstep “a” {\n}\n", "S001", "double quotes"),
        ("schedule 1\nmesh(größe=2)\n", "S001", "names have letters a to z"),
        ("schedule 1\nmesh(t\u200bp=2)\n", "S001", "U+200B"),
        ('schedule 1\nstep "a" {\n  pipeline(order=1F1B, micro=4)\n}\n', "S003", '`order="1F1B"`'),
        ('schedule 1\nstep "a" {\n  pipeline(order=2BW, micro=4)\n}\n', "S003", '`order="2BW"`'),
        ("schedule 1\nknob a: int = 4gib\n", "S003", "`4GiB`"),
        ('schedule 1\nstep "a" {\n  expect x < 70Gib on b\n}\n', "S003", "`70GiB`"),
        ('schedule 1\nstep "a" {\n  h.*  checkpoint\n}\n', "S003", "`h.*  checkpoint()`"),
        ("schedule 1\nrequire 1 in 2\n", "S003", "`in`"),
        ("schedule 1\nrequire " + "(" * 5000 + "1", "S004", "too deep"),
        ("schedule 1\nrequire " + "-" * 5000 + "1", "S004", "too deep"),
        ("schedule 1\nrequire " + "not " * 5000 + "1", "S004", "too deep"),
        ("schedule 1\nrequire " + "(-" * 25 + "1" + ")" * 25, "S004", "brackets and signs"),
        ('schedule 1\nstep "s" {\n' + "at a {\n" * 48, "S004", "brackets may be nested 48 deep"),
        ("schedule 1\nmesh(tp=" + "9" * 5000 + ")", "S004", "5000 digits"),
    ],
)
def test_what_is_said(text: str, code: str, said: str) -> None:
    """Each kind of syntax error has its code and its message."""
    refusal = parse_refusal(text)
    assert refusal.diagnostic.code.startswith(code)
    assert said in refusal.render()


@pytest.mark.parametrize(
    "text",
    [
        "# " + "-" * 80,
        "# " + "(" * 80,
        'use "' + "[" * 80 + '"',
        "require 1 == 1" + " - 1" * 80,
        "require (1) == -1\n" * 80,
    ],
)
def test_what_is_not_nested_is_not_too_deep(text: str) -> None:
    """Long comments, strings and sums are not "too deep"."""
    parse(Source("x", f"schedule 1\n{text}\n"))


def test_all_independent_mistakes() -> None:
    """All syntax errors are reported, in the order of the text."""
    refusal = parse_refusal("schedule 3\nknob in: int = 1\nh.*(1)\n")
    assert [d.code for d in refusal.diagnostics] == ["S006", "S007", "S004"]


@QUICK
@given(st.sampled_from(sorted(SAMPLES)).flatmap(lambda name: with_damage(SAMPLES[name])))
def test_damage_is_refused_or_read(text: str) -> None:
    """A damaged schedule is refused with a message or is another schedule; nothing else."""
    try:
        parse(Source("x", text))
    except Refusal as refusal:
        assert refusal.render().startswith("error[S0")


@QUICK
@given(st.text(max_size=80))
def test_noise_is_refused(text: str) -> None:
    """Any text gives a tree or a refusal that can be printed."""
    try:
        parse(Source("x", "schedule 1\n" + text))
    except Refusal as refusal:
        assert refusal.render()


def test_files(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """A missing file, a directory and invalid UTF-8 are refused; a byte order mark is accepted."""
    (tmp_path / "latin").write_bytes(b"schedule 1\n# \xe9\n")
    (tmp_path / "bom").write_bytes(b"\xef\xbb\xbfschedule 1\r\n")
    for name, message in [("none", "no such file"), ("", "is a directory"), ("latin", "line 2")]:
        with pytest.raises(Refusal) as caught:
            read(tmp_path / name)
        assert message in caught.value.render()
    assert parse(read(tmp_path / "bom")).header.version == "1"
