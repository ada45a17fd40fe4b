"""`fuse` by torch.compile: one graph, the same results, checks and refusals."""

from __future__ import annotations

import copy
import functools
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.activation_memory.recompute import checkpoint
from schedlang.runtime.adapters.torch_compile import keep_buffers
from schedlang.runtime.float64 import Float64
from schedlang.runtime.forward import layers_of
from schedlang.runtime.fusion import fuse as fuse_file
from schedlang.runtime.fusion.check_fused import check_fused
from schedlang.runtime.fusion.fuse import count_graphs, fuse, why_unavailable
from schedlang.runtime.kernel_injection.kernel import match, replace
from schedlang.runtime.modes import enter_modes

pytestmark = pytest.mark.skipif(
    why_unavailable() is not None, reason=f"inductor cannot compile here: {why_unavailable()}"
)


class Block(nn.Module):
    """Norm, products, dropout, a residual and a structured output."""

    def __init__(self, rate=0.2):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(8, eps=1e-6), nn.Linear(8, 16), nn.Linear(16, 8)
        self.rate = rate

    def forward(self, x, *, scale=1.0):
        out = self.down(F.gelu(self.up(self.norm(x)))) * scale
        return {"x": x + F.dropout(out, self.rate, self.training), "none": None}


def gradients(modules, x, seed=0):
    torch.manual_seed(seed)
    x = x.clone().requires_grad_()
    y = x
    for module in modules:
        module.zero_grad()
        y = module(y, scale=0.5)["x"]
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for m in modules for p in m.parameters())]


def blocks(number=3):
    torch.manual_seed(0)
    return [Block() for _ in range(number)]


