"""Tiny models for the tests, unmodified, and float64 without float32 islands."""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode


class Float64(TorchFunctionMode):
    """Casts to float32 become casts to float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            return args[0].double()
        swap = lambda v: torch.float64 if v is torch.float32 else v
        return func(*[swap(a) for a in args], **{k: swap(v) for k, v in (kwargs or {}).items()})


def gpt2():
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=61,
        n_embd=16,
        n_layer=4,
        n_head=2,
        n_positions=16,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config).double()


def tokens(rows=4, length=8):
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 61, (rows, length), generator=g)
    return {"input_ids": ids, "labels": ids.clone()}
