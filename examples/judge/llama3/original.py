"""Llama 3 of torchtitan, tiny, with its plain attention: others need a GPU or a compiler."""

import torch
import torch.nn.functional as F
import torchtitan.models.llama3 as llama3
from torchtitan.models.common import ComplexRoPE
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.sharding import set_llama3_sharding_config


def model() -> llama3.Llama3Model:
    """Two blocks, four query heads on two key/value heads; layouts are in its configuration."""
    layers = llama3._build_llama3_layers(
        n_layers=2,
        dim=32,
        n_heads=4,
        n_kv_heads=2,
        hidden_dim=48,
        fuse_qkv=False,
        rope=ComplexRoPE.Config(dim=8, max_seq_len=64),
        attn_backend="varlen",
    )
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    embedding, head = llama3._EMBEDDING_INIT, llama3._output_linear_init(32)
    config = llama3.Llama3Model.Config(
        dim=32,
        vocab_size=64,
        tok_embeddings=llama3.Embedding.Config(
            num_embeddings=64, embedding_dim=32, param_init=embedding
        ),
        norm=llama3.RMSNorm.Config(normalized_shape=32, param_init=llama3._NORM_INIT),
        lm_head=llama3.Linear.Config(in_features=32, out_features=64, param_init=head),
        layers=layers,
    )
    set_llama3_sharding_config(config, enable_sp=True)
    built = config.build()
    built.init_states()
    return built


def batch(seed: int) -> dict[str, torch.Tensor]:
    """Four rows of ten tokens."""
    return {"tokens": torch.randint(64, (4, 10), generator=torch.Generator().manual_seed(seed))}


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """How badly the next tokens are predicted."""
    return F.cross_entropy(output[:, :-1].flatten(0, 1), batch["tokens"][:, 1:].flatten())
