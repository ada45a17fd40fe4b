"""Models for random schedules: the examples, small networks, and models of libraries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.ir.modelfile import load_model_file
from tests import models as tiny
from tests.drawn import networks as own

EXAMPLES = Path(__file__).parents[2] / "examples"
ROWS, LENGTH = 8, 8
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Subject:
    """A float32 model as users write it: how to build it, its batch for a seed, its loss."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Any]]
    loss: Callable[..., Any] | None = None
    weight: Callable[..., Any] | None = None

    def model(self) -> nn.Module:
        """Build the model with fixed values."""
        torch.manual_seed(0)
        return self.make().float()


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _token_batch(seed: int) -> Batch:
    return tiny.tokens(ROWS + (seed % 3 == 2), LENGTH, seed=seed)


def _unmasked_batch(seed: int) -> Batch:
    return tiny.tokens(ROWS, LENGTH, mask=False, seed=seed)


def _normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(ROWS, *shape, generator=_generator(seed))


def _integers(seed: int, bound: int, *shape: int) -> Tensor:
    return torch.randint(bound, (ROWS, *shape), generator=_generator(seed + 100))


def _image_batch(seed: int, side: int = 16) -> Batch:
    return {"x": _normal(seed, 3, side, side), "y": _integers(seed, 5)}


def _class_loss(output: Tensor, batch: Any) -> Tensor:
    """Return the loss of a model that returns only scores."""
    return F.cross_entropy(output, batch["y"])


def _diffusers_loss(output: Any, batch: Any) -> Tensor:
    """Return a loss for diffusers models, whose output is an object."""
    loss: Tensor = output.sample.square().mean()
    return loss


# -- models of transformers, peft, diffusers and timm ----------------------------------------------

VOCABULARY = {"vocab_size": 61, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


ENCODER_DECODER = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    **VOCABULARY,
}


def _whisper() -> nn.Module:
    import transformers as t

    config = t.WhisperConfig(
        num_mel_bins=8,
        max_source_positions=10,
        max_target_positions=16,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **ENCODER_DECODER,
    )
    return t.WhisperForConditionalGeneration(config)


def _bart() -> nn.Module:
    import transformers as t

    config = t.BartConfig(max_position_embeddings=16, dropout=0.1, **ENCODER_DECODER)
    return t.BartForConditionalGeneration(config)


def _qwen2moe() -> nn.Module:
    import transformers as t

    config = t.Qwen2MoeConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        max_position_embeddings=16,
        **VOCABULARY,
    )
    return t.Qwen2MoeForCausalLM(config)


def _swin() -> nn.Module:
    import transformers as t

    config = t.SwinConfig(
        image_size=16,
        patch_size=2,
        embed_dim=8,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        num_labels=5,
        drop_path_rate=0.0,
    )
    return t.SwinForImageClassification(config)


def _convnext() -> nn.Module:
    import transformers as t

    config = t.ConvNextConfig(
        num_stages=2, hidden_sizes=[8, 16], depths=[2, 2], patch_size=2, num_labels=5
    )
    return t.ConvNextForImageClassification(config)


def _pixel_batch(seed: int) -> Batch:
    images = _image_batch(seed)
    return {"pixel_values": images["x"], "labels": images["y"]}


def _peft_lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj", "down_proj"],
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    model: nn.Module = get_peft_model(tiny.llama(2).float(), config)  # type: ignore[arg-type]
    return model


def _dit() -> nn.Module:
    from diffusers import DiTTransformer2DModel

    model: nn.Module = DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        norm_num_groups=8,
        sample_size=4,
        patch_size=2,
        num_embeds_ada_norm=10,
    )
    return model


def _unet2d() -> nn.Module:
    from diffusers import UNet2DConditionModel

    model: nn.Module = UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(8, 16),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=8,
        attention_head_dim=4,
        norm_num_groups=4,
    )
    return model


