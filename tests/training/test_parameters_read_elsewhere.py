"""Parameters that the forward reads outside their own module, with sliced state and stages."""

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
from tests.proofs import (
    assert_near,
    assert_proven,
    make_plan,
    train_on_ranks,
    train_sequential,
)

WIDTH = 8
STAGES = 'zero(stage=3, over=dp)\npipeline(order="1F1B", micro=2)'


class TwoLayerBlocks(nn.Module):
    """Blocks that subclasses read or call in different ways."""

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
        """Apply the second layer of a block."""
        raise NotImplementedError


class ByHand(TwoLayerBlocks):
    """Reads the weights of modules that are never called, as tied or merged layers do."""

    def join(self, x: Tensor, down: Any) -> Tensor:
        return F.linear(x, down.weight, down.bias)


class Replaced(TwoLayerBlocks):
    """Calls modules with replaced weights, as hypernetworks and fast weights do."""

    def join(self, x: Tensor, down: Any) -> Tensor:
        scaled = {name: value * (1 + 0.1 * self.gain) for name, value in down.named_parameters()}
        return torch.func.functional_call(down, scaled, (x,))


class Generated(TwoLayerBlocks):
    """The same with generated weights: the modules' own weights are not read."""

    def join(self, x: Tensor, down: Any) -> Tensor:
        generated = {
            "weight": torch.eye(WIDTH, dtype=x.dtype) * self.gain,
            "bias": self.gain.expand(WIDTH),
        }
        return torch.func.functional_call(down, generated, (x,)) + down(x)


class Forwarded(TwoLayerBlocks):
    """Calls `forward` of modules, so that none of their hooks runs."""

    def join(self, x: Tensor, down: Any) -> Tensor:
        return down.forward(x)


class Tangents(TwoLayerBlocks):
    """Calls modules inside of a transform: their derivative along a direction."""

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down):
            along: Any = torch.func.jvp(
                nn.Sequential(up, nn.Tanh(), down), (x,), (torch.ones_like(x),)
            )
            x = x + along[0] + 0.1 * along[1]
        return (x**2).mean()


class Normed(TwoLayerBlocks):
    """Reads a parameter in a hook before its module runs, as weight norms do."""

    def __init__(self) -> None:
        super().__init__()
        for down in self.down:
            down.scale = nn.Parameter(torch.full((WIDTH,), 1.5))  # type: ignore[assignment]
            down.register_forward_pre_hook(lambda module, inputs: (inputs[0] * module.scale,))

    def join(self, x: Tensor, down: Any) -> Tensor:
        return down(x)


class Following(TwoLayerBlocks):
    """A teacher whose weights follow a student's in the forward, and weights that are clipped
    there."""

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


class Penalised(TwoLayerBlocks):
    """Has a gradient in its loss: a backward runs inside of the forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().clone().requires_grad_()
            y = x
            for up, down in zip(self.up, self.down):
                y = y + down(torch.tanh(up(y)))
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return (y**2).mean() + ((slope.norm(dim=-1) - 1) ** 2).mean() * self.gain.squeeze()


def batch(rows: int = 8) -> dict[str, Tensor]:
    """Return some rows."""
    generator = torch.Generator().manual_seed(rows)
    return {"x": torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)}


KINDS = (ByHand, Replaced, Generated, Forwarded, Tangents, Normed, Following, Penalised)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", [1, 3])
def test_slices_of_what_is_read_elsewhere(
    kind: type[TwoLayerBlocks], stage: int, threads: Threads
) -> None:
    """The program equals the original: parameters are gathered wherever the model reads them."""
    plan = make_plan(kind().double(), f"zero(stage={stage}, over=dp)", "dp=2")
    assert_proven(threads, plan, [batch(), batch(6)])


def test_a_gradient_of_a_gradient_crosses_ranks(threads: Threads) -> None:
    """A collective in a backward is differentiated too, by its conjugate."""
    rows = (
        "up[:2]  shard(col, over=tp)\ndown[:2]  shard(row, over=tp)\n"
        "up[2:]  shard(col, output=R, over=tp)\ndown[2:]  shard(row, over=tp)"
    )
    assert_proven(threads, make_plan(Penalised().double(), rows, "tp=2"), [batch()])


STAGED = (ByHand, Replaced, Normed)


@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.deep) for k in STAGED])
def test_stages_of_what_is_read_elsewhere(kind: type[TwoLayerBlocks], threads: Threads) -> None:
    """In stages such a parameter is full on each rank, while the others are sliced."""
    plan = make_plan(kind().double(), "up  pipeline_split(over=pp)\n" + STAGES, "dp=2, pp=2")
    assert_proven(threads, plan, [batch(), batch(6)])


def test_a_gradient_through_stages() -> None:
    """No stage has the whole graph: refused, with the line that takes the gradient."""
    rows = 'up  pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)'
    with pytest.raises(Refusal, match="through modules of several stages") as caught:
        prepare(make_plan(Penalised().double(), rows, "pp=2"), batch(4))
    message = caught.value.render()
    assert (
        caught.value.diagnostic.code == "S610"
        and "test_parameters_read_elsewhere.py:" in message
        and "`pp=1`" in message
    )


class Reentrant(TwoLayerBlocks):
    """Blocks that recompute in backward by torch's reentrant checkpoint."""

    def join(self, x: Tensor, down: Any) -> Tensor:
        return checkpoint(down, x, use_reentrant=True)


