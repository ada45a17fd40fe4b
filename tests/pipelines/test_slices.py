"""Slices of a sequence: losses, outputs and all gradients equal those of the full sequence."""

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
from tests.proofs import make_plan
from tests.slice_probes import label_rule, probe_slices

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


def forward_backward(
    model: nn.Module, batch: Any, slices: SliceRunner | None
) -> tuple[Tensor, Any]:
    """Run forward and backward, full or by slices; return the loss and the output."""
    with enter_modes(Float64()):
        if slices is not None:
            loss, outputs = run_slices(slices, model, batch)
            return loss, join_outputs(outputs, slices.split_batch(batch))
        output = model(**batch)
        loss = output if isinstance(output, Tensor) else output.loss
        loss.backward()
    return loss.detach(), output


def assert_same(model: nn.Module, batch: Any, slicing: Slicing, lengths: Any = None) -> None:
    """Assert that a sliced copy has the loss, logits and gradients of the model."""
    copied = copy.deepcopy(model)
    rule = label_rule(model, batch)
    cut = (lambda total, count: lengths) if lengths else None
    slices = SliceRunner(copied, slicing, rule.count, lengths=cut)
    expected_loss, expected = forward_backward(model, batch, None)
    loss, output = forward_backward(copied, batch, slices)
    assert abs(float(loss - expected_loss)) <= GATE * abs(float(expected_loss))
    if hasattr(expected, "logits"):
        assert torch.allclose(output.logits, expected.logits, rtol=0, atol=1e-11)
    largest = max(float(p.grad.norm()) for p in model.parameters() if p.grad is not None)
    for (name, p), q in zip(model.named_parameters(), copied.parameters()):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            error = float((p.grad - q.grad).norm())
            assert error <= GATE * float(p.grad.norm()) + 1e-15 * largest, (name, error)


@pytest.mark.parametrize("name", MODELS)
def test_slices_equal_the_whole(name: str) -> None:
    """Any number of slices of any lengths, rows padded on the right."""
    make, padded = MODELS[name]
    batch = models.tokens(3, 11, mask=padded)
    slicing = probe_slices(make(), batch, 3)
    for lengths in ((11,), (1, 9, 1), (4, 4, 3), (2, 1, 3, 2, 3)):
        assert_same(make(), batch, replace(slicing, count=len(lengths)), lengths)


def test_a_slice_without_labels_counts_for_nothing() -> None:
    """A slice without counted labels has weight 0, and its keys still get gradients."""
    batch = models.tokens(3, 9, mask=False)
    batch["labels"][:, :7] = -100
    for model in (models.llama(2), Causal(layers=2)):
        assert_same(model, batch, probe_slices(model, models.tokens(3, 9, mask=False), 3))


def test_padding_on_the_left() -> None:
    """Left padding works where blind tokens get no output, and is refused where they get a mean."""
    batch = models.pad_left(models.tokens(3, 11))
    assert_same(models.llama(2), batch, probe_slices(models.llama(2), batch, 3))
    model = models.llama(2, attend="eager")
    slicing = probe_slices(model, batch, 3)
    with pytest.raises(Refusal, match="S657.*pads sequences on the left"):
        SliceRunner(model, slicing, label_rule(model, batch).count).split_batch(batch)


def test_packed_rows_are_refused() -> None:
    """Packed documents (positions that restart) are refused: the cache cannot separate them."""
    batch = models.tokens(2, 8, mask=False)
    batch["position_ids"] = torch.arange(8).expand(2, 8) % 5
    model = models.llama(2)
    slices = SliceRunner(
        model, Slicing(2, "cache", labels="labels", shift="given"), label_rule(model, batch).count
    )
    with pytest.raises(Refusal, match="restart within a row"):
        slices.split_batch(batch)


