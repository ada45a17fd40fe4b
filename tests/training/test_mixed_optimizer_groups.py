"""Optimizer steps on sliced and plain parameters in one group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from schedlang.runtime.optim.full_tensor_step import step_only, step_optimizer

OPTIMIZERS = {
    "sgd": lambda ps, **how: torch.optim.SGD(ps, lr=0.1, momentum=0.9, **how),
    "adamw": lambda ps, **how: torch.optim.AdamW(ps, lr=0.1, amsgrad=True, **how),
    "rmsprop": lambda ps, **how: torch.optim.RMSprop(ps, lr=0.1, **how),
}


@pytest.fixture
def meshes() -> Iterator[tuple[Any, Any]]:
    """Yield two meshes of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        shard_mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
        yield shard_mesh, init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))["b"]
    finally:
        dist.destroy_process_group()


def mixed_parameters(meshes: tuple[Any, Any]) -> list[nn.Parameter]:
    """Return parameters: plain, sliced over one mesh, plain, sliced over another."""
    torch.manual_seed(0)
    values = [torch.randn(4, 3) for _ in range(4)]
    mixed = [
        nn.Parameter(v if mesh is None else DTensor.from_local(v, mesh, [Shard(0)]))
        for v, mesh in zip(values, (None, meshes[0], None, meshes[1]))
    ]
    return mixed


def set_gradients(parameters: list[nn.Parameter], seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in parameters:
        grad = torch.randn(4, 3)
        mesh = getattr(parameter, "device_mesh", None)
        parameter.grad = grad if mesh is None else DTensor.from_local(grad, mesh, [Shard(0)])


def local_values(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    locals_ = (p.to_local() if isinstance(p, DTensor) else p for p in parameters)
    return [value.detach().clone() for value in locals_]


@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_lists_of_one_kind(meshes: tuple[Any, Any], kind: str, how: dict[str, bool]) -> None:
    """An optimizer that updates lists of tensors takes sliced and plain parameters in one group,
    and updates them as torch does tensor by tensor."""
    if how.get("fused") and kind == "rmsprop":
        pytest.skip("torch has no such operator")
    options = {key: value for key, value in how.items() if key not in ("foreach", "fused")}
    results = []
    for chosen in (how, {**options, "foreach": False}):
        parameters = mixed_parameters(meshes)
        optimizer = OPTIMIZERS[kind](parameters, **chosen)
        groups = optimizer.param_groups
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for seed in range(3):
            set_gradients(parameters, seed)
            step_optimizer(optimizer) if chosen is how else optimizer.step()
            schedule.step()
        assert (
            optimizer.param_groups is groups
            and [p for g in groups for p in g["params"]] == parameters
        )
        results.append(local_values(parameters))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state_lies_as_the_parameter_does(meshes: tuple[Any, Any], kind: str) -> None:
    """After a step the state of a sliced parameter is what torch's own step leaves: DTensors of its
    layout, the same objects in each step, and no state of another tensor."""
    states = []
    for by_parts in (True, False):
        parameters = mixed_parameters(meshes)
        optimizer = OPTIMIZERS[kind](parameters)
        earlier: dict[tuple[int, str], Any] = {}
        for seed in range(3):
            set_gradients(parameters, seed)
            parameters[seed].grad = None  # a parameter without gradient is not updated
            step_optimizer(optimizer) if by_parts else optimizer.step()
            assert all(any(key is p for p in parameters) for key in optimizer.state)
            current = {
                (i, k): v for i, p in enumerate(parameters) for k, v in optimizer.state[p].items()
            }
            assert all(current[key] is value for key, value in earlier.items())
            earlier = {
                key: value for key, value in current.items() if isinstance(value, torch.Tensor)
            }
        states.append(earlier)
    assert states[0].keys() == states[1].keys() and states[0]
    for key, actual in states[0].items():
        expected = states[1][key]
        assert type(actual) is type(expected) and actual.shape == expected.shape, key
        if isinstance(expected, DTensor):
            assert (actual.device_mesh, actual.placements) == (
                expected.device_mesh,
                expected.placements,
            )
            actual, expected = actual.to_local(), expected.to_local()
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)


def test_some_of_them(meshes: tuple[Any, Any]) -> None:
    """A step on stand-ins of some parameters works on mixed lists too."""
    parameters = mixed_parameters(meshes)
    optimizer = torch.optim.AdamW(parameters, lr=0.1, foreach=True)
    initial = local_values(parameters)
    set_gradients(parameters, 0)
    step_only(optimizer, {id(p): p for p in parameters[:2]})
    changed = [
        not torch.equal(a, b) for a, b in zip(initial, local_values(parameters), strict=True)
    ]
    assert changed == [True, True, False, False] and len(optimizer.param_groups[0]["params"]) == 4


class CountingSgd(torch.optim.SGD):
    """Counts steps in its group, as some optimizers do, and its calls."""

    calls = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Step, and count it."""
        self.calls += 1
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


def test_what_a_group_counts(meshes: tuple[Any, Any]) -> None:
    """What a step writes into a group is kept; the optimizer is called once per step."""
    parameters = mixed_parameters(meshes)
    optimizer = CountingSgd(parameters, lr=0.1, foreach=True)
    for seed in range(2):
        set_gradients(parameters, seed)
        step_optimizer(optimizer)
    assert optimizer.calls == 2 and [group["k"] for group in optimizer.param_groups] == [2]


def test_looked_at_together(meshes: tuple[Any, Any]) -> None:
    """A group that is updated tensor by tensor is not split: its optimizer may read all of it."""
    sizes = []

    class Looking(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            """Takes note of groups."""
            sizes.append([len(group["params"]) for group in self.param_groups])

    step_optimizer(Looking(mixed_parameters(meshes), {}))
    step_optimizer(torch.optim.SGD(mixed_parameters(meshes), foreach=False))
    assert sizes == [[4]]
