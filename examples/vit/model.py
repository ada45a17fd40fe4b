"""ViT of transformers, unmodified and tiny, on made-up pictures."""

import torch
from transformers import ViTConfig, ViTForImageClassification


def model() -> ViTForImageClassification:
    """Four blocks on 16 patches of 4 x 4 pixels and a class token; dropout on; five classes."""
    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
        num_labels=5,
        hidden_dropout_prob=0.1,
    )
    return ViTForImageClassification(config)


def batch(seed: int) -> dict[str, torch.Tensor]:
    """Eight or nine pictures, each with a class."""
    generator = torch.Generator().manual_seed(seed)
    rows = 8 if seed % 3 == 1 else 9
    pixels = torch.randn(rows, 3, 16, 16, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(5, (rows,), generator=generator)}
