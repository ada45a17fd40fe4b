"""The models that schedules are drawn over: the examples, and small ones of many kinds."""

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
    """A model as users have it, in float32: how it is made, its batch of a seed, its loss."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Any]]
    loss: Callable[..., Any] | None = None
    weight: Callable[..., Any] | None = None

    def model(self) -> nn.Module:
        """The model, the same numbers every time."""
        torch.manual_seed(0)
        return self.make().float()


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _words(seed: int) -> Batch:
    return tiny.tokens(ROWS + (seed % 3 == 2), LENGTH, seed=seed)


def _plain(seed: int) -> Batch:
    return tiny.tokens(ROWS, LENGTH, mask=False, seed=seed)


def _noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(ROWS, *shape, generator=_generator(seed))


def _numbers(seed: int, most: int, *shape: int) -> Tensor:
    return torch.randint(most, (ROWS, *shape), generator=_generator(seed + 100))


def _pictures(seed: int, side: int = 16) -> Batch:
    return {"x": _noise(seed, 3, side, side), "y": _numbers(seed, 5)}


def _classes(output: Tensor, batch: Any) -> Tensor:
    """Of a model that gives scores alone."""
    return F.cross_entropy(output, batch["y"])


def _sample(output: Any, batch: Any) -> Tensor:
    """Of a denoiser of diffusers, whose output is a class of its own."""
    found: Tensor = output.sample.square().mean()
    return found


# -- of transformers, peft, diffusers and timm -----------------------------------------------------

WORDS = {"vocab_size": 61, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


ENCODER_DECODER = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    **WORDS,
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
        **WORDS,
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


def _seen(seed: int) -> Batch:
    found = _pictures(seed)
    return {"pixel_values": found["x"], "labels": found["y"]}


def _lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj", "down_proj"],
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    found: nn.Module = get_peft_model(tiny.llama(2).float(), config)  # type: ignore[arg-type]
    return found


def _dit() -> nn.Module:
    from diffusers import DiTTransformer2DModel

    found: nn.Module = DiTTransformer2DModel(
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
    return found


def _unet2d() -> nn.Module:
    from diffusers import UNet2DConditionModel

    found: nn.Module = UNet2DConditionModel(
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
    return found


def _timm(name: str, **sizes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import timm

        found: nn.Module = timm.create_model(name, num_classes=5, **sizes)
        return found

    return make


OTHERS = (
    Subject(
        "whisper",
        _whisper,
        lambda seed: {"input_features": _noise(seed, 8, 20), "labels": 3 + _numbers(seed, 50, 6)},
    ),
    Subject("bart", _bart, _words),
    Subject("qwen2moe", _qwen2moe, _words),
    Subject("swin", _swin, _seen),
    Subject("convnext", _convnext, _seen),
    Subject("phi3", tiny.phi3, _words),
    Subject("gemma2", tiny.gemma2, _words),
    Subject("qwen3", tiny.qwen3, _words),
    Subject("bloom", tiny.bloom, _words),
    Subject("peft-lora", _lora, _words),
    Subject(
        "diffusers-dit",
        _dit,
        lambda seed: {
            "hidden_states": _noise(seed, 4, 4, 4),
            "timestep": _numbers(seed, 1000),
            "class_labels": _numbers(seed, 10),
        },
        _sample,
    ),
    Subject(
        "diffusers-unet2d",
        _unet2d,
        lambda seed: {
            "sample": _noise(seed, 4, 8, 8),
            "timestep": _numbers(seed, 1000),
            "encoder_hidden_states": _noise(seed + 1, 5, 8),
        },
        _sample,
    ),
    Subject(
        "timm-vit",
        _timm(
            "vit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=16, depth=2, num_heads=2
        ),
        _pictures,
        _classes,
    ),
    Subject(
        "timm-convnext",
        _timm("convnext_atto", depths=(1,) * 4, dims=(8,) * 4),
        lambda seed: _pictures(seed, 32),
        _classes,
    ),
)
OWN = (
    Subject(
        "nanogpt",
        own.NanoGPT,
        lambda seed: {"idx": _numbers(seed, 61, LENGTH), "targets": _numbers(seed + 1, 61, LENGTH)},
        lambda output, batch: output[1],
    ),
    Subject(
        "dlrm",
        own.DLRM,
        lambda seed: {
            "dense": _noise(seed, 5),
            "sparse": _numbers(seed, 16, 3, 4),
            "click": _numbers(seed, 2).float(),
        },
        lambda output, batch: F.binary_cross_entropy_with_logits(output, batch["click"]),
    ),
    Subject(
        "lstm",
        own.Recurrent,
        lambda seed: {"x": _numbers(seed, 30, LENGTH), "y": _numbers(seed + 1, 30, LENGTH)},
    ),
    Subject(
        "dit",
        own.Denoiser,
        lambda seed: {
            "x": _noise(seed, 6, 8),
            "t": _numbers(seed, 1000),
            "kind": _numbers(seed, 7),
        },
        lambda output, batch: (output.noise - batch["x"]).square().mean(),
    ),
    Subject("lora", own.Adapted, _plain),
    Subject("convolved", own.Convolved, _pictures, _classes),
    Subject(
        "towers",
        own.Towers,
        lambda seed: {
            "left": _noise(seed, 6),
            "right": _noise(seed + 1, 6),
            "y": _numbers(seed, 4),
        },
        _classes,
    ),
    Subject("looped", own.Looped, _plain, lambda output, batch: output[0]),
    Subject("sharing", own.Sharing, _plain, lambda output, batch: output[0]),
    Subject("fast", own.Fast, _plain, lambda output, batch: output[0]),
    Subject(
        "taught",
        own.Taught,
        lambda seed: {"x": _noise(seed, 6), "domain": _numbers(seed, 2), "y": _numbers(seed, 4)},
    ),
    Subject(
        "routed",
        own.Routed,
        lambda seed: {"x": _noise(seed, 6), "language": _numbers(seed, 3), "y": _numbers(seed, 4)},
        lambda output, batch: output[0],
    ),
    Subject(
        "assorted",
        own.Assorted,
        lambda seed: {
            "inputs": {"words": _numbers(seed, 61, LENGTH)},
            "y": _numbers(seed + 1, 61, LENGTH),
        },
        lambda output, batch: F.cross_entropy(output["scores"].mT, batch["y"]),
    ),
)


def _example(name: str) -> Subject:
    found = load_model_file(None, EXAMPLES / name / "drawn.sched")
    return Subject(name, found.model, found.batch, found.loss, found.weight)


NAMES = (
    *sorted(path.parent.name for path in EXAMPLES.glob("*/model.py")),
    *(one.name for one in (*OWN, *OTHERS)),
)


def subject(name: str) -> Subject:
    """The model of this name; raises ImportError where its library is not installed."""
    if name.startswith("user-"):
        from tests.properties.user_models import named_subject

        return named_subject(name)
    known = {one.name: one for one in (*OWN, *OTHERS)}
    return known[name] if name in known else _example(name)
