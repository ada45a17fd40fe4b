"""Gradient compression (`compress`): the same as in one process, exact limits, bytes as planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.plan import Plan
from schedlang.passes.analyze.prepare import prepare
from schedlang.passes.lower.build import build
from schedlang.passes.simulate.traffic import list_collectives
from schedlang.runtime.comm.collectives import listen_to_collectives
from tests import models
from tests.engine import Threads
from tests.proofs import (
    assert_near,
    assert_proven,
    make_plan,
    sgd,
    train_on_ranks,
    train_sequential,
)
from tests.tiers import thin_out

METHODS = {"powersgd": "powersgd, rank=2", "int8": "int8", "onebit": "onebit, block=64"}


class Net(nn.Module):
    """A wide matrix, a tall one, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(12, 20), nn.Linear(20, 1)
        self.mid = nn.Linear(20, 20)

    def forward(self, x: Tensor) -> Tensor:
        return (self.down(torch.tanh(self.mid(torch.tanh(self.up(x))))) ** 2).mean()


def batch(seed: int, rows: int = 8) -> dict[str, Tensor]:
    """Return a batch of Net."""
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(rows, 12, generator=generator, dtype=torch.float64)}


BATCHES = [batch(seed, 9 - seed) for seed in range(3)]


def compressed_plan(how: str, mesh: str = "dp=4", more: str = "", model: Any = None) -> Plan:
    """Plan Net, or another model, with gradients compressed over dp."""
    rows = f"{more}zero(stage=0, over=dp)\ncompress(gradients, {how}, over=dp)"
    return make_plan(model or Net().double(), rows, mesh, "lossy")


# -- programs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", METHODS)
def test_equal_to_one_process_that_does_the_same(threads: Threads, how: str) -> None:
    """Replicas whose parts weigh differently: outputs, gradients, norm, state."""
    report = assert_proven(threads, compressed_plan(METHODS[how], "dp=3"), BATCHES)
    assert report.equivalence == "relaxed (lossy)"


@pytest.mark.parametrize(
    "how, more, mesh",
    thin_out(
        [
            (
                "powersgd, rank=2",
                "transformer.h.*.mlp.c_fc shard(col, over=tp)\n"
                "transformer.h.*.mlp.c_proj shard(row, over=tp)\n",
                "dp=2, tp=2",
            ),
            ("int8", "zero(stage=2, over=a)\n", "dp=2, a=2"),
            (
                "onebit, error_feedback=false",
                'transformer.h pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)\n',
                "dp=2, pp=2",
            ),
            (
                "onebit, block=8",
                "transformer.h.*.mlp.c_fc shard(col, over=tp, uneven=pad)\n"
                "transformer.h.*.mlp.c_proj shard(row, over=tp, uneven=pad)\n",
                "dp=2, tp=3",
            ),
        ]
    ),
)
def test_beside_other_rows(threads: Threads, how: str, more: str, mesh: str) -> None:
    """Each part of a split matrix or slice is coded by itself, and copies of tied weights
    equally."""
    batches = [models.tokens(rows=8, seed=seed) for seed in range(2)]
    assert_proven(threads, compressed_plan(how, mesh, more, models.gpt2(2)), batches)


def test_in_the_limit_it_is_the_original(threads: Threads) -> None:
    """With a rank that leaves nothing out, gradients and training are those of the original."""
    plan, model = compressed_plan("powersgd, rank=100", "dp=3"), Net().double()
    results = train_on_ranks(threads, plan, BATCHES)
    assert_near(results, train_sequential(model, BATCHES, sgd))


def summed_gradients(plan: Plan, count: int) -> dict[str, Tensor]:
    """Return gradients summed over steps of one batch, without any update."""
    program = build(plan, batch(0))
    total: dict[str, Tensor] = {}
    for _ in range(count):
        program.train_step(batch(0))
        for name, grad in program.gradients().items():
            total[name] = total.get(name, 0) + grad
    return total


