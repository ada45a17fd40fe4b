"""Real models with different layouts of heads: per group, packed, with a bias per head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedlang.passes.propagate.propagate import propagate
from tests import models
from tests.engine import Threads
from tests.proofs import assert_proven, make_plan

PACKED = """at transformer.h.* {
  self_attention.query_key_value  shard(col, over=tp)
  self_attention.dense            shard(row, over=tp)
}"""
MPT = """at transformer.blocks.*.attn {
  Wqkv      shard(col, blocks=3, over=tp)
  out_proj  shard(row, over=tp)
}"""
PHI3 = """at model.layers.* {
  self_attn.qkv_proj  shard(col, blocks=[16, 8, 8], over=tp)
  self_attn.o_proj    shard(row, over=tp)
  mlp.gate_up_proj    shard(col, blocks=2, over=tp, uneven=pad)
  mlp.down_proj       shard(row, over=tp, uneven=pad)
}"""
T5 = """**.{SelfAttention,EncDecAttention}.{q,k,v}  shard(col, over=tp)
**.{SelfAttention,EncDecAttention}.o            shard(row, over=tp)
encoder.block.0.layer.0.SelfAttention.relative_attention_bias  shard(weight=S(hidden), over=tp)
decoder.block.0.layer.0.SelfAttention.relative_attention_bias  shard(weight=S(hidden), over=tp)
"""
BERT = """bert.embeddings.word_embeddings  shard(vocab, over=tp, uneven=pad)
cls.predictions.decoder          shard(vocab, over=tp, uneven=pad)
"""


def hf_causal_lm(name: str, **sizes: Any) -> nn.Module:
    """A causal model of transformers with two layers and four heads of size 4."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(hidden_size=16, **sizes, **models.SIZES)
    return getattr(transformers, f"{name}ForCausalLM")(config).double()  # type: ignore[no-any-return]


def bloom() -> nn.Module:
    """Bloom: q, k, v interleaved per head, and ALiBi made for all heads of all rows at once."""
    return hf_causal_lm("Bloom", n_layer=2, n_head=4, hidden_dropout=0.0, attention_dropout=0.0)


def falcon(alibi: bool) -> nn.Module:
    """Falcon: q, k, v interleaved per group of heads; or per head, with ALiBi."""
    options = {"alibi": True, "parallel_attn": True, "multi_query": False}
    options = options if alibi else {"new_decoder_architecture": True, "num_kv_heads": 2}
    return hf_causal_lm("Falcon", num_hidden_layers=2, num_attention_heads=4, bias=True, **options)


def mpt() -> nn.Module:
    """MPT: q, k, v side by side, and ALiBi made once for all heads."""

    torch.manual_seed(0)
    sizes = {"d_model": 16, "n_heads": 4, "n_layers": 2, "expansion_ratio": 2, "max_seq_len": 16}
    return models.hf("MptForCausalLM", vocab_size=models.VOCAB, **sizes)


@pytest.mark.parametrize(
    ("model", "rows"),
    [
        (bloom, PACKED),
        (lambda: falcon(False), PACKED),
        (models.phi3, PHI3),
        pytest.param(lambda: falcon(True), PACKED, marks=pytest.mark.deep),
        pytest.param(mpt, MPT, marks=pytest.mark.deep),
    ],
    ids=["bloom", "falcon", "phi3", "falcon-alibi", "mpt"],
)
def test_packed_heads(threads: Threads, model: Any, rows: str) -> None:
    """The proof holds for each layout of packed heads."""
    assert_proven(
        threads, make_plan(model(), rows, "tp=2"), [models.tokens(3), models.tokens(2, 5)]
    )


def test_relative_attention_bias(threads: Threads) -> None:
    """T5's table of biases is split by heads, in self-attention and cross-attention."""
    model = models.t5(num_heads=4)

    def batch(seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        ids, labels = torch.randint(3, models.VOCAB, (3, 5 + seed)), torch.randint(3, 60, (3, 4))
        return {"input_ids": ids, "labels": labels}

    assert_proven(threads, make_plan(model, T5, "tp=2"), [batch(0), batch(1)])


def test_a_head_with_a_bias_that_its_parent_holds(threads: Threads) -> None:
    """BERT's decoder: tied to the embedding, its bias also named by the module around it."""
    assert_proven(
        threads, make_plan(models.bert(1), BERT, "tp=2"), [models.tokens(3), models.tokens(2, 5)]
    )


def test_alibi_is_cut_where_the_attention_takes_it() -> None:
    """The ALiBi argument and its dim of heads are found, in Bloom and in MPT."""
    arguments = propagate(make_plan(bloom(), PACKED, "tp=2"), models.tokens(3)).narrowed_arguments
    cut = {
        (module_name.split(".")[-1], p.name, p.dim, p.unit)
        for module_name, ps in arguments.items()
        for p in ps
    }
    assert cut == {("self_attention", "alibi", 0, 4)}
    arguments = propagate(make_plan(mpt(), MPT, "tp=2"), models.tokens(3)).narrowed_arguments
    cut = {
        (module_name.split(".")[-1], p.name, p.dim, p.unit)
        for module_name, ps in arguments.items()
        for p in ps
    }
    assert cut == {("attn", "position_bias", 0, 4)}


def test_attentions_of_one_class_divided_differently() -> None:
    """Numbers of heads are divided by each layer's own axis, and not in an unsharded layer."""
    model = models.hf(
        "GPT2LMHeadModel", n_embd=16, n_layer=3, n_head=4, n_positions=16, **models.SIZES
    )
    rows = "\n".join(
        f"""transformer.h.{layer}.attn.c_attn  shard(col, blocks=3, over={axis})
        transformer.h.{layer}.attn.c_proj  shard(row, over={axis})"""
        for layer, axis in enumerate(("a", "b"))
    )
    traced = propagate(make_plan(model, rows, "a=2, b=4"), models.tokens(3))
    assert set(traced.local_numbers) == {
        ("transformer.h.0.attn", "split_size", 8),
        ("transformer.h.1.attn", "split_size", 4),
    }
