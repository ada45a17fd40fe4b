"""torch's own runtime of pipelines as an oracle: the same order, the same gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from schedlang.pipeline.schedules import make_order
from tests.benchmarks.executor_overhead import Chain, batch, ours, theirs
from tests.ranks import run_ranks


def _both(rank: int, name: str, ranks: int, chunks: int) -> list[tuple[Any, Any]]:
    """Gradients of this rank's stages by this executor and by torch's."""
    plan = make_order(name, ranks, 4, chunks)
    one, two = Chain(plan.stages).double(), Chain(plan.stages).double()
    data = {key: value.double() for key, value in batch(8).items()}
    for step in (ours(one, plan, data), theirs(two, name, plan, data)):
        step()
        step()
    return [(p.grad, q.grad) for p, q in zip(one.parameters(), two.parameters())]


@pytest.mark.parametrize(("name", "ranks", "chunks"), [("1f1b", 2, 1), ("interleaved1f1b", 2, 2)])
def test_gradients_are_those_of_torch(name: str, ranks: int, chunks: int) -> None:
    """Every stage gets the gradients that torch's runtime gives it under the same order."""
    found = run_ranks(ranks, _both, name, ranks, chunks)
    for rank, pairs in enumerate(found):
        held = [pair for pair in pairs if pair[0] is not None or pair[1] is not None]
        assert len(held) == 2 * chunks, rank  # a weight and a bias each
        for mine, other in held:
            torch.testing.assert_close(mine, other, rtol=1e-13, atol=0)