@pytest.mark.parametrize("how", METHODS)
def test_the_sum_over_steps_is_followed(threads: Threads, how: str) -> None:
    """With error feedback the relative error of the sum over steps falls.

    Without it, it stays where a code is biased, and falls as a mean of draws where it is not.
    """
    exact = summed_gradients(make_plan(Net().double(), "", ""), 1)["mid.weight"]
    errors = {}
    for feedback in ("true", "false"):
        plan = compressed_plan(f"{METHODS[how]}, error_feedback={feedback}", "dp=2")
        for count in (2, 64):
            total = threads.run(summed_gradients, 2, plan, count)[0]["mid.weight"]
            errors[feedback, count] = float((total / count - exact).norm() / exact.norm())
    assert errors["true", 2] > 1e-4  # it is lossy
    assert errors["true", 64] < 0.2 * errors["true", 2]
    if how == "onebit":
        assert errors["false", 64] > 0.9 * errors["false", 2]
    if how == "int8":
        assert errors["false", 64] < 0.5 * errors["false", 2]


# -- bytes ---------------------------------------------------------------------------------------


def record_messages(plan: Plan) -> list[tuple[str, int]]:
    """Return the gradient messages that a rank sends in a step."""
    program = build(plan, batch(0), optimizer=sgd)
    messages: list[tuple[str, int]] = []
    with listen_to_collectives(lambda kind, group, size: messages.append((kind, size))):
        program.train_step(batch(0))
    return messages


@pytest.mark.parametrize("how", METHODS)
def test_bytes_are_those_of_the_plan(threads: Threads, how: str) -> None:
    """Ranks send the planned bytes: the fraction of full gradients that the paper states."""
    plan = compressed_plan(METHODS[how], "dp=2")
    prepared = prepare(plan, batch(0, 4))
    collectives = list_collectives(plan, prepared, batch(0, 4))
    expected = sorted(
        (collective.kind, collective.bytes)
        for collective in collectives
        if collective.what != "loss and gradient norm"
    )
    assert sorted(threads.run(record_messages, 2, plan)[0]) == expected
    by_word = {collective.what: collective.bytes for collective in collectives}
    matrices = (12 * 20, 20 * 20)
    if how == "powersgd":
        low_rank = [collective.bytes for collective in collectives if "low rank" in collective.what]
        assert sum(low_rank) == 2 * (12 + 20 + 20 + 20) * 8
    elif how == "int8":
        assert by_word["grads, coded"] == 2 * sum(-(-n // 256) * 256 for n in (*matrices, 20))
    else:
        assert by_word["grads, coded"] == 2 * sum(-(-n // 64) * 8 for n in (*matrices, 20))


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows, relax, code, said",
    [
        (
            "zero(stage=2, over=dp)\ncompress(gradients, int8, over=dp)",
            "lossy",
            "S417",
            "replicate over it, in a row above: `zero(stage=0, over=dp)`",
        ),
        ("compress(gradients, int8, over=dp)", "lossy", "S417", "no all-reduce of gradients"),
        ("zero(stage=0, over=dp)\ncompress(gradients, int8, over=dp)", "", "S505", "relax(lossy)"),
        (
            "zero(stage=0, over=dp)\ncompress(gradients, powersgd, rank=0, over=dp)",
            "lossy",
            "S304",
            "`rank` must be 1 or more",
        ),
        (
            "zero(stage=0, over=dp)\ncompress(gradients, int8, over=dp)\n"
            "compress(gradients, onebit, over=dp)",
            "lossy",
            "S509",
            "compressed already",
        ),
    ],
)
def test_refusals(rows: str, relax: str, code: str, said: str) -> None:
    """Gradients that are not summed whole, missing `relax`, bad values, and repeated rows."""
    with pytest.raises(Refusal) as error:
        make_plan(Net(), rows, "dp=2", relax)
    assert code in error.value.render() and said in error.value.render()
