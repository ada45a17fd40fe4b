"""BERT of transformers, unmodified and tiny: masked language modelling on made-up tokens."""

import torch
from transformers import BertConfig, BertForMaskedLM


def model() -> BertForMaskedLM:
    """Three layers with dropout; embedding and decoder tied."""
    config = BertConfig(
        vocab_size=120,
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=48,
        attn_implementation="eager",
    )
    return BertForMaskedLM(config)


def batch(seed: int) -> dict[str, torch.Tensor]:
    """Six rows of up to 20 tokens, of which some are to be guessed."""
    generator = torch.Generator().manual_seed(seed)
    rows, longest = (6, 14) if seed % 3 == 1 else (5, 20)
    ids = torch.randint(2, 120, (rows, longest), generator=generator)
    guessed = torch.rand(rows, longest, generator=generator) < 0.3
    lengths = torch.full((rows,), longest)
    if seed % 3 != 1:
        lengths = torch.randint(longest // 2, longest + 1, (rows,), generator=generator)
    padding = torch.arange(longest) >= lengths[:, None]
    guessed[:, 0] = True
    return {
        "input_ids": ids.masked_fill(guessed, 1).masked_fill(padding, 0),
        "attention_mask": (~padding).long(),
        "labels": ids.masked_fill(~guessed | padding, -100),
    }
