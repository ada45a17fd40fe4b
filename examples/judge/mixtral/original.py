"""Mixtral of transformers, unmodified and tiny: of four experts each word meets two."""

import torch
from transformers import MixtralConfig, MixtralForCausalLM


def model() -> MixtralForCausalLM:
    """Two blocks, four query heads on two key/value heads."""
    config = MixtralConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        sliding_window=None,
        use_cache=False,
    )
    config._experts_implementation = "batched_mm"  # grouped_mm knows no float64
    return MixtralForCausalLM(config)


def batch(seed: int) -> dict[str, torch.Tensor]:
    """Four rows of ten tokens."""
    ids = torch.randint(96, (4, 10), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}
