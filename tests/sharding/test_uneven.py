"""Sizes that ranks do not divide: replicated heads, padded heads and padded widths."""

from __future__ import annotations

import pytest
from torch import nn

from tests import models
from tests.engine import Threads
from tests.proofs import assert_proven, make_plan, refusal_text
from tests.tiers import thin_out


def llama(heads: int, keys: int, attend: str = "eager", inner: int = 24) -> nn.Module:
    """Llama with any number of heads of size 4."""
    return models.llama_like(
        "LlamaForCausalLM",
        hidden_size=24,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        intermediate_size=inner,
        attention_bias=True,
        head_dim=4,
        attn_implementation=attend,
    )


def attention_rows(queries: str, keys: str) -> str:
    """Rows for a Llama's attention, with options for query heads and for key-value heads."""
    return f"""at model.layers.*.self_attn {{
      q_proj      shard(col, over=tp{queries})
      {{k,v}}_proj  shard(col, over=tp{keys})
      o_proj      shard(row, over=tp{queries})
    }}"""


def assert_equal_to_model(
    threads: Threads, model: nn.Module, rows: str, mesh: str = "tp=4"
) -> None:
    """Assert that the proof holds for two batches of different lengths."""
    batches = [models.tokens(3, seed=1), models.tokens(2, 5, seed=2)]
    assert_proven(threads, make_plan(model, rows, mesh), batches)


@pytest.mark.parametrize("attend", ["eager", "sdpa"])
@pytest.mark.parametrize("heads, keys", thin_out([(8, 2), (8, 1), (4, 1), (4, 2)]))
def test_key_value_heads_below_the_ranks(
    threads: Threads, heads: int, keys: int, attend: str
) -> None:
    """Key-value heads are replicated on the ranks that share them: 2 heads on 4 ranks, or 1 on all.

    With one query head on each rank no head is repeated locally.
    """
    rows = attention_rows("", f", heads={keys}, uneven=replicate")
    assert_equal_to_model(threads, llama(heads, keys, attend), rows)


def test_heads_padded(threads: Threads) -> None:
    """Six heads on four ranks are eight, two of them zeros."""
    options = ", heads=6, uneven=pad"
    assert_equal_to_model(threads, llama(6, 6), attention_rows(options, options))


def test_groups_padded(threads: Threads) -> None:
    """Three groups of two query heads on two ranks: whole groups are padded."""
    options = ", heads=3, uneven=pad"
    assert_equal_to_model(threads, llama(6, 3), attention_rows(options, options), "tp=2")


def test_widths_padded(threads: Threads) -> None:
    """An inner size of 23 over 3 ranks."""
    rows = """at model.layers.*.mlp {
      {gate,up}_proj  shard(col, over=tp, uneven=pad)
      down_proj       shard(row, over=tp, uneven=pad)
    }"""
    assert_equal_to_model(threads, llama(4, 2, inner=23), rows, "tp=3")


def test_heads_that_do_not_fit_name_both_remedies() -> None:
    """S403 gives the number of heads and two legal rows: replicate or pad."""
    rows = attention_rows("", "")
    message = refusal_text(llama(8, 2), rows, "tp=4", models.tokens())
    row = "model.layers.0.self_attn.k_proj shard(col, over=tp, heads=2, uneven="
    assert "S403" in message and f"`{row}replicate)`" in message and f"`{row}pad)`" in message
    message = refusal_text(llama(6, 6), rows, "tp=4", models.tokens())
    assert (
        "q_proj shard(col, over=tp, heads=6, uneven=pad)`" in message and "replicate" not in message
    )


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
    """Sizes that do not fit are refused (S402, S406), with legal ones."""
    assert said in refusal_text(llama(4, 2), f"model.layers.0.{row}", mesh)


def test_a_padded_projection_without_its_partner() -> None:
    """Padding on one side of a pair only is refused (S405)."""
    rows = """at model.layers.*.mlp {
      {gate,up}_proj  shard(col, over=tp, heads=3, uneven=pad)
      down_proj       shard(row, over=tp)
    }"""
    message = refusal_text(llama(4, 2, inner=24), rows, "tp=4", models.tokens())
    assert "S405" in message and "needs its input as S(-1), but gets S(2, pad)" in message
