"""Diagnostic messages: frames as in rustc, marks under the source, wrapping, suggestions."""

import pickle

import pytest

from schedlang.diagnostics.diagnostic import Diagnostic, Label, Refusal, find_closest
from schedlang.diagnostics.source import Source, Span, python_span

TEXT = """\
schedule 1 for GPT2LMHeadModel

# One-dimensional tensor parallelism, placed as Megatron places it.
knob tp: int = 2 in [1, 2, 4]

mesh(tp=tp) on a100x8

require model.config.n_head % tp == 0

step "tensor parallel" {
  transformer.wte  shard(vocab, over=tp)
  at transformer.h[2, 7] {
    attn.c_attn  shard(col, blocks=3, over=tp)  # q, k and v live side by side in one weight
    attn.c_proj  shard(row, over=tp)
    mlp.c_fc     shard(col, over=tp)
    mlp.c_proj   shard(row, over=tp)
  }
  transformer.h.*.attn  replace_kernel(flash_attention)
  verify(forward, backward)
}
"""
SOURCE = Source("gpt2.sched", TEXT)


def span_of(line: int, text: str) -> Span:
    """The span of a text on a line of the sample."""
    col = SOURCE.line(line).index(text) + 1
    return Span(SOURCE, line, col, line, col + len(text))


CASES = [
    (
        Diagnostic(
            "S402",
            "cannot split 50257 evenly 2 ways",
            Label(span_of(11, "shard(vocab, over=tp)"), "`tp` has 2 ranks"),
            notes=("`transformer.wte.weight` is 50257 x 768; `vocab` splits dim `vocab` = 50257",),
            helps=("or pad it first: `transformer.wte pad(vocab, multiple=128)`",),
        ),
        """\
error[S402]: cannot split 50257 evenly 2 ways
  --> gpt2.sched:11:20
   |
11 |   transformer.wte  shard(vocab, over=tp)
   |                    ^^^^^^^^^^^^^^^^^^^^^ `tp` has 2 ranks
   |
   = note: `transformer.wte.weight` is 50257 x 768; `vocab` splits dim `vocab` = 50257
   = help: or pad it first: `transformer.wte pad(vocab, multiple=128)`""",
    ),
    (
        Diagnostic(
            "S202",
            "index 7 is out of range",
            Label(span_of(12, "h[2, 7]"), "`transformer.h` has 4 children, 0 to 3"),
        ),
        """\
error[S202]: index 7 is out of range
  --> gpt2.sched:12:18
   |
12 |   at transformer.h[2, 7] {
   |                  ^^^^^^^ `transformer.h` has 4 children, 0 to 3
   |""",
    ),
    (
        Diagnostic(
            "S103",
            "`tp` cannot be 3",
            Label(span_of(4, "[1, 2, 4]"), "its allowed values"),
            helps=("set `tp` to one of [1, 2, 4]",),
        ),
        """\
error[S103]: `tp` cannot be 3
 --> gpt2.sched:4:21
  |
4 | knob tp: int = 2 in [1, 2, 4]
  |                     ^^^^^^^^^ its allowed values
  |
  = help: set `tp` to one of [1, 2, 4]""",
    ),
    (
        Diagnostic(
            "S501",
            "two rows in a line",
            Label(span_of(16, "shard(row, over=tp)"), "again"),
            also=(Label(span_of(15, "shard(col, over=tp)"), "first"),),
            helps=("drop one of the two",),
        ),
        """\
error[S501]: two rows in a line
  --> gpt2.sched:16:18
   |
15 |     mlp.c_fc     shard(col, over=tp)
   |                  ------------------- first
16 |     mlp.c_proj   shard(row, over=tp)
   |                  ^^^^^^^^^^^^^^^^^^^ again
   |
   = help: drop one of the two""",
    ),
    (
        Diagnostic(
            "S503",
            "replacing a module that is already sharded would lose its placement",
            Label(
                span_of(18, "replace_kernel(flash_attention)"), "replaces `transformer.h.0.attn`"
            ),
            also=(
                Label(
                    span_of(13, "shard(col, blocks=3, over=tp)"),
                    "shards `transformer.h.0.attn.c_attn`",
                ),
            ),
        ),
        """\
error[S503]: replacing a module that is already sharded would lose its placement
  --> gpt2.sched:18:25
   |
13 |     attn.c_attn  shard(col, blocks=3, over=tp)  # q, k and v live side by side in one weight
   |                  ----------------------------- shards `transformer.h.0.attn.c_attn`
...
18 |   transformer.h.*.attn  replace_kernel(flash_attention)
   |                         ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^ replaces `transformer.h.0.attn`
   |""",
    ),
]


