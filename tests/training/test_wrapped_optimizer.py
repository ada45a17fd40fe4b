"""Optimizers that wrap another one, as libraries have them."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import pytest
import torch

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.lower.build import build
from tests.engine import Threads
from tests.proofs import make_plan
from tests.training.test_user_loop import Net, batch

LAYOUTS = {
    "dp": ("zero(stage=0, over=dp)", "dp=2"),
    "zero1": ("zero(stage=1, over=dp)", "dp=2"),
    "tp": ("up  shard(col, over=tp)\ndown  shard(row, over=tp)", "tp=2"),
    "pp": ('down  pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)', "pp=2"),
}


class Lookahead(torch.optim.Optimizer):
    """Zhang et al. 2019, as its wrappers are: it does not call the constructor of torch's class."""

    def __init__(self, fast: torch.optim.Optimizer) -> None:
        self.fast, self.param_groups = fast, fast.param_groups
        self.state: Any = defaultdict(dict)
        for group in self.param_groups:
            group["counter"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.fast.step()
        for group in self.param_groups:
            group["counter"] += 1
            for parameter in group["params"]:
                state = self.state[parameter]
                slow = state.setdefault("slow", parameter.clone())
                if group["counter"] % 2 == 0:
                    slow += 0.5 * (parameter - slow)
                    parameter.copy_(slow)


class ByPosition(Lookahead):
    """Another one, whose slow weights have the positions of their parameters."""

    def __init__(self, fast: torch.optim.Optimizer) -> None:
        super().__init__(fast)
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.fast.step()
        parameters = (p for group in self.param_groups for p in group["params"])
        for parameter, slow in zip(parameters, self.slow):
            slow += 0.5 * (parameter - slow)
            parameter.copy_(slow)


def wrapped(named: Any) -> torch.optim.Optimizer:
    """Return a wrapped SGD."""
    return Lookahead(torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_wrapper_without_the_hooks_of_torch(layout: str, threads: Threads) -> None:
    """It steps as in a plain loop, and its state can be saved."""
    rows, mesh = LAYOUTS[layout]

    def body() -> Any:
        program = build(make_plan(Net(), rows, mesh), batch(0), optimizer=wrapped)
        for seed in range(4):
            program.train_step(batch(seed))
        assert program.optimizer is not None and program.optimizer.state_dict()["state"]
        return program.state_dict()

    model = Net()
    optimizer = wrapped(model.named_parameters())
    for seed in range(4):
        model.zero_grad()
        model(**batch(seed)).backward()
        optimizer.step()
    state = copy.deepcopy(model.state_dict())
    for found in threads.run(body, 2):
        torch.testing.assert_close(found, dict(state), rtol=1e-9, atol=1e-12)


def test_state_by_position_is_refused(threads: Threads) -> None:
    """The trial on small tensors fails in the user's code: S622 says what it does."""
    make = lambda named: ByPosition(torch.optim.SGD([p for _, p in named], lr=0.1))  # noqa: E731

    def body() -> Any:
        build(make_plan(Net(), *LAYOUTS["tp"]), batch(0), optimizer=make)

    with pytest.raises(Refusal, match="this optimizer fails") as caught:
        threads.run(body, 2)
    assert caught.value.diagnostic.code == "S622"
