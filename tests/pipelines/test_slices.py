"""Slices of a sequence: losses, outputs and every gradient are those of the whole sequence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.analyze.prepare import prepare
from schedlang.passes.propagate.sequence_trials import slices_of
from schedlang.runtime.activation_memory.recompute import checkpoint
from schedlang.runtime.float64 import Float64
from schedlang.runtime.modes import enter_modes
from schedlang.runtime.rng.logical_dropout import LogicalDropout
from schedlang.runtime.scope import Scope, enter_scope, named_sites
from schedlang.runtime.sequence_pipelining.carried_keys import CarriedKeys, SliceSpan
from schedlang.runtime.sequence_pipelining.slices import (
    SliceRunner,
    Slicing,
    even_lengths,
    join_outputs,
    run_slices,
    sequence_inputs,
    token_masks,
)
from tests import models
from tests.causal import Causal
from tests.proofs import planned
from tests.slicing import found, labels_of

GATE = 1e-12

Make = Callable[[], nn.Module]
MODELS: dict[str, tuple[Make, bool]] = {
    "llama": (lambda: models.llama(2), True),
    "llama eager": (lambda: models.llama(2, attend="eager"), True),
    "gpt2": (lambda: models.gpt2(2), True),
    "windows": (lambda: models.gemma2(2), True),
    "own": (lambda: Causal(layers=2), False),
    "own table": (lambda: Causal(positions="table", layers=2), False),
    "own mask": (lambda: Causal("mask", layers=2), True),
    "own labels": (lambda: Causal(shift=False, layers=2), False),
}


def passes(model: nn.Module, batch: Any, slices: SliceRunner | None) -> tuple[Tensor, Any]:
    """The loss and the output of one forward and backward, whole or by slices."""
    with enter_modes(Float64()):
        if slices is not None:
            loss, outputs = run_slices(slices, model, batch)
            return loss, join_outputs(outputs, slices.split_batch(batch))
        output = model(**batch)
        loss = output if isinstance(output, Tensor) else output.loss
        loss.backward()
    return loss.detach(), output


def assert_same(model: nn.Module, batch: Any, slicing: Slicing, lengths: Any = None) -> None:
    """By slices a copy gives the loss, the logits and the gradients of the model."""
    twin = copy.deepcopy(model)
    rule = labels_of(model, batch)
    cut = (lambda total, count: lengths) if lengths else None
    slices = SliceRunner(twin, slicing, rule.count, lengths=cut)
    wanted, whole = passes(model, batch, None)
    loss, output = passes(twin, batch, slices)
    assert abs(float(loss - wanted)) <= GATE * abs(float(wanted))
    if hasattr(whole, "logits"):
        assert torch.allclose(output.logits, whole.logits, rtol=0, atol=1e-11)
    largest = max(float(p.grad.norm()) for p in model.parameters() if p.grad is not None)
    for (name, p), q in zip(model.named_parameters(), twin.parameters()):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            gap = float((p.grad - q.grad).norm())
            assert gap <= GATE * float(p.grad.norm()) + 1e-15 * largest, (name, gap)


@pytest.mark.parametrize("name", MODELS)
def test_slices_equal_the_whole(name: str) -> None:
    """Any number of slices of any lengths, rows padded on the right."""
    make, padded = MODELS[name]
    batch = models.tokens(3, 11, mask=padded)
    slicing = found(make(), batch, 3)
    for lengths in ((11,), (1, 9, 1), (4, 4, 3), (2, 1, 3, 2, 3)):
        assert_same(make(), batch, replace(slicing, count=len(lengths)), lengths)


def test_a_slice_without_labels_counts_for_nothing() -> None:
    """Where no label of a slice counts its loss is no number, and the keys still get gradients."""
    batch = models.tokens(3, 9, mask=False)
    batch["labels"][:, :7] = -100
    for model in (models.llama(2), Causal(layers=2)):
        assert_same(model, batch, found(model, models.tokens(3, 9, mask=False), 3))


def test_padding_on_the_left() -> None:
    """Right where attention gives blind tokens nothing, refused where it gives them a mean."""
    batch = models.left(models.tokens(3, 11))
    assert_same(models.llama(2), batch, found(models.llama(2), batch, 3))
    model = models.llama(2, attend="eager")
    slicing = found(model, batch, 3)
    with pytest.raises(Refusal, match="S657.*pads sequences on the left"):
        SliceRunner(model, slicing, labels_of(model, batch).count).split_batch(batch)


def test_packed_rows_are_refused() -> None:
    """Positions that start anew tell documents apart, which a cache of keys does not see."""
    batch = models.tokens(2, 8, mask=False)
    batch["position_ids"] = torch.arange(8).expand(2, 8) % 5
    model = models.llama(2)
    slices = SliceRunner(
        model, Slicing(2, "cache", labels="labels", shift="given"), labels_of(model, batch).count
    )
    with pytest.raises(Refusal, match="restart within a row"):
        slices.split_batch(batch)


@pytest.mark.parametrize(
    "make", [lambda: models.gpt2(4, dropout=0.3), lambda: Causal(layers=4, dropout=0.3)]
)
def test_dropout_is_drawn_by_place_in_the_sequence(make: Make) -> None:
    """Masks of hidden values, of attention weights and of embeddings are those of the whole."""
    batch = models.tokens(3, 11)
    if isinstance(make(), Causal):
        del batch["attention_mask"]
    slicing = found(make(), batch, 3)
    assert slicing.draws
    losses, grads = [], []
    for part in (None, slicing):
        model = make()
        named_sites(model)
        drawn = LogicalDropout(7, part.windows(None) if part else None)
        slices = SliceRunner(model, part, labels_of(model, batch).count) if part else None
        with enter_modes(drawn), enter_scope(Scope(4, 0, (5, 6, 7))):
            loss, _ = passes(model, batch, slices)
        losses.append(loss)
        grads.append([p.grad for p in model.parameters()])
    assert torch.allclose(*losses, rtol=GATE, atol=0)
    for a, b in zip(*grads):
        assert (a is None and b is None) or torch.allclose(a, b, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("name", ["llama", "own mask"])
def test_recomputed_blocks(name: str) -> None:
    """A block that runs again in backward sees the keys that it saw, and notes none twice."""
    model, batch = MODELS[name][0](), models.tokens(3, 11)
    slicing = found(model, batch, 3)
    twin = copy.deepcopy(model)
    for block in twin.model.layers if name == "llama" else twin.blocks:
        checkpoint(block)
    wanted, _ = passes(model, batch, None)
    loss, _ = passes(twin, batch, SliceRunner(twin, slicing, labels_of(model, batch).count))
    assert torch.allclose(loss, wanted, rtol=GATE, atol=0)
    for (key, p), q in zip(model.named_parameters(), twin.parameters()):
        assert p.grad is None or torch.allclose(p.grad, q.grad, rtol=1e-9, atol=1e-13), key


def test_keys_lie_in_one_memory_and_are_let_go() -> None:
    """A later slice reads earlier keys where they lie; after its backward nothing is kept."""
    carried, spans = (
        CarriedKeys(),
        (SliceSpan(0, 0, 3, 8), SliceSpan(1, 3, 5, 8), SliceSpan(2, 5, 8, 8)),
    )
    made = [torch.randn(2, span.length, 4, dtype=torch.float64) for span in spans]
    keys = [part.requires_grad_() for part in made]
    seen = [carried.join("k", part * 1.0, -2, span) for part, span in zip(keys, spans)]
    assert len({one.untyped_storage().data_ptr() for one in seen}) == 1
    for one, span in zip(seen, spans):
        assert torch.equal(one, torch.cat(made, 1)[:, : span.stop])
    factors = [torch.randn_like(one) for one in seen]
    for span in reversed(spans):
        edges, grads = carried.backward_roots(span.index)
        torch.autograd.backward([seen[span.index], *edges], [factors[span.index], *grads])
        carried.free(span.index)
    assert not carried._lines
    for part, span in zip(keys, spans):
        wanted = sum(f[:, span.start : span.stop] for f in factors[span.index :])
        assert torch.allclose(part.grad, wanted, rtol=0, atol=1e-14)


def test_a_later_slice_needs_the_earlier() -> None:
    """Out of order the keys are not there, and nothing is made up."""
    with pytest.raises(LookupError):
        CarriedKeys().join("k", torch.zeros(1, 2, 4), -2, SliceSpan(1, 2, 4, 4))


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 4))
def test_lengths(units: int, count: int, grain: int) -> None:
    """Even slices fill the sequence, differ by one unit, and are whole units."""
    total = units * grain
    lengths = even_lengths(total, count, grain)
    assert sum(lengths) == total and len(lengths) == count
    assert all(n % grain == 0 for n in lengths) and max(lengths) - min(lengths) <= grain


def test_inputs_of_slices() -> None:
    """Tokens are cut, masks reach back to the first key, labels have the next slice's first."""
    batch = {
        "input_ids": torch.arange(12).reshape(2, 6),
        "labels": torch.arange(12).reshape(2, 6),
        "attention_mask": torch.ones(2, 6),
        "weights": torch.ones(2),
        "scale": 0.5,
        "inputs_embeds": torch.zeros(2, 6, 3),
        "bias": torch.zeros(2, 1, 6, 6),
    }
    way = Slicing(2, "cache", labels="labels", shift="given", keys=token_masks(batch))
    first, last = way.split_batch(batch, (2, 4))
    assert first.inputs["labels"].tolist() == [[0, 1], [6, 7]]
    assert first.inputs["shift_labels"].tolist() == [[1, 2], [7, 8]]
    assert last.inputs["shift_labels"].tolist() == [[3, 4, 5, -100], [9, 10, 11, -100]]
    assert last.inputs["input_ids"].tolist() == [[2, 3, 4, 5], [8, 9, 10, 11]]
    assert last.inputs["attention_mask"].shape == (2, 6) and last.inputs["scale"] == 0.5
    assert last.inputs["inputs_embeds"].shape == (2, 4, 3)
    assert first.inputs["bias"].shape == (2, 1, 2, 2) and last.inputs["bias"].shape == (2, 1, 4, 6)
    with pytest.raises(Refusal, match="6 tokens are too few for 7 slices"):
        Slicing(7, "calls").split_batch(batch)


