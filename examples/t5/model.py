"""T5 of transformers, unmodified and tiny, on made-up pairs of token sequences."""

import torch
from transformers import T5Config, T5ForConditionalGeneration


def model() -> T5ForConditionalGeneration:
    """Two encoder and two decoder blocks; one embedding for both sides and the head."""
    config = T5Config(
        vocab_size=160,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return T5ForConditionalGeneration(config)


def batch(seed: int) -> dict[str, torch.Tensor]:
    """Eight or nine sources of up to 20 tokens and targets of up to 12, mostly ragged."""
    generator = torch.Generator().manual_seed(seed)
    rows, source, target = (8, 16, 12) if seed % 3 == 1 else (9, 20, 10)
    ids = torch.randint(2, 160, (rows, source), generator=generator)
    labels = torch.randint(2, 160, (rows, target), generator=generator)
    if seed % 3 == 1:
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    lengths = torch.randint(source // 2, source + 1, (rows, 1), generator=generator)
    padding = torch.arange(source) >= lengths
    target_lengths = torch.randint(target // 2, target + 1, (rows, 1), generator=generator)
    return {
        "input_ids": ids.masked_fill(padding, 0),
        "attention_mask": (~padding).long(),
        "labels": labels.masked_fill(torch.arange(target) >= target_lengths, -100),
    }
