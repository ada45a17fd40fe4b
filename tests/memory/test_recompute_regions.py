"""Checkpointed regions of several modules: equal gradients, fewer saved inputs, any loop."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from schedlang.remat import group_consecutive, group_places, region_paths, sqrt_region_size
from schedlang.runtime.activation_memory.recompute import checkpoint, checkpoint_regions
from schedlang.runtime.forward import layers_of
from schedlang.runtime.offload.offloaded_activations import ActivationStore, offload_activations
from schedlang.runtime.storage.tiers import TierBytes
from tests.memory.test_recompute import Block, Products


class Stack(nn.Module):
    """Six blocks in a loop of some kind, with a side input."""

    def __init__(self, loop_kind, rate=0.3, count=6):
        super().__init__()
        self.blocks = nn.ModuleList(Block(rate=rate) for _ in range(count))
        self.way = loop_kind

    def forward(self, x, mask=None):
        pack, states = {"scale": [x.mean()]}, []
        for block in self.blocks:
            states.append(x)
            output = block(x, mask=mask, pack=pack)
            x = output["hidden"]
            if self.way == "glue":
                x = torch.nn.functional.dropout(x * 1.5, 0.2) + states[0]
            if self.way == "view":
                x = x.transpose(0, 1).transpose(0, 1)
            if self.way == "written":
                x = x * 1.0
                x += 1.0
        return x + sum(states) if self.way == "states" else x


TREES = [
    group_places(6, 6),
    group_places(6, 4),
    group_places(6, 2),
    group_places(6, 1, 2),
    group_places(6, 2, 2),
    ((0, (1, 2), (3,)), 4, 5),
    (((0, 1), 2), (3, (4, 5))),
    ((((0,), 1), 2), 3, (4,), 5),
]
PLAIN = tuple(range(6))
LOOP_KINDS = ["plain", "glue", "view", "written", "states"]


def gradients(model, times=1):
    torch.manual_seed(1)
    x = torch.randn(2, 4, 8, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    model.zero_grad()
    torch.manual_seed(2)
    out = x
    for _ in range(times):
        out = model(out, mask=mask)
    after = torch.rand(3)
    out.square().sum().backward()
    return [out.detach(), x.grad, after, torch.rand(3), *(p.grad for p in model.parameters())]


def make_pair(loop_kind, tree, save=(), **options):
    torch.manual_seed(0)
    plain = Stack(loop_kind, **options).double()
    recomputed = copy.deepcopy(plain)
    checkpoint_regions(list(recomputed.blocks), tree, save)
    return plain, recomputed


@pytest.mark.parametrize("way", LOOP_KINDS)
@pytest.mark.parametrize("tree", TREES, ids=str)
def test_same_gradients_bit_by_bit(tree, way):
    """Output, gradients and random state are the original's, whatever runs between two calls,
    called once and twice."""
    plain, recomputed = make_pair(way, tree)
    for times in (1, 2):
        actual, expected = gradients(recomputed, times), gradients(plain, times)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def count_products(model):
    with Products() as counter:
        gradients(model)
    return counter.products


@pytest.mark.parametrize(
    "tree, more",
    [
        (group_places(6, 6), 6),
        (group_places(6, 1, 2), 3),
        ((((0, 1), 2, 3),), 6),
        (((((0,), 1), 2),), 6),
        ((((0, 1), (2, 3)),), 6),
    ],
)
def test_runs_as_often_as_the_tree_says(tree, more):
    """A module runs once more for each region around it, except where it ends an inner region,
    whose input alone is needed."""
    plain, recomputed = make_pair("plain", tree, count=len(region_paths(tree)))
    assert count_products(recomputed) - count_products(plain) == 4 * more


def kept_bytes(model):
    """Return the bytes that live between forward and backward, without parameters; and the
    output."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with StorageRecorder(weights) as recorder:
        x = torch.randn(2, 4, 8, dtype=torch.float64)
        out = model(x)
    del x
    return recorder.alive(), out


class StorageRecorder(TorchDispatchMode):
    """Records every storage that an operator creates, while it lives."""

    def __init__(self, excluded):
        super().__init__()
        self.known, self.seen = excluded, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage.data_ptr() not in self.known:
                    self.seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def alive(self):
        return sum(size for reference, size in self.seen.values() if not reference.expired())


def test_keeps_one_input_for_a_region():
    """A region keeps its input only, however many blocks it has."""
    unit = 2 * 4 * 8 * 8
    sizes = [
        kept_bytes(make_pair("plain", group_places(n, n), rate=0.0, count=n)[1])[0] for n in (2, 6)
    ]
    assert sizes[0] == sizes[1] <= 4 * unit
    three_regions = kept_bytes(make_pair("plain", group_places(6, 2), rate=0.0)[1])[0]
    assert three_regions == sizes[0] + 2 * unit
    assert kept_bytes(make_pair("plain", PLAIN)[0])[0] > 20 * unit


