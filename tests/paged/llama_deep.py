"""Llama with as many layers as a large one has, and nothing else of its size."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

LAYERS, ROWS = 32, 2


def model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=LAYERS,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def batch(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 32, (ROWS + seed % 2, 8), generator=generator)
    return {"input_ids": ids, "labels": ids}
