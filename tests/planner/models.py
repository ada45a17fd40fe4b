"""Models of transformers on the meta device, and the planner's profiles of their costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from schedlang.ir.model import ModelFacts
from schedlang.ir.primitive import load_all
from schedlang.passes.planner.profile import Profiles

LENGTH, WORDS, WIDTH, INNER = 512, 4096, 1024, 2816
OF_LLAMA: Mapping[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": LENGTH,
    "use_cache": False,
}


def llama(layers: int = 8, **config: Any) -> nn.Module:
    """Return a Llama."""
    return LlamaForCausalLM(LlamaConfig(**OF_LLAMA, num_hidden_layers=layers, **config))


def gpt2(layers: int = 8) -> nn.Module:
    """Return a GPT-2, whose head is tied to its embedding."""
    config = GPT2Config(
        vocab_size=WORDS,
        n_embd=WIDTH,
        n_layer=layers,
        n_head=8,
        n_positions=LENGTH,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def mixtral(layers: int = 4) -> nn.Module:
    """Return a Mixtral of four experts."""
    config = MixtralConfig(
        **OF_LLAMA, num_hidden_layers=layers, num_local_experts=4, num_experts_per_tok=2
    )
    return MixtralForCausalLM(config)


@cache
def profiles(make: Callable[[], nn.Module], dtype: str = "", length: int = LENGTH) -> Profiles:
    """Return the cached profiles of a model, shared by all tests that use the same one."""
    load_all()
    with torch.device("meta"):
        model_facts = ModelFacts(make())
    ids = torch.randint(1, WORDS, (1, length), generator=torch.Generator().manual_seed(0))
    return Profiles(model_facts, {"input_ids": ids, "labels": ids}, dtype=dtype)
