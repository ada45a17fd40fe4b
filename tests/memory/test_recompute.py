"""Recomputed modules: the same gradients bit by bit, from less memory, all else kept."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.activation_memory.recompute import Checkpoint, checkpoint
from schedlang.runtime.activation_memory.selective import OPERATOR_CLASSES, is_saved_call
from schedlang.runtime.float64 import Float64
from schedlang.runtime.forward import layers_of
from schedlang.runtime.modes import enter_modes
from schedlang.runtime.scope import named_sites
from tests import models
from tests.proofs import planned, proven
from tests.ranks import run_ranks

SAVES = [(), ("linear",), ("attention",), ("linear", "attention"), OPERATOR_CLASSES]


class Block(nn.Module):
    """Attention and a feed-forward part, with dropout, keyword arguments and an odd output."""

    def __init__(self, size=8, rate=0.3):
        super().__init__()
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.up, self.down = nn.Linear(size, 2 * size), nn.Linear(2 * size, size, bias=False)
        self.norm, self.drop = nn.LayerNorm(size), nn.Dropout(rate)

    def forward(self, x, *, mask=None, pack=None):
        parts = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts, attn_mask=mask)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        x = x + self.drop(self.down(F.gelu(self.up(x)))) * pack["scale"][0]
        return {"hidden": x, "none": None, "pair": (x.sum(), 3)}


class Stack(nn.Module):
    """Two blocks: what a schedule checkpoints, and what lies around it."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x, mask=None):
        scale = x.mean()
        for block in self.blocks:
            x = block(x, mask=mask, pack={"scale": [scale]})["hidden"]
        return x


def batch(dtype=torch.float64):
    torch.manual_seed(1)
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    return torch.randn(2, 4, 8, dtype=dtype), mask


def gradients(model, dtype=torch.float64):
    x, mask = batch(dtype)
    x.requires_grad_()
    model.zero_grad()
    torch.manual_seed(2)
    out = model(x, mask=mask)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in model.parameters())]


class Products(TorchDispatchMode):
    """Counts matrix products and fused attention."""

    def __init__(self):
        super().__init__()
        self.products = self.attention = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        self.products += name in ("aten::mm", "aten::addmm")
        self.attention += name.endswith("flash_attention_for_cpu")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_same_gradients_bit_by_bit(dtype, save):
    """Output and every gradient equal the untouched module's, dropout included; names stay."""
    torch.manual_seed(0)
    model = Stack().to(dtype)
    names, state = [n for n, _ in model.named_modules()], list(model.state_dict())
    expected = gradients(model, dtype)
    for block in model.blocks:
        checkpoint(block, save)
    found = gradients(model, dtype)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert [n for n, _ in model.named_modules()] == names and list(model.state_dict()) == state


def test_recomputes_what_is_not_saved():
    """Without `save` every product runs again in backward, with it those of its class do not."""
    counts = {}
    for save in [None, *SAVES]:
        torch.manual_seed(0)
        model = Stack().double()
        for block in model.blocks:
            if save is not None:
                checkpoint(block, save)
        with Products() as seen:
            gradients(model)
        counts[save] = (seen.products, seen.attention)
    plain, whole = counts[None], counts[()]
    assert (whole[0] - plain[0], whole[1] - plain[1]) == (2 * 4, 2)
    assert counts[("linear",)] == (plain[0], plain[1] + 2)
    assert counts[("attention",)] == (whole[0], plain[1])
    assert counts[("linear", "attention")] == plain


def test_keeps_less():
    """Between forward and backward only the inputs of the block are held."""

    def held(model):
        kept = {}
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

        def pack(t):
            if t.untyped_storage().data_ptr() not in weights:
                kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = model(*batch())
        return sum(kept.values()), out

    model = Stack().double()
    before, _ = held(model)
    for block in model.blocks:
        checkpoint(block)
    after, _ = held(model)
    assert after < before / 5


