"""Users' own loops over `program.module`: equal to a plain loop, or refused at their line."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors import torch as safetensors
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import get_total_norm
from torch.optim.swa_utils import AveragedModel

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.lower.build import build
from tests.engine import Threads
from tests.proofs import make_plan

TENSOR_ROWS = "up  shard(col, over=tp)\ndown  shard(row, over=tp)\n"
SUMMED = "zero(stage=0, over=dp)"
SLICED = "zero(stage=2, over=dp)"


class Net(nn.Module):
    """Up and down."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = (x + self.down(torch.tanh(self.up(x)))).square().mean()
        return loss


def batch(seed: int) -> dict[str, Tensor]:
    """Return four rows."""
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(4, 6, generator=generator, dtype=torch.float64)}


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    """Return SGD with momentum over a module."""
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def make_sgd(named: Any) -> torch.optim.Optimizer:
    """Return the same optimizer over named parameters, as `build` takes it."""
    return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)


def plain_loop(clip: bool = False) -> Any:
    """Return the parameters after a plain loop."""
    model = Net()
    steps = sgd(model)
    for seed in range(3):
        steps.zero_grad()
        model(**batch(seed)).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        steps.step()
    return model.state_dict()


def own_backward(program: Any) -> None:
    """Call backward directly, over the whole batch."""
    steps = sgd(program.module)
    for seed in range(3):
        with torch.no_grad():
            program.module(**batch(seed))
        steps.zero_grad()
        program.module(**batch(seed)).backward()  # here
        steps.step()


def own_optimizer(program: Any) -> None:
    """Take gradients of steps, and update by a user's optimizer."""
    steps = sgd(program.module)
    for seed in range(3):
        program.train_step(batch(seed))
        steps.step()


def own_clipping(program: Any) -> None:
    """The same, with clipping."""
    steps = sgd(program.module)
    for seed in range(3):
        program.train_step(batch(seed))
        torch.nn.utils.clip_grad_norm_(program.module.parameters(), 0.05)  # here
        steps.step()


def own_tensorwise(program: Any) -> None:
    """The same, with an optimizer that reads full tensors."""
    steps: Any = torch.optim.Adafactor(program.module.parameters())
    program.train_step(batch(0))
    steps.step()  # here


def own_scaler(program: Any) -> None:
    """Call backward directly on a loss that torch's GradScaler scales."""
    steps, scaler = sgd(program.module), torch.amp.GradScaler("cpu", init_scale=8.0)
    for seed in range(3):
        steps.zero_grad()
        scaler.scale(program.module(**batch(seed))).backward()
        scaler.step(steps)  # here
        scaler.update()


def own_average(program: Any) -> None:
    """Average weights by torch's AveragedModel."""
    AveragedModel(program.module)  # here


def own_copy(program: Any) -> None:
    """Copy the program."""
    copy.deepcopy(program)  # here


def new_parameter(program: Any) -> None:
    """Replace a parameter."""
    program.module.up.weight = nn.Parameter(torch.zeros(8, 6, dtype=torch.float64))  # here


def new_module(program: Any) -> None:
    """Replace a module."""
    program.module.down = nn.Linear(8, 6).double()  # here


def by_a_term(program: Any) -> None:
    """The norm of each parameter, added to the loss."""
    loss = program.module(**batch(0))
    loss = loss + 0.1 * sum(one.norm() for one in program.module.parameters())
    loss.backward()  # here


def by_squares(program: Any) -> None:
    """The squares of each parameter, added to the loss: the gradient would be right, not this."""
    loss = program.module(**batch(0))
    loss = loss + 0.1 * sum(one.square().sum() for one in program.module.parameters())
    loss.backward()  # here


def by_a_gradient_of_a_term(program: Any) -> None:
    """The gradient of a norm of all parameters."""
    parameters = list(program.module.parameters())
    loss = program.module(**batch(0)) + 0.1 * torch.stack([p.norm() for p in parameters]).sum()
    torch.autograd.grad(loss, parameters)  # here


def by_another_operator(program: Any) -> None:
    """A term that begins with a product."""
    weight = program.module.up.weight
    loss = program.module(**batch(0)) + (weight @ weight.T).square().sum()
    loss.backward()  # here


def by_gradients(program: Any) -> None:
    """The norm of all gradients, added to the loss."""
    loss = program.module(**batch(0))
    grads = torch.autograd.grad(loss, list(program.module.parameters()), create_graph=True)
    loss = loss + 0.1 * torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
    loss.backward()  # here