def _timm(name: str, **sizes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import timm

        model: nn.Module = timm.create_model(name, num_classes=5, **sizes)
        return model

    return make


LIBRARY_SUBJECTS = (
    Subject(
        "whisper",
        _whisper,
        lambda seed: {"input_features": _normal(seed, 8, 20), "labels": 3 + _integers(seed, 50, 6)},
    ),
    Subject("bart", _bart, _token_batch),
    Subject("qwen2moe", _qwen2moe, _token_batch),
    Subject("swin", _swin, _pixel_batch),
    Subject("convnext", _convnext, _pixel_batch),
    Subject("phi3", tiny.phi3, _token_batch),
    Subject("gemma2", tiny.gemma2, _token_batch),
    Subject("qwen3", tiny.qwen3, _token_batch),
    Subject("bloom", tiny.bloom, _token_batch),
    Subject("peft-lora", _peft_lora, _token_batch),
    Subject(
        "diffusers-dit",
        _dit,
        lambda seed: {
            "hidden_states": _normal(seed, 4, 4, 4),
            "timestep": _integers(seed, 1000),
            "class_labels": _integers(seed, 10),
        },
        _diffusers_loss,
    ),
    Subject(
        "diffusers-unet2d",
        _unet2d,
        lambda seed: {
            "sample": _normal(seed, 4, 8, 8),
            "timestep": _integers(seed, 1000),
            "encoder_hidden_states": _normal(seed + 1, 5, 8),
        },
        _diffusers_loss,
    ),
    Subject(
        "timm-vit",
        _timm(
            "vit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=16, depth=2, num_heads=2
        ),
        _image_batch,
        _class_loss,
    ),
    Subject(
        "timm-convnext",
        _timm("convnext_atto", depths=(1,) * 4, dims=(8,) * 4),
        lambda seed: _image_batch(seed, 32),
        _class_loss,
    ),
)
OWN_SUBJECTS = (
    Subject(
        "nanogpt",
        own.NanoGPT,
        lambda seed: {
            "idx": _integers(seed, 61, LENGTH),
            "targets": _integers(seed + 1, 61, LENGTH),
        },
        lambda output, batch: output[1],
    ),
    Subject(
        "dlrm",
        own.DLRM,
        lambda seed: {
            "dense": _normal(seed, 5),
            "sparse": _integers(seed, 16, 3, 4),
            "click": _integers(seed, 2).float(),
        },
        lambda output, batch: F.binary_cross_entropy_with_logits(output, batch["click"]),
    ),
    Subject(
        "lstm",
        own.Recurrent,
        lambda seed: {"x": _integers(seed, 30, LENGTH), "y": _integers(seed + 1, 30, LENGTH)},
    ),
    Subject(
        "dit",
        own.Denoiser,
        lambda seed: {
            "x": _normal(seed, 6, 8),
            "t": _integers(seed, 1000),
            "kind": _integers(seed, 7),
        },
        lambda output, batch: (output.noise - batch["x"]).square().mean(),
    ),
    Subject("lora", own.Adapted, _unmasked_batch),
    Subject("convolved", own.Convolved, _image_batch, _class_loss),
    Subject(
        "towers",
        own.Towers,
        lambda seed: {
            "left": _normal(seed, 6),
            "right": _normal(seed + 1, 6),
            "y": _integers(seed, 4),
        },
        _class_loss,
    ),
    Subject("looped", own.Looped, _unmasked_batch, lambda output, batch: output[0]),
    Subject("sharing", own.Sharing, _unmasked_batch, lambda output, batch: output[0]),
    Subject("fast", own.Fast, _unmasked_batch, lambda output, batch: output[0]),
    Subject(
        "taught",
        own.Taught,
        lambda seed: {"x": _normal(seed, 6), "domain": _integers(seed, 2), "y": _integers(seed, 4)},
    ),
    Subject(
        "routed",
        own.Routed,
        lambda seed: {
            "x": _normal(seed, 6),
            "language": _integers(seed, 3),
            "y": _integers(seed, 4),
        },
        lambda output, batch: output[0],
    ),
    Subject(
        "assorted",
        own.Assorted,
        lambda seed: {
            "inputs": {"words": _integers(seed, 61, LENGTH)},
            "y": _integers(seed + 1, 61, LENGTH),
        },
        lambda output, batch: F.cross_entropy(output["scores"].mT, batch["y"]),
    ),
)


def _example_subject(name: str) -> Subject:
    loaded = load_model_file(None, EXAMPLES / name / "drawn.sched")
    return Subject(name, loaded.model, loaded.batch, loaded.loss, loaded.weight)


NAMES = (
    *sorted(path.parent.name for path in EXAMPLES.glob("*/model.py")),
    *(one.name for one in (*OWN_SUBJECTS, *LIBRARY_SUBJECTS)),
)


def load_subject(name: str) -> Subject:
    """Return the subject of this name; raises ImportError if its library is not installed."""
    if name.startswith("user-"):
        from tests.properties.user_models import named_subject

        return named_subject(name)
    subjects = {entry.name: entry for entry in (*OWN_SUBJECTS, *LIBRARY_SUBJECTS)}
    return subjects[name] if name in subjects else _example_subject(name)
