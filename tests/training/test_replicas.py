"""Tests of replicas: gathered parameters never outlive the slices that they were gathered from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedlang.ir.mesh import Mesh
from schedlang.ir.model import ModelFacts
from schedlang.ir.plan import Plan
from schedlang.passes.lower.build import build
from schedlang.primitives.zero import zero
from schedlang.runtime.program import Program
from tests.ranks import run_ranks


class Blocks(nn.Module):
    """Units with parameters of their own, and some outside of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return (self.head(x) ** 2).mean()


def _batch() -> dict[str, Tensor]:
    return {"x": torch.arange(48.0).view(8, 6).sin()}


def _program(stage: int, scale: float = 1.0) -> Program:
    model = Blocks()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    plan = Plan.empty(ModelFacts(model), Mesh((("dp", 2),)))
    return build(plan.add(zero(stage=stage, over=("dp",)), [""]), _batch())


def _after_eval(rank: int, stage: int) -> tuple[Any, ...]:
    """Outputs after a load and after an optimizer's step, each right behind an eval_step."""
    program, other = _program(stage), _program(0, 0.5)
    batch = _batch()
    program.eval_step(batch)
    program.load_state_dict(other.state_dict())
    loaded = program.eval_step(batch), other.eval_step(batch)
    program.train_step(batch)
    program.eval_step(batch)
    torch.optim.SGD(program.assembly.parameters.values(), lr=0.1).step()
    stepped = program.eval_step(batch)
    other.load_state_dict(program.state_dict())
    return (*loaded, stepped, other.eval_step(batch))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_changed_slices_are_gathered_again(stage: int) -> None:
    """What a caller changes between two forwards is what the second one computes with."""
    for loaded, expected, stepped, again in run_ranks(2, _after_eval, stage):
        assert torch.equal(loaded, expected)
        assert torch.equal(stepped, again) and not torch.equal(stepped, loaded)
