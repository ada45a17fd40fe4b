"""A loop trains parameters that were frozen: for its first steps, or when the program was built."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.lower.build import build
from tests.engine import Threads
from tests.proofs import make_plan

TENSOR = "blocks.*.up  shard(col, over=tp)\nblocks.*.down  shard(row, over=tp)\n"
PIPELINE = 'blocks  pipeline_split(over=pp)\n{}\npipeline(order="1F1B", micro=2)'
SEQUENCE = """
embed  shard(output=S(seq), over=tp)
at blocks.* {
    norm  shard(input=S(seq), output=S(seq), over=tp)
    up    shard(col, over=tp)
    down  shard(row, output=S(seq), over=tp)
}
norm  shard(input=S(seq), output=R, over=tp)
"""


class Block(nn.Module):
    """A norm, two projections and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        """Return a sum with the input."""
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """An embedding, two blocks, a norm, and a block that a batch may leave out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.more = nn.LayerNorm(6), nn.Linear(6, 6)
        self.double()

    def forward(self, ids: Tensor, more: Tensor | None = None) -> Tensor:
        """Return a mean of squares."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        used = more is not None and bool((more > 0).all())
        return (x + self.more(x) if used else x).square().sum(-1).mean()


def batch(seed: int, more: bool | None = None) -> dict[str, Any]:
    """Return four rows."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 11, (4, 6), generator=generator)
    return {"ids": ids} if more is None else {"ids": ids, "more": torch.full((4,), float(more))}


def sgd(named: Any) -> torch.optim.Optimizer:
    """Return SGD with momentum and decay, which moves a parameter with a gradient of zero."""
    parameters = [p for _, p in named]
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.05)


def freeze(parameters: Mapping[str, nn.Parameter]) -> None:
    """Train the last block only."""
    for name, parameter in parameters.items():
        parameter.requires_grad_("blocks.1" in name)


def plain_loop(*, more: bool) -> Any:
    """Return the state after steps with frozen parameters, and steps without."""
    model = Net()
    optimizer = sgd(model.named_parameters())
    freeze(dict(model.named_parameters()))
    for seed in range(6):
        if seed == 2:
            model.requires_grad_(True)
        optimizer.zero_grad()
        model(**batch(seed, seed % 2 == 0 if more else None)).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("zero", ["zero(stage=1, over=dp)", "zero(stage=2, over=dp)"])
def test_a_stage_that_is_frozen_at_first(zero: str, threads: Threads) -> None:
    """It gathers its parameters anew in each step: with their values, and whether they train."""

    def body() -> Any:
        plan = make_plan(Net(), PIPELINE.format(zero), "dp=2, pp=2")
        program = build(plan, batch(0), optimizer=sgd)
        freeze(program.assembly.parameters)
        for seed in range(6):
            if seed == 2:
                for parameter in program.assembly.parameters.values():
                    parameter.requires_grad_(True)
            program.train_step(batch(seed))
        return program.state_dict()

    expected = plain_loop(more=False)
    for state in threads.run(body, 4):
        torch.testing.assert_close(state, expected, rtol=1e-9, atol=1e-12)


def frozen_net() -> Net:
    """Return the model with frozen parameters."""
    model = Net()
    freeze(dict(model.named_parameters()))
    return model


LAYOUTS = {
    "zero": ("zero(stage=2, over=dp)", "dp=2"),
    "tp": (TENSOR, "tp=2"),
    "dp": ("zero(stage=0, over=dp)", "dp=2"),
    "sequence": (SEQUENCE, "tp=2"),
}


@pytest.mark.parametrize("layout", ["zero", "tp"])
def test_parameters_that_were_built_frozen(layout: str, threads: Threads) -> None:
    """They train; where a step uses one on no rank, it has no gradient."""
    rows, mesh = LAYOUTS[layout]

    def body() -> Any:
        program = build(make_plan(frozen_net(), rows, mesh), batch(0, True))
        optimizer = sgd(program.module.named_parameters())
        for seed in range(6):
            if seed == 2:
                program.module.requires_grad_(True)
            program.train_step(batch(seed, seed % 2 == 0))
            optimizer.step()
        return program.state_dict()

    for state in threads.run(body, 2):
        torch.testing.assert_close(state, plain_loop(more=True), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("layout", ["dp", "sequence"])
def test_gradients_that_no_step_reduces(layout: str, threads: Threads) -> None:
    """They would differ by rank: refused, until the parameters are frozen again."""
    rows, mesh = LAYOUTS[layout]

    def body() -> Any:
        program = build(make_plan(copy.deepcopy(frozen_net()), rows, mesh), batch(0))
        program.train_step(batch(0))
        program.module.requires_grad_(True)
        with pytest.raises(Refusal) as caught:
            program.train_step(batch(1))
        freeze(dict(program.module.named_parameters()))
        return caught.value.diagnostic.code, program.train_step(batch(1)).isfinite().item()

    assert threads.run(body, 2) == [("S617", True)] * 2
