"""The order of two rows on the same modules: refusals that follow from the primitives' facets."""

from collections.abc import Iterator

import pytest

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import Source
from schedlang.ir.model import ModelFacts
from schedlang.language.syntax import parse
from schedlang.passes.elaborate.expand import expand
from tests.toy_primitives import GPT2LMHeadModel, only_toys

FACTS = ModelFacts(GPT2LMHeadModel())


@pytest.fixture(autouse=True)
def _toys() -> Iterator[None]:
    with only_toys():
        yield


def expand_rows(*rows: str) -> None:
    """Expand a schedule of these rows."""
    text = "\n".join(["schedule 1", "mesh(tp=2, ep=3)", 'step "a" {', *rows, "}", ""])
    expand(parse(Source("gpt2.sched", text)), FACTS)


def refusal_text(*rows: str) -> str:
    """The message of the one refusal of these rows."""
    with pytest.raises(Refusal) as caught:
        expand_rows(*rows)
    assert len(caught.value.diagnostics) == 1
    return caught.value.render()


def test_twice_at_one_module() -> None:
    """The same row twice on a module is refused, with both places and the number of further
    ones."""
    assert (
        refusal_text("  transformer.h[:3]  checkpoint()", "  transformer.h.1    checkpoint()")
        == """\
error[S501]: `transformer.h.1` is already checkpointed
 --> gpt2.sched:5:22
  |
4 |   transformer.h[:3]  checkpoint()
  |                      ------------ first checkpointed here
5 |   transformer.h.1    checkpoint()
  |                      ^^^^^^^^^^^^ would recompute it twice
  |
  = help: drop one of the two"""
    )
    text = refusal_text("  transformer.h[:3]  checkpoint()", "  transformer.h.*  checkpoint()")
    assert "and 2 more like it" in text


@pytest.mark.parametrize("inner_first", [True, False])
def test_one_inside_the_other(inner_first: bool) -> None:
    """Nested checkpoint regions are refused in either order; inner and outer are named."""
    rows = ["  transformer.h.1.mlp  checkpoint()", "  transformer.h.1      checkpoint()"]
    text = refusal_text(*(rows if inner_first else rows[::-1]))
    assert "S502" in text
    assert "`transformer.h.1.mlp` lies inside `transformer.h.1`" in text


def test_an_axis_splits_once() -> None:
    """Sharding a module twice over one axis is refused; over another axis it is not."""
    text = refusal_text("lm_head  shard(col, over=ep)", "lm_head  shard(row, over=ep)")
    assert "`lm_head` is already sharded over `ep`" in text and "S504" in text
    expand_rows(
        "transformer.h.*.mlp.c_fc  shard(col, over=tp)",
        "transformer.h.*.mlp.c_proj  shard(row, over=tp)",
    )


@pytest.mark.parametrize(
    "first, then",
    [
        ("transformer.h.*.attn.c_attn  shard(col, over=tp)", "**.attn  replace_kernel(sdpa)"),
        ("transformer.h.1  checkpoint()", "transformer.h.1.attn  replace_kernel(sdpa)"),
        ("lm_head  shard(col, over=ep)", "lm_head  pad(vocab, multiple=8)"),
    ],
)
def test_order_of_verbs(first: str, then: str) -> None:
    """A row that changes what an earlier row relies on is refused; the other order is legal."""
    text = refusal_text(first, then)
    assert "S503" in text and "must stand above" in text and "help: move" in text
    expand_rows(then, first)


def test_tied_parameters_meet() -> None:
    """Two modules that share a tensor conflict, though neither contains the other."""
    text = refusal_text("lm_head  shard(col, over=ep)", "transformer.wte  pad(vocab, multiple=8)")
    assert "S503" in text and "`lm_head`" in text


def test_modules_apart_do_not_meet() -> None:
    """Rows on modules that share nothing are legal in any order."""
    expand_rows("transformer.h.0  checkpoint()", "transformer.h.1.attn  replace_kernel(sdpa)")


def test_a_verbs_own_check_shows_the_row_above() -> None:
    """A refusal by a primitive's own check of two rows also shows the earlier row."""
    text = refusal_text('pipeline(order="1F1B", micro=4)', 'pipeline(order="GPipe", micro=4)')
    assert "S509" in text and "the row above" in text and "4 |" in text and "5 |" in text


def test_markers_meet_nothing() -> None:
    """`verify` rows are legal anywhere, any number of times."""
    expand_rows(
        "lm_head  checkpoint()", "verify(forward)", "verify(forward)", "transformer checkpoint()"
    )
