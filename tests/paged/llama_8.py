"""Model file: Llama with eight layers, and rows for eight microbatches."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def batch(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 32, (8 + seed % 2, 8), generator=generator)
    return {"input_ids": ids, "labels": ids}
