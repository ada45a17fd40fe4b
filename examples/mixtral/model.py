"""Mixtral of transformers, unmodified and tiny, on made-up tokens."""

import torch
from transformers import MixtralConfig, MixtralForCausalLM


def model() -> MixtralForCausalLM:
    """Two blocks of eight experts each, of which a token meets two."""
    config = MixtralConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        num_local_experts=8,
        num_experts_per_tok=2,
        use_cache=False,
    )
    return MixtralForCausalLM(config)


def batch(seed: int) -> dict[str, torch.Tensor]:
    """Four or five rows of up to 16 tokens, padded and ragged but for every third batch."""
    generator = torch.Generator().manual_seed(seed)
    rows, longest = (4, 12) if seed % 3 == 1 else (5, 16)
    ids = torch.randint(1, 96, (rows, longest), generator=generator)
    lengths = torch.full((rows,), longest)
    if seed % 3 != 1:
        lengths = torch.randint(longest // 2, longest + 1, (rows,), generator=generator)
    padding = torch.arange(longest) >= lengths[:, None]
    return {
        "input_ids": ids.masked_fill(padding, 0),
        "attention_mask": (~padding).long(),
        "labels": ids.masked_fill(padding, -100),
    }