@pytest.mark.parametrize("diagnostic, text", CASES, ids=lambda x: getattr(x, "code", ""))
def test_frame(diagnostic: Diagnostic, text: str) -> None:
    """A message prints exactly in the frame that users know from rustc."""
    assert diagnostic.render() == text


def test_two_files() -> None:
    """A label in another file is shown with that file's name, in its own frame."""
    base_file = Source("base.sched", "schedule 1\nknob n: int = 1\n")
    label = Label(Span(base_file, 2, 1, 2, 5), "declared here")
    text = Diagnostic("S101", "twice", Label(span_of(4, "knob"), "again"), (label,)).render()
    assert " --> gpt2.sched:4:1" in text and " ::: base.sched:2:1" in text


def test_a_place_behind_the_end_and_wide_letters() -> None:
    """Marks are under the right columns: past the end of a line, after wide characters, after
    tabs."""
    source = Source("x", "\t漢字 ab")
    text = Diagnostic("S001", "t", Label(Span(source, 1, 5, 1, 7))).render()
    assert text.splitlines()[3:5] == ["1 |  漢字 ab", "  |       ^^"]
    text = Diagnostic("S001", "t", Label(Span(source, 1, 7, 1, 8))).render()
    assert text.splitlines()[4] == "  |         ^"


def test_refusal_sorts_places_and_travels() -> None:
    """Several diagnostics print in the order of the text; a refusal can be pickled."""
    first = Diagnostic("S103", "one", Label(span_of(4, "knob")))
    second = Diagnostic("S402", "two", Label(span_of(11, "shard")))
    refusal = Refusal(second, first)
    assert [d.title for d in refusal.diagnostics] == ["one", "two"]
    assert pickle.loads(pickle.dumps(refusal)).render() == refusal.render()
    assert refusal.diagnostic.to_json()["at"]["line"] == 4  # type: ignore[index]


def test_place_is_attached_once() -> None:
    """`at` sets the span of a diagnostic that has none, and keeps one that is there."""
    bare = Diagnostic("S401", "no weight", Label(text="here"))
    placed = bare.at(span_of(4, "knob"))
    assert placed.primary == Label(span_of(4, "knob"), "here")
    assert placed.at(span_of(11, "shard")) == placed


def test_python_place() -> None:
    """The span of a Python call is the caller's expression, also over several lines."""
    span = python_span()
    assert span.source.line(span.line).strip() == "span = python_span()"
    assert span.source.line(span.line)[span.col - 1 : span.end_col - 1] == "python_span()"


@pytest.mark.parametrize(
    "word, near",
    [("c_fcc", "c_fc"), ("verfy", "verify"), ("Verify", "verify"), ("zzz", None), ("", None)],
)
def test_closest(word: str, near: str | None) -> None:
    """One suggestion, and none that is not similar enough."""
    assert find_closest(word, ["c_fc", "c_proj", "verify", "shard"]) == near


def test_what_is_wider_than_the_page() -> None:
    """Sentences and labels wrap between words; names, shapes, source and pasted lines are not
    broken."""
    row = "attn.c_attn  shard(col, blocks=3, over=tp)"
    loss = "add to the model file:\n      def loss(output, batch):\n          return output.sum()"
    rendered = Diagnostic(
        "S501",
        "a title that has more words than a line of so few columns holds",
        Label(span_of(13, row), "said of this row, in more words than are left"),
        notes=("a tensor of shape [2, 3, 8, 8] meets `a name of several words` here",),
        helps=(loss,),
    ).render(60)
    assert (
        rendered
        == f"""\
error[S501]: a title that has more words than a line of so
             few columns holds
  --> gpt2.sched:13:5
   |
13 |     {row}  # q, k and v live side by side in one weight
   |     {"^" * len(row)}
   |     said of this row, in more words than are left
   |
   = note: a tensor of shape [2, 3, 8, 8] meets
           `a name of several words` here
   = help: {loss}"""
    )


def test_a_refusal_prints_a_page() -> None:
    """`str(refusal)` is wrapped at 80 columns, as on the command line."""
    refusal = Refusal.of("S101", " ".join(["words"] * 30), Label(span_of(4, "knob")))
    assert (
        str(refusal) == "\n" + refusal.render(80) and max(map(len, str(refusal).split("\n"))) <= 80
    )


def test_facts_are_for_programs() -> None:
    """A fact can be read by its name and is never printed."""
    diagnostic = Diagnostic("S506", "t", facts=(("parameter", "head.weight"),))
    assert diagnostic.fact("parameter") == "head.weight" and diagnostic.fact("line") is None
    assert "head.weight" not in diagnostic.render()
