"""A user's loop trains a program as it trains the plain model: one function, run on both."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.lower.build import build
from schedlang.runtime.grad_reduction.gradient import FlatGradients
from tests.engine import Threads
from tests.proofs import make_plan

TENSOR = "up  shard(col, over=tp)\ndown  shard(row, over=tp)\n"
LAYOUTS = {
    "tp": (TENSOR, "tp=2"),
    "dp": ("zero(stage=0, over=dp)", "dp=2"),
    "zero2": ("zero(stage=2, over=dp)", "dp=2"),
    "zero3": ("zero(stage=3, over=dp)", "dp=2"),
    "tp zero3": (TENSOR + "zero(stage=3, over=dp)", "dp=2, tp=2"),
}
ALL, TP = tuple(LAYOUTS), ("tp",)
DATA = ("dp", "zero2", "zero3")


class Net(nn.Module):
    """Norm, up and down, and a weight that no row names."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """Return a mean of squares."""
        hidden = torch.tanh(self.up(self.norm(x)))
        loss: Tensor = (x + self.scale * self.down(hidden)).square().mean()
        return loss


torch.manual_seed(0)
NET = Net()


def batch(seed: int) -> dict[str, Tensor]:
    """Return four rows."""
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(4, 6, generator=generator, dtype=torch.float64)}


class Plain:
    """A plain model with the calls of a program without an optimizer."""

    def __init__(self) -> None:
        self.module = copy.deepcopy(NET)

    def train_step(self, batch: dict[str, Tensor]) -> Tensor:
        """Leave the gradients of a batch."""
        self.module.train()
        for parameter in self.module.parameters():
            parameter.grad = None
        loss: Tensor = self.module(**batch)
        loss.backward()
        return loss.detach()

    def eval_step(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the loss of a batch."""
        self.module.eval()
        with torch.no_grad():
            loss: Tensor = self.module(**batch)
        return loss

    def state_dict(self) -> dict[str, Tensor]:
        """Return the model's."""
        return {name: value.clone() for name, value in self.module.state_dict().items()}


def sgd(program: Any) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD(program.module.parameters(), lr=0.1, momentum=0.9)


def train(program: Any, steps: int = 3) -> list[Any]:
    """Train by steps of the program and an optimizer of the loop."""
    optimizer, losses = sgd(program), []
    for seed in range(steps):
        losses.append(program.train_step(batch(seed)))
        optimizer.step()
    return losses


def clamping_hooks(program: Any) -> list[Any]:
    """Clamp each gradient by a hook."""
    for parameter in program.module.parameters():
        parameter.register_hook(lambda grad: grad.clamp(-0.02, 0.02))
    return train(program)


def optimizers_in_hooks(program: Any) -> list[Any]:
    """Step when a gradient is there, by an optimizer for each parameter."""

    def stepping(optimizer: torch.optim.Optimizer) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            optimizer.step()
            parameter.grad = None

        return hook

    for parameter in program.module.parameters():
        hook = stepping(torch.optim.SGD([parameter], lr=0.1))
        parameter.register_post_accumulate_grad_hook(hook)
    return [program.train_step(batch(seed)) for seed in range(3)]


def looking_hooks(program: Any) -> list[Any]:
    """Count the calls of hooks, look at a gradient, and remove a hook."""
    seen, module = [], program.module
    handle = module.scale.register_hook(lambda grad: seen.append(full(grad).clone()))
    train(program, 2)
    handle.remove()
    train(program, 1)
    return [len(seen), *seen]


def kept_gradients(program: Any) -> list[Any]:
    """Add the gradients of two steps, which the loop has kept as they are."""
    optimizer, losses = sgd(program), []
    for seed in range(3):
        losses.append(program.train_step(batch(seed)))
        kept = [parameter.grad for parameter in program.module.parameters()]
        optimizer.zero_grad()
        losses.append(program.train_step(batch(seed + 7)))
        for parameter, grad in zip(program.module.parameters(), kept):
            parameter.grad.add_(grad)
        optimizer.step()
    return losses


def inference_first(program: Any) -> list[Any]:
    """Evaluate in inference mode before the first step."""
    program.module.eval()
    with torch.inference_mode():
        value = program.module(**batch(9)).clone()
    program.module.train()
    return [value, *train(program)]


