"""Llama of transformers, unmodified and tiny, on ragged rows of made-up tokens."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def model() -> LlamaForCausalLM:
    """Two blocks, four query heads on two key/value heads, head and embedding tied."""
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        attention_dropout=0.1,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def batch(seed: int) -> dict[str, torch.Tensor]:
    """Four rows of up to twelve tokens; their ends are padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 96, (4, 12), generator=generator)
    lengths = torch.randint(6, 13, (4, 1), generator=generator)
    padding = torch.arange(12) >= lengths
    return {
        "input_ids": ids.masked_fill(padding, 0),
        "attention_mask": (~padding).long(),
        "labels": ids.masked_fill(padding, -100),
    }