@pytest.mark.parametrize(
    "make", [lambda: models.gpt2(4, dropout=0.3), lambda: Causal(layers=4, dropout=0.3)]
)
def test_dropout_is_drawn_by_place_in_the_sequence(make: Make) -> None:
    """Dropout masks of slices are those of the full sequence."""
    batch = models.tokens(3, 11)
    if isinstance(make(), Causal):
        del batch["attention_mask"]
    slicing = probe_slices(make(), batch, 3)
    assert slicing.draws
    losses, grads = [], []
    for part in (None, slicing):
        model = make()
        named_sites(model)
        masks = LogicalDropout(7, part.windows(None) if part else None)
        slices = SliceRunner(model, part, label_rule(model, batch).count) if part else None
        with enter_modes(masks), enter_scope(Scope(4, 0, (5, 6, 7))):
            loss, _ = forward_backward(model, batch, slices)
        losses.append(loss)
        grads.append([p.grad for p in model.parameters()])
    assert torch.allclose(*losses, rtol=GATE, atol=0)
    for a, b in zip(*grads):
        assert (a is None and b is None) or torch.allclose(a, b, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("name", ["llama", "own mask"])
def test_recomputed_blocks(name: str) -> None:
    """A recomputed block reads the same keys and stores none twice."""
    model, batch = MODELS[name][0](), models.tokens(3, 11)
    slicing = probe_slices(model, batch, 3)
    copied = copy.deepcopy(model)
    for block in copied.model.layers if name == "llama" else copied.blocks:
        checkpoint(block)
    expected, _ = forward_backward(model, batch, None)
    loss, _ = forward_backward(
        copied, batch, SliceRunner(copied, slicing, label_rule(model, batch).count)
    )
    assert torch.allclose(loss, expected, rtol=GATE, atol=0)
    for (key, p), q in zip(model.named_parameters(), copied.parameters()):
        assert p.grad is None or torch.allclose(p.grad, q.grad, rtol=1e-9, atol=1e-13), key


def test_keys_lie_in_one_memory_and_are_let_go() -> None:
    """All slices share one memory for keys; after the backwards nothing is kept."""
    carried, spans = (
        CarriedKeys(),
        (SliceSpan(0, 0, 3, 8), SliceSpan(1, 3, 5, 8), SliceSpan(2, 5, 8, 8)),
    )
    parts = [torch.randn(2, token_span.length, 4, dtype=torch.float64) for token_span in spans]
    keys = [part.requires_grad_() for part in parts]
    joined = [
        carried.join("k", part * 1.0, -2, token_span) for part, token_span in zip(keys, spans)
    ]
    assert len({joined_keys.untyped_storage().data_ptr() for joined_keys in joined}) == 1
    for joined_keys, token_span in zip(joined, spans):
        assert torch.equal(joined_keys, torch.cat(parts, 1)[:, : token_span.stop])
    factors = [torch.randn_like(joined_keys) for joined_keys in joined]
    for token_span in reversed(spans):
        edges, grads = carried.backward_roots(token_span.index)
        torch.autograd.backward(
            [joined[token_span.index], *edges], [factors[token_span.index], *grads]
        )
        carried.free(token_span.index)
    assert not carried._lines
    for part, token_span in zip(keys, spans):
        expected = sum(
            f[:, token_span.start : token_span.stop] for f in factors[token_span.index :]
        )
        assert torch.allclose(part.grad, expected, rtol=0, atol=1e-14)


def test_a_later_slice_needs_the_earlier() -> None:
    """A later slice without the earlier ones raises LookupError."""
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
    """Tokens are sliced, masks reach back to the first key, labels include the next slice's."""
    batch = {
        "input_ids": torch.arange(12).reshape(2, 6),
        "labels": torch.arange(12).reshape(2, 6),
        "attention_mask": torch.ones(2, 6),
        "weights": torch.ones(2),
        "scale": 0.5,
        "inputs_embeds": torch.zeros(2, 6, 3),
        "bias": torch.zeros(2, 1, 6, 6),
    }
    slicing = Slicing(2, "cache", labels="labels", shift="given", keys=token_masks(batch))
    first_slice, last_slice = slicing.split_batch(batch, (2, 4))
    assert first_slice.inputs["labels"].tolist() == [[0, 1], [6, 7]]
    assert first_slice.inputs["shift_labels"].tolist() == [[1, 2], [7, 8]]
    assert last_slice.inputs["shift_labels"].tolist() == [[3, 4, 5, -100], [9, 10, 11, -100]]
    assert last_slice.inputs["input_ids"].tolist() == [[2, 3, 4, 5], [8, 9, 10, 11]]
    assert last_slice.inputs["attention_mask"].shape == (2, 6) and last_slice.inputs["scale"] == 0.5
    assert last_slice.inputs["inputs_embeds"].shape == (2, 4, 3)
    assert first_slice.inputs["bias"].shape == (2, 1, 2, 2) and last_slice.inputs["bias"].shape == (
        2,
        1,
        4,
        6,
    )
    with pytest.raises(Refusal, match="6 tokens are too few for 7 slices"):
        Slicing(7, "calls").split_batch(batch)


def test_only_what_runs_along_the_sequence_is_cut() -> None:
    """An input whose width happens to equal the sequence length is not sliced."""
    batch = {"input_ids": torch.zeros(2, 6), "features": torch.zeros(2, 4)}
    slicing = Slicing(2, "calls", along=sequence_inputs(batch))
    later = {"input_ids": torch.zeros(2, 4), "features": torch.zeros(2, 4)}
    assert [p.inputs["features"].shape for p in slicing.split_batch(later)] == [(2, 4), (2, 4)]
    assert [p.inputs["input_ids"].shape for p in slicing.split_batch(later)] == [(2, 2), (2, 2)]
    cut_both = Slicing(2, "calls", along=frozenset(later))
    with pytest.raises(Refusal, match="`features` is not as long"):
        cut_both.split_batch(batch)


def test_a_loss_without_labels_weighs_tokens() -> None:
    """A loss without labels is the mean of its slices, weighted by lengths."""

    class Values(Causal):
        def forward(self, input_ids: Tensor, values: Tensor) -> Tensor:
            x = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1]))
            for block in self.blocks:
                x = block(x, None)
            return ((x - values) ** 2).mean()

    ids = models.tokens(3, 11, mask=False)["input_ids"]
    batch = {"input_ids": ids, "values": torch.randn(3, 11, 16, dtype=torch.float64)}
    model, copied = Values(layers=2), Values(layers=2)
    plan = make_plan(model, 'pipeline(order="Seq1F1B", micro=1, slices=3)')
    prepared = prepare(plan, batch)
    slices = slices_of(prepared.slicing, copied, prepared.traced, None)
    expected, _ = forward_backward(model, batch, None)
    loss, _ = forward_backward(copied, batch, slices)
    assert torch.allclose(loss, expected, rtol=GATE, atol=0)
    for p, q in zip(model.parameters(), copied.parameters()):
        assert p.grad is None or torch.allclose(p.grad, q.grad, rtol=1e-9, atol=1e-13)
