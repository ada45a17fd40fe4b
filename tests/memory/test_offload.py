"""Offloaded activations: on the host between forward and backward, the same gradients after."""

from __future__ import annotations

import contextlib
import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from schedlang.runtime.activation_memory.recompute import checkpoint
from schedlang.runtime.float64 import Float64
from schedlang.runtime.modes import enter_modes
from schedlang.runtime.offload.offloaded_activations import (
    ActivationStore,
    offload_activations,
    offload_all_sizes,
)
from schedlang.runtime.pipeline.split_backward import SplitBackward
from schedlang.runtime.storage.tiers import TierBytes

SIZE = 32


class Block(nn.Module):
    """Views of one storage, an expanded and a transposed tensor, dropout, and a buffer."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(SIZE, 3 * SIZE), nn.Linear(SIZE, SIZE, bias=False)
        self.norm = nn.LayerNorm(SIZE)
        self.register_buffer("table", torch.randn(SIZE, SIZE))

    def forward(self, x, scale=None):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        mixed = torch.softmax(q @ k.mT, -1) @ (v * self.table[: x.shape[-2]])
        x = x + F.dropout(self.out(mixed), 0.2)
        return x * scale.expand_as(x) if scale is not None else x


class Stack(nn.Module):
    """Three blocks, one after the other."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x, scale):
        for block in self.blocks:
            x = block(x, scale=scale)
        return x


def build(dtype=torch.float64):
    torch.manual_seed(0)
    return Stack().to(dtype)


def inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 8, SIZE, dtype=dtype, generator=generator).requires_grad_()
    return x, torch.tensor([[1.5]], dtype=dtype, requires_grad=True)


def forward(model, dtype=torch.float64):
    model.zero_grad()
    x, scale = inputs(dtype)
    torch.manual_seed(2)
    return model(x, scale), [x, scale, *model.parameters()]


def gradients(model, dtype=torch.float64):
    out, leaves = forward(model, dtype)
    out.square().sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_same_gradients_bit_by_bit(dtype, prefetch):
    """Output and every gradient equal the untouched module's; names and state stay."""
    model = build(dtype)
    expected, state = gradients(model, dtype), list(model.state_dict())
    store = ActivationStore(prefetch=prefetch, smallest=0)
    for block in model.blocks:
        offload_activations(block, store)
    found = gradients(model, dtype)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert store.moved > 0 and list(model.state_dict()) == state


def test_what_is_small_moves_in_a_proof():
    """Stores leave small storages where they are, but not those of a proof."""
    model, moved = build(torch.float64), []
    for context in (contextlib.nullcontext(), offload_all_sizes(), contextlib.nullcontext()):
        with context:
            store = ActivationStore()
        twin = copy.deepcopy(model)
        for block in twin.blocks:
            offload_activations(block, store)
        gradients(twin, torch.float64)
        moved.append(store.moved)
    assert moved[0] == moved[2] == 0 < moved[1]


