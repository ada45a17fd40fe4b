"""The shrinker of random schedules: a bug that needs two rows is reduced to these rows."""

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
from tests.properties.shrink import fails_by_difference, reproducer, shrink, shrinking
from tests.zoo.bug import Patch
from tests.zoo.pool import Mutated


def bug_of_two_rows(patch: Patch) -> None:
    """Inject a bug: a module that is both checkpointed and offloaded gets other weights."""
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
    """Seven steps, three blocks and four ranks shrink to two rows, one block, one rank, one row of
    the batch; the report can be parsed and evaluated."""
    fails = fails_by_difference(Mutated(threads, bug_of_two_rows))
    assert fails(LARGE)
    smallest = shrink(LARGE, fails)
    assert [left_step.rows for left_step in smallest.steps] == [
        ("blocks.0  checkpoint(save=[linear])",),
        ("blocks.0  offload(activations, to=cpu)",),
    ]
    assert len(smallest.config.blocks) == smallest.world == smallest.rows == smallest.length == 1
    report = reproducer(smallest)
    text, python = report[report.index("schedule 1") :].rsplit("\n", 1)
    parse(Source("least.sched", text))
    names = {"Drawn": Drawn, "Config": Config, "Block": Block}
    from tests.properties.schedules import Step

    assert eval(python, {**names, "Step": Step}) == smallest


def test_a_failing_property_tells_the_least(
    threads: Threads, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failing property prints the smallest schedule and still fails."""

    rows = LARGE.steps[1:2] + (step("offload", ["blocks.0  offload(activations)"], ["x"]),)
    small = Drawn(LARGE.config, (("tp", 1),), (*rows, LARGE.steps[2]))

    @shrinking
    def fails() -> None:
        engine.assert_holds(small, Mutated(threads, bug_of_two_rows))

    with pytest.raises(engine.Differs):
        fails()
    output = capsys.readouterr().out
    assert "  blocks.0  checkpoint()\n  blocks.0  offload" in output
    assert "mesh(" in output and "save" not in output
