"""Qwen 3 with experts of transformers, unmodified and tiny, on ragged rows of made-up tokens."""

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM


def model() -> Qwen3MoeForCausalLM:
    """Two blocks of four experts, of which a token meets two."""
    config = Qwen3MoeConfig(
        vocab_size=96,
        hidden_size=32,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        use_cache=False,
    )
    config._experts_implementation = "batched_mm"  # grouped_mm knows no float64
    return Qwen3MoeForCausalLM(config)


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
