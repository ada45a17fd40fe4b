"""The shrinker: a bug that only two rows together show is reduced to these rows, and told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from schedlang.diagnostics.source import Source
from schedlang.language.syntax import parse
from schedlang.runtime.activation_memory import recompute
from schedlang.runtime.offload import offloaded_activations
from tests.engine import Threads
from tests.properties import engine
from tests.properties.models import Block, Config
from tests.properties.schedules import Drawn, step
from tests.properties.shrink import differs, shrink, shrinking, told
from tests.zoo.bug import Patch
from tests.zoo.pool import Mutated


def wrong_together(patch: Patch) -> None:
    """A module that is both recomputed and offloaded has other weights."""
    checkpoint, move = recompute.checkpoint, offloaded_activations.offload_activations

    def marked(module: Any, save: Any) -> None:
        checkpoint(module, save)
        module.marked = True

    def moved(module: Any, store: Any) -> None:
        move(module, store)
        if getattr(module, "marked", False):
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.mul_(1.5)

    patch.setattr(recompute, "checkpoint", marked)
    patch.setattr(offloaded_activations, "offload_activations", moved)


LARGE = Drawn(
    Config(
        (Block("mlp", 4), Block("twice"), Block("attention")),
        4,
        "words",
        12,
        True,
        "dict",
        dropout=0.25,
        mask=True,
        side=True,
    ),
    (("dp", 2), ("tp", 2)),
    (
        step(
            "shard",
            ["blocks.0.up  shard(col, over=tp)", "blocks.0.down  shard(row, over=tp)"],
            ["shard blocks.0"],
            ["tp"],
        ),
        step("checkpoint", ["blocks.0  checkpoint()"], ["checkpoint blocks.0"]),
        step("checkpoint", ["blocks.1  checkpoint(save=[linear])"], ["checkpoint blocks.1"]),
        step("offload", ["blocks.1  offload(activations, to=cpu)"], ["offload blocks.1"]),
        step("offload", ["blocks.2  offload(activations, to=cpu)"], ["offload blocks.2"]),
        step("zero", ["zero(stage=2, over=dp)"], ["zero dp", "sliced"], ["dp"]),
        step("pipeline", ['pipeline(order="GPipe", micro=2)'], ["order"]),
    ),
    2,
    4,
)


@pytest.mark.deep
def test_two_rows_are_left(threads: Threads) -> None:
    """Of seven steps, three blocks and four ranks: the two rows, one block, one rank, one row of
    the batch; what is told parses, and evaluates to the same."""
    fails = differs(Mutated(threads, wrong_together))
    assert fails(LARGE)
    least = shrink(LARGE, fails)
    assert [one.rows for one in least.steps] == [
        ("blocks.0  checkpoint(save=[linear])",),
        ("blocks.0  offload(activations, to=cpu)",),
    ]
    assert len(least.config.blocks) == least.world == least.rows == least.length == 1
    said = told(least)
    text, python = said[said.index("schedule 1") :].rsplit("\n", 1)
    parse(Source("least.sched", text))
    names = {"Drawn": Drawn, "Config": Config, "Block": Block}
    from tests.properties.schedules import Step

    assert eval(python, {**names, "Step": Step}) == least


def test_a_failing_property_tells_the_least(
    threads: Threads, capsys: pytest.CaptureFixture[str]
) -> None:
    """A property that fails prints the least schedule and still fails."""

    rows = LARGE.steps[1:2] + (step("offload", ["blocks.0  offload(activations)"], ["x"]),)
    small = Drawn(LARGE.config, (("tp", 1),), (*rows, LARGE.steps[2]))

    @shrinking
    def fails() -> None:
        engine.holds(small, Mutated(threads, wrong_together))

    with pytest.raises(engine.Differs):
        fails()
    said = capsys.readouterr().out
    assert "  blocks.0  checkpoint()\n  blocks.0  offload" in said
    assert "mesh(" in said and "save" not in said