def test_own_hooks_run_once():
    """Hooks of the module itself see one call; those of its submodules see the recomputation."""
    model = Stack().double()
    seen = []
    model.blocks[0].register_forward_hook(lambda *_: seen.append("own"))
    model.blocks[0].register_forward_pre_hook(lambda *_: seen.append("pre"))
    model.blocks[0].norm.register_forward_hook(lambda *_: seen.append("inner"))
    checkpoint(model.blocks[0])
    gradients(model)
    assert seen.count("own") == seen.count("pre") == 1 and seen.count("inner") == 2


def test_ambient_modes_hold_in_recomputation():
    """A module that casts to float32 computes in float64 in the recomputation too."""

    class Casting(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.float64))

        def forward(self, x):
            return (x.float() @ self.weight.to(torch.float32)).tanh()

    torch.manual_seed(0)
    module = Casting()
    x = torch.randn(4, 8, dtype=torch.float64)

    def run():
        module.zero_grad()
        with enter_modes(Float64):
            loss = module(x).square().sum()
        assert loss.dtype == torch.float64
        loss.backward()  # outside the modes
        return module.weight.grad

    expected = run()
    for save in SAVES:
        checkpoint(module, save)
        assert torch.equal(run(), expected)


def test_state_among_the_arguments():
    """A cache that the forward fills and a list that it appends to change once, not twice."""

    class Cache:
        def __init__(self):
            self.keys = None

    class Attend(nn.Module):
        def __init__(self):
            super().__init__()
            self.key = nn.Linear(4, 4)

        def forward(self, x, cache, losses):
            key = self.key(x)
            cache.keys = key if cache.keys is None else torch.cat([cache.keys, key])
            losses.append(key.square().sum())
            return (x @ cache.keys.T).softmax(-1) @ cache.keys

    torch.manual_seed(0)
    plain = Attend().double()
    ours = copy.deepcopy(plain)
    checkpoint(ours)
    found = []
    for module in (plain, ours):
        cache, losses = Cache(), []
        x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        out = module(module(x, cache, losses), cache, losses)
        (out.sum() + sum(losses)).backward()
        assert len(losses) == 2 and cache.keys.shape == (6, 4)
        found.append(module.key.weight.grad)
    assert torch.equal(*found)


def test_transformers_with_its_cache():
    """Llama as transformers builds it, its cache on, gives the same gradients."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(config).train()
    assert config.use_cache
    ours = copy.deepcopy(plain)
    for layer in ours.model.layers:
        checkpoint(layer)
    ids = torch.arange(12).view(2, 6)
    for model in (plain, ours):
        out = model(input_ids=ids, labels=ids)
        assert any(isinstance(one, transformers.Cache) for one in out.values())
        out.loss.backward()
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_no_gradient_no_checkpoint():
    """Under no_grad the module runs as ever, and evaluation equals training without dropout."""
    torch.manual_seed(0)
    model = Stack().double().eval()
    x, mask = batch()
    expected = model(x, mask=mask)
    for block in model.blocks:
        checkpoint(block, OPERATOR_CLASSES)
    with torch.no_grad():
        assert torch.equal(model(x, mask=mask), expected)


def test_retained_graph_and_split_backward():
    """Whole checkpoints can be run backward twice, as a split backward does."""
    torch.manual_seed(0)
    model = Stack().double()
    expected = gradients(model)
    for block in model.blocks:
        checkpoint(block)
    x, mask = batch()
    x.requires_grad_()
    torch.manual_seed(2)
    loss = model(x, mask=mask).square().sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    assert torch.equal(first, expected[1])
    assert all(torch.equal(a, b) for a, b in zip(grads, expected[2:], strict=True))


def test_a_copy_recomputes_itself():
    """A deep copy of a checkpointed module uses its own parameters."""
    torch.manual_seed(0)
    block = Block(rate=0.0).double()
    checkpoint(block)
    copied = copy.deepcopy(block)
    with torch.no_grad():
        for p in copied.parameters():
            p.zero_()
    assert layers_of(copied) is not layers_of(block)
    x, _ = batch()
    out = copied(x, pack={"scale": [1.0]})["hidden"]
    out.sum().backward()
    assert torch.equal(out, x) and block.up.weight.grad is None


def test_names_changed_buffers():
    """A module that changes its buffers in forward is refused when it runs."""
    real = nn.BatchNorm1d(3)
    checkpoint(real)
    with pytest.raises(Refusal, match="changes its buffers"):
        real(torch.randn(4, 3))
    real.eval()(torch.randn(4, 3))


class Growing(nn.Module):
    """Draws from a generator of its child, if that has one; puts in a child with buffers, if told
    to."""

    def __init__(self):
        super().__init__()
        self.child, self.grows = nn.Linear(4, 4), False

    def forward(self, x):
        self.child = nn.BatchNorm1d(4) if self.grows else self.child
        draws = getattr(self.child, "draws", None)
        return self.child(x) * (1.0 if draws is None else torch.rand(x.shape, generator=draws))


def test_what_a_module_holds_may_change_between_calls_and_within_one():
    """A generator that a child is given later is put back, also one of another child; a child that
    came with buffers is seen."""
    model, x = Growing(), torch.ones(3, 4, requires_grad=True)
    checkpoint(model)
    model(x).sum().backward()
    for child in (model.child, nn.Linear(4, 4)):
        child.draws = torch.Generator().manual_seed(3)
        model.child, x.grad = child, None
        model(x).sum().backward()
        drawn = torch.rand(x.shape, generator=torch.Generator().manual_seed(3))
        torch.testing.assert_close(x.grad, drawn @ child.weight)
    model.grows = True
    with pytest.raises(Refusal, match="changes its buffers"):
        model(x)


def test_changed_buffers_are_told_by_the_modules_path():
    """Its class says little, and sharded storage (FSDP2) puts one of its own in its place."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    named_sites(model)
    checkpoint(model[1])
    with pytest.raises(Refusal, match="`1` changes its buffers"):
        model(torch.randn(4, 3))
    stored = nn.BatchNorm1d(3)
    stored.__class__ = type("FSDPBatchNorm1d", (FSDPModule, nn.BatchNorm1d), {})
    checkpoint(stored)
    with pytest.raises(Refusal, match="`BatchNorm1d` changes its buffers"):
        stored(torch.randn(4, 3))


