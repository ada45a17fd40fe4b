"""Sizes that ranks do not divide: heads that several ranks hold, heads and widths padded."""

from __future__ import annotations

import pytest
from torch import nn

from tests import models
from tests.engine import Threads
from tests.proofs import planned, proven, refused
from tests.tiers import thinned


def llama(heads: int, keys: int, attend: str = "eager", inner: int = 24) -> nn.Module:
    """Llama with any number of heads of size 4."""
    return models.kin(
        "LlamaForCausalLM",
        hidden_size=24,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        intermediate_size=inner,
        attention_bias=True,
        head_dim=4,
        attn_implementation=attend,
    )


def attention(queries: str, keys: str) -> str:
    """The rows of a Llama's attention, with more said of query heads and of key-value heads."""
    return f"""at model.layers.*.self_attn {{
      q_proj      shard(col, over=tp{queries})
      {{k,v}}_proj  shard(col, over=tp{keys})
      o_proj      shard(row, over=tp{queries})
    }}"""


def prove(threads: Threads, model: nn.Module, rows: str, mesh: str = "tp=4") -> None:
    """The proof must hold for two batches of different lengths."""
    batches = [models.tokens(3, seed=1), models.tokens(2, 5, seed=2)]
    proven(threads, planned(model, rows, mesh), batches)


@pytest.mark.parametrize("attend", ["eager", "sdpa"])
@pytest.mark.parametrize("heads, keys", thinned([(8, 2), (8, 1), (4, 1), (4, 2)]))
def test_key_value_heads_below_the_ranks(
    threads: Threads, heads: int, keys: int, attend: str
) -> None:
    """Each of 2 key-value heads on 2 of 4 ranks, or the only one on all.

    With one query head on each rank there is nothing left for a rank to repeat.
    """
    rows = attention("", f", heads={keys}, uneven=replicate")
    prove(threads, llama(heads, keys, attend), rows)


def test_heads_padded(threads: Threads) -> None:
    """Six heads on four ranks are eight, two of them zeros."""
    more = ", heads=6, uneven=pad"
    prove(threads, llama(6, 6), attention(more, more))


def test_groups_padded(threads: Threads) -> None:
    """Three groups of two query heads on two ranks: whole groups are padded."""
    more = ", heads=3, uneven=pad"
    prove(threads, llama(6, 3), attention(more, more), "tp=2")


def test_widths_padded(threads: Threads) -> None:
    """An inner size of 23 over 3 ranks."""
    rows = """at model.layers.*.mlp {
      {gate,up}_proj  shard(col, over=tp, uneven=pad)
      down_proj       shard(row, over=tp, uneven=pad)
    }"""
    prove(threads, llama(4, 2, inner=23), rows, "tp=3")


def test_heads_that_do_not_fit_name_both_remedies() -> None:
    """S403: how many heads, and rows to paste that replicate them or pad; each of them is legal."""
    plain = attention("", "")
    said = refused(llama(8, 2), plain, "tp=4", models.tokens())
    row = "model.layers.0.self_attn.k_proj shard(col, over=tp, heads=2, uneven="
    assert "S403" in said and f"`{row}replicate)`" in said and f"`{row}pad)`" in said
    said = refused(llama(6, 6), plain, "tp=4", models.tokens())
    assert "q_proj shard(col, over=tp, heads=6, uneven=pad)`" in said and "replicate" not in said


@pytest.mark.parametrize(
    ("row", "mesh", "said"),
    [
        ("mlp.up_proj shard(col, over=tp)", "tp=7", "mlp.up_proj shard(col, over=tp, uneven=pad)`"),
        ("self_attn.k_proj shard(col, over=tp, uneven=replicate)", "tp=3", "give it: `heads=2`"),
        ("self_attn.k_proj shard(col, heads=3, over=tp)", "tp=3", "cannot be divided into 3 equal"),
        (
            "self_attn.k_proj shard(col, heads=2, over=tp, uneven=replicate)",
            "tp=3",
            "3 ranks cannot share 2 heads evenly",
        ),
        (
            "self_attn.o_proj shard(row, heads=2, over=tp, uneven=replicate)",
            "tp=4",
            "would be summed twice",
        ),
        (
            "self_attn.k_proj shard(col, heads=1, over=tp, uneven=pad)",
            "tp=2",
            "cannot split 1 heads evenly 2 ways",
        ),
        (
            f"mlp.up_proj shard(col, blocks={10**15}, over=tp)",
            "tp=2",
            "blocks [0, 0, 0,",
        ),
    ],
)
def test_what_is_refused(row: str, mesh: str, said: str) -> None:
    """Sizes that a rule does not make fit (S402, S406), with what would."""
    assert said in refused(llama(4, 2), f"model.layers.0.{row}", mesh)


def test_a_padded_projection_without_its_partner() -> None:
    """What is padded on one side only does not arrive as the other side wants it."""
    rows = """at model.layers.*.mlp {
      {gate,up}_proj  shard(col, over=tp, heads=3, uneven=pad)
      down_proj       shard(row, over=tp)
    }"""
    said = refused(llama(4, 2, inner=24), rows, "tp=4", models.tokens())
    assert "S405" in said and "needs its input as S(-1), but gets S(2, pad)" in said