def assert_close(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.deep
def test_fuses_equal_modules_into_one_graph():
    """Three equal blocks with a kernel share graphs; gradients, dropout and names stay."""
    modules, x = blocks(), torch.randn(5, 8)
    expected, state = gradients(modules, x), list(modules[0].state_dict())
    for module in modules:
        replace(module.norm, match(module.norm, "rms_norm"))
        fuse(module)
    assert_close(gradients(modules, x), expected)
    graph_counts = [count_graphs(module) for module in modules]
    assert graph_counts == [1, 0, 0]
    assert_close(gradients(modules, x, seed=1), gradients(blocks(), x, seed=1))
    assert [count_graphs(module) for module in modules] == graph_counts  # nothing compiled anew
    assert list(modules[0].state_dict()) == state

    twin = copy.deepcopy(modules[0])  # uses its own parameters, not the original's
    with torch.no_grad():
        twin.down.weight.zero_(), twin.down.bias.zero_()
    assert torch.equal(twin(x)["x"], x)

    for comparison in check_fused(modules[0], (x,), {"scale": 2.0}):
        assert comparison.ok, comparison
    names = [comparison.name for comparison in check_fused(modules[0], (x,))]
    assert "output .x" in names and "gradient of up.weight" in names
    assert "gradient of input 0" in names


def test_eager_under_ambient_modes():
    """Under the float64 mode the region runs eagerly in float64, and nothing is compiled."""
    module = Block(0.0).double()
    x = torch.randn(3, 8, dtype=torch.float64)
    expected = module(x)["x"]
    fuse(module)
    with enter_modes(Float64):
        assert torch.equal(module(x)["x"], expected)
    assert count_graphs(module) == 0


@pytest.mark.deep
def test_inside_a_checkpoint():
    """A fused module may be recomputed: gradients stay the same."""
    modules, x = blocks(1), torch.randn(4, 8)
    expected = gradients(modules, x)
    checkpoint(modules[0])
    fuse(modules[0])
    assert_close(gradients(modules, x), expected)
    assert list(layers_of(modules[0]).kinds) == ["checkpoint", "fuse"]


def test_split_backward():
    """Gradients of the input first, then of the weights, from one fused graph."""
    torch.manual_seed(0)
    module, x = Block(0.0), torch.randn(6, 8, requires_grad=True)
    params = list(module.parameters())
    expected = torch.autograd.grad(module(x)["x"].square().sum(), [x, *params])
    keep_buffers()
    fuse(module)
    loss = module(x)["x"].square().sum()
    first = torch.autograd.grad(loss, [x], retain_graph=True)
    assert_close([*first, *torch.autograd.grad(loss, params)], expected)


def test_the_check_runs_with_dropout(monkeypatch):
    """The compiled graph is checked with dropout too: a missing scale is found."""
    module, x = Block(0.3), torch.randn(3, 8)
    fuse(module)
    passed = {comparison.name: comparison.ok for comparison in check_fused(module, (x,))}
    assert passed["output .x"] and passed["output .x with dropout"] and all(passed.values())
    dropout = F.dropout
    monkeypatch.setattr(fuse_file, "_compile", lambda inner, *args: _unscaled(inner, dropout))
    passed_wrong = {comparison.name: comparison.ok for comparison in check_fused(module, (x,))}
    assert passed_wrong["output .x"] and not passed_wrong["output .x with dropout"]


def test_later_calls_meet_what_the_first_left(monkeypatch):
    """A scalar or batch size that the first call fixed in the graph is found by a later call."""
    module, x = Block(0.0), torch.randn(3, 8)
    fuse(module)
    first: dict[str, object] = {}
    monkeypatch.setattr(
        fuse_file,
        "_compile",
        lambda inner, *args: lambda x, scale=1.0: inner(x, scale=first.setdefault("scale", scale)),
    )
    later = {"again": ((x + 1,), {"scale": 1.0}), "scaled": ((x,), {"scale": 3.0})}
    comparisons = check_fused(module, (x,), {"scale": 1.0}, later=later)
    assert {
        comparison.name
        for comparison in comparisons
        if not comparison.ok and "output" in comparison.name
    } == {"output .x scaled"}

    def of_so_many_rows(inner, *args):
        return lambda x: inner(x) if len(x) == first.setdefault("rows", len(x)) else 1 / 0

    monkeypatch.setattr(fuse_file, "_compile", of_so_many_rows)
    comparisons = check_fused(module, (x,), later={"shorter": ((x[:2],), {})})
    (failed,) = [comparison.name for comparison in comparisons if not comparison.ok]
    assert failed == "the call shorter fails (ZeroDivisionError: division by zero)"


def test_a_lost_gradient_is_a_verdict(monkeypatch):
    """A region without gradients, or with an output of another shape, is wrong, not an error."""
    module, x = Block(0.0), torch.randn(3, 8)
    fuse(module)
    for wrong, expected in [
        (lambda inner: lambda x: inner(x.detach()), {"gradient of input 0 (is not there)"}),
        (
            lambda inner: torch.no_grad()(lambda x: inner(x)),
            {"gradient of input 0 (is not there)", "gradient of up.weight (is not there)"},
        ),
        (lambda inner: lambda x: {"x": inner(x)["x"][:2]}, {"output .x (has shape [2, 8])"}),
    ]:
        monkeypatch.setattr(
            fuse_file, "_compile", lambda inner, *args, compile_wrong=wrong: compile_wrong(inner)
        )
        assert expected <= {
            comparison.name for comparison in check_fused(module, (x,)) if not comparison.ok
        }


@pytest.mark.deep
def test_masks_that_are_given(monkeypatch):
    """Where a compiled graph draws other random numbers, dropout gets given masks, which are
    checked; random draws are checked apart: fixed ones, and ones that ignore the seed, are
    found."""
    module, x = Block(0.3), torch.randn(3, 8)
    fuse(module)

    def wrong():
        return {
            comparison.name
            for comparison in check_fused(module, (x,), given_masks=True)
            if not comparison.ok
        }

    assert wrong() == set()
    dropout = F.dropout
    monkeypatch.setattr(fuse_file, "_compile", lambda inner, *args: _unscaled(inner, dropout))
    assert "output .x with dropout" in wrong()
    for seeding, expected in [
        (lambda: torch.manual_seed(0), "spread of draws"),
        (torch.seed, "draws after one seed"),
    ]:
        compile_fn = functools.partial(_compiled_after, seeding)
        monkeypatch.setattr(fuse_file, "_compile", compile_fn)
        assert expected in wrong()


def _compiled_after(seeding, inner, *_):
    def call(*args, **kwargs):
        seeding()
        return inner(*args, **kwargs)

    return call


def _unscaled(inner, dropout):
    def call(*args, **kwargs):
        F.dropout = lambda x, p, training: dropout(x, p, training) * (1 - p if training else 1)
        try:
            return inner(*args, **kwargs)
        finally:
            F.dropout = dropout

    return call


class Breaks(nn.Module):
    def forward(self, x):
        print("a graph cannot print")
        return x * 2


class Numbered(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number, self.weight = number, nn.Parameter(torch.ones(2))

    def forward(self, x):
        return x * self.weight * self.number


def test_refuses_a_graph_break():
    """A forward that is not one graph is refused with torch's reason and the line."""
    module = Breaks()
    fuse(module)
    with pytest.raises(Refusal, match="cannot be compiled as one graph") as caught:
        module(torch.ones(2))
    assert "print" in str(caught.value)


class WritesInput(Numbered):
    def forward(self, x):
        x += super().forward(x.clone())
        return x


def test_refuses_what_writes_into_its_argument(monkeypatch):
    """Inductor keeps an argument for backward although the graph writes into it: torch raises an
    error there, and a layer of schedlang would give a wrong gradient."""
    monkeypatch.setattr(fuse_file, "_compile", lambda inner, rounding: inner)
    for module, is_refused in ((Numbered(3), False), (WritesInput(3), True)):
        fuse(module)
        x = torch.ones(2, requires_grad=True) * 2
        with (
            pytest.raises(Refusal, match="S833.*changes its inputs in place")
            if is_refused
            else nullcontext()
        ):
            module(x)


def test_refuses_endless_recompilation(monkeypatch):
    """If each layer needs its own graph, too many graphs are refused, not only logged."""
    monkeypatch.setattr(fuse_file, "MAX_GRAPHS", 2)
    modules = [Numbered(number) for number in (3, 5, 7)]
    for module in modules:
        fuse(module)
    for module in modules[:2]:
        module(torch.ones(2))
    with pytest.raises(Refusal, match="S834.*compiled again too often"):
        modules[2](torch.ones(2))


def test_refuses_before_it_starts(monkeypatch):
    """Without a compiler, or on a replaced kernel, `fuse` is refused and changes nothing."""
    norm = nn.RMSNorm(4, eps=1e-6)
    replace(norm, match(norm, "rms_norm"))
    with pytest.raises(Refusal, match="S832.*already has a kernel"):
        fuse(norm)
    from torch._inductor import config

    monkeypatch.setenv("CXX", "/no/such/compiler")
    module = Block()
    # the setting is a proxy that `monkeypatch` would delete instead of restoring
    with (
        config.patch({"cpp.cxx": (None, "/no/such/compiler")}),
        pytest.raises(Refusal, match="S831.*\n.*no C\\+\\+ compiler"),
    ):
        fuse(module)
    assert layers_of(module) is None
