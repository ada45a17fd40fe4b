"""Llama of transformers, unmodified and tiny, on made-up tokens."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def model() -> LlamaForCausalLM:
    """Four blocks, four query heads on two key/value heads."""
    config = LlamaConfig(
        vocab_size=160,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def batch(seed: int) -> dict[str, torch.Tensor]:
    """Eight or nine rows of up to 24 tokens, padded and ragged but for every third batch."""
    generator = torch.Generator().manual_seed(seed)
    rows, longest = (8, 16) if seed % 3 == 1 else (9, 24)
    ids = torch.randint(1, 160, (rows, longest), generator=generator)
    lengths = torch.full((rows,), longest)
    if seed % 3 != 1:
        lengths = torch.randint(longest // 2, longest + 1, (rows,), generator=generator)
    padding = torch.arange(longest) >= lengths[:, None]
    return {
        "input_ids": ids.masked_fill(padding, 0),
        "attention_mask": (~padding).long(),
        "labels": ids.masked_fill(padding, -100),
    }
