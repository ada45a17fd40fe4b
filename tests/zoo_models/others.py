"""Models that are no causal language models: encoders, encoder-decoders, vision, speech."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batches = list[dict[str, Tensor]]
Make = Callable[[], tuple[nn.Module, Batches]]


@dataclass(frozen=True)
class Other:
    """A family, and how one of its models is made with its batches."""

    family: str
    make: Make


TEXT: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "embedding_size": 32,
}
BOTH: dict[str, Any] = {
    "vocab_size": 256,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "max_position_embeddings": 64,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}
T5: dict[str, Any] = {
    "vocab_size": 256,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
    "num_decoder_layers": 2,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
VIEW: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": 6,
    "hidden_dropout_prob": 0.0,
    "drop_path_rate": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
HEARD: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "conv_dim": (32, 32),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "layerdrop": 0.0,
    "mask_time_prob": 0.0,
    "num_feat_extract_layers": 2,
    "apply_spec_augment": False,
    "num_labels": 6,
    "classifier_proj_size": 32,
    "final_dropout": 0.0,
    "mask_feature_prob": 0.0,
}


ALWAYS = ("num_labels", "decoder_start_token_id")  # of every configuration


def _built(cls: str, config: str, numbers: dict[str, Any]) -> nn.Module:
    """A model of transformers, its configuration given only the numbers that it knows."""
    import transformers

    made = getattr(transformers, config)
    known = {*made().to_dict(), *(made.attribute_map or {}), *ALWAYS}
    model: nn.Module = getattr(transformers, cls)(
        made(**{name: value for name, value in numbers.items() if name in known})
    )
    return model


def _words(decoder: bool = False) -> Batches:
    from tests.zoo_models.cases import text

    return [text(seed, ragged=seed == 0) for seed in (0, 1)]


def _filled() -> Batches:
    """Masked language modelling: every label counts but those of the padding."""
    return _words()


def _pictures(size: int = 16) -> Batches:
    return [
        {
            "pixel_values": torch.randn(4, 3, size, size, generator=g, dtype=torch.float64),
            "labels": torch.randint(0, 6, (4,), generator=g),
        }
        for g in (torch.Generator().manual_seed(seed) for seed in (0, 1))
    ]


def _sounds() -> Batches:
    return [
        {
            "input_values": torch.randn(4, 400, generator=g, dtype=torch.float64),
            "labels": torch.randint(0, 6, (4,), generator=g),
        }
        for g in (torch.Generator().manual_seed(seed) for seed in (0, 1))
    ]


def _spectra() -> Batches:
    words = _words()
    return [
        {
            "input_features": torch.randn(4, 8, 40, generator=g, dtype=torch.float64),
            "labels": batch["labels"],
        }
        for g, batch in zip((torch.Generator().manual_seed(seed) for seed in (0, 1)), words)
    ]


def _encoder(name: str, **more: Any) -> Other:
    def make() -> tuple[nn.Module, Batches]:
        numbers = {**TEXT, **more}
        return _built(f"{name}ForMaskedLM", f"{name}Config", numbers), _filled()

    return Other("encoder", make)


def _pair(name: str, numbers: dict[str, Any], **more: Any) -> Other:
    def make() -> tuple[nn.Module, Batches]:
        cls = f"{name}ForConditionalGeneration" if name != "Marian" else "MarianMTModel"
        return _built(cls, f"{name}Config", {**numbers, **more}), _words()

    return Other("encoder-decoder", make)


def _vision(name: str, size: int = 16, **more: Any) -> Other:
    def make() -> tuple[nn.Module, Batches]:
        numbers = {**VIEW, "image_size": size, **more}
        cls, config = f"{name}ForImageClassification", f"{name}Config"
        return _built(cls, config, numbers), _pictures(size)

    return Other("vision", make)


def _speech(name: str, **more: Any) -> Other:
    def make() -> tuple[nn.Module, Batches]:
        cls, config = f"{name}ForSequenceClassification", f"{name}Config"
        return _built(cls, config, {**HEARD, **more}), _sounds()

    return Other("speech", make)


def _whisper() -> tuple[nn.Module, Batches]:
    numbers = {**BOTH, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 32}
    model = _built("WhisperForConditionalGeneration", "WhisperConfig", numbers)
    return model, _spectra()


STAGED = {"depths": [2, 2], "num_stages": 2, "out_features": None}
OTHERS: dict[str, Other] = {
    **{
        name.lower(): _encoder(name)
        for name in (
            "Bert",
            "Electra",
            "Albert",
            "DistilBert",
            "Deberta",
            "DebertaV2",
            "MPNet",
            "Roberta",
            "MobileBert",
            "ModernBert",
            "XLMRoberta",
            "Camembert",
            "ConvBert",
            "FNet",
            "Nystromformer",
            "RoFormer",
            "SqueezeBert",
            "Funnel",
            "EuroBert",
        )
    },
    "deberta (relative)": _encoder(
        "DebertaV2",
        relative_attention=True,
        position_buckets=8,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pos_att_type=["p2c", "c2p"],
        max_relative_positions=16,
    ),
    "t5": _pair("T5", T5),
    "mt5": _pair("MT5", T5),
    "umt5": _pair("UMT5", T5),
    "longt5": _pair("LongT5", T5, local_radius=4),
    "switch_transformers": _pair("SwitchTransformers", T5, num_experts=4),
    **{
        f"{name.lower()} (both)": _pair(name, BOTH)
        for name in (
            "Bart",
            "MBart",
            "Pegasus",
            "Marian",
            "Blenderbot",
            "BlenderbotSmall",
            "M2M100",
            "PLBart",
            "LED",
        )
    },
    "vit": _vision("ViT"),
    "deit": _vision("DeiT"),
    "beit": _vision("Beit"),
    "dinov2": _vision("Dinov2"),
    "vit_msn": _vision("ViTMSN"),
    "swin": _vision("Swin", embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=2),
    "swinv2": _vision("Swinv2", embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=2),
    "convnext": _vision("ConvNext", hidden_sizes=[16, 32], drop_path_rate=0.0, **STAGED),
    "convnextv2": _vision("ConvNextV2", hidden_sizes=[16, 32], drop_path_rate=0.0, **STAGED),
    "resnet": _vision("ResNet", hidden_sizes=[16, 32], embedding_size=16, depths=[2, 2]),
    "regnet": _vision(
        "RegNet", hidden_sizes=[16, 32], embedding_size=16, depths=[2, 2], groups_width=8
    ),
    "poolformer": _vision(
        "PoolFormer",
        hidden_sizes=[16, 32],
        depths=[2, 2],
        num_encoder_blocks=2,
        patch_sizes=[3, 3],
        strides=[2, 2],
        padding=[1, 1],
    ),
    "segformer": _vision(
        "Segformer",
        hidden_sizes=[16, 32],
        depths=[2, 2],
        num_encoder_blocks=2,
        sr_ratios=[2, 1],
        patch_sizes=[3, 3],
        strides=[2, 2],
        num_attention_heads=[2, 4],
        mlp_ratios=[2, 2],
    ),
    "whisper (both)": Other("speech", _whisper),
    "wav2vec2": _speech("Wav2Vec2"),
    "hubert": _speech("Hubert"),
    "wavlm": _speech("WavLM", num_buckets=8, max_bucket_distance=16),
    "sew": _speech("SEW", squeeze_factor=2),
}
