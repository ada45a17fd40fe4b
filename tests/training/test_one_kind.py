"""Tests of steps on sliced and plain parameters in one group of an optimizer."""

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

MADE = {
    "sgd": lambda ps, **how: torch.optim.SGD(ps, lr=0.1, momentum=0.9, **how),
    "adamw": lambda ps, **how: torch.optim.AdamW(ps, lr=0.1, amsgrad=True, **how),
    "rmsprop": lambda ps, **how: torch.optim.RMSprop(ps, lr=0.1, **how),
}


@pytest.fixture
def meshes() -> Iterator[tuple[Any, Any]]:
    """Two meshes of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        one = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
        yield one, init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))["b"]
    finally:
        dist.destroy_process_group()


def _parameters(meshes: tuple[Any, Any]) -> list[nn.Parameter]:
    """Plain, sliced over one mesh, plain, sliced over another."""
    torch.manual_seed(0)
    values = [torch.randn(4, 3) for _ in range(4)]
    made = [
        nn.Parameter(v if mesh is None else DTensor.from_local(v, mesh, [Shard(0)]))
        for v, mesh in zip(values, (None, meshes[0], None, meshes[1]))
    ]
    return made


def _grads(parameters: list[nn.Parameter], seed: int) -> None:
    torch.manual_seed(seed)
    for one in parameters:
        drawn = torch.randn(4, 3)
        mesh = getattr(one, "device_mesh", None)
        one.grad = drawn if mesh is None else DTensor.from_local(drawn, mesh, [Shard(0)])


def _values(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    locals_ = (p.to_local() if isinstance(p, DTensor) else p for p in parameters)
    return [one.detach().clone() for one in locals_]


@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("kind", MADE)
def test_lists_of_one_kind(meshes: tuple[Any, Any], kind: str, how: dict[str, bool]) -> None:
    """An optimizer that updates lists of tensors takes sliced and plain parameters in one group,
    and moves them as torch's own step, tensor by tensor, does."""
    if how.get("fused") and kind == "rmsprop":
        pytest.skip("torch has no such operator")
    plain = {key: value for key, value in how.items() if key not in ("foreach", "fused")}
    found = []
    for given in (how, {**plain, "foreach": False}):
        parameters = _parameters(meshes)
        made = MADE[kind](parameters, **given)
        groups = made.param_groups
        schedule = torch.optim.lr_scheduler.StepLR(made, 1, 0.5)
        for seed in range(3):
            _grads(parameters, seed)
            step_optimizer(made) if given is how else made.step()
            schedule.step()
        assert (
            made.param_groups is groups and [p for g in groups for p in g["params"]] == parameters
        )
        found.append(_values(parameters))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", MADE)
def test_state_lies_as_the_parameter_does(meshes: tuple[Any, Any], kind: str) -> None:
    """Behind a step the state of a sliced parameter is what torch's own step leaves: DTensors laid
    like it, the same objects from step to step, and nothing of another tensor."""
    found = []
    for by_parts in (True, False):
        parameters = _parameters(meshes)
        made = MADE[kind](parameters)
        kept: dict[tuple[int, str], Any] = {}
        for seed in range(3):
            _grads(parameters, seed)
            parameters[seed].grad = None  # what gets no gradient is left alone
            step_optimizer(made) if by_parts else made.step()
            assert all(any(key is p for p in parameters) for key in made.state)
            now = {(i, k): v for i, p in enumerate(parameters) for k, v in made.state[p].items()}
            assert all(now[key] is value for key, value in kept.items())
            kept = {key: value for key, value in now.items() if isinstance(value, torch.Tensor)}
        found.append(kept)
    assert found[0].keys() == found[1].keys() and found[0]
    for key, ours in found[0].items():
        theirs = found[1][key]
        assert type(ours) is type(theirs) and ours.shape == theirs.shape, key
        if isinstance(theirs, DTensor):
            assert (ours.device_mesh, ours.placements) == (theirs.device_mesh, theirs.placements)
            ours, theirs = ours.to_local(), theirs.to_local()
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_some_of_them(meshes: tuple[Any, Any]) -> None:
    """A step on stand-ins of some parameters is one of lists of one kind, too."""
    parameters = _parameters(meshes)
    made = torch.optim.AdamW(parameters, lr=0.1, foreach=True)
    before = _values(parameters)
    _grads(parameters, 0)
    step_only(made, {id(p): p for p in parameters[:2]})
    moved = [not torch.equal(a, b) for a, b in zip(before, _values(parameters), strict=True)]
    assert moved == [True, True, False, False] and len(made.param_groups[0]["params"]) == 4


class _Counting(torch.optim.SGD):
    """Counts steps in its group, as some optimizers do, and how often it is called."""

    calls = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """A step, counted."""
        self.calls += 1
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


def test_what_a_group_counts(meshes: tuple[Any, Any]) -> None:
    """What a step notes in a group is there afterwards; the optimizer is called once a step."""
    parameters = _parameters(meshes)
    made = _Counting(parameters, lr=0.1, foreach=True)
    for seed in range(2):
        _grads(parameters, seed)
        step_optimizer(made)
    assert made.calls == 2 and [group["k"] for group in made.param_groups] == [2]


def test_looked_at_together(meshes: tuple[Any, Any]) -> None:
    """A group that is updated tensor by tensor stays one: its optimizer may look at all of it."""
    seen = []

    class Looking(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            """Takes note of groups."""
            seen.append([len(group["params"]) for group in self.param_groups])

    step_optimizer(Looking(_parameters(meshes), {}))
    step_optimizer(torch.optim.SGD(_parameters(meshes), foreach=False))
    assert seen == [[4]]
