"""The executor runs random orders: any placement, replicas, idle ranks, any microbatch order."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from schedlang.pipeline.schedules import make_order
from schedlang.pipeline.timeline.table import Timeline, timeline_from_rows
from tests import models
from tests.engine import Threads
from tests.pipeline_runs import assert_same, cut_model, train_rank
from tests.properties.profiles import examples
from tests.random_orders import random_timeline

V = ((0, 1, 1, 0),)
TWO_WAYS = ((0, 1, 2), (2, 1, 0))
PLACES = {
    "V": V,
    "two of a kind": ((0, 0, 1, 1),),
    "loop": ((0, 1, 0, 1),),
    "an idle rank": ((0, 2, 2),),
    "two ways": TWO_WAYS,
    "two ways, two chunks": ((0, 1, 0, 1), (1, 0, 1, 0)),
    "both replicas on one rank": ((0, 1, 2), (0, 2, 1)),
    "a replica on fewer ranks": ((0, 1, 2), (1, 1, 1)),
}


def _train(make: Any, batch: Any, plan: Timeline, shift: bool, options: Any) -> Any:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return train_rank(rank, make, batch, plan, shift, **options)


def assert_equal(threads: Threads, plan: Timeline, count: int, **options: Any) -> None:
    """Assert that an order of the skipping model gives the full model's losses and gradients."""
    batch = models.points()
    answers = threads.run(_train, plan.ranks, models.Skipping, batch, plan, False, options)
    assert_same(models.Skipping, batch, answers, count=count)


@cache
def edges_of(stages: int) -> Any:
    return cut_model(models.Skipping(), models.points(), stages).edges


@pytest.mark.parametrize("name", PLACES)
def test_places(threads: Threads, name: str) -> None:
    """Any placement of stages, in a random order, gives the model's gradients."""
    homes = PLACES[name]
    plan = random_timeline(random.Random(name), homes, 4, edges_of(len(homes[0])), split=1.0)
    assert_equal(threads, plan, 4)


def test_backwards_in_another_order(threads: Threads) -> None:
    """Microbatches may have another order in backward than in forward."""
    plan = make_order("gpipe", 3, 4)
    turned = {0: 2, 1: 0, 2: 3, 3: 1}
    rows = [
        [op._replace(microbatch=turned[op.microbatch]) for op in plan.rows(r)] for r in range(3)
    ]
    assert_equal(threads, timeline_from_rows(rows, edges_of(3)), 4)


@st.composite
def stage_ranks(draw: Any) -> Any:
    """Strategy: ranks of all stages, of one replica or two; some ranks may be idle."""
    stages, ranks = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    replica = st.tuples(*[st.integers(0, ranks - 1)] * stages)
    return draw(st.lists(replica, min_size=1, max_size=2))


@examples(12)
@given(stage_ranks(), st.integers(1, 5), st.integers(0, 9999), st.integers(0, 3))
def test_random(threads: Threads, places: Any, micro: int, seed: int, lookahead: int) -> None:
    """Any order that can run, with any placement, gives the full model's gradients."""
    count = max(micro, len(places))
    plan = random_timeline(random.Random(seed), places, count, edges_of(len(places[0])))
    assert_equal(threads, plan, count, lookahead=lookahead)
