"""The formatter `fmt`: it keeps the program and its comments, and is idempotent."""

import re
from itertools import zip_longest

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import Source
from schedlang.language import nodes as n
from schedlang.language.printer import fmt, to_text, with_printed_spans
from schedlang.language.syntax import parse_with_problems
from tests.samples import SAMPLES
from tests.strategies import programs, with_comments

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
LONG = settings(QUICK, max_examples=2000)
SPANNED = (n.Header, n.Rule, n.Do, n.At, n.When, n.Step, n.Def, n.Knob, n.Mesh, n.Use, n.Block)


def format_text(text: str) -> str:
    """The canonical form of a text."""
    return to_text(parse_with_problems(Source("x", text))[0])


def check_format(text: str) -> None:
    """Check that formatting keeps the parsed program, is idempotent, and loses no comment."""
    once = format_text(text)
    assert parse_with_problems(Source("x", once))[0] == parse_with_problems(Source("x", text))[0]
    assert format_text(once) == once
    comments = parse_with_problems(Source("x", text))[0].comments
    parsed = parse_with_problems(Source("x", once))[0]
    assert sorted(c.text for c in parsed.comments) == sorted(c.text for c in comments)
    check_spans(with_printed_spans(parse_with_problems(Source("x", text))[0], "x"), parsed)


def check_spans(printed: n.File, parsed: n.File) -> None:
    """Check that a tree has the spans of its printed text, as if it were parsed again."""
    assert printed == parsed and printed.text == parsed.text
    for node, parsed_node in zip(n.walk(printed), n.walk(parsed), strict=True):
        if isinstance(node, SPANNED):
            assert (node.span.line, node.span.end_line) == (
                parsed_node.span.line,
                parsed_node.span.end_line,
            )
    positions = [[(c.text, c.span.line) for c in file.comments] for file in (printed, parsed)]
    assert positions[0] == positions[1]


def check_program(text: str) -> None:
    """Check a generated program, if its tokens are valid together."""
    try:
        parse_with_problems(Source("x", text))
    except Refusal:
        assume(False)  # two tokens that the generator glued into another
    check_format(text)


@QUICK
@given(programs())
@example('schedule 1\nstep "a" {\n  when 1 {} else {}\n}\n')
def test_everything_the_grammar_makes(text: str) -> None:
    """Formatting keeps the meaning of any program of the grammar, and is idempotent."""
    check_program(text)


@pytest.mark.deep
@LONG
@given(programs())
def test_everything_the_grammar_makes_at_length(text: str) -> None:
    """The same, on many more programs."""
    check_program(text)


@QUICK
@given(st.sampled_from(sorted(SAMPLES)).flatmap(lambda name: with_comments(SAMPLES[name])))
def test_comments_anywhere(text: str) -> None:
    """Comments and blank lines may be anywhere; none is lost."""
    check_format(text)


@pytest.mark.deep
@LONG
@given(st.sampled_from(sorted(SAMPLES)).flatmap(lambda name: with_comments(SAMPLES[name])))
def test_comments_anywhere_at_length(text: str) -> None:
    """The same, on many more texts."""
    check_format(text)


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_samples_are_canonical(name: str) -> None:
    """The samples of the language's description are already formatted."""
    assert fmt(Source(name, SAMPLES[name])) == SAMPLES[name]


BEFORE = """\
# about the file
schedule   1 for GPT2LMHeadModel   # the header
knob tp:int=2 in[1,2,4]
knob pp:int = 1


# the mesh
mesh( tp=tp )
step "x" relax( rng ){   # why

at transformer.h.* {  # each
attn.c_attn shard( col, blocks = 3,over=tp ) # qkv
mlp.c_fc    shard(col,over=tp)   # up

layers[3] checkpoint()
**:Linear checkpoint(save=[linear,flash_attention,some_other_operator,and_one_more_of_them],to=cpu)
}
at **:Linear except classifier { split_backward() }
when tp==2 and not pp>1 { verify(
   forward,  # inside
   backward) } else {
   # nothing
}
}
# the end"""

AFTER = """\
# about the file
schedule 1 for GPT2LMHeadModel  # the header

knob tp: int = 2 in [1, 2, 4]
knob pp: int = 1

# the mesh
mesh(tp=tp)

step "x" relax(rng) {  # why
  at transformer.h.* {  # each
    attn.c_attn  shard(col, blocks=3, over=tp)  # qkv
    mlp.c_fc     shard(col, over=tp)            # up

    layers.3   checkpoint()
    **:Linear  checkpoint(
      save=[linear, flash_attention, some_other_operator, and_one_more_of_them],
      to=cpu,
    )
  }
  at **:Linear except classifier { split_backward() }
  when tp == 2 and not pp > 1 {
    # inside
    verify(forward, backward)
  } else {
    # nothing
  }
}
# the end
"""


def test_one_style() -> None:
    """Alignment, spaces, blank lines, wrapped calls and comments follow the style."""
    result = fmt(Source("x", BEFORE))
    for line, expected in zip_longest(result.split("\n"), AFTER.split("\n")):
        assert line == expected
    check_format(BEFORE)


def test_crlf() -> None:
    """Windows line ends are read and printed as `\\n`."""
    assert fmt(Source("x", BEFORE.replace("\n", "\r\n"))) == AFTER


def test_lines_stay_short() -> None:
    """No formatted line is longer than the width, except by a trailing comment."""
    for text in SAMPLES.values():
        lines = fmt(Source("x", text)).split("\n")
        assert max(len(re.sub(r"  #.*", "", line)) for line in lines) <= 88
