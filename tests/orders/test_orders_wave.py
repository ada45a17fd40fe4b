"""Hanayo: waves over the ranks, against the published results of another list scheduler."""

from __future__ import annotations

import pytest

from schedlang.pipeline.cost import Cost
from schedlang.pipeline.schedules import OrderError, make_order
from schedlang.pipeline.timeline.memory import peak_activations
from schedlang.pipeline.timeline.proof import check_timeline, with_transfers
from schedlang.pipeline.timeline.simulation import simulate_timeline


@pytest.mark.parametrize(
    ("ranks", "waves", "bubble"),
    [(4, 1, 0.333), (4, 2, 0.213), (4, 4, 0.119), (8, 1, 0.368), (8, 2, 0.238), (8, 4, 0.135)],
)
def test_bubbles_of_waves(ranks: int, waves: int, bubble: float) -> None:
    """With m = p and B = 2F bubbles equal an independent simulation, with p in flight."""
    t = make_order("Hanayo", ranks, ranks, 2 * waves)
    assert round(float(simulate_timeline(t, Cost()).bubble), 3) == bubble
    assert peak_activations(t).max() == ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("waves", [1, 2, 3])
def test_waves(ranks: int, waves: int) -> None:
    """Stages go forward and back over the ranks; every size can run."""
    forward_ranks = [*range(ranks)]
    for micro in (1, 2, 3, 5, 8, 17):
        t = make_order("wave", ranks, micro, 2 * waves)
        check_timeline(with_transfers(t))
        assert t.stage_rank.tolist() == (forward_ranks + forward_ranks[::-1]) * waves
        assert peak_activations(t).max() <= min(micro, 2 * ranks)


@pytest.mark.parametrize("memory", [1, 2, 3, 4, 5])
def test_memory_of_waves(memory: int) -> None:
    """`memory` bounds the microbatches in flight, and more of it is never slower here."""
    spans = []
    for limit in range(1, memory + 1):
        t = make_order("hanayo", 4, 16, 4, memory=limit)
        check_timeline(with_transfers(t))
        assert peak_activations(t).max() <= limit
        spans.append(simulate_timeline(t, Cost()).makespan)
    assert spans == sorted(spans, reverse=True)


@pytest.mark.parametrize("chunks", [1, 3, 5])
def test_proposed_chunks_of_waves(chunks: int) -> None:
    """An odd number of stages per rank is refused with numbers that are accepted."""
    with pytest.raises(OrderError) as caught:
        make_order("hanayo", 4, 4, chunks)
    for part in caught.value.legal.split(" or "):
        if part.startswith("chunks="):
            make_order("hanayo", 4, 4, int(part.removeprefix("chunks=").rstrip(",")))
    with pytest.raises(OrderError, match="memory=1"):
        make_order("hanayo", 4, 4, memory=0.5)
