"""Cut tiny causal language models of transformers into three stages and compare them."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from schedlang.runtime.float64 import Float64
from tests.single_process import Comparison, compare_stages, cut_evenly

# small sizes, under all names that configurations have for them
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "model_dim"), 64),
    **dict.fromkeys(("word_embed_proj_dim", "embedding_size", "lru_width"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 4),
    **dict.fromkeys(("decoder_layers", "num_decoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim"), 128),
    **dict.fromkeys(("encoder_ffn_dim", "d_ff", "ffn_hidden_size", "dff"), 128),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 128),
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("head_dim", "v_head_dim", "mamba_d_head", "attention_head_size"), 16),
    **dict.fromkeys(("mamba_d_state", "state_size", "mamba_n_heads"), 8),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 1),
    **dict.fromkeys(("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("linear_num_heads", "linear_num_value_heads"), 4),
    "linear_num_key_heads": 2,
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 8),
    **dict.fromkeys(("mamba_expand", "expand", "num_key_value_heads", "encoder_layers"), 2),
    **dict.fromkeys(("hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout"), 0.0),
    **dict.fromkeys(("attention_dropout", "activation_dropout", "hidden_dropout_prob"), 0.0),
    **dict.fromkeys(("attention_probs_dropout_prob", "attn_dropout", "residual_dropout"), 0.0),
    "vocab_size": 256,
    "num_experts_per_tok": 2,
    "attention_window_size": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
# models that are refused, and why
REFUSED = {"hrm_text": "called in a loop", "jetmoe": r"while\s+it\s+is\s+recorded\s+without\s+data"}
DEPTH = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers")
HEADS = ("head", "rope", "lora", "mamba", "expand", "state", "groups", "experts_per_tok")
# tried in turn: some configurations check that their numbers are consistent
SMALLER: tuple[Mapping[str, Any], ...] = (
    SIZES,
    {**SIZES, "rotary_dim": 8, "head_dim": 8, "hidden_size_per_layer_input": 0},
    {**SIZES, "num_key_value_heads": 4},
    {**SIZES, "head_dim": 8, "num_key_value_heads": 4},
    {
        name: value
        for name, value in SIZES.items()
        if "chunk" in name or not any(word in name for word in HEADS)
    },
    {n: SIZES[n] for n in SIZES if n in (*DEPTH, "vocab_size", "use_cache") or "drop" in n},
)
PER_LAYER = ("layer_types", "mlp_layer_types")  # lists with an entry for each layer
MOST = 60_000_000  # parameters; a configuration that stays larger is left out


def kinds() -> list[str]:
    """All model types of transformers that have a causal language model."""
    from transformers.models.auto import modeling_auto as auto

    return sorted(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def build_tiny(kind: str, small: Mapping[str, Any]) -> nn.Module:
    """The model of a type, from its configuration class, with small numbers."""
    import transformers
    from transformers.models.auto import configuration_auto, modeling_auto

    config_class = configuration_auto.CONFIG_MAPPING[kind]
    base = config_class()
    text = base.get_text_config() if hasattr(base, "get_text_config") else base
    settable = {n for n in small if hasattr(text, n) and not _computed(type(text), n)}
    # a depth that is computed from another one is not set (two attentions in a layer)
    own_depths = [
        n for n in DEPTH if n in settable and not isinstance(getattr(type(text), n, None), property)
    ]
    settable -= {n for n in DEPTH if own_depths and n not in own_depths}
    settings = {name: value for name, value in small.items() if name in settable}
    if text is not base:
        config = config_class(text_config=type(text)(**settings))
    else:
        lists = {name: None for name in PER_LAYER if name in base.to_dict()}
        try:
            config = config_class(**settings, **lists)
        except Exception:  # whatever a configuration makes of it
            config = config_class(**settings)
    name = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    torch.manual_seed(0)
    return getattr(transformers, name[0] if isinstance(name, tuple | list) else name)(config)


def _computed(config: type, name: str) -> bool:
    """Whether the configuration computes a number from others."""
    attribute = getattr(config, name, None)
    return isinstance(attribute, property) and attribute.fset is None


def trunk_of(model: nn.Module) -> str:
    """The name of the largest list of at least two modules, which a user would cut."""
    sizes = {
        name: sum(p.numel() for p in module.parameters())
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) >= 2
    }
    return max(sizes, key=lambda name: sizes[name])


class NotTiny(Exception):
    """The model is left out: it is too large, or does not run alone."""


def tiny_model(kind: str, layers: int = 4) -> tuple[nn.Module, dict[str, Any]]:
    """The model in float64 and a batch that it takes; raises NotTiny where there is none."""
    message = ""
    for small in SMALLER:
        try:
            return _tiny_model(kind, {n: layers if n in DEPTH else small[n] for n in small})
        except Exception as error:
            message = message or f"{type(error).__name__}: {error}"
    raise NotTiny(message)


def _tiny_model(kind: str, small: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    with torch.device("meta"):
        size = sum(p.numel() for p in build_tiny(kind, small).parameters())
    if size > MOST:
        raise NotTiny(f"{size} parameters")
    model = build_tiny(kind, small).double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped product has no float64
    if hasattr(model, "set_default_language"):
        model.set_default_language(next(iter(model.config.languages)))
    ids = torch.randint(3, 250, (2, 16), generator=torch.Generator().manual_seed(0))
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids}
    with Float64(), torch.no_grad():
        model(**batch)
        if "attention_mask" in inspect.signature(model.forward).parameters:
            # only with a mask do some kernels check the numbers of heads
            model(**batch, attention_mask=(ids < 200).long())
    return model, batch


def compare_tiny(model: nn.Module, batch: dict[str, Any], stages: int = 3) -> Comparison:
    """Cut one model into stages and compare them with the full model."""
    stage_split = cut_evenly(model, batch, stages, [trunk_of(model)])
    return compare_stages(model, stage_split, batch)


def survey_kind(kind: str) -> dict[str, Any]:
    """The comparison of one kind as plain values: `ok`, or why not."""
    try:
        comparison = compare_tiny(*tiny_model(kind))
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        return {"kind": kind, "ok": False, "why": " ".join(message.split())[:300]}
    return {"kind": kind, "ok": comparison.ok, **comparison._asdict()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for asked in sys.argv[1:] or kinds():
        print(json.dumps(survey_kind(asked)), flush=True)