def inference_first_step(program: Any) -> list[Any]:
    """The same, by `eval_step`."""
    with torch.inference_mode():
        value = program.eval_step(batch(9)).clone()
    return [value, *train(program)]


def evaluations_between(program: Any) -> list[Any]:
    """Evaluate the module before and after each update, and change values by hand."""
    optimizer, values = sgd(program), []
    for seed in range(3):
        with torch.no_grad():
            values.append(program.module(**batch(9)))
        values.append(program.train_step(batch(seed)))
        with torch.no_grad():
            values.append(program.module(**batch(9)))
        optimizer.step()
        with torch.no_grad():
            values.append(program.module(**batch(9)))
            for parameter in program.module.parameters():
                parameter.mul_(0.9)
    return values


def loading_full_values(program: Any) -> list[Any]:
    """Load full values into the module, and into a part of it."""
    state = {name: 0.5 * value for name, value in program.state_dict().items()}
    program.module.load_state_dict(state)
    losses = train(program, 1)
    program.module.up.load_state_dict({key: 2 * state[f"up.{key}"] for key in ("weight", "bias")})
    return losses + train(program, 2)


def averages_and_snapshots(program: Any) -> list[Any]:
    """Average state dicts, and go back to a snapshot."""
    train(program, 1)
    snapshot = copy.deepcopy(program.module.state_dict())
    average = {name: value.clone() for name, value in snapshot.items()}
    train(program, 2)
    for name, value in program.module.state_dict().items():
        average[name] = 0.9 * average[name] + 0.1 * value
    program.module.load_state_dict(average)
    value = program.eval_step(batch(9))
    program.module.load_state_dict(snapshot)
    return [value, *train(program, 1)]


def own_steps(program: Any, loss_of: Callable[[Any, Tensor], Tensor]) -> list[Any]:
    """Train by a backward of the loop."""
    optimizer, losses = sgd(program), []
    for seed in range(3):
        optimizer.zero_grad()
        loss = loss_of(program.module, batch(seed)["x"])
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def modules_inside(program: Any) -> list[Any]:
    """Call the parts of the module one by one."""

    def loss_of(module: Any, x: Tensor) -> Tensor:
        hidden = torch.tanh(module.up(module.norm(x)))
        loss: Tensor = module.down(hidden).square().mean() + module(x)
        return loss

    return own_steps(program, loss_of)


