"""Llama of transformers with adapters of PEFT at projections that go wide; all else is frozen."""

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

ADAPTER = LoraConfig(
    r=4,
    lora_alpha=8,
    lora_dropout=0.1,
    target_modules=["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"],
)


def model() -> PeftModel:
    """Two blocks, four query heads on two key/value heads; what is trained has rank four."""
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return get_peft_model(LlamaForCausalLM(config), ADAPTER)


def batch(seed: int) -> dict[str, torch.Tensor]:
    """Four rows of up to twelve tokens; their ends are padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 96, (4, 12), generator=generator)
    lengths = torch.randint(6, 13, (4, 1), generator=generator)
    padding = torch.arange(12) >= lengths
    return {
        "input_ids": ids.masked_fill(padding, 0),
        "attention_mask": (~padding).long(),
        "labels": ids.masked_fill(padding, -100),
    }
