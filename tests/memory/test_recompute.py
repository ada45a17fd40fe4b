"""Checkpointed modules: equal gradients, saved operators, less memory, unchanged hooks and
state."""

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
from tests.proofs import assert_proven, make_plan
from tests.ranks import run_ranks

SAVES = [(), ("linear",), ("attention",), ("linear", "attention"), OPERATOR_CLASSES]


class Block(nn.Module):
    """Attention and an MLP, with dropout, keyword arguments and a dict as output."""

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
    """Two blocks to checkpoint, and code around them."""

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
    """Output and gradients equal the original's, with dropout; names stay."""
    torch.manual_seed(0)
    model = Stack().to(dtype)
    names, state = [n for n, _ in model.named_modules()], list(model.state_dict())
    expected = gradients(model, dtype)
    for block in model.blocks:
        checkpoint(block, save)
    actual = gradients(model, dtype)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
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
        with Products() as counter:
            gradients(model)
        counts[save] = (counter.products, counter.attention)
    plain, recomputed = counts[None], counts[()]
    assert (recomputed[0] - plain[0], recomputed[1] - plain[1]) == (2 * 4, 2)
    assert counts[("linear",)] == (plain[0], plain[1] + 2)
    assert counts[("attention",)] == (recomputed[0], plain[1])
    assert counts[("linear", "attention")] == plain


def test_keeps_less():
    """Between forward and backward only the blocks' inputs are held."""

    def held(model):
        sizes = {}
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

        def pack(t):
            if t.untyped_storage().data_ptr() not in weights:
                sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = model(*batch())
        return sum(sizes.values()), out

    model = Stack().double()
    before, _ = held(model)
    for block in model.blocks:
        checkpoint(block)
    after, _ = held(model)
    assert after < before / 5


def test_own_hooks_run_once():
    """The module's own hooks run once; those of submodules run again."""
    model = Stack().double()
    hook_calls = []
    model.blocks[0].register_forward_hook(lambda *_: hook_calls.append("own"))
    model.blocks[0].register_forward_pre_hook(lambda *_: hook_calls.append("pre"))
    model.blocks[0].norm.register_forward_hook(lambda *_: hook_calls.append("inner"))
    checkpoint(model.blocks[0])
    gradients(model)
    assert (
        hook_calls.count("own") == hook_calls.count("pre") == 1 and hook_calls.count("inner") == 2
    )


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
    """A cache and a list that the forward changes are changed once, not twice."""

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
    recomputed = copy.deepcopy(plain)
    checkpoint(recomputed)
    grads = []
    for module in (plain, recomputed):
        cache, losses = Cache(), []
        x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        out = module(module(x, cache, losses), cache, losses)
        (out.sum() + sum(losses)).backward()
        assert len(losses) == 2 and cache.keys.shape == (6, 4)
        grads.append(module.key.weight.grad)
    assert torch.equal(*grads)


