"""Tests of `compress`: who is compared with whom, limits, and bytes as counted."""

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
from tests.proofs import assert_near, planned, proven, sequential, sgd, steps
from tests.tiers import thinned

HOW = {"powersgd": "powersgd, rank=2", "int8": "int8", "onebit": "onebit, block=64"}


class Net(nn.Module):
    """A wide matrix, a tall one, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(12, 20), nn.Linear(20, 1)
        self.mid = nn.Linear(20, 20)

    def forward(self, x: Tensor) -> Tensor:
        return (self.down(torch.tanh(self.mid(torch.tanh(self.up(x))))) ** 2).mean()


def points(seed: int, rows: int = 8) -> dict[str, Tensor]:
    """A batch of Net."""
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(rows, 12, generator=generator, dtype=torch.float64)}


BATCHES = [points(seed, 9 - seed) for seed in range(3)]


def plan_of(how: str, mesh: str = "dp=4", more: str = "", model: Any = None) -> Plan:
    """Net, or another model, whose gradients are compressed over dp."""
    rows = f"{more}zero(stage=0, over=dp)\ncompress(gradients, {how}, over=dp)"
    return planned(model or Net().double(), rows, mesh, "lossy")


# -- programs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", HOW)
def test_equal_to_one_process_that_does_the_same(threads: Threads, how: str) -> None:
    """Over replicas whose parts weigh differently: outputs, gradients, norm, state."""
    report = proven(threads, plan_of(HOW[how], "dp=3"), BATCHES)
    assert report.equivalence == "relaxed (lossy)"


@pytest.mark.parametrize(
    "how, more, mesh",
    thinned(
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
    """Each part of a split matrix is coded by itself, slices too, and copies of a tie alike."""
    batches = [models.tokens(rows=8, seed=seed) for seed in range(2)]
    proven(threads, plan_of(how, mesh, more, models.gpt2(2)), batches)


def test_in_the_limit_it_is_the_original(threads: Threads) -> None:
    """With a rank that leaves nothing out gradients and training are the original's own."""
    plan, model = plan_of("powersgd, rank=100", "dp=3"), Net().double()
    found = threads.run(steps, 3, plan, BATCHES, sgd, None, {})[0]
    assert_near(found, sequential(model, BATCHES, sgd))


def _sums(plan: Plan, count: int) -> dict[str, Tensor]:
    """Gradients summed over steps of one batch, without any update."""
    program = build(plan, points(0))
    total: dict[str, Tensor] = {}
    for _ in range(count):
        program.train_step(points(0))
        for name, grad in program.gradients().items():
            total[name] = total.get(name, 0) + grad
    return total


@pytest.mark.parametrize("how", HOW)
def test_the_sum_over_steps_is_followed(threads: Threads, how: str) -> None:
    """With error feedback the relative error of the sum over steps falls; without it, it stays
    where a code is biased, and falls as a mean of draws where it is not."""
    exact = _sums(planned(Net().double(), "", ""), 1)["mid.weight"]
    errors = {}
    for feedback in ("true", "false"):
        plan = plan_of(f"{HOW[how]}, error_feedback={feedback}", "dp=2")
        for count in (2, 64):
            found = threads.run(_sums, 2, plan, count)[0]["mid.weight"]
            errors[feedback, count] = float((found / count - exact).norm() / exact.norm())
    assert errors["true", 2] > 1e-4  # it is lossy
    assert errors["true", 64] < 0.2 * errors["true", 2]
    if how == "onebit":
        assert errors["false", 64] > 0.9 * errors["false", 2]
    if how == "int8":
        assert errors["false", 64] < 0.5 * errors["false", 2]


# -- bytes ---------------------------------------------------------------------------------------


def _heard(plan: Plan) -> list[tuple[str, int]]:
    """What a rank sends of gradients in a step."""
    program = build(plan, points(0), optimizer=sgd)
    found: list[tuple[str, int]] = []
    with listen_to_collectives(lambda kind, group, size: found.append((kind, size))):
        program.train_step(points(0))
    return found


@pytest.mark.parametrize("how", HOW)
def test_bytes_are_those_of_the_plan(threads: Threads, how: str) -> None:
    """What is sent is what the plan says, the fraction of whole gradients that a paper states."""
    plan = plan_of(HOW[how], "dp=2")
    made = prepare(plan, points(0, 4))
    told = list_collectives(plan, made, points(0, 4))
    wanted = sorted((one.kind, one.bytes) for one in told if one.what != "loss and gradient norm")
    assert sorted(threads.run(_heard, 2, plan)[0]) == wanted
    by_word = {one.what: one.bytes for one in told}
    matrices = (12 * 20, 20 * 20)
    if how == "powersgd":
        low = [one.bytes for one in told if "low rank" in one.what]
        assert sum(low) == 2 * (12 + 20 + 20 + 20) * 8
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
    """What is not summed whole, not allowed, without meaning, or said twice."""
    with pytest.raises(Refusal) as error:
        planned(Net(), rows, "dp=2", relax)
    assert code in error.value.render() and said in error.value.render()