def test_kernels_that_draw_are_recomputed():
    """Attention with dropout is not kept: skipped, it would shift every later draw."""
    operator = torch.ops.aten._scaled_dot_product_flash_attention.default
    kept = frozenset([operator._schema.name])
    q = torch.empty(1, 1, 2, 2)
    for dropout, saved in [(0.0, True), (0.1, False)]:
        assert is_saved_call(kept, operator, (q, q, q, dropout), {}) == saved
    assert not is_saved_call(kept, operator, (q, q, q), {"dropout_p": 0.1})
    assert is_saved_call(kept, operator, (q, q, q), {})


class Once(nn.Module):
    """Makes something of constants in its first run alone, and some room in its second alone."""

    def __init__(self):
        super().__init__()
        self.product, self.table, self.runs = nn.Linear(4, 4, bias=False), None, 0

    def forward(self, x):
        self.runs += 1
        if self.table is None:
            self.table = torch.ones(4, 4, dtype=x.dtype) @ torch.eye(4, dtype=x.dtype)
        if self.runs == 2:
            torch.empty(3)
        return self.product(self.table @ x).sin()


class Cell(nn.Module):
    """Adds to a product in place, as cells of recurrent networks do."""

    def __init__(self):
        super().__init__()
        self.enter, self.again = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.again(self.enter(x).add_(x).tanh()).sigmoid()


class Scores(nn.Module):
    """Scales a product of four dims in place: `matmul` ends with a view that counts by itself."""

    def __init__(self):
        super().__init__()
        self.keys, self.values = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)

    def forward(self, x):
        x = x.expand(2, 3, 4, 4)
        keys = self.keys(x).mul_(2.0)
        return (x @ keys.mT).mul_(0.5).softmax(-1) @ self.values(x)


