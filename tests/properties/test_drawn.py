"""What is drawn: nothing that is hard to come by is left out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from tests.engine import Threads
from tests.properties import engine, schedules, splits
from tests.properties.drawn import Drawn
from tests.properties.models import Block, Config
from tests.tiers import thinned

RARE = ("grid(summa", "activations, to=peer", "uneven=pad", "uneven=replicate", "embed  grid(")


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


@pytest.mark.parametrize("block, count", thinned([
    (Block("mlp", hidden=4, pre=False), 3),
    (Block("attention", heads=4, groups=2, norm="rms", causal=True), 7),
    (Block("attention", heads=4, groups=4, pre=False, flag=True, causal=True, fused=True), 4),
    (Block("attention", heads=2, window=2, pre=False, norm="rms"), 7),
    (Block("mlp", hidden=7, norm="rms", pre=False), 4),
], 5))  # fmt: skip
def test_every_kernel_is_the_original(threads: Threads, block: Block, count: int) -> None:
    """Each step with kernels that is offered holds, beside a split block, a split head and
    dropout."""
    config = Config((block,), entry="words", dropout=0.25, returns="dict")
    axes = (("tp", 2),)
    mine = schedules.replace_kernel(config, dict(axes), 4)
    assert len(mine) == count
    for one in mine:
        split = [
            s for s in splits.shard(config, dict(axes), 4) if len(s.rows) > 1 or "vocab" in str(s)
        ]
        engine.holds(
            Drawn(config, axes, schedules.allowed([one, *split], config, axes), 1, 4), threads
        )