def saved_storages(model):
    """Bytes of distinct storages that autograd keeps, parameters and buffers left out."""
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    kept = {}

    def pack(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out, _ = forward(model)
    del out
    return sum(kept.values())


def test_residence():
    """After forward all saved bytes lie on the host, after backward none anywhere."""
    model = build()
    wanted = saved_storages(model)
    ledger = TierBytes()
    store = ActivationStore(smallest=0, ledger=ledger)
    for block in model.blocks:
        offload_activations(block, store)
    out, leaves = forward(model)
    gc.collect()
    alive = sum(t.untyped_storage().nbytes() for t in (out, *leaves[:2]))
    assert ledger.bytes("cpu") == wanted  # each storage once, weights never
    assert ledger.bytes("device") <= alive
    out.sum().backward()
    del out, leaves
    gc.collect()
    assert ledger.bytes("cpu") == 0 and ledger.bytes("device") == 0
    assert ledger.peak["cpu"] == wanted


@pytest.mark.parametrize("run", ["nothing", "halves"])
def test_what_is_small_holds_no_graph(run):
    """Results that an operator saves itself and that stay: a graph that no backward walked, or one
    in halves, which leaves the way to the inputs alone, goes with its results."""
    model, ledger = build(), TierBytes()
    store = ActivationStore(smallest=4096, ledger=ledger)  # of softmax 2 KiB stay
    for block in model.blocks:
        offload_activations(block, store)
    out, leaves = forward(model)
    if run == "halves":
        half = SplitBackward([out], [torch.ones_like(out)], leaves[:2])
        half.backward_inputs()
        half.backward_weights()
        del half
    assert ledger.peak["cpu"] > 0
    del out, leaves
    gc.collect()
    assert ledger.bytes("cpu") == 0 and ledger.bytes("device") == 0


def test_prefetch_reloads_ahead():
    """Backward holds one block's tensors at a time without prefetch, two with, three with two."""
    peaks = []
    for prefetch in (0, 1, 2):
        model, ledger = build(), TierBytes()
        store = ActivationStore(prefetch=prefetch, smallest=0, ledger=ledger)
        for block in model.blocks:
            offload_activations(block, store)
        out, _ = forward(model)
        gc.collect()
        whole = ledger.bytes("cpu")
        ledger.peak["device"] = 0
        out.sum().backward()
        peaks.append(ledger.peak["device"] / whole)
    assert peaks[0] < peaks[1] < peaks[2]
    assert 0.6 < peaks[1] < 0.75 and peaks[2] > 0.95


def test_small_tensors_stay():
    """Nothing below the limit moves."""
    model = build()
    store = ActivationStore(smallest=1 << 30, ledger=TierBytes())
    for block in model.blocks:
        offload_activations(block, store)
    gradients(model)
    assert store.moved == 0 and store.ledger.peak["cpu"] == 0


@pytest.mark.parametrize("order", [("checkpoint", "offload"), ("offload", "checkpoint")])
def test_offloads_the_inputs_of_a_checkpoint(order):
    """With both, in either order, the host holds the blocks' inputs and nothing else is kept."""
    model = build()
    expected = gradients(model)
    ledger = TierBytes()
    store = ActivationStore(smallest=1024, ledger=ledger)
    for block in model.blocks:
        for kind in order:
            checkpoint(block) if kind == "checkpoint" else offload_activations(block, store)
    found = gradients(model)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    out, leaves = forward(model)
    gc.collect()
    assert ledger.bytes("cpu") == 3 * leaves[0].untyped_storage().nbytes()


def test_interleaved_microbatches():
    """Two microbatches in flight, backward in either order, give what they give apart."""
    model = build()
    plain = copy.deepcopy(model)
    store = ActivationStore(smallest=0)
    for block in model.blocks:
        offload_activations(block, store)
    for order in ([0, 1], [1, 0]):
        found = []
        for each in (plain, model):
            each.zero_grad()
            outs = [forward(each)[0], forward(each)[0]]
            for place in order:
                (outs[place] * (place + 1.0)).sum().backward()
            found.append([p.grad for p in each.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_retained_graph_and_changed_tensors():
    """A second backward sees the same; a storage changed between two saves is copied twice."""

    class Twice(nn.Module):
        def forward(self, x, buffer):
            first = x * buffer.clone().mul_(1.0)
            buffer.add_(1)
            return first * buffer

    module = Twice()
    offload_activations(module, ActivationStore(smallest=0))
    x = torch.ones(8, 8, requires_grad=True)
    buffer = torch.full((8, 8), 2.0)
    loss = module(x, buffer).sum()
    grads = [torch.autograd.grad(loss, x, retain_graph=keep)[0] for keep in (True, False)]
    assert torch.equal(grads[0], torch.full((8, 8), 6.0)) and torch.equal(*grads)


def test_under_float64():
    """Under the ambient float64 mode, as verification runs it, gradients stay the same."""
    model = build()
    with enter_modes(Float64):
        expected = gradients(model)
        for block in model.blocks:
            offload_activations(block, ActivationStore(smallest=0))
        found = gradients(model)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_no_gradient_no_copy():
    """Under no_grad nothing is moved."""
    model, store = build(), ActivationStore(smallest=0)
    for block in model.blocks:
        offload_activations(block, store)
    with torch.no_grad():
        forward(model)
    assert store.moved == 0


class Gates(nn.Module):
    """Parts of one tensor that are written one by one, as in torch's own recurrent cells."""

    def __init__(self, parts: int = 3) -> None:
        super().__init__()
        self.parts, self.up = parts, nn.Linear(8, 8 * parts)

    def forward(self, x):
        """The product of all parts."""
        made = torch.ones_like(x)
        for part in self.up(x).unsafe_chunk(self.parts, -1):
            made = made * part.sigmoid_()
        return made


@pytest.mark.parametrize(
    "make",
    [
        Gates,
        lambda: nn.LSTM(8, 8, 2, batch_first=True),
        lambda: nn.GRU(8, 8, batch_first=True),
        lambda: nn.LSTM(8, 8, 1, bidirectional=True, proj_size=4),
    ],
)
def test_parts_that_count_their_own_writes(make):
    """What was saved of one part is not taken for what another part was before it was written."""
    torch.manual_seed(0)
    plain = make().double()
    moved = copy.deepcopy(plain)
    x = torch.randn(4, 5, 8, dtype=torch.float64)
    with offload_all_sizes():
        offload_activations(moved, ActivationStore())
    for model in (plain, moved):
        out = model(x)
        (out if isinstance(out, torch.Tensor) else out[0]).square().sum().backward()
    for (name, one), other in zip(plain.named_parameters(), moved.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name