def test_a_graph_kept_for_a_second_backward():
    """Two backwards through one graph, and a split backward, are equal."""
    plain, recomputed = make_pair("plain", ((0, 1), (2, (3, 4)), 5))
    expected = gradients(plain)
    torch.manual_seed(1)
    x = torch.randn(2, 4, 8, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(2)
    loss = recomputed(x, mask=torch.ones(4, 4, dtype=torch.bool).tril()).square().sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    grads = torch.autograd.grad(loss, list(recomputed.parameters()))
    assert torch.equal(first, expected[1])
    assert all(torch.equal(a, b) for a, b in zip(grads, expected[4:], strict=True))


def test_no_graph_no_region():
    """Nothing is held after backward, or after a forward without gradients."""
    plain, recomputed = make_pair("plain", group_places(6, 4), rate=0.0)
    gradients(recomputed)
    with torch.no_grad():
        x = torch.randn(2, 4, 8, dtype=torch.float64)
        assert torch.equal(recomputed(x), plain(x))
    chains = {id(layers_of(b).kinds["checkpoint"].chain) for b in recomputed.blocks}
    assert len(chains) == 1 and not layers_of(recomputed.blocks[0]).kinds["checkpoint"].chain.open


def test_calls_out_of_turn():
    """Blocks called in another order, skipped or repeated are recomputed too."""
    plain, recomputed = make_pair("plain", group_places(6, 3))

    def run(model, order):
        model.zero_grad()
        torch.manual_seed(3)
        x = torch.randn(2, 4, 8, dtype=torch.float64)
        pack = {"scale": [1.0]}
        for k in order:
            x = model.blocks[k](x, pack=pack)["hidden"]
        x.square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    for order in [(0, 1, 3, 4, 5), (5, 4, 3, 2, 1, 0), (0, 0, 1, 1, 2), (1, 2, 3)]:
        actual, expected = run(recomputed, order), run(plain, order)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True)), order


def test_a_forward_that_ends_in_the_middle():
    """An exception between or inside calls leaves nothing behind."""
    plain, recomputed = make_pair("plain", group_places(6, 3))

    def stop(*_):
        raise KeyboardInterrupt

    handle = recomputed.blocks[1].norm.register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        gradients(recomputed)
    handle.remove()
    actual, expected = gradients(recomputed), gradients(plain)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_a_copy_recomputes_itself():
    """A deep copy has its own regions over its own blocks."""
    _, recomputed = make_pair("plain", group_places(6, 3), rate=0.0)
    copied = copy.deepcopy(recomputed)
    with torch.no_grad():
        for p in copied.parameters():
            p.mul_(2.0)
    gradients(copied)
    chains = [layers_of(m.blocks[0]).kinds["checkpoint"].chain for m in (recomputed, copied)]
    assert chains[0] is not chains[1] and recomputed.blocks[1].up.weight.grad is None
    assert copied.blocks[1].up.weight.grad is not None


def test_an_input_that_is_written_into_later():
    """If the model overwrites a region's saved input, that is an error, never a wrong gradient."""
    _, recomputed = make_pair("plain", group_places(6, 3), rate=0.0)
    x = torch.randn(2, 4, 8, dtype=torch.float64) * 1.0
    out = recomputed.blocks[0](x, pack={"scale": [1.0]})["hidden"]
    out = recomputed.blocks[1](out, pack={"scale": [1.0]})["hidden"]
    x.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        out.sum().backward()


def test_a_second_run_that_takes_another_way():
    """A second run that saves other tensors is an error that names the class."""
    _, recomputed = make_pair("plain", group_places(6, 3), rate=0.0)
    calls = []
    recomputed.blocks[1].norm.register_forward_hook(lambda *_: calls.append(1))
    up = recomputed.blocks[1].up.forward
    recomputed.blocks[1].up.forward = lambda x: up(x) if len(calls) < 2 else up(x).exp().log()
    with pytest.raises(RuntimeError, match="recomputation of Block ran differently"):
        gradients(recomputed)


def test_own_generators_are_replayed():
    """A module with its own generator draws the same again, in a region and alone."""

    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.made = nn.Linear(4, 4), torch.Generator().manual_seed(5)

        def forward(self, x):
            return self.lin(x).tanh() * torch.rand(4, generator=self.made, dtype=x.dtype)

    def run(wrapped):
        torch.manual_seed(0)
        model = nn.Sequential(Noisy(), Noisy()).double()
        wrapped(model)
        out = model(torch.ones(3, 4, dtype=torch.float64))
        out.sum().backward()
        return [*(p.grad for p in model.parameters()), *(m.made.get_state() for m in model)]

    expected = run(lambda model: None)
    for wrapped in (
        lambda m: checkpoint_regions(list(m), group_places(2, 2)),
        lambda m: [checkpoint(k) for k in m],
    ):
        assert all(torch.equal(a, b) for a, b in zip(run(wrapped), expected, strict=True))


def test_kept_inputs_are_offloaded():
    """With `offload` on the same modules the region's input is on the host."""
    _, recomputed = make_pair("plain", group_places(6, 3), rate=0.0)
    store = ActivationStore(smallest=0, ledger=TierBytes())
    for block in recomputed.blocks:
        offload_activations(block, store)
    plain, _ = make_pair("plain", PLAIN, rate=0.0)
    assert all(
        torch.equal(a, b) for a, b in zip(gradients(recomputed), gradients(plain), strict=True)
    )
    unit = 2 * 4 * 8 * 8
    assert store.moved <= 2 * (unit + 8 + 16)  # one input for each region, the scale and the mask


def test_trees_of_places():
    """Groups cover all modules in order; the last region may be shorter."""
    assert group_places(5, 2) == ((0, 1), (2, 3), (4,)) and group_places(5, 1, 2) == (
        (0,),
        1,
        (2,),
        3,
        (4,),
    )
    assert group_places(7, 2, 2) == ((0, 1), 2, 3, (4, 5), 6) and group_places(0, 3) == ()
    assert [sqrt_region_size(n) for n in (1, 2, 4, 5, 9, 16, 24)] == [1, 2, 2, 3, 3, 4, 5]
    assert group_consecutive(["h.1", "h.2", "h.4", "g.5", "g.6", "x"]) == [
        ("h.1", "h.2"),
        ("h.4",),
        ("g.5", "g.6"),
        ("x",),
    ]
    assert region_paths((0, (1, (2,)), 3)) == ((), (0,), (0, 1), ())