def test_transformers_with_its_cache():
    """Llama of transformers, with its cache on, has the same gradients."""
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
    recomputed = copy.deepcopy(plain)
    for layer in recomputed.model.layers:
        checkpoint(layer)
    ids = torch.arange(12).view(2, 6)
    for model in (plain, recomputed):
        out = model(input_ids=ids, labels=ids)
        assert any(isinstance(value, transformers.Cache) for value in out.values())
        out.loss.backward()
    for a, b in zip(plain.parameters(), recomputed.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_no_gradient_no_checkpoint():
    """Under no_grad the module runs as before."""
    torch.manual_seed(0)
    model = Stack().double().eval()
    x, mask = batch()
    expected = model(x, mask=mask)
    for block in model.blocks:
        checkpoint(block, OPERATOR_CLASSES)
    with torch.no_grad():
        assert torch.equal(model(x, mask=mask), expected)


def test_retained_graph_and_split_backward():
    """A checkpoint can run backward twice, as a split backward does."""
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
    """A deep copy uses its own parameters."""
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
    """A module that changes buffers in forward is refused when it runs."""
    real = nn.BatchNorm1d(3)
    checkpoint(real)
    with pytest.raises(Refusal, match="changes its buffers"):
        real(torch.randn(4, 3))
    real.eval()(torch.randn(4, 3))


class ChangesChild(nn.Module):
    """Draws from its child's generator, if any; replaces the child by one with buffers, if told
    to."""

    def __init__(self):
        super().__init__()
        self.child, self.grows = nn.Linear(4, 4), False

    def forward(self, x):
        self.child = nn.BatchNorm1d(4) if self.grows else self.child
        draws = getattr(self.child, "draws", None)
        return self.child(x) * (1.0 if draws is None else torch.rand(x.shape, generator=draws))


def test_what_a_module_holds_may_change_between_calls_and_within_one():
    """A generator added later is restored, also one of a new child; a new child with buffers is
    noticed."""
    model, x = ChangesChild(), torch.ones(3, 4, requires_grad=True)
    checkpoint(model)
    model(x).sum().backward()
    for child in (model.child, nn.Linear(4, 4)):
        child.draws = torch.Generator().manual_seed(3)
        model.child, x.grad = child, None
        model(x).sum().backward()
        mask = torch.rand(x.shape, generator=torch.Generator().manual_seed(3))
        torch.testing.assert_close(x.grad, mask @ child.weight)
    model.grows = True
    with pytest.raises(Refusal, match="changes its buffers"):
        model(x)


def test_changed_buffers_are_told_by_the_modules_path():
    """The path says more than the class, which FSDP2 replaces by its own."""
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
    """Attention with dropout is not saved: skipping it would shift all later random numbers."""
    operator = torch.ops.aten._scaled_dot_product_flash_attention.default
    saved_names = frozenset([operator._schema.name])
    q = torch.empty(1, 1, 2, 2)
    for dropout, saved in [(0.0, True), (0.1, False)]:
        assert is_saved_call(saved_names, operator, (q, q, q, dropout), {}) == saved
    assert not is_saved_call(saved_names, operator, (q, q, q), {"dropout_p": 0.1})
    assert is_saved_call(saved_names, operator, (q, q, q), {})


class RunsDiffer(nn.Module):
    """Computes a table in its first run only, and allocates memory in its second only."""

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
    """Adds to a product in place, as recurrent cells do."""

    def __init__(self):
        super().__init__()
        self.enter, self.again = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.again(self.enter(x).add_(x).tanh()).sigmoid()


class Scores(nn.Module):
    """Scales a product of four dims in place: `matmul` ends with a view with its own version
    counter."""

    def __init__(self):
        super().__init__()
        self.keys, self.values = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)

    def forward(self, x):
        x = x.expand(2, 3, 4, 4)
        keys = self.keys(x).mul_(2.0)
        return (x @ keys.mT).mul_(0.5).softmax(-1) @ self.values(x)