class ReentrantHalf(nn.Module):
    """A projection that recomputes itself in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=True)


class NestedReentrant(Reentrant):
    """Reentrant recomputation inside of modules that become stages."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(ReentrantHalf() for _ in range(4))

    def join(self, x: Tensor, down: Any) -> Tensor:
        return down(x)


class ReentrantTwice(TwoLayerBlocks):
    """Blocks that call a layer twice, once or twice by a reentrant checkpoint."""

    def join(self, x: Tensor, down: Any) -> Tensor:
        def again(y: Tensor) -> Any:
            return torch.tanh(down(checkpoint(down, y, use_reentrant=True)))

        first: Tensor = checkpoint(down, x, use_reentrant=True)
        return first + checkpoint(again, torch.tanh(x), use_reentrant=True)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("pipeline", ["", 'pipeline(order="1F1B", micro=2)'])
def test_layers_that_are_recomputed_twice(stage: int, pipeline: str, threads: Threads) -> None:
    """Each use's gradient is reduced, where a backward reruns the layer again and again."""
    model, batches = ReentrantTwice().double(), [batch(), batch(6)]
    plan = make_plan(model, f"zero(stage={stage}, over=dp)\n{pipeline}", "dp=2")
    # no proof: with several reductions the last bits differ from those of one
    assert_near(train_on_ranks(threads, plan, batches), train_sequential(model, batches))


def test_halved_backwards_of_reentrant_checkpoints() -> None:
    """Such a backward cannot be halved: orders with halves are refused, others are not."""
    rows = 'up  pipeline_split(over=pp)\npipeline(order="{}", micro=2)'
    with pytest.raises(Refusal, match="reentrant checkpoints") as caught:
        prepare(make_plan(NestedReentrant().double(), rows.format("ZB-H1"), "pp=2"), batch(4))
    assert caught.value.diagnostic.code == "S608" and caught.value.diagnostic.helps
    prepare(make_plan(NestedReentrant().double(), rows.format("1F1B"), "pp=2"), batch(4))


def test_reentrant_checkpoints_in_earlier_stages() -> None:
    """Later stages run the same code, which would call modules that they do not have."""
    rows = 'down.2  pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)'
    with pytest.raises(Refusal, match="runs in a reentrant checkpoint") as caught:
        prepare(make_plan(Reentrant().double(), rows, "pp=2"), batch(4))
    assert caught.value.diagnostic.code == "S610" and caught.value.diagnostic.helps


class _Rerun(torch.autograd.Function):
    """Calls modules without a graph, and reruns them in its own backward, as Reformer does."""

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
            start = output = x.detach().requires_grad_()
            for layer in ctx.layers:
                output = output + layer(output).tanh()
        torch.autograd.backward(output, grads[0])
        return start.grad, None


class Reversible(nn.Module):
    """Calls its layers by such a function."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        return {"loss": _Rerun.apply(self.enter(x), self.layers).square().mean()}  # type: ignore


def test_functions_of_a_models_own_are_not_cut() -> None:
    """Layers that a function reruns in its backward must be in one stage."""
    rows = '{}  pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)'
    x = {"x": batch(4)["x"]}
    for cut in ("layers", "layers.1"):
        with pytest.raises(Refusal, match="`_Rerun`, whose backward is its own") as caught:
            prepare(make_plan(Reversible().double(), rows.format(cut), "pp=2"), x)
        assert caught.value.diagnostic.code == "S610" and caught.value.diagnostic.helps


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_functions_of_a_models_own_train_in_slices(threads: Threads, stage: int) -> None:
    """Their gradients are summed, and their parameters gathered, where that backward runs them."""
    plan = make_plan(Reversible().double(), f"zero(stage={stage}, over=dp)", "dp=2")
    x = [{"x": batch(seed)["x"]} for seed in (4, 6)]
    assert_proven(threads, plan, x)
