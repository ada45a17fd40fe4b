"""Model file: ALBERT, one group of layers called twelve times."""

import torch
from transformers import AlbertConfig, AlbertForMaskedLM


def model() -> AlbertForMaskedLM:
    config = AlbertConfig(
        vocab_size=32,
        embedding_size=8,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=12,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    return AlbertForMaskedLM(config)


def batch(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 32, (4 + seed % 2, 8), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
