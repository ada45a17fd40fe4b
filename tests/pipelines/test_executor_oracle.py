"""The executor against torch's own pipeline runtime: same order, same gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from schedlang.pipeline.schedules import make_order
from tests.benchmarks.executor_overhead import Chain, batch, schedlang_runtime, torch_runtime
from tests.ranks import run_ranks


def _gradient_pairs(rank: int, name: str, ranks: int, chunks: int) -> list[tuple[Any, Any]]:
    """Pairs of this rank's gradients: by our executor and by torch's."""
    plan = make_order(name, ranks, 4, chunks)
    schedlang_model, torch_model = Chain(plan.stages).double(), Chain(plan.stages).double()
    data = {key: value.double() for key, value in batch(8).items()}
    for step in (
        schedlang_runtime(schedlang_model, plan, data),
        torch_runtime(torch_model, name, plan, data),
    ):
        step()
        step()
    return [
        (p.grad, q.grad) for p, q in zip(schedlang_model.parameters(), torch_model.parameters())
    ]


@pytest.mark.parametrize(("name", "ranks", "chunks"), [("1f1b", 2, 1), ("interleaved1f1b", 2, 2)])
def test_gradients_are_those_of_torch(name: str, ranks: int, chunks: int) -> None:
    """Under the same order every stage gets the gradients of torch's runtime."""
    pairs_by_rank = run_ranks(ranks, _gradient_pairs, name, ranks, chunks)
    for rank, pairs in enumerate(pairs_by_rank):
        present = [pair for pair in pairs if pair[0] is not None or pair[1] is not None]
        assert len(present) == 2 * chunks, rank  # a weight and a bias each
        for local, expected in present:
            torch.testing.assert_close(local, expected, rtol=1e-13, atol=0)
