"""Models of many kinds, unmodified, in stages: loss and every gradient are those of the whole."""

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
from tests.alone import compared, cut_evenly
from tests.docs.test_examples import ROOT

Batch = dict[str, Any]
T5 = functools.partial(models.t5, 3, d_kv=8)
GROUP = "albert.encoder.albert_layer_groups.0"


def whisper() -> nn.Module:
    """Sound in, words out: the encoder begins with convolutions."""
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
    """Pictures in patches, a class token, a head that slices."""
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
    """Experts chosen by a router, whose scores nobody but the layer reads."""
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
    """Words to words; each layer finds its expert by a name that is made of a tensor's value."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(models.VOCAB, 8), nn.Linear(8, models.VOCAB)
        self.layers = nn.ModuleList(Chosen() for _ in range(3))
        self.double()

    def forward(self, input_ids: Tensor, labels: Tensor, **_: Any) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


class Chosen(nn.Module):
    """One of two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({f"expert_{k}": nn.Linear(8, 8) for k in range(2)})

    def forward(self, x: Tensor) -> Tensor:
        first = x.detach().isfinite().all().logical_not().long()
        chosen: Tensor = self.experts[f"expert_{first}"](x)
        return x + chosen.tanh()


def albert() -> nn.Module:
    """One group of layers, called four times."""
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
    """The example: three lists, called in another order than declared."""
    torch.manual_seed(0)
    return _example().model().double()


def _example() -> Any:
    return load_model_file(str(ROOT / "examples/unet/model.py"), None)


def words() -> Batch:
    """Token ids, some rows padded."""
    return models.tokens(4)


def pairs() -> Batch:
    """Sources, and targets of another length."""
    batch = models.tokens(4)
    return {**batch, "labels": batch["labels"][:, :5].contiguous()}


def sound() -> Batch:
    """Features in float64, and words."""
    g = torch.Generator().manual_seed(1)
    features = torch.randn(3, 4, 20, generator=g, dtype=torch.float64)
    return {"input_features": features, "labels": torch.randint(3, 60, (3, 6), generator=g)}


def pictures() -> Batch:
    """Pictures in float64, and classes."""
    g = torch.Generator().manual_seed(1)
    pixels = torch.randn(3, 3, 8, 8, generator=g, dtype=torch.float64)
    return {"pixel_values": pixels, "labels": torch.randint(5, (3,), generator=g)}


def squares() -> Batch:
    """A batch of the example, in float64."""
    return {name: value.double() for name, value in _example().batch(0).items()}


Case = tuple[Callable[[], nn.Module], Callable[[], Batch], int, tuple[str, ...]]
CASES: dict[str, Case] = {
    "gpt2": (models.gpt2, words, 3, ("transformer.h",)),
    "llama": (models.llama, words, 4, ("model.layers",)),
    "bert": (models.bert, words, 3, ("bert.encoder.layer",)),
    "t5": (T5, pairs, 4, ("encoder.block", "decoder.block")),
    "bart": (models.bart, pairs, 4, ("model.decoder.layers", "model.encoder.layers")),
    "whisper": (whisper, sound, 4, ("model.encoder.layers", "model.decoder.layers")),
    "vit": (vit, pictures, 4, ("vit.layers",)),
    "mixtral": (mixtral, words, 3, ("model.layers",)),
    "named experts": (Named, words, 3, ("layers",)),
    "unet": (unet, squares, 5, ("down", "middle", "up")),
    "albert": (albert, words, 3, (GROUP,)),
}


@pytest.mark.parametrize("name", CASES)
def test_stages_equal_the_whole(name: str) -> None:
    """Loss, every gradient, and which parameters have one."""
    make, draw, stages, trunks = CASES[name]
    model, batch = make(), draw()
    unrolled = {GROUP: 4} if name == "albert" else {}
    made = cut_evenly(model, batch, stages, trunks, unrolled)
    assert made.stages == stages and len(made.edges) >= stages - 1
    found = compared(model, made, batch)
    assert found.ok, found


def test_router_losses_cross_the_cut() -> None:
    """Scores that hooks gather for the loss are sent to it, and their gradients come back."""
    model, batch = mixtral(), words()
    model.config.output_router_logits, model.router_aux_loss_coef = True, 0.5
    made = cut_evenly(model, batch, 3, ["model.layers"])
    told = [source for tokens in made.routes.values() for source, k in tokens if k < 0]
    assert len(told) >= 2, made.routes
    found = compared(model, made, batch)
    assert found.ok, found


def test_an_encoder_and_a_decoder_send_where_it_is_read() -> None:
    """The encoder's last state goes to every decoder stage, and straight from where it is made."""
    made = cut_evenly(T5(), pairs(), 6, ["encoder.block", "decoder.block"])
    senders = {edge[0] for edge in made.edges if edge[1] == 5}
    assert {2, 4} <= senders  # the encoder's last stage, and the decoder's stage before
    assert not {(0, 3), (1, 3), (0, 5)} & set(made.edges)


def test_skips_go_straight() -> None:
    """What a level down made is sent to the level up that joins it, and to no stage between."""
    made = cut_evenly(unet(), squares(), 8, ["down", "middle", "up"])
    assert {(0, 7), (1, 6), (2, 5)} <= set(made.edges)
    assert not {(0, 3), (0, 4), (0, 5), (0, 6), (1, 4), (1, 5)} & set(made.edges)


@pytest.mark.deep
@pytest.mark.parametrize("kind", survey.kinds())
def test_every_causal_language_model_of_the_library(kind: str) -> None:
    """Split into three stages by its largest module list: equal, or refused with a reason."""
    try:
        model, batch = survey.ready(kind)
    except survey.NotTiny as why:
        pytest.skip(str(why))
    if kind in survey.REFUSED:
        from schedlang.diagnostics.diagnostic import Refusal

        with pytest.raises(Refusal, match=survey.REFUSED[kind]):
            survey.survey(model, batch)
        return
    found = survey.survey(model, batch)
    assert found.ok, found