@pytest.mark.parametrize("make", [Once, Cell, Scores, lambda: nn.LSTM(4, 4, num_layers=2)])
def test_what_one_run_alone_makes_or_writes_into(make):
    """A second run may make more or less than the first, and results may be written into: the
    gradients are those of the untouched module, bit by bit."""
    torch.manual_seed(0)
    plain, x = make().double(), torch.randn(4, 4, dtype=torch.float64)
    ours = copy.deepcopy(plain)
    checkpoint(ours, ("linear",))
    for module in (plain, ours):
        out = module(x)
        (out[0] if isinstance(out, tuple) else out).square().sum().backward()
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.fixture
def packaged():
    """An attention as a package registers it: forward and backward are operators of its own."""
    ran = []
    with torch.library._scoped_library("spelt_attn", "FRAGMENT") as library:
        library.define("forward(Tensor q, Tensor k, Tensor v, float dropout_p=0.0) -> Tensor")
        library.define("backward(Tensor g, Tensor q, Tensor k, Tensor v) -> Tensor[]")

        def forward(q, k, v, dropout_p=0.0):
            ran.append("forward")
            mixed = torch.softmax(q @ k.mT, -1) @ v
            return F.dropout(mixed, dropout_p) if dropout_p else mixed

        def backward(g, q, k, v):
            ran.append("backward")
            with torch.enable_grad():
                given = [t.detach().requires_grad_() for t in (q, k, v)]
                mixed = torch.softmax(given[0] @ given[1].mT, -1) @ given[2]
            return list(torch.autograd.grad(mixed, given, g))

        library.impl("forward", forward, "CPU")
        library.impl("backward", backward, "CPU")
        yield torch.ops.spelt_attn, ran


class Packaged(nn.Module):
    """Calls the package's operators from an autograd function, as flash_attn does."""

    def __init__(self, operators, rate):
        super().__init__()
        self.qkv, self.drop = nn.Linear(4, 12), nn.Dropout(0.5)

        class Attend(torch.autograd.Function):
            @staticmethod
            def forward(ctx, q, k, v):
                ctx.save_for_backward(q, k, v)
                return operators.forward(q, k, v, rate)

            @staticmethod
            def backward(ctx, g):
                return tuple(operators.backward(g, *ctx.saved_tensors))

        self.attend = Attend.apply

    def forward(self, x):
        return self.drop(self.attend(*self.qkv(x).chunk(3, -1))).sin()


@pytest.mark.parametrize(
    "save, rate, runs", [((), 0.0, 2), (("attention",), 0.0, 1), (("attention",), 0.5, 2)]
)
def test_the_attention_of_a_package_is_kept(packaged, save, rate, runs):
    """It runs once where it is saved, and again where it draws, though it does not say so; the
    gradients are those of the untouched module, bit by bit."""
    operators, ran = packaged
    torch.manual_seed(0)
    model, x = Packaged(operators, rate).double(), torch.randn(2, 3, 4, dtype=torch.float64)

    def step():
        model.zero_grad()
        torch.manual_seed(1)
        model(x).square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = step()
    checkpoint(model, save)
    ran.clear()
    assert all(torch.equal(a, b) for a, b in zip(step(), expected, strict=True))
    assert ran.count("forward") == runs and ran.count("backward") == 1


def _ranks(rank, save):
    import torch.distributed as dist

    from schedlang.runtime.comm.collectives import (
        Group,
        all_reduce,
        gather,
        listen_to_collectives,
        reduce,
    )

    group = Group(("tp",), (0, 1), rank, dist.group.WORLD)

    class Parallel(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.full((4, 4), 0.1 + rank, dtype=torch.float64))

        def forward(self, x):
            whole = reduce(x.sin() @ self.weight, group).tanh()
            wide = gather(whole * self.weight[0], -1, group, consumers_differ=True)
            return wide.exp().sum() + (all_reduce(whole.detach(), group) * whole).sum()

    def gradient(module):
        x = torch.linspace(0, 1, 8, dtype=torch.float64).view(2, 4).requires_grad_()
        module(x).backward()
        return torch.cat([x.grad.flatten(), module.weight.grad.flatten()])

    counts = []

    def sent(*_):
        counts[-1] += 1

    found = []
    for each in (None, (), save):
        module = Parallel()
        if each is not None:
            checkpoint(module, each)
        counts.append(0)
        with listen_to_collectives(sent):
            found.append(gradient(module))
    real = _count_real(partial(gradient, module))
    return counts, [torch.equal(found[0], each) for each in found[1:]], real