def by_gradients_of_a_norm(program: Any) -> None:
    """The same, whose value nobody reads: the sum is not all of the norm."""
    parameters = list(program.module.parameters())
    grads = torch.autograd.grad(program.module(**batch(0)), parameters, create_graph=True)
    norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
    torch.autograd.grad(norm, parameters)  # here


def by_a_graph_of_gradients(program: Any) -> None:
    """The same, of the gradients that a backward has left."""
    program.module(**batch(0)).backward(create_graph=True)
    norms = [parameter.grad.norm() for parameter in program.module.parameters()]
    torch.stack(norms).sum().backward()  # here


def by_an_output_inside(program: Any) -> None:
    """A term of the output of a module that leaves it split over ranks."""
    program.module.up(batch(0)["x"]).square().mean().backward()  # here


def by_a_norm_in_a_hook(program: Any) -> None:
    """A hook that divides each gradient by its norm."""
    program.module.up.weight.register_hook(lambda grad: grad / grad.norm())
    try:
        program.train_step(batch(0))  # here
    finally:
        program.module.up.weight._backward_hooks.clear()


def by_torch_save(program: Any) -> None:
    """The module's own state, halved, in a file of torch."""
    state = {name: 0.5 * value.cpu() for name, value in program.module.state_dict().items()}
    torch.save({"model": state}, io.BytesIO())  # here


def by_safetensors(program: Any) -> None:
    """The same, in another file."""
    safetensors.save(program.module.state_dict())  # here


def by_saving_the_module(program: Any) -> None:
    """The module itself, in a file."""
    torch.save(program.module, io.BytesIO())  # here


def by_a_functional_call(program: Any) -> None:
    """A forward with other values."""
    state = {name: 0.5 * value for name, value in program.module.state_dict().items()}
    with torch.no_grad():
        torch.func.functional_call(program.module, state, (batch(0)["x"],))  # here


def by_terms_of_the_output(program: Any) -> None:
    """Two forwards in one loss, and a second backward through the gradient of the input."""
    steps = sgd(program.module)
    for seed in range(3):
        steps.zero_grad()
        loss, more = program.module(**batch(seed)), program.module(**batch(seed))
        x = batch(seed)["x"].requires_grad_()
        (grad,) = torch.autograd.grad(program.module(x), x, create_graph=True)
        (0.5 * (loss + more) + 0.0 * grad.square().sum()).backward()
        steps.step()


def by_transforming(program: Any) -> None:
    """A gradient by torch.func."""
    torch.func.grad(lambda x: program.module(x))(batch(0)["x"])  # here


def by_tangents(program: Any) -> None:
    """A directional derivative, forwards."""
    x = batch(0)["x"]
    with forward_ad.dual_level():
        program.module(forward_ad.make_dual(x, torch.ones_like(x)))  # here


