"""What is drawn: nothing that is hard to come by is left out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from tests.engine import Threads
from tests.properties import engine, schedules, splits
from tests.properties.drawn import Drawn
from tests.properties.models import Block, Config

RARE = ("grid(summa", "uneven=pad", "uneven=replicate", "embed  grid(")


def test_rare_rows_are_drawn() -> None:
    """Of 400 schedules some have grids, padded sizes, and heads that several ranks hold."""
    seen: list[str] = []

    @settings(max_examples=400, derandomize=True, database=None, deadline=None)
    @given(schedules.legal())
    def draw(drawn: Drawn) -> None:
        seen.append(drawn.text)

    draw()
    counts = {word: sum(word in text for text in seen) for word in RARE}
    assert min(counts.values()) >= 1, counts


@pytest.mark.parametrize("block, axes, word", [
    (Block("attention", heads=4, groups=1, causal=True), (("dp", 2), ("tp", 2)),
     "uneven=replicate"),
    (Block("attention", heads=2, groups=1, plain=True), (("tp", 2),), "uneven=replicate"),
    (Block("attention", heads=6, groups=3, window=2, norm="rms"), (("tp", 2),), "uneven=pad"),
    (Block("mlp", hidden=7), (("dp", 2), ("tp", 3)), "uneven=pad"),
])  # fmt: skip
def test_uneven_rows_are_the_original(
    threads: Threads, block: Block, axes: schedules.Axes, word: str
) -> None:
    """Every uneven step that is offered holds, beside replicas, tied words and dropout."""
    config = Config((block,), entry="words", tied=True, dropout=0.25)
    steps = [s for s in splits.shard(config, dict(axes), 4) if any(word in row for row in s.rows)]
    assert steps
    for one in steps:
        engine.holds(Drawn(config, axes, (one,), 1, 4), threads)
