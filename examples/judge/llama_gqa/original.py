"""Llama of transformers, unmodified and tiny: four groups of queries, rows of one length."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def model() -> LlamaForCausalLM:
    """Two blocks, eight query heads on four key/value heads."""
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def batch(seed: int) -> dict[str, torch.Tensor]:
    """Four rows of ten tokens."""
    ids = torch.randint(96, (4, 10), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}