def by_full_data(program: Any) -> None:
    """The full values, where a rank has a part of them."""
    parameters = dict(program.module.named_parameters())
    shards = {name: parameter.data for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        parameter.data = Net().state_dict()[name]  # here
    try:
        program.eval_step(batch(0))  # here
    finally:
        for name, parameter in parameters.items():
            parameter.data = shards[name]


def by_data(program: Any) -> None:
    """A step as it was written before `no_grad`: on this rank's part, of whatever kind it is."""
    for seed in range(3):
        program.train_step(batch(seed))
        for parameter in program.module.parameters():
            parameter.data = parameter.data - 0.1 * parameter.grad.data  # here


def by_data_of_an_optimizer(program: Any) -> None:
    """The same, by an optimizer."""

    class Old(torch.optim.Optimizer):
        """As they were written before `no_grad`."""

        def step(self, closure: Any = None) -> None:
            """Subtract."""
            for parameter in self.param_groups[0]["params"]:
                parameter.data = parameter.data - 0.1 * parameter.grad.data  # here

    steps = Old(program.module.parameters(), {})
    program.train_step(batch(0))
    steps.step()


Loop = Callable[[Any], None]
RIGHT = ((TENSOR_ROWS, "tp=2", own_backward), (TENSOR_ROWS, "tp=2", by_terms_of_the_output)) + (
    (TENSOR_ROWS, "tp=2", own_optimizer),
    (SLICED, "dp=2", own_optimizer),
    (SUMMED, "dp=2", own_clipping),
    (SLICED, "dp=2", own_clipping),
    (TENSOR_ROWS, "tp=2", own_clipping),
    (TENSOR_ROWS + SLICED, "dp=2, tp=2", own_clipping),
)
REFUSED: tuple[tuple[str, str, Loop, str], ...] = (
    (SUMMED, "dp=2", own_backward, "S617"),
    (SLICED, "dp=2", own_backward, "S617"),
    (TENSOR_ROWS + SUMMED, "dp=2, tp=2", own_backward, "S617"),
    (TENSOR_ROWS, "tp=2", by_a_term, "S622"),
    (TENSOR_ROWS, "tp=2", by_squares, "S622"),
    (TENSOR_ROWS, "tp=2", by_transforming, "S617"),
    (TENSOR_ROWS, "tp=2", by_tangents, "S617"),
    (TENSOR_ROWS, "tp=2", by_a_gradient_of_a_term, "S622"),
    (TENSOR_ROWS, "tp=2", by_another_operator, "S622"),
    (TENSOR_ROWS, "tp=2", by_gradients, "S622"),
    (TENSOR_ROWS, "tp=2", by_gradients_of_a_norm, "S622"),
    (TENSOR_ROWS, "tp=2", by_a_graph_of_gradients, "S622"),
    (TENSOR_ROWS, "tp=2", by_an_output_inside, "S622"),
    (TENSOR_ROWS, "tp=2", by_a_norm_in_a_hook, "S622"),
    (TENSOR_ROWS, "tp=2", by_torch_save, "S617"),
    (TENSOR_ROWS, "tp=2", by_safetensors, "S617"),
    (TENSOR_ROWS, "tp=2", by_saving_the_module, "S617"),
    (SLICED, "dp=2", by_a_functional_call, "S617"),
    (TENSOR_ROWS, "tp=2", own_tensorwise, "S622"),
    (TENSOR_ROWS, "tp=2", own_scaler, "S622"),
    (SLICED, "dp=2", own_average, "S617"),
    (SLICED, "dp=2", own_copy, "S617"),
    (SUMMED, "dp=2", own_copy, "S617"),
    (TENSOR_ROWS, "tp=2", own_copy, "S617"),
    (SLICED, "dp=2", new_parameter, "S617"),
    (TENSOR_ROWS, "tp=2", new_parameter, "S617"),
    (SUMMED, "dp=2", new_module, "S617"),
    (TENSOR_ROWS, "tp=2", by_full_data, "S617"),
    (SLICED, "dp=2", by_full_data, "S617"),
    (SLICED, "dp=2", by_data, "S617"),
    (SLICED, "dp=2", by_data_of_an_optimizer, "S617"),
)


@pytest.mark.parametrize("rows", [TENSOR_ROWS, TENSOR_ROWS + "zero(stage=2, over=dp)"])
def test_norms_of_gradients(rows: str, threads: Threads) -> None:
    """They are those of full gradients, for a log and for clipping, of every kind."""

    def norms(parameters: Any) -> list[Tensor]:
        gradients = [parameter.grad for parameter in parameters]
        few = [get_total_norm(gradients[:2], 1.0), get_total_norm([])]
        return few + [
            torch.nn.utils.clip_grad_norm_(parameters, largest, kind)
            for largest, kind in ((math.inf, 2.0), (math.inf, math.inf), (0.5, 3.0), (0.05, 2))
        ]

    def body() -> Any:
        program = build(make_plan(Net(), rows, "dp=2, tp=2" if "dp" in rows else "tp=2"), batch(0))
        program.train_step(batch(0))
        for kind in (0, -math.inf):
            with pytest.raises(Refusal, match="this rank's gradients"):
                get_total_norm([p.grad for p in program.module.parameters()], kind)
        found = norms([*program.module.parameters()])
        return found, program.gradients()

    model = Net()
    model(**batch(0)).backward()
    expected = norms([*model.parameters()])
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for found, clipped in threads.run(body, 4 if "dp" in rows else 2):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(clipped, gradients, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rows, mesh, way", RIGHT)
def test_a_loop_that_is_right(rows: str, mesh: str, way: Loop, threads: Threads) -> None:
    """It leaves the parameters of a plain loop."""

    def body() -> Any:
        program = build(make_plan(Net(), rows, mesh), batch(0))
        way(program)
        return program.state_dict()

    state, expected = threads.run(body, 4 if "," in mesh else 2)[0], plain_loop(way is own_clipping)
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)


def test_steps_after_the_module_was_read(threads: Threads) -> None:
    """The guards of the module's own backward are no hooks of the user (S867)."""

    def body() -> Any:
        rows = f"{SLICED}\nzero(stage=0, over=node)"
        program = build(make_plan(Net(), rows, "node=2, dp=2"), batch(0), optimizer=make_sgd)
        for seed in range(3):
            with torch.no_grad():
                program.module(**batch(seed))
            program.train_step(batch(seed))
        return program.state_dict()

    for name, value in threads.run(body, 4)[0].items():
        torch.testing.assert_close(value, plain_loop()[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rows, mesh, way, code", REFUSED)
def test_a_loop_that_would_be_wrong(
    rows: str, mesh: str, way: Loop, code: str, threads: Threads
) -> None:
    """A rank's part of a sum or tensor is not taken for the whole: refused; later steps work."""

    def body() -> Any:
        program = build(make_plan(Net(), rows, mesh), batch(0))
        with pytest.raises(Refusal) as caught:
            way(program)
        loss = program.train_step(batch(0))
        diagnostic = caught.value.diagnostic
        line = diagnostic.primary.span.source.line(diagnostic.primary.span.line)
        return diagnostic.code, "# here" in line, loss.isfinite().item()

    world = 4 if "," in mesh else 2
    assert threads.run(body, world) == [(code, True, True)] * world


@pytest.mark.parametrize("rows, mesh", [(TENSOR_ROWS, "tp=2"), (SUMMED, "dp=2")])
def test_data_of_a_shard_may_be_assigned(rows: str, mesh: str, threads: Threads) -> None:
    """Values of a shard are the rank's own; under `zero` torch would lose them: see above."""

    def body() -> Any:
        program = build(make_plan(Net(), rows, mesh), batch(0))
        by_data(program)
        return program.state_dict()

    model = Net()
    for seed in range(3):
        model.zero_grad()
        model(**batch(seed)).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(0.1 * parameter.grad)
    found = threads.run(body, 2)[0]
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


def test_an_optimizer_by_elements_is_taken(threads: Threads) -> None:
    """An unknown elementwise class is tried, without changing it."""

    class Mine(torch.optim.SGD):
        """SGD under another name."""

    def body() -> Any:
        program = build(make_plan(Net(), TENSOR_ROWS, "tp=2"), batch(0))
        steps = Mine(program.module.parameters(), lr=0.1, momentum=0.9)
        for seed in range(3):
            program.train_step(batch(seed))
            steps.step()
        assert len(steps.state) == len(list(program.module.parameters()))
        return program.state_dict()

    state = threads.run(body, 2)[0]
    for name, value in plain_loop().items():
        torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adafactor])
def test_a_compiled_step_of_an_optimizer(kind: Any, threads: Threads) -> None:
    """It is checked as an eager one; dynamo failed inside the check, for plain modules as well."""

    def step(parameters: Any) -> None:
        optimizer = kind(parameters, lr=0.1)
        torch.compile(lambda: optimizer.step(), backend="eager")()  # here

    def body() -> Any:
        program = build(make_plan(Net(), TENSOR_ROWS, "tp=2"), batch(0))
        program.train_step(batch(0))
        if kind is torch.optim.Adafactor:
            with pytest.raises(Refusal, match="S622"):
                step(program.module.parameters())
            return None
        step(program.module.parameters())
        return program.state_dict()

    found, model = threads.run(body, 2)[0], Net()
    model(**batch(0)).backward()
    step(model.parameters())
    for name, value in model.state_dict().items() if found is not None else ():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


def test_a_program_is_not_pickled() -> None:
    """Files of it are refused, on one rank as well; a shallow copy is none."""
    program = build(make_plan(Net(), ""), batch(0), optimizer=make_sgd)
    for write in (pickle.dumps, lambda it: torch.save({"program": it}, io.BytesIO())):
        with pytest.raises(Refusal, match="a program cannot be pickled") as caught:
            write(program)
        assert caught.value.diagnostic.code == "S617"
    assert copy.copy(program).assembly is program.assembly


def test_a_program_of_one_rank_is_copied() -> None:
    """The copy trains separately."""
    program = build(make_plan(Net(), "up  checkpoint()"), batch(0), optimizer=make_sgd)
    copied = copy.deepcopy(program)
    for seed in range(3):
        copied.train_step(batch(seed))
    for name, value in plain_loop().items():
        torch.testing.assert_close(copied.state_dict()[name], value, rtol=1e-9, atol=1e-12)
        assert torch.equal(program.state_dict()[name], Net().state_dict()[name])
