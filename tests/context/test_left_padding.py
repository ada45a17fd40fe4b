"""Context parallelism with left padding: queries of padding see no key."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import models
from tests.engine.threads import Threads
from tests.proofs import assert_near, make_plan, sgd, train_on_ranks, train_sequential, train_steps

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def llama(attention: str) -> nn.Module:
    """Llama with two query heads for each key-value head."""
    return models.hf(
        "LlamaForCausalLM", **SIZES, intermediate_size=24, attn_implementation=attention
    )


def gpt_oss(attention: str) -> nn.Module:
    """GPT-OSS: sinks take the weight of a query that sees no key."""
    return models.hf(
        "GptOssForCausalLM",
        **SIZES,
        intermediate_size=8,
        head_dim=4,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=4,
        attn_implementation=attention,
    )


def batches() -> list[dict[str, Tensor]]:
    """Batches of eleven and eight tokens; some rows begin with padding."""
    draw = torch.Generator().manual_seed(1)
    result = []
    for length in (11, 8):
        ids = torch.randint(3, 61, (4, length), generator=draw)
        mask = torch.ones_like(ids)
        mask[0, :5] = 0
        mask[2, :1] = 0
        labels = ids.masked_fill(mask == 0, -100)
        result.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return result


MODELS: dict[str, Any] = {
    "llama, eager": (llama, "eager"),
    "llama, sdpa": (llama, "sdpa"),
    "gpt-oss": (gpt_oss, "eager"),
}


@pytest.mark.parametrize("way", ["gather", "ring", "ulysses"])
@pytest.mark.parametrize("name", MODELS)
def test_padding_on_the_left(name: str, way: str, threads: Threads) -> None:
    """Losses, gradients and weights are the plain loop's, blind queries included.

    Attention that adds very low numbers to scores gives such a query the mean of all values, and
    its scores a gradient.
    """
    make, attention = MODELS[name]
    rows = f"  model.layers.*.self_attn  context_parallel({way}, over=cp)"
    plan = make_plan(make(attention), rows, "cp=2")
    observed = train_on_ranks(threads, plan, batches())
    assert_near(observed, train_sequential(make(attention), batches()))


def gemma2(attention: str) -> nn.Module:
    """Gemma 2: scores are capped."""
    return models.hf(
        "Gemma2ForCausalLM",
        **SIZES,
        intermediate_size=24,
        head_dim=4,
        sliding_window=4,
        attn_implementation=attention,
    )


def test_capped_scores_of_blind_queries(threads: Threads) -> None:
    """Capped scores of blind queries: refused if they need a gradient, otherwise all is equal."""
    rows = "  model.layers.*.self_attn  context_parallel(ring, over=cp)"
    plan = make_plan(gemma2("eager"), rows, "cp=2")
    with pytest.raises(Exception, match="pad rows on the right"):
        threads.run(train_steps, 2, plan, tuple(batches()), sgd, None, {})
    unlearned = [dict(batch) for batch in batches()]
    for batch in unlearned:
        batch["labels"][0, 5] = batch["labels"][2, 1] = -100
    observed = train_on_ranks(threads, plan, unlearned)
    assert_near(observed, train_sequential(gemma2("eager"), unlearned))
