"""The executor runs any order: placements, replicas, idle ranks, microbatches in any order."""

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
from tests.drawn_orders import drawn
from tests.engine import Threads
from tests.executing import assert_same, cut_model, train
from tests.properties.profiles import examples

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
    return train(rank, make, batch, plan, shift, **options)


def equal(threads: Threads, plan: Timeline, count: int, **options: Any) -> None:
    """A drawn order of the skipping model gives the losses and gradients of the whole model."""
    batch = models.points()
    answers = threads.run(_train, plan.ranks, models.Skipping, batch, plan, False, options)
    assert_same(models.Skipping, batch, answers, count=count)


@cache
def edges_of(stages: int) -> Any:
    return cut_model(models.Skipping(), models.points(), stages).edges


@pytest.mark.parametrize("name", PLACES)
def test_places(threads: Threads, name: str) -> None:
    """Wherever stages live, in whatever order that can run, gradients are the model's."""
    homes = PLACES[name]
    plan = drawn(random.Random(name), homes, 4, edges_of(len(homes[0])), split=1.0)
    equal(threads, plan, 4)


def test_backwards_in_another_order(threads: Threads) -> None:
    """Microbatches that go forward in one order and back in another are not confused."""
    plan = make_order("gpipe", 3, 4)
    turned = {0: 2, 1: 0, 2: 3, 3: 1}
    rows = [
        [op._replace(microbatch=turned[op.microbatch]) for op in plan.rows(r)] for r in range(3)
    ]
    equal(threads, timeline_from_rows(rows, edges_of(3)), 4)


@st.composite
def homes(draw: Any) -> Any:
    """Where stages live: any rank for any stage, of one replica or two; a rank may be idle."""
    stages, ranks = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    one = st.tuples(*[st.integers(0, ranks - 1)] * stages)
    return draw(st.lists(one, min_size=1, max_size=2))


@examples(12)
@given(homes(), st.integers(1, 5), st.integers(0, 9999), st.integers(0, 3))
def test_random(threads: Threads, places: Any, micro: int, seed: int, lookahead: int) -> None:
    """Any order that can run, wherever stages live, gives the gradients of the whole model."""
    count = max(micro, len(places))
    plan = drawn(random.Random(seed), places, count, edges_of(len(places[0])))
    equal(threads, plan, count, lookahead=lookahead)
