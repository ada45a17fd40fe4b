"""Llama of transformers, unmodified and tiny, on packed rows of bytes: several texts in each."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

TEXT = Path(__file__).parents[1] / "gpt2" / "text.txt"  # a few sonnets (Shakespeare, 1609)
LENGTH = 48
END = 256  # ends a text


def model() -> LlamaForCausalLM:
    """Four blocks, four query heads on two key/value heads."""
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def packed(texts: list[bytes], length: int = LENGTH) -> list[dict[str, torch.Tensor]]:
    """Rows of tokens without padding; a text that does not fit goes on in the next row.

    `position_ids` begin at 0 with each text, by which transformers keeps attention within it.  The
    first token of a text is no label: it would be predicted from the text before.
    """
    ids = torch.tensor([token for text in texts for token in (*text, END)])
    places = torch.tensor([index for text in texts for index in range(len(text) + 1)])
    rows = []
    for start in range(0, len(ids) - length + 1, length):
        row, index = ids[start : start + length], places[start : start + length]
        begins = (
            torch.arange(length) - (index == 0).int().mul(torch.arange(length)).cummax(0).values
        )
        labels = row.masked_fill(begins == 0, -100)
        rows.append({"input_ids": row, "position_ids": begins, "labels": labels})
    return rows


def lines() -> list[bytes]:
    """The texts: every line is one."""
    return [line for line in TEXT.read_bytes().splitlines() if line]


def batch(seed: int) -> dict[str, torch.Tensor]:
    """Eight or nine packed rows."""
    rows = packed(lines())
    generator = torch.Generator().manual_seed(seed)
    picked = torch.randperm(len(rows), generator=generator)[: 8 + seed % 2].tolist()
    return {key: torch.stack([rows[row][key] for row in picked]) for key in rows[0]}
