"""Parameters that the forward reads where no module around them runs, beside sliced state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.analyze.prepare import prepare
from tests.engine import Threads
from tests.proofs import planned, proven

WIDTH = 8
STAGES = 'zero(stage=3, over=dp)\npipeline(order="1F1B", micro=2)'


class Own(nn.Module):
    """Blocks, which subclasses read or call in their own ways."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down):
            x = x + self.join(torch.tanh(up(x)), down)
        return (x**2).mean()

    def join(self, x: Tensor, down: Any) -> Tensor:
        """Half a block."""
        raise NotImplementedError


class ByHand(Own):
    """The weights of modules that are never called, as of tied or merged layers."""

    def join(self, x: Tensor, down: Any) -> Tensor:
        return F.linear(x, down.weight, down.bias)


class Replaced(Own):
    """Modules called with other values than their own, as of hypernetworks and fast weights."""

    def join(self, x: Tensor, down: Any) -> Tensor:
        made = {name: value * (1 + 0.1 * self.gain) for name, value in down.named_parameters()}
        return torch.func.functional_call(down, made, (x,))


class Generated(Own):
    """The same, but what they hold is read nowhere: all of it is made."""

    def join(self, x: Tensor, down: Any) -> Tensor:
        made = {
            "weight": torch.eye(WIDTH, dtype=x.dtype) * self.gain,
            "bias": self.gain.expand(WIDTH),
        }
        return torch.func.functional_call(down, made, (x,)) + down(x)


class Forwarded(Own):
    """Modules whose `forward` is called, so that none of their hooks runs."""

    def join(self, x: Tensor, down: Any) -> Tensor:
        return down.forward(x)


class Tangents(Own):
    """Modules that a transform calls in turn: their derivative along a direction."""

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down):
            along: Any = torch.func.jvp(
                nn.Sequential(up, nn.Tanh(), down), (x,), (torch.ones_like(x),)
            )
            x = x + along[0] + 0.1 * along[1]
        return (x**2).mean()


class Normed(Own):
    """A parameter that a hook reads before its module runs, as weight norms do."""

    def __init__(self) -> None:
        super().__init__()
        for down in self.down:
            down.scale = nn.Parameter(torch.full((WIDTH,), 1.5))  # type: ignore[assignment]
            down.register_forward_pre_hook(lambda module, given: (given[0] * module.scale,))

    def join(self, x: Tensor, down: Any) -> Tensor:
        return down(x)


class Following(Own):
    """A teacher that the forward lets follow a student, and weights that it clips."""

    def __init__(self) -> None:
        super().__init__()
        for down in self.down:
            down.requires_grad_(False)

    def join(self, x: Tensor, down: Any) -> Tensor:
        return down(x)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for up, down in zip(self.up, self.down):
                    down.weight.lerp_(up.weight, 0.1)
                    down.bias.data = down.bias * 0.9 + up.bias * 0.1
                    up.weight.data.clamp_(-0.3, 0.3)
        return super().forward(x)


