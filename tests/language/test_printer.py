"""The formatter: what it prints is the same program, and printing again changes nothing."""

import re
from itertools import zip_longest

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import Source
from schedlang.language import nodes as n
from schedlang.language.printer import fmt, to_text, with_printed_spans
from schedlang.language.syntax import parse_with_problems
from tests.samples import SAMPLES
from tests.strategies import commented, programs

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
LONG = settings(QUICK, max_examples=2000)
PLACED = (n.Header, n.Rule, n.Do, n.At, n.When, n.Step, n.Def, n.Knob, n.Mesh, n.Use, n.Block)


def formatted(text: str) -> str:
    return to_text(parse_with_problems(Source("x", text))[0])


def holds_its_form(text: str) -> None:
    """parse(fmt(s)) == parse(s), fmt(fmt(s)) == fmt(s), and no comment is lost."""
    once = formatted(text)
    assert parse_with_problems(Source("x", once))[0] == parse_with_problems(Source("x", text))[0]
    assert formatted(once) == once
    said = parse_with_problems(Source("x", text))[0].comments
    read = parse_with_problems(Source("x", once))[0]
    assert sorted(c.text for c in read.comments) == sorted(c.text for c in said)
    stands_like(with_printed_spans(parse_with_problems(Source("x", text))[0], "x"), read)


def stands_like(made: n.File, read: n.File) -> None:
    """A tree that was not read again stands as if it had been: statements, blocks and comments."""
    assert made == read and made.text == read.text
    for one, other in zip(n.walk(made), n.walk(read), strict=True):
        if isinstance(one, PLACED):
            assert (one.span.line, one.span.end_line) == (other.span.line, other.span.end_line)
    places = [[(c.text, c.span.line) for c in file.comments] for file in (made, read)]
    assert places[0] == places[1]


def from_grammar(text: str) -> None:
    try:
        parse_with_problems(Source("x", text))
    except Refusal:
        assume(False)  # two tokens that the generator glued into another
    holds_its_form(text)


@QUICK
@given(programs())
def test_everything_the_grammar_makes(text: str) -> None:
    """Formatting keeps the meaning of any program of the grammar, and is idempotent."""
    from_grammar(text)


@pytest.mark.deep
@LONG
@given(programs())
def test_everything_the_grammar_makes_at_length(text: str) -> None:
    """The same, on many more programs."""
    from_grammar(text)


@QUICK
@given(st.sampled_from(sorted(SAMPLES)).flatmap(lambda name: commented(SAMPLES[name])))
def test_comments_anywhere(text: str) -> None:
    """Comments and blank lines may stand anywhere; the form still holds and none is lost."""
    holds_its_form(text)


@pytest.mark.deep
@LONG
@given(st.sampled_from(sorted(SAMPLES)).flatmap(lambda name: commented(SAMPLES[name])))
def test_comments_anywhere_at_length(text: str) -> None:
    """The same, on many more texts."""
    holds_its_form(text)


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_samples_are_canonical(name: str) -> None:
    """The samples of the language's description are already in its form."""
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
    """Columns, spaces, blank lines, wrapped calls and comments fall where the style says."""
    result = fmt(Source("x", BEFORE))
    for got, wanted in zip_longest(result.split("\n"), AFTER.split("\n")):
        assert got == wanted
    holds_its_form(BEFORE)


def test_crlf() -> None:
    """Line ends of another system are read as ours."""
    assert fmt(Source("x", BEFORE.replace("\n", "\r\n"))) == AFTER


def test_lines_stay_short() -> None:
    """No line of the samples' form is longer than the width, a trailing comment apart."""
    for text in SAMPLES.values():
        lines = fmt(Source("x", text)).split("\n")
        assert max(len(re.sub(r"  #.*", "", line)) for line in lines) <= 88