def test_only_what_runs_along_the_sequence_is_cut() -> None:
    """An input that is by chance as wide as a sequence is long stays whole."""
    batch = {"input_ids": torch.zeros(2, 6), "features": torch.zeros(2, 4)}
    slicing = Slicing(2, "calls", along=sequence_inputs(batch))
    later = {"input_ids": torch.zeros(2, 4), "features": torch.zeros(2, 4)}
    assert [p.inputs["features"].shape for p in slicing.split_batch(later)] == [(2, 4), (2, 4)]
    assert [p.inputs["input_ids"].shape for p in slicing.split_batch(later)] == [(2, 2), (2, 2)]
    both = Slicing(2, "calls", along=frozenset(later))
    with pytest.raises(Refusal, match="`features` is not as long"):
        both.split_batch(batch)


def test_a_loss_without_labels_weighs_tokens() -> None:
    """A mean over tokens of something else than labels is that of its slices, by their lengths."""

    class Values(Causal):
        def forward(self, input_ids: Tensor, values: Tensor) -> Tensor:
            x = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1]))
            for block in self.blocks:
                x = block(x, None)
            return ((x - values) ** 2).mean()

    ids = models.tokens(3, 11, mask=False)["input_ids"]
    batch = {"input_ids": ids, "values": torch.randn(3, 11, 16, dtype=torch.float64)}
    model, twin = Values(layers=2), Values(layers=2)
    plan = planned(model, 'pipeline(order="Seq1F1B", micro=1, slices=3)')
    found = prepare(plan, batch)
    slices = slices_of(found.slicing, twin, found.traced, None)
    wanted, _ = passes(model, batch, None)
    loss, _ = passes(twin, batch, slices)
    assert torch.allclose(loss, wanted, rtol=GATE, atol=0)
    for p, q in zip(model.parameters(), twin.parameters()):
        assert p.grad is None or torch.allclose(p.grad, q.grad, rtol=1e-9, atol=1e-13)