class Penalised(Own):
    """A gradient is part of the loss: a backward ends while the forward still runs."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().clone().requires_grad_()
            y = x
            for up, down in zip(self.up, self.down):
                y = y + down(torch.tanh(up(y)))
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return (y**2).mean() + ((slope.norm(dim=-1) - 1) ** 2).mean() * self.gain.squeeze()


def batch(rows: int = 8) -> dict[str, Tensor]:
    """Some rows."""
    generator = torch.Generator().manual_seed(rows)
    return {"x": torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)}


KINDS = (ByHand, Replaced, Generated, Forwarded, Tangents, Normed, Following, Penalised)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", [1, 3])
def test_slices_of_what_is_read_elsewhere(kind: type[Own], stage: int, threads: Threads) -> None:
    """The program is the original: the model gathers what nobody around would have gathered."""
    plan = planned(kind().double(), f"zero(stage={stage}, over=dp)", "dp=2")
    proven(threads, plan, [batch(), batch(6)])


def test_a_gradient_of_a_gradient_crosses_ranks(threads: Threads) -> None:
    """What crosses ranks in a backward is itself differentiated: each way by its conjugate."""
    rows = (
        "up[:2]  shard(col, over=tp)\ndown[:2]  shard(row, over=tp)\n"
        "up[2:]  shard(col, output=R, over=tp)\ndown[2:]  shard(row, over=tp)"
    )
    proven(threads, planned(Penalised().double(), rows, "tp=2"), [batch()])


STAGED = (ByHand, Replaced, Normed)


@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.deep) for k in STAGED])
def test_stages_of_what_is_read_elsewhere(kind: type[Own], threads: Threads) -> None:
    """In stages it is whole on each rank, where the rest is in slices."""
    plan = planned(kind().double(), "up  pipeline_split(over=pp)\n" + STAGES, "dp=2, pp=2")
    proven(threads, plan, [batch(), batch(6)])


def test_a_gradient_through_stages() -> None:
    """No stage has the graph of all: refused, with the line that takes the gradient."""
    rows = 'up  pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)'
    with pytest.raises(Refusal, match="through modules of several stages") as caught:
        prepare(planned(Penalised().double(), rows, "pp=2"), batch(4))
    said = caught.value.render()
    assert caught.value.diagnostic.code == "S610" and "test_lent.py:" in said and "`pp=1`" in said


class Again(Own):
    """Blocks that run again in backward, by the checkpoint of torch that enters it anew."""

    def join(self, x: Tensor, down: Any) -> Tensor:
        return checkpoint(down, x, use_reentrant=True)


class Half(nn.Module):
    """A projection that runs itself again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=True)


class Within(Again):
    """The same inside of modules that are cut between."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(Half() for _ in range(4))

    def join(self, x: Tensor, down: Any) -> Tensor:
        return down(x)


def test_halved_backwards_of_reentrant_checkpoints() -> None:
    """No half of such a backward can wait: the order is refused, and whole backwards are not."""
    rows = 'up  pipeline_split(over=pp)\npipeline(order="{}", micro=2)'
    with pytest.raises(Refusal, match="reentrant checkpoints") as caught:
        prepare(planned(Within().double(), rows.format("ZB-H1"), "pp=2"), batch(4))
    assert caught.value.diagnostic.code == "S608" and caught.value.diagnostic.helps
    prepare(planned(Within().double(), rows.format("1F1B"), "pp=2"), batch(4))


def test_reentrant_checkpoints_in_earlier_stages() -> None:
    """Later stages go through the same code, which would call modules that they do not have."""
    rows = 'down.2  pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)'
    with pytest.raises(Refusal, match="runs in a reentrant checkpoint") as caught:
        prepare(planned(Again().double(), rows, "pp=2"), batch(4))
    assert caught.value.diagnostic.code == "S610" and caught.value.diagnostic.helps


class _Rerun(torch.autograd.Function):
    """Calls modules without a graph, and runs them again in a backward of its own (Reformer)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: Any) -> Tensor:
        ctx.layers = layers
        ctx.save_for_backward(x)
        for layer in layers:
            x = x + layer(x).tanh()
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            begin = out = x.detach().requires_grad_()
            for layer in ctx.layers:
                out = out + layer(out).tanh()
        torch.autograd.backward(out, grads[0])
        return begin.grad, None


class Reversible(nn.Module):
    """Layers that such a function calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        return {"loss": _Rerun.apply(self.enter(x), self.layers).square().mean()}  # type: ignore


def test_functions_of_a_models_own_are_not_cut() -> None:
    """Layers that a function runs again in its backward lie in one stage, or are refused."""
    rows = '{}  pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)'
    x = {"x": batch(4)["x"]}
    for cut in ("layers", "layers.1"):
        with pytest.raises(Refusal, match="`_Rerun`, whose backward is its own") as caught:
            prepare(planned(Reversible().double(), rows.format(cut), "pp=2"), x)
        assert caught.value.diagnostic.code == "S610" and caught.value.diagnostic.helps


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_functions_of_a_models_own_train_in_slices(threads: Threads, stage: int) -> None:
    """Their gradients are summed, and their parameters gathered, where the backward runs them."""
    plan = planned(Reversible().double(), f"zero(stage={stage}, over=dp)", "dp=2")
    x = [{"x": batch(seed)["x"]} for seed in (4, 6)]
    proven(threads, plan, x)
