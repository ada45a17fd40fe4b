"""GPT-2 of transformers, unmodified and tiny, on the bytes of a few sonnets (Shakespeare, 1609)."""

from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

END = 256  # ends a text; padding after it


def model() -> GPT2LMHeadModel:
    """Four blocks, dropout on, embedding and head tied; 257 tokens divide by nothing useful."""
    config = GPT2Config(
        vocab_size=257,
        n_positions=64,
        n_embd=64,
        n_layer=4,
        n_head=4,
        bos_token_id=END,
        eos_token_id=END,
        pad_token_id=END,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def batch(seed: int) -> dict[str, torch.Tensor]:
    """Eight or nine pieces of text, up to 40 bytes; in every third batch they are equally long."""
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    rows, longest = (8, 32) if seed % 3 == 1 else (9, 40 - seed % 3)
    starts = torch.randint(len(text) - longest, (rows,), generator=generator)
    ids = torch.stack([text[start : start + longest] for start in starts.tolist()])
    lengths = torch.full((rows,), longest)
    if seed % 3 != 1:
        lengths = torch.randint(longest // 2, longest + 1, (rows,), generator=generator)
    padding = torch.arange(longest) >= lengths[:, None]
    return {
        "input_ids": ids.masked_fill(padding, END),
        "attention_mask": (~padding).long(),
        "labels": ids.masked_fill(padding, -100),
    }


TEXT = Path(__file__).with_name("text.txt")
