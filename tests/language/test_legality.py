"""Two rows that meet: order follows from what the verbs declare."""

from collections.abc import Iterator

import pytest

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import Source
from schedlang.ir.model import ModelFacts
from schedlang.language.syntax import parse
from schedlang.passes.elaborate.expand import expand
from tests.verbs_for_tests import GPT2LMHeadModel, toys

FACTS = ModelFacts(GPT2LMHeadModel())


@pytest.fixture(autouse=True)
def _toys() -> Iterator[None]:
    with toys():
        yield


def run(*rows: str) -> None:
    text = "\n".join(["schedule 1", "mesh(tp=2, ep=3)", 'step "a" {', *rows, "}", ""])
    expand(parse(Source("gpt2.sched", text)), FACTS)


def refused(*rows: str) -> str:
    with pytest.raises(Refusal) as caught:
        run(*rows)
    assert len(caught.value.diagnostics) == 1
    return caught.value.render()


def test_twice_at_one_module() -> None:
    """Equal regions are refused with both places, and how many more there are."""
    assert (
        refused("  transformer.h[:3]  checkpoint()", "  transformer.h.1    checkpoint()")
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
    text = refused("  transformer.h[:3]  checkpoint()", "  transformer.h.*  checkpoint()")
    assert "and 2 more like it" in text


@pytest.mark.parametrize("inner_first", [True, False])
def test_one_inside_the_other(inner_first: bool) -> None:
    """Nested regions are refused whichever comes first, naming inner and outer."""
    rows = ["  transformer.h.1.mlp  checkpoint()", "  transformer.h.1      checkpoint()"]
    text = refused(*(rows if inner_first else rows[::-1]))
    assert "S502" in text
    assert "`transformer.h.1.mlp` lies inside `transformer.h.1`" in text


def test_an_axis_splits_once() -> None:
    """The same axis twice at one module is refused; another axis is not."""
    text = refused("lm_head  shard(col, over=ep)", "lm_head  shard(row, over=ep)")
    assert "`lm_head` is already sharded over `ep`" in text and "S504" in text
    run(
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
    """What changes what an earlier row relied on is refused; the other order is not."""
    text = refused(first, then)
    assert "S503" in text and "must stand above" in text and "help: move" in text
    run(then, first)


def test_tied_parameters_meet() -> None:
    """Two modules that share a tensor meet, though neither holds the other."""
    text = refused("lm_head  shard(col, over=ep)", "transformer.wte  pad(vocab, multiple=8)")
    assert "S503" in text and "`lm_head`" in text


def test_modules_apart_do_not_meet() -> None:
    """Rows at modules that share nothing stand in any order."""
    run("transformer.h.0  checkpoint()", "transformer.h.1.attn  replace_kernel(sdpa)")


def test_a_verbs_own_check_shows_the_row_above() -> None:
    """What a verb itself refuses of two rows is shown with the earlier one."""
    text = refused('pipeline(order="1F1B", micro=4)', 'pipeline(order="GPipe", micro=4)')
    assert "S509" in text and "the row above" in text and "4 |" in text and "5 |" in text


def test_markers_meet_nothing() -> None:
    """`verify` may stand anywhere, any number of times."""
    run("lm_head  checkpoint()", "verify(forward)", "verify(forward)", "transformer checkpoint()")