def _count_real(run):
    class Count(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Count.number += func._schema.name.startswith("c10d::")
            return func(*args, **(kwargs or {}))

    with Count():
        run()
    return Count.number


@pytest.mark.parametrize("save", [("collective",), ("collective", "linear")])
def test_collectives_are_kept(save):
    """With `collective` none is issued in recomputation, and gradients are the same bit by bit."""
    for _counts, same, real in run_ranks(2, _ranks, save):
        assert same == [True, True]
        assert real == 4  # reduce, gather, all_reduce in forward, the gather's backward


def _written_ranks(rank):
    import torch.distributed as dist

    from schedlang.runtime.comm.collectives import Group, reduce

    group = Group(("tp",), (0, 1), rank, dist.group.WORLD)

    class Adding(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.full((4, 4), 0.1 + rank, dtype=torch.float64))

        def forward(self, x):
            whole = reduce(x @ self.weight, group)
            whole += x
            return reduce(whole.sin() @ self.weight, group).cos().sum()

    found = []
    for save in (None, ("collective",)):
        module, x = Adding(), torch.linspace(0, 1, 8, dtype=torch.float64).view(2, 4)
        if save:
            checkpoint(module, save)
        module(x.requires_grad_()).backward()
        found.append(torch.cat([x.grad.flatten(), module.weight.grad.flatten()]))
    return torch.equal(*found)


def test_a_sum_that_is_written_into_is_sent_again():
    """A sum over ranks that is kept, and then added to in place, is no reason to fail."""
    assert run_ranks(2, _written_ranks) == [True, True]


def test_streamed_parameters_come_inside_of_what_is_kept(threads):
    """Parameters that come from the host in the second run are none of the calls that are kept."""
    rows = "transformer.h.0  checkpoint(save=[linear, attention])\noffload(parameters)\n"
    proven(threads, planned(models.gpt2(), rows), [models.tokens(seed=s) for s in (1, 2, 3)])


def test_layers_are_one_each():
    """Checkpointing twice replaces the layer: the module is not recomputed twice."""
    block = Block()
    checkpoint(block)
    checkpoint(block, ("linear",))
    layer = layers_of(block).kinds["checkpoint"]
    assert isinstance(layer, Checkpoint) and layer.save == ("linear",)
    assert list(layers_of(block).kinds) == ["checkpoint"]
    assert "forward" not in block.state_dict()


class OnADevice(nn.Module):
    """Makes a tensor wherever new tensors are made, and tells where."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def forward(self, x):
        self.seen(torch.zeros(1).device.type)  # no attribute, which a second run would begin with
        return x.tanh()


def test_new_tensors_lie_where_they_lay_in_the_first_run():
    """What a block of `with torch.device(...)` makes is made there in the recomputation too, which
    comes after the block."""
    seen = []
    model = OnADevice(seen.append)
    checkpoint(model)
    with torch.device("meta"):
        out = model(torch.ones(3, device="cpu", requires_grad=True))
    out.sum().backward()
    assert seen == ["meta", "meta"]


@pytest.mark.parametrize("around", [True, False])
def test_autocast_is_that_of_the_first_run(around):
    """Backward inside or outside of the block: products run again in the dtype of the first run."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    ours = copy.deepcopy(plain)
    checkpoint(ours)
    found = []
    for model in (plain, ours):
        x = torch.arange(8.0).reshape(2, 4).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().sum()
            if around:
                loss.backward()
        if not around:
            with torch.autocast("cpu", torch.float16):
                loss.backward()
        found.append([x.grad, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_query_that_is_its_key_is_so_again():
    """What is one tensor in the first run is one in the second: an attention asks, and takes
    another way where it is not."""
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(8, 2, batch_first=True).double()
    again = copy.deepcopy(plain)
    checkpoint(again)
    grads = []
    for attend in (plain, again):
        x = torch.linspace(-1, 1, 48, dtype=torch.float64).view(2, 3, 8).requires_grad_()
        attend(x, x, x, need_weights=False)[0].square().sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)
    for one, other in zip(plain.parameters(), again.parameters()):
        assert torch.equal(one.grad, other.grad)
