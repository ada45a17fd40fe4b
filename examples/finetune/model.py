"""Qwen3 of transformers, unmodified and tiny, on bytes: it stands in for the model of a hub."""

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

TEXT = Path(__file__).parents[1] / "gpt2" / "text.txt"  # a few sonnets (Shakespeare, 1609)


def model() -> Qwen3ForCausalLM:
    """Two blocks, four query heads on two key/value heads; the vocabulary of ByT5's tokenizer."""
    config = Qwen3Config(
        vocab_size=384,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        use_cache=False,
    )
    return Qwen3ForCausalLM(config)


def batch(seed: int) -> dict[str, torch.Tensor]:
    """Eight or nine pieces of text, as the tokenizer gives them: each byte is its value plus 3."""
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long() + 3
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - 40, (8 + seed % 2,), generator=generator)
    ids = torch.stack([text[start : start + 40 - seed % 3] for start in starts.tolist()])
    return {"input_ids": ids, "labels": ids.clone()}
