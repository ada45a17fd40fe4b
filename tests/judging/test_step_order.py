"""Inputs of the first wrong module: wrong order or wrong rows of its input are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from schedlang import TrainingProgram, verify_program
from schedlang.passes.judge.module_inputs import RankCall, explain_inputs
from schedlang.runtime.launch.pool import Pool
from tests.judging.catches.collectives import GatherTokens, local_part
from tests.judging.catches.language_model import WIDTH, LanguageModel, batch, loss, token_parallel

ROWS, PLACES = 4, 6


def full_input() -> Tensor:
    """Return the original's input: rows, tokens, features."""
    return torch.randn(
        ROWS, PLACES, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )


def rank_output(x: Tensor) -> Tensor:
    """Return an output that differs from other ranks'."""
    return x.flip(-1) + 1


def doubled(x: Tensor) -> Tensor:
    """Return the output of the original's module: features with different weights."""
    return x * torch.arange(1.0, 1.0 + x.shape[-1], dtype=x.dtype)


ORDERS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "all": (lambda x: x, ""),
    "a block": (lambda x: x[2:, :3], ""),
    "the first and the last": (lambda x: x[:, [0, 1, 4, 5]], ""),
    "halves exchanged": (lambda x: x.roll(3, 1), "holds along dim 1 the places [3, 4, 5, 0, 1, 2]"),
    "a half twice": (lambda x: x[:, [0, 1, 0, 1]], "holds along dim 1 the places [0, 1, 0, 1]"),
    "rows backwards": (lambda x: x.flip(0), "holds along dim 0 the places [3, 2, 1, 0]"),
    "no transpose": (
        lambda x: x.transpose(1, 2).reshape(x.shape),
        "has the right numbers at other places",
    ),
    "other numbers": (lambda x: x + 1, ""),
}


@pytest.mark.parametrize("laid, said", ORDERS.values(), ids=ORDERS)
def test_an_order_is_told(laid: Callable[[Tensor], Tensor], said: str) -> None:
    """A changed order of positions is listed; parts in order are not reported."""
    value = laid(full_input())
    explanation = explain_inputs(
        [full_input()], [RankCall(1, [value], rank_output(value))], lambda x: None
    )
    assert said in explanation if said else not explanation, explanation
    assert not said or explanation.endswith("(rank 1)")


def test_ids_are_no_order() -> None:
    """Repeated integers such as ids do not give an order."""
    ids = torch.arange(24.0, dtype=torch.float64).reshape(4, 6)
    value = ids.flip(0, 1) * 1.0
    value[0, 0] = value[3, 5] = 7.0
    assert explain_inputs([ids], [RankCall(0, [value], rank_output(value))], lambda x: None) == ""


def test_features_may_lie_otherwise() -> None:
    """Permuted features are reported only if the original's module then gives the wrong output."""
    value = full_input().roll(2, -1)
    for output, message in (
        (rank_output(value), ""),
        (doubled(value), "along dim 2 the places [6, 7, 0"),
    ):
        explanation = explain_inputs([full_input()], [RankCall(0, [value], output)], doubled)
        assert message in explanation if message else not explanation, explanation


def test_other_rows_are_told_of_what_is_computed_together() -> None:
    """Ranks with equal outputs but different input rows are named."""
    halves = full_input().chunk(2)
    equal_outputs = [RankCall(k, [half], torch.ones(3)) for k, half in enumerate(halves)]
    explanation = explain_inputs([full_input()], equal_outputs, lambda x: None)
    assert "have other rows there (rank 0 [0, 1] and rank 1 [2, 3])" in explanation, explanation
    different_outputs = [RankCall(k, [half], rank_output(half)) for k, half in enumerate(halves)]
    assert explain_inputs([full_input()], different_outputs, lambda x: None) == ""
    equal_inputs = [RankCall(k, [halves[0]], torch.ones(3)) for k in range(2)]
    assert explain_inputs([full_input()], equal_inputs, lambda x: None) == ""


# ---- In verdicts.


def two_layers() -> nn.Module:
    """Return a language model with two linear layers."""
    return LanguageModel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)))


def split_layers(rows: bool) -> Any:
    """Return tensor parallel layers; `rows`: each rank wrongly reads its own rows."""

    def program(model: Any) -> TrainingProgram:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        plan: Any = {"inner.0": ColwiseParallel(), "inner.2": RowwiseParallel()}
        parallelize_module(model, mesh, plan)

        def step(batch: Any) -> Tensor:
            local = {"ids": local_part(batch["ids"])} if rows else batch
            value = loss(model(local["ids"]), local)
            value.backward()
            return value

        return TrainingProgram(model, step)

    return program


class RunningMean(nn.Module):
    """Each token sums the tokens before it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out, self.order = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        """Gather the parts of tokens in the given order of ranks, and sum."""
        x = self.gate(x)
        if not self.order:
            return self.out(x.cumsum(1))
        parts = GatherTokens.apply(x).chunk(2, 1)
        mixed = torch.cat([*parts][:: self.order], 1).cumsum(1)
        return self.out(mixed.chunk(2, 1)[dist.get_rank()])


def test_ranks_of_one_copy_that_read_other_rows(pool: Pool) -> None:
    """The row-parallel layer is named, with the different rows of its input."""
    torch.manual_seed(0)
    inputs = {"model": two_layers(), "batch": batch, "loss": loss, "ranks": 2, "pool": pool}
    assert verify_program(split_layers(False), **inputs).ok
    message = dict(verify_program(split_layers(True), **inputs).localised)["first module"]
    assert message.startswith("the output of `inner.2`"), message
    assert "other rows there (rank 0 [0, 1] and rank 1 [2, 3])" in message, message


def test_words_that_are_put_together_in_another_order(pool: Pool) -> None:
    """A wrong order of gathered tokens is named, and no mask."""
    torch.manual_seed(0)
    inputs = {
        "model": LanguageModel(RunningMean()),
        "batch": batch,
        "loss": loss,
        "ranks": 2,
        "pool": pool,
    }
    for order in (1, -1):

        def program(model: Any, order: int = order) -> TrainingProgram:
            model.inner.order = order
            return token_parallel(model)

        report = verify_program(program, **inputs)
        assert report.ok == (order == 1), str(report)
    message = dict(report.localised)["first module"]
    assert "the words in the order [3, 4, 5, 0, 1, 2]" in message and "mask" not in message, message
