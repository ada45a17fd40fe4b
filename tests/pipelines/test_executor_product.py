"""Orders of any placement end to end: built, trained, sharded, counted, proven."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.ir import annotations
from schedlang.ir.plan import Plan
from schedlang.pipeline.schedules import ORDERS
from tests import models, small_models
from tests.engine import Threads
from tests.proofs import (
    adamw,
    assert_near,
    make_plan,
    static_holds,
    train_on_ranks,
    train_sequential,
)
from tests.proofs import assert_proven as proves
from tests.random_orders import Homes, random_timeline

TWO_WAYS = ((0, 1), (1, 0))
V = ((0, 1, 1, 0),)
BATCHES = (models.tokens(9), models.tokens(10, seed=2))


def random_plan(
    patch: pytest.MonkeyPatch, homes: Homes, extra: str = "", mesh: str = "pp=2"
) -> Plan:
    """The plan of GPT-2 under a random order with these placements, and further rows."""
    stages = len(homes[0])
    edges = [(s, s + 1) for s in range(stages - 1)]
    patch.setattr(
        annotations,
        "_timeline",
        lambda order, _: random_timeline(random.Random(3), homes, order.micro, edges),
    )
    chunks = stages // (max(homes[0]) + 1)
    rows = (
        f'transformer.h pipeline_split(over=pp)\n{extra}\npipeline(order="Interleaved1F1B", micro=4'
    )
    return make_plan(models.gpt2(), f"{rows}, chunks={chunks})", mesh)


@pytest.mark.parametrize(
    ("homes", "more", "mesh"),
    [
        (V, "", "pp=2"),
        (TWO_WAYS, "", "pp=2"),
        (TWO_WAYS, "zero(stage=3, over=dp)", "dp=2, pp=2"),
        (V, "zero(stage=2, over=dp)", "dp=2, pp=2"),
    ],
)
def test_trained(
    threads: Threads, monkeypatch: pytest.MonkeyPatch, homes: Homes, more: str, mesh: str
) -> None:
    """Losses, norms, clipped gradients, parameters and moments equal the plain loop's."""
    plan = random_plan(monkeypatch, homes, more, mesh)
    observed = train_on_ranks(threads, plan, BATCHES, adamw, clip=0.5)
    assert_near(observed, train_sequential(plan.model.model, BATCHES, adamw, clip=0.5))


def test_proven(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    """`verify` holds with replicas: outputs of training and evaluation, copies, saved state."""
    proves(threads, random_plan(monkeypatch, TWO_WAYS), BATCHES)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("homes", "more", "mesh"),
    [(V, "", "pp=2"), (TWO_WAYS, "zero(stage=1, over=dp)", "dp=2, pp=2")],
)
def test_static(monkeypatch: pytest.MonkeyPatch, homes: Homes, more: str, mesh: str) -> None:
    """The static proofs hold: sums over all copies of a stage, messages of each replica matched."""
    static_holds(random_plan(monkeypatch, homes, more, mesh), models.tokens(8))


REGISTERED = [o.name for o in ORDERS if not o.relaxed and o.name not in ("Seq1F1B", "TeraPipe")]


def _check_order(threads: Threads, name: str, ranks: int, micro: int) -> None:
    rows = f'transformer.h pipeline_split(over=pp)\npipeline(order="{name}", micro={micro})'
    plan = make_plan(models.gpt2(8 if ranks == 4 else 4), rows, f"pp={ranks}")
    observed = train_on_ranks(threads, plan, BATCHES, adamw, clip=0.5)
    assert_near(observed, train_sequential(plan.model.model, BATCHES, adamw, clip=0.5))


@pytest.mark.parametrize(("name", "ranks"), [("BPipe", 4), ("Varuna", 2)])
def test_aside(threads: Threads, name: str, ranks: int) -> None:
    """Orders that park or recompute activations train as the plain loop."""
    _check_order(threads, name, ranks, 4)


class _Past(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)


def test_a_norm_that_saves_its_statistics_runs_again(threads: Threads) -> None:
    """A recomputed batch norm reads the running statistics of its first forward."""
    torch.manual_seed(0)
    model = small_models.Chain(4)
    for index in (1, 3):
        model.layers[index] = nn.Sequential(nn.Linear(6, 6), _Past(6)).double()
    rows = 'layers pipeline_split(over=pp)\npipeline(order="Varuna", micro=2)'
    batches = (small_models.points(1), small_models.points(2))
    observed = train_on_ranks(threads, make_plan(model, rows, "pp=2"), batches, adamw, clip=0.5)
    assert_near(observed, train_sequential(model, batches, adamw, clip=0.5))


@pytest.mark.deep
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", REGISTERED)
def test_every_order(threads: Threads, name: str, ranks: int) -> None:
    """Every registered order without slices or stale weights trains as the plain loop."""
    _check_order(threads, name, ranks, 2 * ranks)