def penalties_of_inputs(program: Any) -> list[Any]:
    """Add a gradient penalty, and a term of a parameter that is whole."""

    def loss_of(module: Any, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        loss = module(x)
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        term: Tensor = loss + grad.norm() + 0.1 * module.scale.norm()
        return term

    return own_steps(program, loss_of)


def hessian_products(program: Any) -> list[Any]:
    """Multiply the Hessian by the gradient, by two ways that add up, and step by the result."""
    parameters = list(program.module.parameters())
    optimizer = sgd(program)
    for seed in range(3):
        grads = torch.autograd.grad(program.module(**batch(seed)), parameters, create_graph=True)
        dot = sum((grad * grad.detach()).sum() for grad in grads)
        products = torch.autograd.grad(dot, parameters, retain_graph=True)
        again = torch.autograd.grad(grads, parameters, [grad.detach() for grad in grads])
        for parameter, grad, first, second in zip(parameters, grads, products, again):
            parameter.grad = grad.detach() - 0.1 * first - 0.2 * second
        optimizer.step()
    return []


def compiled_steps(program: Any) -> list[Any]:
    """Compile the function of a step."""
    optimizer = sgd(program)

    @torch.compile(backend="eager")
    def step(rows: dict[str, Tensor]) -> Any:
        loss = program.train_step(rows)
        optimizer.step()
        return loss

    return [step(batch(seed)) for seed in range(3)]


def compiled_evaluations(program: Any) -> list[Any]:
    """Evaluate a compiled module before the optimizer takes the parameters, and between updates."""
    compiled, values = torch.compile(program.module, backend="eager"), []
    with torch.no_grad():
        values.append(compiled(**batch(9)))
    optimizer = sgd(program)
    for seed in range(2):
        values.append(program.train_step(batch(seed)))
        optimizer.step()
        with torch.no_grad():
            values.append(compiled(**batch(9)))
            for parameter in program.module.parameters():
                parameter.mul_(0.9)
            values.append(compiled(**batch(9)))
    return values


Loop = Callable[[Any], list[Any]]
LOOPS: tuple[tuple[Loop, tuple[str, ...]], ...] = (
    (clamping_hooks, ALL),
    (optimizers_in_hooks, ("tp", "dp", "zero2")),
    (looking_hooks, ("tp", "dp", "zero3")),
    (kept_gradients, DATA),
    (inference_first, DATA),
    (inference_first_step, ("zero3",)),
    (evaluations_between, DATA),
    (loading_full_values, ALL),
    (averages_and_snapshots, ("tp", "zero3")),
    (modules_inside, TP),
    (penalties_of_inputs, TP),
    (hessian_products, TP),
    (compiled_steps, ("tp", "zero2")),
    (compiled_evaluations, ("tp", "zero2", "zero3")),
)


def full(value: Any) -> Any:
    """Return the full tensor of a DTensor, and all else as it is."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


@pytest.mark.parametrize("loop", [loop for loop, _ in LOOPS])
def test_a_loop_on_a_program(loop: Loop, threads: Threads) -> None:
    """What it logs and the state that it leaves are those of the plain model, in all layouts."""

    def body(rows: str, mesh: str) -> Any:
        program = build(make_plan(copy.deepcopy(NET), rows, mesh), batch(0))
        return loop(program), program.state_dict()

    plain = Plain()
    logged, state = loop(plain), plain.state_dict()
    for layout in dict(LOOPS)[loop]:
        rows, mesh = LAYOUTS[layout]
        for found, left in threads.run(body, 4 if "," in mesh else 2, rows, mesh):
            torch.testing.assert_close(
                [torch.as_tensor(full(value)) for value in found],
                [torch.as_tensor(value) for value in logged],
                rtol=1e-9,
                atol=1e-12,
                msg=lambda text, layout=layout: f"{layout}: {text}",
            )
            torch.testing.assert_close(left, state, rtol=1e-9, atol=1e-12)


def test_a_step_reuses_the_tensor_of_gradients() -> None:
    """It gets another one only if a loop has kept a gradient, or a view of one."""
    parameters = [nn.Parameter(torch.ones(3, 2)) for _ in range(3)]
    flat = FlatGradients(parameters)

    def step() -> int:
        flat.zero()
        sum(p.square().sum() for p in parameters).backward()  # type: ignore[union-attr]
        return flat.collect().data_ptr()

    first = step()
    for parameter in parameters[:2]:
        parameter.grad = None
    parameters[2].grad = 2 * torch.ones(3, 2)
    assert step() == step() == first
    kept = parameters[1].grad
    assert kept is not None
    second = step()
    part = parameters[0].grad.view(-1)[1:]  # type: ignore[union-attr]
    third = step()
    assert len({first, second, third}) == 3 and third == step()
    assert torch.equal(kept, torch.full((3, 2), 2.0)) and torch.equal(part, torch.full((5,), 2.0))


def test_a_shard_for_a_file_of_its_own() -> None:
    """A rank that asks for its own shard may save it."""
    from schedlang.runtime.shard_state import mark_shard_tensor

    value = 0.5 * mark_shard_tensor(torch.ones(2), "up.weight") + 0.5
    file = io.BytesIO()
    torch.save(value.as_subclass(Tensor), file)
    file.seek(0)
    assert torch.equal(torch.load(file), torch.ones(2))


@pytest.mark.parametrize("layout", ["dp", "tp zero3"])
def test_inference_mode(layout: str) -> None:
    """A step within it is refused, and changes nothing: its tensors have no gradient."""
    rows, mesh = LAYOUTS[layout]
    plan = make_plan(NET, rows, mesh)

    def run() -> tuple[str, bool]:
        program = build(plan, batch(0), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
        before = program.state_dict()
        with torch.inference_mode(), pytest.raises(Refusal) as caught:
            program.train_step(batch(0))
        after = program.state_dict()
        equal = all(torch.equal(value, after[name]) for name, value in before.items())
        program.train_step(batch(0))
        return caught.value.diagnostic.code, equal

    for code, is_unchanged in Threads().run(run, plan.mesh.world):
        assert code == "S617" and is_unchanged
