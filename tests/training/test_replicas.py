"""Gathered parameters are discarded when the slices they come from change."""

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
    """Units with parameters, and some parameters outside of them."""

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


def build_program(stage: int, scale: float = 1.0) -> Program:
    model = Blocks()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    plan = Plan.empty(ModelFacts(model), Mesh((("dp", 2),)))
    return build(plan.add(zero(stage=stage, over=("dp",)), [""]), _batch())


def outputs_after_eval(rank: int, stage: int) -> tuple[Any, ...]:
    """Return outputs after a load and after an optimizer's step, each right after an eval_step."""
    program, reference = build_program(stage), build_program(0, 0.5)
    batch = _batch()
    program.eval_step(batch)
    program.load_state_dict(reference.state_dict())
    loaded = program.eval_step(batch), reference.eval_step(batch)
    program.train_step(batch)
    program.eval_step(batch)
    torch.optim.SGD(program.assembly.parameters.values(), lr=0.1).step()
    stepped = program.eval_step(batch)
    reference.load_state_dict(program.state_dict())
    return (*loaded, stepped, reference.eval_step(batch))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_changed_slices_are_gathered_again(stage: int) -> None:
    """The second forward uses what a caller changed after the first."""
    for loaded, expected, stepped, stepped_expected in run_ranks(2, outputs_after_eval, stage):
        assert torch.equal(loaded, expected)
        assert torch.equal(stepped, stepped_expected) and not torch.equal(stepped, loaded)