@pytest.mark.parametrize("make", [RunsDiffer, Cell, Scores, lambda: nn.LSTM(4, 4, num_layers=2)])
def test_what_one_run_alone_makes_or_writes_into(make):
    """A second run may compute more or less than the first, and write into results: gradients are
    bitwise equal."""
    torch.manual_seed(0)
    plain, x = make().double(), torch.randn(4, 4, dtype=torch.float64)
    recomputed = copy.deepcopy(plain)
    checkpoint(recomputed, ("linear",))
    for module in (plain, recomputed):
        out = module(x)
        (out[0] if isinstance(out, tuple) else out).square().sum().backward()
    for a, b in zip(plain.parameters(), recomputed.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.fixture
def packaged():
    """Provide an attention as a package registers it: forward and backward are its own
    operators."""
    calls = []
    with torch.library._scoped_library("spelt_attn", "FRAGMENT") as library:
        library.define("forward(Tensor q, Tensor k, Tensor v, float dropout_p=0.0) -> Tensor")
        library.define("backward(Tensor g, Tensor q, Tensor k, Tensor v) -> Tensor[]")

        def forward(q, k, v, dropout_p=0.0):
            calls.append("forward")
            mixed = torch.softmax(q @ k.mT, -1) @ v
            return F.dropout(mixed, dropout_p) if dropout_p else mixed

        def backward(g, q, k, v):
            calls.append("backward")
            with torch.enable_grad():
                inputs = [t.detach().requires_grad_() for t in (q, k, v)]
                mixed = torch.softmax(inputs[0] @ inputs[1].mT, -1) @ inputs[2]
            return list(torch.autograd.grad(mixed, inputs, g))

        library.impl("forward", forward, "CPU")
        library.impl("backward", backward, "CPU")
        yield torch.ops.spelt_attn, calls


class PackageAttention(nn.Module):
    """Calls the package's operators in an autograd function, as flash_attn does."""

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
    """It runs once if it is saved, and again if it has dropout, with bitwise equal gradients."""
    operators, calls = packaged
    torch.manual_seed(0)
    model, x = PackageAttention(operators, rate).double(), torch.randn(2, 3, 4, dtype=torch.float64)

    def step():
        model.zero_grad()
        torch.manual_seed(1)
        model(x).square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = step()
    checkpoint(model, save)
    calls.clear()
    assert all(torch.equal(a, b) for a, b in zip(step(), expected, strict=True))
    assert calls.count("forward") == runs and calls.count("backward") == 1


def _run_rank(rank, save):
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
            full = reduce(x.sin() @ self.weight, group).tanh()
            gathered = gather(full * self.weight[0], -1, group, consumers_differ=True)
            return gathered.exp().sum() + (all_reduce(full.detach(), group) * full).sum()

    def gradient(module):
        x = torch.linspace(0, 1, 8, dtype=torch.float64).view(2, 4).requires_grad_()
        module(x).backward()
        return torch.cat([x.grad.flatten(), module.weight.grad.flatten()])

    counts = []

    def sent(*_):
        counts[-1] += 1

    grads = []
    for option in (None, (), save):
        module = Parallel()
        if option is not None:
            checkpoint(module, option)
        counts.append(0)
        with listen_to_collectives(sent):
            grads.append(gradient(module))
    issued = _count_collectives(partial(gradient, module))
    return counts, [torch.equal(grads[0], option) for option in grads[1:]], issued


def _count_collectives(run):
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
    """With `collective` none runs in recomputation, and gradients are bitwise equal."""
    for _counts, equal, issued in run_ranks(2, _run_rank, save):
        assert equal == [True, True]
        assert issued == 4  # reduce, gather, all_reduce in forward, the gather's backward


def _written_rank(rank):
    import torch.distributed as dist

    from schedlang.runtime.comm.collectives import Group, reduce

    group = Group(("tp",), (0, 1), rank, dist.group.WORLD)

    class Adding(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.full((4, 4), 0.1 + rank, dtype=torch.float64))

        def forward(self, x):
            full = reduce(x @ self.weight, group)
            full += x
            return reduce(full.sin() @ self.weight, group).cos().sum()

    grads = []
    for save in (None, ("collective",)):
        module, x = Adding(), torch.linspace(0, 1, 8, dtype=torch.float64).view(2, 4)
        if save:
            checkpoint(module, save)
        module(x.requires_grad_()).backward()
        grads.append(torch.cat([x.grad.flatten(), module.weight.grad.flatten()]))
    return torch.equal(*grads)


def test_a_sum_that_is_written_into_is_sent_again():
    """A saved sum over ranks that is written in place afterwards works."""
    assert run_ranks(2, _written_rank) == [True, True]


def test_streamed_parameters_come_inside_of_what_is_kept(threads):
    """Copies of streamed parameters in the second run are not taken for saved calls."""
    rows = "transformer.h.0  checkpoint(save=[linear, attention])\noffload(parameters)\n"
    assert_proven(
        threads, make_plan(models.gpt2(), rows), [models.tokens(seed=s) for s in (1, 2, 3)]
    )


def test_layers_are_one_each():
    """Checkpointing twice replaces the layer: the module is recomputed once."""
    block = Block()
    checkpoint(block)
    checkpoint(block, ("linear",))
    checkpoint_layer = layers_of(block).kinds["checkpoint"]
    assert isinstance(checkpoint_layer, Checkpoint) and checkpoint_layer.save == ("linear",)
    assert list(layers_of(block).kinds) == ["checkpoint"]
    assert "forward" not in block.state_dict()


class RecordsDevice(nn.Module):
    """Creates a tensor on the default device, and records that device."""

    def __init__(self, record):
        super().__init__()
        self.seen = record

    def forward(self, x):
        self.seen(torch.zeros(1).device.type)  # no attribute: a second run would restore it
        return x.tanh()


def test_new_tensors_lie_where_they_lay_in_the_first_run():
    """Recomputation after a block of `with torch.device(...)` uses that device too."""
    devices = []
    model = RecordsDevice(devices.append)
    checkpoint(model)
    with torch.device("meta"):
        out = model(torch.ones(3, device="cpu", requires_grad=True))
    out.sum().backward()
    assert devices == ["meta", "meta"]


@pytest.mark.parametrize("around", [True, False])
def test_autocast_is_that_of_the_first_run(around):
    """With backward inside or outside the block, recomputation has the first run's autocast."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    recomputed = copy.deepcopy(plain)
    checkpoint(recomputed)
    results = []
    for model in (plain, recomputed):
        x = torch.arange(8.0).reshape(2, 4).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().sum()
            if around:
                loss.backward()
        if not around:
            with torch.autocast("cpu", torch.float16):
                loss.backward()
        results.append([x.grad, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_query_that_is_its_key_is_so_again():
    """Arguments that are one tensor in the first run are one in the second: attention tests
    that."""
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(8, 2, batch_first=True).double()
    recomputed = copy.deepcopy(plain)
    checkpoint(recomputed)
    grads = []
    for attend in (plain, recomputed):
        x = torch.linspace(-1, 1, 48, dtype=torch.float64).view(2, 3, 8).requires_grad_()
        attend(x, x, x, need_weights=False)[0].square().sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)
    for parameter, other in zip(plain.parameters(), recomputed.parameters()):
        assert torch.equal(parameter.grad, other.grad)
