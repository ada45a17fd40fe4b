"""The probe of slices: models that cannot run on slices of their sequences are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.analyze.prepare import prepare
from schedlang.runtime.sequence_pipelining import probe
from schedlang.runtime.sequence_pipelining.trial import small_copy
from tests import models
from tests.causal import Causal
from tests.proofs import make_plan
from tests.slice_probes import probe_slices

REFUSED = {
    "bert": (models.bert, "it is not causal: in `bert.encoder.layer.0.attention.self`"),
    "encoder": (models.bart, "it is not causal: in `model.encoder.layers.0.self_attn"),
    "full attention": (lambda: Causal("full"), "it is not causal: in `blocks.0.out`"),
    "convolution": (lambda: Causal("conv"), "it is not causal: in `blocks.0"),
    "attention by products": (lambda: Causal("products"), "does not run on a slice"),
    "positions by sums": (lambda: Causal(positions="counted"), "`places` computes a slice"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_named(name: str) -> None:
    """The refusal names the first module that reads later tokens or ignores earlier ones."""
    make, expected = REFUSED[name]
    with pytest.raises(Refusal) as error:
        probe_slices(make(), models.tokens(3, 9, mask=name == "bert"), 3)
    message = error.value.render()
    assert "S655" in message and expected in message and "slices=1" in message


def test_ways_that_are_found() -> None:
    """How the probe slices Llama (its cache) and users' models (attention calls, labels)."""
    batch, unpadded = models.tokens(3, 9), models.tokens(3, 9, mask=False)
    slicings = {
        "llama": probe_slices(models.llama(3), batch, 4),
        "own": probe_slices(Causal(layers=3), unpadded, 2),
        "labels": probe_slices(Causal(shift=False), unpadded, 2),
    }
    properties = {
        k: (w.count, w.carrier, w.shift, w.head, len(w.places)) for k, w in slicings.items()
    }
    assert properties == {
        "llama": (4, "cache", "given", "", 0),
        "own": (2, "calls", "head", "head", 1),
        "labels": (2, "calls", "none", "", 1),
    }


def test_a_loss_of_the_users_own() -> None:
    """A loss function that shifts logits and labels is followed across slices."""

    class Logits(Causal):
        def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
            return 2 * logits

    def loss(output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    slicing = probe_slices(Logits(), models.tokens(3, 9, mask=False), 3, loss)
    assert (slicing.carrier, slicing.shift, slicing.head) == ("calls", "head", "head")


def test_a_wrong_way_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slicing without positions is not accepted."""
    list_all = probe.list_candidates
    monkeypatch.setattr(
        probe,
        "list_candidates",
        lambda trial: (replace(way, places=frozenset()) for way in list_all(trial)),
    )
    with pytest.raises(Refusal, match="`blocks.0.norm` computes a slice differently"):
        probe_slices(Causal(), models.tokens(3, 9, mask=False), 3)


def test_the_stand_in_is_small_and_drawn() -> None:
    """The small copy keeps two equal blocks, all kinds and ties; its values are new."""
    model = models.gpt2(8)
    small = small_copy(model).model
    assert len(small.transformer.h) == 2 and len(model.transformer.h) == 8
    assert small.lm_head.weight is small.transformer.wte.weight
    assert not torch.equal(small.lm_head.weight, model.lm_head.weight)
    mixed = Causal(layers=5)
    mixed.blocks[3].norm = nn.LayerNorm(16, elementwise_affine=False)
    small = small_copy(mixed)
    assert len(small.model.blocks) == 4 and small.representatives == {"blocks.4": "blocks.0"}
    assert len(small_copy(models.gpt2(8), short=False).model.transformer.h) == 8


def test_the_row_is_shown() -> None:
    """The refusal points at the row that asks for slices."""
    rows = '  pipeline(order="Seq1F1B", micro=2, slices=3)'
    batch = models.tokens(4, 9)
    with pytest.raises(Refusal) as error:
        prepare(make_plan(models.bert(), rows), batch)
    message = error.value.render()
    assert "rows.sched:4:3" in message and "not causal" in message
