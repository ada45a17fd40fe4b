"""Unmodified models of many kinds in stages: loss and all gradients equal the full model's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.ir.modelfile import load_model_file
from tests import models, survey
from tests.docs.test_examples import ROOT
from tests.single_process import compare_stages, cut_evenly

Batch = dict[str, Any]
T5 = functools.partial(models.t5, 3, d_kv=8)
GROUP = "albert.encoder.albert_layer_groups.0"


def whisper() -> nn.Module:
    """Whisper: its encoder begins with convolutions."""
    return models.hf(
        "WhisperForConditionalGeneration",
        **models.HALVES,
        vocab_size=models.VOCAB,
        num_mel_bins=4,
        max_source_positions=10,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )


def vit() -> nn.Module:
    """ViT: patches, a class token, a head that slices."""
    return models.hf(
        "ViTForImageClassification",
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=24,
        image_size=8,
        patch_size=4,
        num_labels=5,
    )


def mixtral() -> nn.Module:
    """Mixtral, with router scores that only the layer reads."""
    model = models.hf(
        "MixtralForCausalLM",
        vocab_size=models.VOCAB,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=24,
        num_local_experts=4,
        max_position_embeddings=16,
    )
    model.set_experts_implementation("eager")  # the grouped product has no float64
    return model


class Named(nn.Module):
    """A language model whose layers find their expert by a name from a tensor's value."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(models.VOCAB, 8), nn.Linear(8, models.VOCAB)
        self.layers = nn.ModuleList(ChosenExpert() for _ in range(3))
        self.double()

    def forward(self, input_ids: Tensor, labels: Tensor, **_: Any) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


class ChosenExpert(nn.Module):
    """One of two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({f"expert_{k}": nn.Linear(8, 8) for k in range(2)})

    def forward(self, x: Tensor) -> Tensor:
        index = x.detach().isfinite().all().logical_not().long()
        expert_output: Tensor = self.experts[f"expert_{index}"](x)
        return x + expert_output.tanh()


def albert() -> nn.Module:
    """ALBERT: one group of layers, called four times."""
    return models.hf(
        "AlbertForMaskedLM",
        vocab_size=models.VOCAB,
        embedding_size=8,
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=16,
    )


def unet() -> nn.Module:
    """The U-Net example: three lists, called in another order than declared."""
    torch.manual_seed(0)
    return _example().model().double()


def _example() -> Any:
    return load_model_file(str(ROOT / "examples/unet/model.py"), None)


def token_batch() -> Batch:
    """Token ids, some rows padded."""
    return models.tokens(4)


def translation_batch() -> Batch:
    """Token ids, and labels of another length."""
    batch = models.tokens(4)
    return {**batch, "labels": batch["labels"][:, :5].contiguous()}


def sound_batch() -> Batch:
    """Audio features in float64, and labels."""
    g = torch.Generator().manual_seed(1)
    features = torch.randn(3, 4, 20, generator=g, dtype=torch.float64)
    return {"input_features": features, "labels": torch.randint(3, 60, (3, 6), generator=g)}


def picture_batch() -> Batch:
    """Pictures in float64, and classes."""
    g = torch.Generator().manual_seed(1)
    pixels = torch.randn(3, 3, 8, 8, generator=g, dtype=torch.float64)
    return {"pixel_values": pixels, "labels": torch.randint(5, (3,), generator=g)}


def unet_batch() -> Batch:
    """A batch of the U-Net example, in float64."""
    return {name: value.double() for name, value in _example().batch(0).items()}


Case = tuple[Callable[[], nn.Module], Callable[[], Batch], int, tuple[str, ...]]
CASES: dict[str, Case] = {
    "gpt2": (models.gpt2, token_batch, 3, ("transformer.h",)),
    "llama": (models.llama, token_batch, 4, ("model.layers",)),
    "bert": (models.bert, token_batch, 3, ("bert.encoder.layer",)),
    "t5": (T5, translation_batch, 4, ("encoder.block", "decoder.block")),
    "bart": (models.bart, translation_batch, 4, ("model.decoder.layers", "model.encoder.layers")),
    "whisper": (whisper, sound_batch, 4, ("model.encoder.layers", "model.decoder.layers")),
    "vit": (vit, picture_batch, 4, ("vit.layers",)),
    "mixtral": (mixtral, token_batch, 3, ("model.layers",)),
    "named experts": (Named, token_batch, 3, ("layers",)),
    "unet": (unet, unet_batch, 5, ("down", "middle", "up")),
    "albert": (albert, token_batch, 3, (GROUP,)),
}


@pytest.mark.parametrize("name", CASES)
def test_stages_equal_the_whole(name: str) -> None:
    """Loss, every gradient, and which parameters have one."""
    make, draw, stages, trunks = CASES[name]
    model, batch = make(), draw()
    unrolled = {GROUP: 4} if name == "albert" else {}
    stage_split = cut_evenly(model, batch, stages, trunks, unrolled)
    assert stage_split.stages == stages and len(stage_split.edges) >= stages - 1
    comparison = compare_stages(model, stage_split, batch)
    assert comparison.ok, comparison


def test_router_losses_cross_the_cut() -> None:
    """Router scores that hooks collect for the loss are sent to its stage, with gradients."""
    model, batch = mixtral(), token_batch()
    model.config.output_router_logits, model.router_aux_loss_coef = True, 0.5
    stage_split = cut_evenly(model, batch, 3, ["model.layers"])
    hook_values = [
        source for tokens in stage_split.routes.values() for source, k in tokens if k < 0
    ]
    assert len(hook_values) >= 2, stage_split.routes
    comparison = compare_stages(model, stage_split, batch)
    assert comparison.ok, comparison


def test_an_encoder_and_a_decoder_send_where_it_is_read() -> None:
    """The encoder's last state is sent directly from its stage to every decoder stage."""
    stage_split = cut_evenly(T5(), translation_batch(), 6, ["encoder.block", "decoder.block"])
    senders = {edge[0] for edge in stage_split.edges if edge[1] == 5}
    assert {2, 4} <= senders  # the encoder's last stage, and the decoder's stage before
    assert not {(0, 3), (1, 3), (0, 5)} & set(stage_split.edges)


def test_skips_go_straight() -> None:
    """U-Net skips are sent directly to the stage that reads them."""
    stage_split = cut_evenly(unet(), unet_batch(), 8, ["down", "middle", "up"])
    assert {(0, 7), (1, 6), (2, 5)} <= set(stage_split.edges)
    assert not {(0, 3), (0, 4), (0, 5), (0, 6), (1, 4), (1, 5)} & set(stage_split.edges)


@pytest.mark.deep
@pytest.mark.parametrize("kind", survey.kinds())
def test_every_causal_language_model_of_the_library(kind: str) -> None:
    """Split into three stages by its largest module list: equal, or refused with a reason."""
    try:
        model, batch = survey.tiny_model(kind)
    except survey.NotTiny as error:
        pytest.skip(str(error))
    if kind in survey.REFUSED:
        from schedlang.diagnostics.diagnostic import Refusal

        with pytest.raises(Refusal, match=survey.REFUSED[kind]):
            survey.compare_tiny(model, batch)
        return
    comparison = survey.compare_tiny(model, batch)
    assert comparison.ok, comparison
