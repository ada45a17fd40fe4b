"""Offloaded activations: equal gradients, bytes on the host, prefetching, small tensors."""

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
    """Views of one storage, expanded and transposed tensors, dropout, and a buffer."""

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


def build_stack(dtype=torch.float64):
    torch.manual_seed(0)
    return Stack().to(dtype)


def inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 8, SIZE, dtype=dtype, generator=generator).requires_grad_()
    return x, torch.tensor([[1.5]], dtype=dtype, requires_grad=True)


def run_forward(model, dtype=torch.float64):
    model.zero_grad()
    x, scale = inputs(dtype)
    torch.manual_seed(2)
    return model(x, scale), [x, scale, *model.parameters()]


def gradients(model, dtype=torch.float64):
    out, leaves = run_forward(model, dtype)
    out.square().sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_same_gradients_bit_by_bit(dtype, prefetch):
    """Output and gradients equal the original's; names and state stay."""
    model = build_stack(dtype)
    expected, state = gradients(model, dtype), list(model.state_dict())
    store = ActivationStore(prefetch=prefetch, smallest=0)
    for block in model.blocks:
        offload_activations(block, store)
    actual = gradients(model, dtype)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert store.moved > 0 and list(model.state_dict()) == state


def test_what_is_small_moves_in_a_proof():
    """Small storages stay on the device, except in a proof."""
    model, moved = build_stack(torch.float64), []
    for context in (contextlib.nullcontext(), offload_all_sizes(), contextlib.nullcontext()):
        with context:
            store = ActivationStore()
        copied = copy.deepcopy(model)
        for block in copied.blocks:
            offload_activations(block, store)
        gradients(copied, torch.float64)
        moved.append(store.moved)
    assert moved[0] == moved[2] == 0 < moved[1]


def saved_bytes(model):
    """Return the bytes of distinct storages that autograd saves, without parameters and buffers."""
    weights = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    sizes = {}

    def pack(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out, _ = run_forward(model)
    del out
    return sum(sizes.values())


def test_residence():
    """After forward all saved bytes are on the host, after backward none."""
    model = build_stack()
    expected = saved_bytes(model)
    ledger = TierBytes()
    store = ActivationStore(smallest=0, ledger=ledger)
    for block in model.blocks:
        offload_activations(block, store)
    out, leaves = run_forward(model)
    gc.collect()
    live_bytes = sum(t.untyped_storage().nbytes() for t in (out, *leaves[:2]))
    assert ledger.bytes("cpu") == expected  # each storage once, no weights
    assert ledger.bytes("device") <= live_bytes
    out.sum().backward()
    del out, leaves
    gc.collect()
    assert ledger.bytes("cpu") == 0 and ledger.bytes("device") == 0
    assert ledger.peak["cpu"] == expected


@pytest.mark.parametrize("run", ["nothing", "halves"])
def test_what_is_small_holds_no_graph(run):
    """Small results that an operator saves itself do not keep a graph alive, without a backward or
    with a split one."""
    model, ledger = build_stack(), TierBytes()
    store = ActivationStore(smallest=4096, ledger=ledger)  # of softmax 2 KiB stay
    for block in model.blocks:
        offload_activations(block, store)
    out, leaves = run_forward(model)
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
    """Backward holds one block's tensors without prefetch, two with 1, three with 2."""
    peaks = []
    for prefetch in (0, 1, 2):
        model, ledger = build_stack(), TierBytes()
        store = ActivationStore(prefetch=prefetch, smallest=0, ledger=ledger)
        for block in model.blocks:
            offload_activations(block, store)
        out, _ = run_forward(model)
        gc.collect()
        total = ledger.bytes("cpu")
        ledger.peak["device"] = 0
        out.sum().backward()
        peaks.append(ledger.peak["device"] / total)
    assert peaks[0] < peaks[1] < peaks[2]
    assert 0.6 < peaks[1] < 0.75 and peaks[2] > 0.95


def test_small_tensors_stay():
    """Nothing below the limit moves."""
    model = build_stack()
    store = ActivationStore(smallest=1 << 30, ledger=TierBytes())
    for block in model.blocks:
        offload_activations(block, store)
    gradients(model)
    assert store.moved == 0 and store.ledger.peak["cpu"] == 0


@pytest.mark.parametrize("order", [("checkpoint", "offload"), ("offload", "checkpoint")])
def test_offloads_the_inputs_of_a_checkpoint(order):
    """With a checkpoint, in either order, the host holds the blocks' inputs only."""
    model = build_stack()
    expected = gradients(model)
    ledger = TierBytes()
    store = ActivationStore(smallest=1024, ledger=ledger)
    for block in model.blocks:
        for kind in order:
            checkpoint(block) if kind == "checkpoint" else offload_activations(block, store)
    actual = gradients(model)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    out, leaves = run_forward(model)
    gc.collect()
    assert ledger.bytes("cpu") == 3 * leaves[0].untyped_storage().nbytes()


def test_interleaved_microbatches():
    """Two microbatches in flight, with backwards in either order, give the original's gradients."""
    model = build_stack()
    plain = copy.deepcopy(model)
    store = ActivationStore(smallest=0)
    for block in model.blocks:
        offload_activations(block, store)
    for order in ([0, 1], [1, 0]):
        results = []
        for variant in (plain, model):
            variant.zero_grad()
            outs = [run_forward(variant)[0], run_forward(variant)[0]]
            for index in order:
                (outs[index] * (index + 1.0)).sum().backward()
            results.append([p.grad for p in variant.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_retained_graph_and_changed_tensors():
    """A second backward is equal; a storage written between two saves is copied twice."""

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
    """Under the float64 mode of verification gradients stay the same."""
    model = build_stack()
    with enter_modes(Float64):
        expected = gradients(model)
        for block in model.blocks:
            offload_activations(block, ActivationStore(smallest=0))
        actual = gradients(model)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_no_gradient_no_copy():
    """Under no_grad nothing is moved."""
    model, store = build_stack(), ActivationStore(smallest=0)
    for block in model.blocks:
        offload_activations(block, store)
    with torch.no_grad():
        run_forward(model)
    assert store.moved == 0


class Gates(nn.Module):
    """Parts of one tensor that are written one by one, as in torch's recurrent cells."""

    def __init__(self, parts: int = 3) -> None:
        super().__init__()
        self.parts, self.up = parts, nn.Linear(8, 8 * parts)

    def forward(self, x):
        """Return the product of all parts."""
        product = torch.ones_like(x)
        for part in self.up(x).unsafe_chunk(self.parts, -1):
            product = product * part.sigmoid_()
        return product


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
    """Saved parts of one tensor are not confused after in-place writes."""
    torch.manual_seed(0)
    plain = make().double()
    offloaded = copy.deepcopy(plain)
    x = torch.randn(4, 5, 8, dtype=torch.float64)
    with offload_all_sizes():
        offload_activations(offloaded, ActivationStore())
    for model in (plain, offloaded):
        out = model(x)
        (out if isinstance(out, torch.Tensor) else out[0]).square().sum().backward()
    for (name, parameter), other in zip(
        plain.named_parameters(), offloaded.parameters(), strict=True
    ):
        assert torch.equal(parameter.grad, other.grad), name
