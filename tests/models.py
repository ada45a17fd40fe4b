"""Tiny models and batches for tests; models of transformers are unmodified."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

VOCAB = 61
SIZES = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


# default sizes of models with Llama's configuration
LLAMA_SIZES: dict[str, Any] = {
    **{"hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 16},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, **SIZES},
}


def hf(name: str, **sizes: Any) -> Any:
    """Build a model of transformers by its class name, in float64, from seed 0."""
    import transformers

    torch.manual_seed(0)
    model_class = getattr(transformers, name)
    return model_class(model_class.config_class(**sizes)).double()


def llama_like(name: str, **changes: Any) -> Any:
    """Build a model with Llama's configuration; sizes that are not given come from LLAMA_SIZES."""
    return hf(name, **LLAMA_SIZES | changes)


def gpt2(
    layers: int = 4, dropout: float = 0.0, by_layer: bool = False, tied: bool = True
) -> nn.Module:
    """GPT-2, embedding and head tied; `by_layer`: layers divide their scores by their number."""
    return hf(
        "GPT2LMHeadModel",
        n_embd=16,
        n_layer=layers,
        n_head=2,
        n_positions=16,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        scale_attn_by_inverse_layer_idx=by_layer,
        tie_word_embeddings=tied,
        **SIZES,
    )


def llama(layers: int = 4, keys: int = 2, bias: bool = False, attend: str = "sdpa") -> nn.Module:
    """Llama with grouped key-value heads, cache on as its config says."""
    return llama_like(
        "LlamaForCausalLM",
        num_hidden_layers=layers,
        num_key_value_heads=keys,
        attention_bias=bias,
        mlp_bias=bias,
        attn_implementation=attend,
    )


def phi3(layers: int = 2) -> nn.Module:
    """Phi-3: gate and up projection side by side in one weight, and q, k, v in another."""
    return llama_like(
        "Phi3ForCausalLM", num_hidden_layers=layers, original_max_position_embeddings=16
    )


def gemma2(layers: int = 1) -> nn.Module:
    """Gemma-2: norms before and after each part, which multiply by 1 + w."""
    return llama_like("Gemma2ForCausalLM", num_hidden_layers=layers, head_dim=4, sliding_window=4)


def qwen3(layers: int = 2) -> nn.Module:
    """Qwen-3: a norm over each head of queries and keys, with one weight for all heads."""
    return llama_like("Qwen3ForCausalLM", num_hidden_layers=layers, head_dim=4)


def bert(layers: int = 4, heads: int = 2) -> nn.Module:
    """BERT for masked words: decoder tied to the embedding, a bias under two names."""
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {"num_hidden_layers": layers, "num_attention_heads": heads, "vocab_size": VOCAB}
    widths = {"hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 16}
    return hf("BertForMaskedLM", **sizes, **widths, **rates)


def t5(layers: int = 2, **changes: Any) -> nn.Module:
    """T5, with this number of layers in encoder and decoder, and one shared embedding."""
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_heads": 2, "dropout_rate": 0.0}
    ends = {"vocab_size": VOCAB, "decoder_start_token_id": 0, "pad_token_id": 0}
    return hf("T5ForConditionalGeneration", **{**sizes, **ends, "num_layers": layers, **changes})


def bloom(layers: int = 2, dropout: float = 0.0) -> nn.Module:
    """Bloom: ALiBi, a bias of the scores by positions that do not count padding."""
    return hf(
        "BloomForCausalLM",
        vocab_size=VOCAB,
        hidden_size=16,
        n_layer=layers,
        n_head=4,
        hidden_dropout=dropout,
        attention_dropout=dropout,
    )


HALVES = {
    **{"d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 24},
    **{"decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 24},
}


def bart() -> nn.Module:
    """An encoder and a decoder: every decoder layer reads the encoder's last output."""
    ends = SIZES | {"eos_token_id": 2}
    return hf(
        "BartForConditionalGeneration", **HALVES, max_position_embeddings=16, dropout=0.0, **ends
    )


class Stack(nn.Module):
    """A list of layers in sequence; the loss is the mean square of the last output.

    The layers are initialized from seed 0.
    """

    def __init__(self, layers: Iterable[nn.Module], name: str = "blocks") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.name = name
        self.add_module(name, nn.ModuleList(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in getattr(self, self.name):
            x = layer(x)
        return x.square().mean()


class Block(nn.Module):
    """Modifies its input in place, then mixes; can also return which outputs are positive."""

    def __init__(self, width: int, mask: bool = False) -> None:
        super().__init__()
        self.mix, self.mask = nn.Linear(width, width), mask

    def forward(self, x: Tensor) -> Any:
        output = self.mix(torch.tanh(x.add_(0.1)))
        return (output, output > 0) if self.mask else output


class Skipping(nn.Module):
    """A skip over stages, a bool tensor, a detached use, and outputs modified in place later."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width, mask=k == 1) for k in range(5))
        self.gain = nn.Parameter(torch.rand(width))  # read between units, in two places
        self.head = nn.Linear(width, 1)
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        embedded = self.embed(x)
        skip = self.blocks[0](embedded.clone())
        skip.mul_(1.5)
        h, large = self.blocks[1](skip * self.gain)
        for block in self.blocks[2:]:
            h = block(h)
        h = torch.where(large, h, h * self.gain) + skip + 0.1 * embedded.detach()
        return ((self.head(h)[..., 0] - y) ** 2).mean()


def tokens(rows: int = 7, length: int = 8, mask: bool = True, seed: int = 1) -> dict[str, Tensor]:
    """Token ids with labels, some of them ignored; rows are padded on the right."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (rows, length), generator=g)
    labels = ids.clone()
    batch = {"input_ids": ids, "labels": labels}
    if mask:
        lengths = torch.randint(3, length + 1, (rows, 1), generator=g)
        batch["attention_mask"] = (torch.arange(length) < lengths).long()
        labels[batch["attention_mask"] == 0] = -100
    labels[0, 2:4] = -100
    return batch


def pad_left(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same rows padded on the left: their first queries see no key."""
    return {name: value.flip(1) for name, value in batch.items()}


def points(rows: int = 7, seed: int = 1) -> dict[str, Tensor]:
    """Inputs and targets for Skipping."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 6, generator=g, dtype=torch.float64)
    return {"x": x, "y": x.sum(1)}


def split_batch(batch: dict[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """Microbatches of nearly equal numbers of rows, the last ones smaller."""
    parts = {name: value.tensor_split(count) for name, value in batch.items()}
    return [{name: part[k] for name, part in parts.items()} for k in range(count)]


def batch_weight(batch: dict[str, Tensor], shift: bool = True) -> float:
    """The weight of a part's loss: its number of labels after the shift, or else of rows."""
    if "labels" not in batch:
        return float(len(batch["x"]))
    labels = batch["labels"][:, 1:] if shift else batch["labels"]
    return float((labels != -100).sum())
