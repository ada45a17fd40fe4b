"""Regions of several modules: the same gradients bit by bit, from fewer inputs, in any loop."""

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

    def __init__(self, way, rate=0.3, count=6):
        super().__init__()
        self.blocks = nn.ModuleList(Block(rate=rate) for _ in range(count))
        self.way = way

    def forward(self, x, mask=None):
        pack, states = {"scale": [x.mean()]}, []
        for block in self.blocks:
            states.append(x)
            made = block(x, mask=mask, pack=pack)
            x = made["hidden"]
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
WAYS = ["plain", "glue", "view", "written", "states"]


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


def pair(way, tree, save=(), **options):
    torch.manual_seed(0)
    plain = Stack(way, **options).double()
    ours = copy.deepcopy(plain)
    checkpoint_regions(list(ours.blocks), tree, save)
    return plain, ours


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tree", TREES, ids=str)
def test_same_gradients_bit_by_bit(tree, way):
    """Output, every gradient and the random state afterwards are the untouched model's, whatever
    stands between two calls, called once and twice."""
    plain, ours = pair(way, tree)
    for times in (1, 2):
        found, expected = gradients(ours, times), gradients(plain, times)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def counted(model):
    with Products() as seen:
        gradients(model)
    return seen.products


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
    """A module runs once more for each region around it; but a region that ends another one not
    for that, which wants its input alone."""
    plain, ours = pair("plain", tree, count=len(region_paths(tree)))
    assert counted(ours) - counted(plain) == 4 * more


def kept(model):
    """Bytes of what lives on between forward and backward, parameters left out."""
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with Storages(known) as seen:
        x = torch.randn(2, 4, 8, dtype=torch.float64)
        out = model(x)
    del x
    return seen.alive(), out


class Storages(TorchDispatchMode):
    """Every storage that an operator makes, as long as it lives."""

    def __init__(self, known):
        super().__init__()
        self.known, self.seen = known, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage.data_ptr() not in self.known:
                    self.seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def alive(self):
        return sum(size for held, size in self.seen.values() if not held.expired())


def test_keeps_one_input_for_a_region():
    """A region of all blocks keeps its input alone; a block more or less in it changes nothing."""
    unit = 2 * 4 * 8 * 8
    found = [kept(pair("plain", group_places(n, n), rate=0.0, count=n)[1])[0] for n in (2, 6)]
    assert found[0] == found[1] <= 4 * unit
    three = kept(pair("plain", group_places(6, 2), rate=0.0)[1])[0]
    assert three == found[0] + 2 * unit
    assert kept(pair("plain", PLAIN)[0])[0] > 20 * unit


def test_a_graph_kept_for_a_second_backward():
    """Two backwards through one graph, and a backward in two parts, give the same."""
    plain, ours = pair("plain", ((0, 1), (2, (3, 4)), 5))
    expected = gradients(plain)
    torch.manual_seed(1)
    x = torch.randn(2, 4, 8, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(2)
    loss = ours(x, mask=torch.ones(4, 4, dtype=torch.bool).tril()).square().sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    grads = torch.autograd.grad(loss, list(ours.parameters()))
    assert torch.equal(first, expected[1])
    assert all(torch.equal(a, b) for a, b in zip(grads, expected[4:], strict=True))


def test_no_graph_no_region():
    """Nothing is held after backward, nor after a forward without gradients."""
    plain, ours = pair("plain", group_places(6, 4), rate=0.0)
    gradients(ours)
    with torch.no_grad():
        x = torch.randn(2, 4, 8, dtype=torch.float64)
        assert torch.equal(ours(x), plain(x))
    chains = {id(layers_of(b).kinds["checkpoint"].chain) for b in ours.blocks}
    assert len(chains) == 1 and not layers_of(ours.blocks[0]).kinds["checkpoint"].chain.open


def test_calls_out_of_turn():
    """Blocks called in another order, skipped or twice in a row are recomputed all the same."""
    plain, ours = pair("plain", group_places(6, 3))

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
        found, expected = run(ours, order), run(plain, order)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), order


def test_a_forward_that_ends_in_the_middle():
    """An exception between two calls, or within one, leaves nothing behind."""
    plain, ours = pair("plain", group_places(6, 3))

    def stop(*_):
        raise KeyboardInterrupt

    handle = ours.blocks[1].norm.register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        gradients(ours)
    handle.remove()
    found, expected = gradients(ours), gradients(plain)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_copy_recomputes_itself():
    """A deep copy has regions of its own, over its own blocks."""
    _, ours = pair("plain", group_places(6, 3), rate=0.0)
    copied = copy.deepcopy(ours)
    with torch.no_grad():
        for p in copied.parameters():
            p.mul_(2.0)
    gradients(copied)
    chains = [layers_of(m.blocks[0]).kinds["checkpoint"].chain for m in (ours, copied)]
    assert chains[0] is not chains[1] and ours.blocks[1].up.weight.grad is None
    assert copied.blocks[1].up.weight.grad is not None


def test_an_input_that_is_written_into_later():
    """What a region kept and the model then wrote into is an error, never a wrong gradient."""
    _, ours = pair("plain", group_places(6, 3), rate=0.0)
    x = torch.randn(2, 4, 8, dtype=torch.float64) * 1.0
    out = ours.blocks[0](x, pack={"scale": [1.0]})["hidden"]
    out = ours.blocks[1](out, pack={"scale": [1.0]})["hidden"]
    x.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        out.sum().backward()


def test_a_second_run_that_takes_another_way():
    """A module whose second run saves other tensors is an error that names its class."""
    _, ours = pair("plain", group_places(6, 3), rate=0.0)
    calls = []
    ours.blocks[1].norm.register_forward_hook(lambda *_: calls.append(1))
    up = ours.blocks[1].up.forward
    ours.blocks[1].up.forward = lambda x: up(x) if len(calls) < 2 else up(x).exp().log()
    with pytest.raises(RuntimeError, match="recomputation of Block ran differently"):
        gradients(ours)


def test_own_generators_are_replayed():
    """A module with a generator of its own draws the same again, in a region and alone."""

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
    """With `offload` on the same modules the input of the region lies on the host."""
    _, ours = pair("plain", group_places(6, 3), rate=0.0)
    store = ActivationStore(smallest=0, ledger=TierBytes())
    for block in ours.blocks:
        offload_activations(block, store)
    plain, _ = pair("plain", PLAIN, rate=0.0)
    assert all(torch.equal(a, b) for a, b in zip(gradients(ours), gradients(plain), strict=True))
    unit = 2 * 4 * 8 * 8
    assert store.moved <= 2 * (unit + 8 + 16)  # an input for each region, the scale and the mask


def test_trees_of_places():
    """Groups cover all places in order; a region is as many places as asked for, the last fewer."""
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
