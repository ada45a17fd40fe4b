"""Models as people write them in one file, under what `init` writes, against a plain torch loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import Refusal
from tests.engine import Threads
from tests.zoo_models import (
    written_contrastive,
    written_generative,
    written_graphs,
    written_language,
    written_mixers,
    written_sequences,
    written_vision,
)
from tests.zoo_models.written import MESHES, Written, init_text, judge

FILES = (written_language, written_mixers, written_sequences, written_graphs)
MODELS: dict[str, Written] = {
    name: written
    for file in (*FILES, written_vision, written_generative, written_contrastive)
    for name, written in file.MODELS.items()
}
TELLING = (
    ("mingpt", "dp, tp"),  # a lambda over its own layers
    ("modded", "pp"),  # skips between the layers of two stages, values of tokens
    ("rwkv", "tp"),  # two parameters of one module, split with the heads
    ("mae", "dp"),  # patches picked and put back by gather
    ("swin", "tp"),  # shifted windows, a table of biases
    ("schnet_forces", "zero"),  # a gradient in the loss
    ("evoformer", "tp"),  # pair biases, triangles
    ("two_tower", "dp, tp"),  # rows are gathered for the loss
    ("ahead_ragged", "pp"),  # three losses with other labels each
)

# what is refused, with the code, on which meshes (all of those that are not named train equally)
SPLIT = ("dp", "zero", "pp", "dp, tp")
REFUSED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "rnn_lm": {"S612": tuple(MESHES)},  # packed sequences: their lengths are values
    "vqvae_ema": {"S708": ("dp", "zero", "pp"), "S212": ("tp", "dp, tp")},  # statistics
    "gan": {"S708": ("pp",)},  # a power iteration for each microbatch
    "clip": {"S703": ("dp", "zero", "dp, tp")},  # features are computed outside of modules
    "siglip": {"S703": ("dp", "zero", "dp, tp")},
    "simclr": {"S703": ("dp", "zero", "dp, tp"), "S212": ("pp",)},  # it counts its own rows
    "simclr_joined": {"S703": ("dp", "zero", "dp, tp")},
    "efficientnet": {"S212": ("tp", "dp, tp")},  # convolutions of several groups
    "efficientnet_gn": {"S212": ("tp", "dp, tp")},
    "capsules": {"S212": ("tp", "pp", "dp, tp")},
    "byol": {"S212": ("pp",)},  # modules that are called again
    "universal": {"S212": ("pp",)},
    "tacotron": {"S212": ("pp",)},
    "ntm": {"S212": ("pp",)},
    "transformer_xl": {"S601": ("pp",)},
}


@pytest.mark.parametrize("name, mesh", TELLING)
def test_a_telling_model(threads: Threads, name: str, mesh: str) -> None:
    """It trains as in a plain loop under the schedule that `init` writes for its mesh."""
    text = init_text(MODELS[name], mesh)
    assert judge(MODELS[name], text, threads) == ""
    if name == "rwkv":
        row = "mix                         shard(time_first=S(0), time_decay=S(0), over=tp)"
        assert row in text and "output=R" not in text


def test_init_follows_a_gradient_in_a_forward() -> None:
    """A forward that takes a gradient itself is followed: its projections are split."""

    class Forces(written_graphs.SchNet):
        """Without a guard against evaluations without gradients."""

        def forward(self, z: Tensor, pos: Tensor, energy: Tensor, force: Tensor) -> Tensor:
            pos = pos.detach().requires_grad_()
            e = self.energies(z, pos)
            (grad,) = torch.autograd.grad(e.sum(), pos, create_graph=True)
            return F.mse_loss(e, energy) + F.mse_loss(-grad, force)

    written = Written(lambda: Forces(True), written_graphs.molecules)
    assert "shard(col, over=tp)" in init_text(written, "tp")


def test_several_losses_with_their_own_labels(threads: Threads) -> None:
    """Each is weighted by its own labels; a weight by rows trains with statistics of each part."""
    ragged = MODELS["ahead_ragged"]
    text = init_text(ragged, "dp")
    assert judge(ragged, text, threads) == ""
    weighed = replace(ragged, weight=written_language.count_rows)
    relaxed = text.replace('step "data" {', 'step "data" relax(batch_stats) {')
    assert judge(weighed, relaxed, threads) == "relaxed"
    assert judge(MODELS["ahead"], text, threads) == ""


@pytest.mark.deep
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_every_model(threads: Threads, name: str, mesh: str) -> None:
    """It trains equally, or is refused with the known code; `relaxed` are batch norms alone."""
    known = {m: code for code, meshes in REFUSED.get(name, {}).items() for m in meshes}
    try:
        outcome = judge(MODELS[name], init_text(MODELS[name], mesh), threads)
    except Refusal as refusal:
        assert refusal.diagnostic.code == known.get(mesh), refusal.render(100)
        return
    normed = name in ("resnet", "efficientnet") and mesh in SPLIT
    assert mesh not in known and outcome == ("relaxed" if normed else "")
