"""Selectors: which modules a path names, in which order, and the message when it names none."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import Source
from schedlang.language import nodes as n
from schedlang.language.selector import Selector
from schedlang.language.syntax import parse
from schedlang.language.value import Names
from tests.toys import gpt_tree

SELECTOR = Selector(gpt_tree())


def parse_at(text: str) -> n.At:
    """The `at` statement of a selector."""
    item = parse(Source("gpt2.sched", f"schedule 1\nat {text} {{}}\n")).items[0]
    assert isinstance(item, n.At)
    return item


def select(text: str, *roots: str, **knobs: object) -> tuple[str, ...]:
    """The modules that a selector names, from the roots of a scope."""
    return SELECTOR.select_scope(
        parse_at(text), roots or ("",), Names(knobs=knobs, model=SELECTOR.tree)
    )


def refusal_text(text: str, *roots: str) -> str:
    """The message of a selector's refusal."""
    with pytest.raises(Refusal) as caught:
        select(text, *roots)
    return caught.value.render()


H = tuple(f"transformer.h.{i}" for i in range(4))


@pytest.mark.parametrize(
    "text, found",
    [
        ("transformer.h.*", H),
        ("transformer.h.3", (H[3],)),
        ("transformer.h[3]", (H[3],)),
        ("transformer.h[-1]", (H[3],)),
        ("transformer.h[3, 0]", (H[0], H[3])),
        ("transformer.h[::2]", (H[0], H[2])),
        ("transformer.h[:ckpt]", H[:2]),
        ("transformer.h[1:3].attn", tuple(f"{m}.attn" for m in H[1:3])),
        ("transformer.h.0.{attn,mlp}.c_proj", (f"{H[0]}.attn.c_proj", f"{H[0]}.mlp.c_proj")),
        ("transformer.h.*.mlp.c_*", tuple(f"{m}.mlp.{c}" for m in H for c in ("c_fc", "c_proj"))),
        ("transformer.h.*.mlp.gate?", (f"{H[3]}.mlp.gate",)),
        ("transformer.h.*.mlp.nothing?", ()),
        ("**.gate", (f"{H[3]}.mlp.gate",)),
        ("**:LayerNorm", tuple(f"{m}.ln_1" for m in H)),
        (
            "transformer.h[0].**:Projection",
            tuple(f"{H[0]}.{m}" for m in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")),
        ),
        ("transformer.h.1, transformer.h.0, transformer.h.*", H),
        ("transformer.h.* except transformer.h[0]", H[1:]),
        ("transformer.h.* where place >= 2", H[2:]),
        ("transformer.h.* where index % 2 == 1", (H[1], H[3])),
        (
            "**:Conv1D where params > 200",
            tuple(f"{m}.mlp.{c}" for m in H for c in ("c_fc", "c_proj")),
        ),
        ("** where nf == 10", ("lm_head",)),
        ("transformer.* where dtype == float32", ("transformer.wte", "transformer.h")),
        ("`lm_head`", ("lm_head",)),
    ],
)
def test_what_a_path_names(text: str, found: tuple[str, ...]) -> None:
    """A selector gives the modules that it names in model order, each once."""
    assert select(text, ckpt=2) == found


def test_relative_to_the_scope() -> None:
    """A path inside an `at` starts at each module of the scope."""
    assert select("mlp.c_fc", *H[:2]) == (f"{H[0]}.mlp.c_fc", f"{H[1]}.mlp.c_fc")


def test_a_knob_may_empty_a_slice() -> None:
    """`[:ckpt]` with ckpt = 0 is legal and selects nothing; `[3:1]` is a mistake."""
    assert select("transformer.h[:ckpt]", ckpt=0) == ()
    assert "S202" in refusal_text("transformer.h[3:1]")


def test_no_match_names_the_segment() -> None:
    """The message marks the segment, says where it was searched, and suggests a name."""
    path = parse_at("mlp.c_fcc").paths[0]
    with pytest.raises(Refusal) as caught:
        SELECTOR.select(path, H, Names())
    assert (
        caught.value.render()
        == """\
error[S201]: selector matches no module
 --> gpt2.sched:2:8
  |
2 | at mlp.c_fcc {}
  |        ^^^^^ `transformer.h.0.mlp` has no child `c_fcc`
  |
  = note: searched 4 modules, `transformer.h.0.mlp` to `transformer.h.3.mlp`
  = help: did you mean `c_fc`?"""
    )


def test_no_match_at_the_root() -> None:
    """Where no name is similar, the children are listed."""
    assert (
        refusal_text("model.layers.*")
        == """\
error[S201]: selector matches no module
 --> gpt2.sched:2:4
  |
2 | at model.layers.* {}
  |    ^^^^^ the model has no child `model`
  |
  = help: its children are `lm_head`, `transformer`"""
    )


def test_every_outer_match_counts() -> None:
    """A name that only some of the modules have is refused, and `?` is offered."""
    text = refusal_text("transformer.h.*.mlp.gate")
    assert "`transformer.h.0.mlp` has no child `gate`" in text
    assert "1 of them have one; end the path in `?`" in text
    assert "has no child `nix`" in refusal_text("transformer.h.*.{attn,nix}")


def test_index_out_of_range() -> None:
    """The message says how many children there are."""
    assert (
        refusal_text("transformer.h[2, 7]")
        == """\
error[S202]: index 7 is out of range
 --> gpt2.sched:2:16
  |
2 | at transformer.h[2, 7] {}
  |                ^^^^^^^ `transformer.h` has 4 children, 0 to 3
  |
  = help: count from the end: the last is `-1`"""
    )
    assert "index 7 is out of range" in refusal_text("transformer.h.7")


def test_no_module_of_the_type() -> None:
    """The message suggests a similar type, or lists the types."""
    assert "the types there are `Attention`, `Block`, `Conv1D`" in refusal_text(
        "transformer.**:Dense"
    )
    assert "did you mean `:Conv1D`?" in refusal_text("transformer.**:Conv1d")


@pytest.mark.parametrize(
    "text, code, said",
    [
        ("transformer.h.* where place > 9", "S207", "`where` is false for all of them"),
        ("transformer.h.* except transformer.h.*", "S207", "`except` removes all"),
        ("transformer.h.* where plaice > 9", "S208", "attribute `plaice`"),
        ("transformer.h.* where place + 1", "S304", "needs a condition"),
        ("transformer.h[:ckptt]", "S210", "unknown name `ckptt`"),
        ("transformer.h.* except transformer.x", "S201", "no child `x`"),
    ],
)
def test_scope_refusals(text: str, code: str, said: str) -> None:
    """An `at` that selects nothing, or reads an unknown attribute, is refused."""
    message = refusal_text(text)
    assert code in message and said in message


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["*", "**", "h", "transformer", "mlp", "c_*"]), max_size=4))
def test_order_and_uniqueness(segs: list[str]) -> None:
    """Any path of globs gives modules in model order without repeats, or is refused."""
    order = list(SELECTOR.descend(""))
    try:
        selected = select(".".join(segs) or "*")
    except Refusal:
        return
    assert [m for m in order if m in selected] == list(selected)
