"""Models other than causal language models: encoders, encoder-decoders, vision, speech."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batches = list[dict[str, Tensor]]
Make = Callable[[], tuple[nn.Module, Batches]]


@dataclass(frozen=True)
class FamilyModel:
    """A model family, and a function that builds one model with its batches."""

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
SEQ2SEQ: dict[str, Any] = {
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
VISION: dict[str, Any] = {
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
AUDIO: dict[str, Any] = {
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


COMMON_NAMES = ("num_labels", "decoder_start_token_id")  # accepted by every configuration


def _build_model(cls: str, config: str, numbers: dict[str, Any]) -> nn.Module:
    """Build a transformers model; only sizes that its configuration knows are passed."""
    import transformers

    config_class = getattr(transformers, config)
    known_names = {*config_class().to_dict(), *(config_class.attribute_map or {}), *COMMON_NAMES}
    model: nn.Module = getattr(transformers, cls)(
        config_class(**{name: value for name, value in numbers.items() if name in known_names})
    )
    return model


def _text_batches(decoder: bool = False) -> Batches:
    from tests.zoo_models.cases import text_batch

    return [text_batch(seed, ragged=seed == 0) for seed in (0, 1)]


def _masked_lm_batches() -> Batches:
    """Return batches for masked language modelling: all labels except padding count."""
    return _text_batches()


def _image_batches(size: int = 16) -> Batches:
    return [
        {
            "pixel_values": torch.randn(4, 3, size, size, generator=g, dtype=torch.float64),
            "labels": torch.randint(0, 6, (4,), generator=g),
        }
        for g in (torch.Generator().manual_seed(seed) for seed in (0, 1))
    ]


def _audio_batches() -> Batches:
    return [
        {
            "input_values": torch.randn(4, 400, generator=g, dtype=torch.float64),
            "labels": torch.randint(0, 6, (4,), generator=g),
        }
        for g in (torch.Generator().manual_seed(seed) for seed in (0, 1))
    ]


def _spectrogram_batches() -> Batches:
    text_batches_ = _text_batches()
    return [
        {
            "input_features": torch.randn(4, 8, 40, generator=g, dtype=torch.float64),
            "labels": batch["labels"],
        }
        for g, batch in zip((torch.Generator().manual_seed(seed) for seed in (0, 1)), text_batches_)
    ]


def _encoder(name: str, **overrides: Any) -> FamilyModel:
    def make() -> tuple[nn.Module, Batches]:
        numbers = {**TEXT, **overrides}
        return _build_model(f"{name}ForMaskedLM", f"{name}Config", numbers), _masked_lm_batches()

    return FamilyModel("encoder", make)


def _encoder_decoder(name: str, numbers: dict[str, Any], **overrides: Any) -> FamilyModel:
    def make() -> tuple[nn.Module, Batches]:
        cls = f"{name}ForConditionalGeneration" if name != "Marian" else "MarianMTModel"
        return _build_model(cls, f"{name}Config", {**numbers, **overrides}), _text_batches()

    return FamilyModel("encoder-decoder", make)


def _vision(name: str, size: int = 16, **overrides: Any) -> FamilyModel:
    def make() -> tuple[nn.Module, Batches]:
        numbers = {**VISION, "image_size": size, **overrides}
        cls, config = f"{name}ForImageClassification", f"{name}Config"
        return _build_model(cls, config, numbers), _image_batches(size)

    return FamilyModel("vision", make)


def _speech(name: str, **overrides: Any) -> FamilyModel:
    def make() -> tuple[nn.Module, Batches]:
        cls, config = f"{name}ForSequenceClassification", f"{name}Config"
        return _build_model(cls, config, {**AUDIO, **overrides}), _audio_batches()

    return FamilyModel("speech", make)


def _whisper() -> tuple[nn.Module, Batches]:
    numbers = {**SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 32}
    model = _build_model("WhisperForConditionalGeneration", "WhisperConfig", numbers)
    return model, _spectrogram_batches()


TWO_STAGES = {"depths": [2, 2], "num_stages": 2, "out_features": None}
OTHER_MODELS: dict[str, FamilyModel] = {
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
    "t5": _encoder_decoder("T5", T5),
    "mt5": _encoder_decoder("MT5", T5),
    "umt5": _encoder_decoder("UMT5", T5),
    "longt5": _encoder_decoder("LongT5", T5, local_radius=4),
    "switch_transformers": _encoder_decoder("SwitchTransformers", T5, num_experts=4),
    **{
        f"{name.lower()} (both)": _encoder_decoder(name, SEQ2SEQ)
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
    "convnext": _vision("ConvNext", hidden_sizes=[16, 32], drop_path_rate=0.0, **TWO_STAGES),
    "convnextv2": _vision("ConvNextV2", hidden_sizes=[16, 32], drop_path_rate=0.0, **TWO_STAGES),
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
    "whisper (both)": FamilyModel("speech", _whisper),
    "wav2vec2": _speech("Wav2Vec2"),
    "hubert": _speech("Hubert"),
    "wavlm": _speech("WavLM", num_buckets=8, max_bucket_distance=16),
    "sew": _speech("SEW", squeeze_factor=2),
}
