"""Resizing a job: the same schedule file on other ranks goes on without any change of results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from schedlang.diagnostics.source import Source
from schedlang.language.syntax import parse
from schedlang.passes.elaborate.state import Settings
from schedlang.passes.lower.build import build
from schedlang.runtime.float64 import Float64
from schedlang.runtime.modes import enter_modes
from schedlang.schedule import Schedule
from tests import models
from tests.proofs import adamw, train_sequential
from tests.ranks import run_ranks

FILE = """schedule 1 for GPT2LMHeadModel

knob pp: int = 2 in [1, 2, 3, 4]

mesh(dp=_, pp=pp)

step "pipeline" {
  transformer.h  pipeline_split(over=pp)
  zero(stage=1, over=dp)
  pipeline(order="Varuna", micro=2)
}
"""
BATCHES = [models.tokens(rows=8, seed=seed) for seed in range(4)]


def resume_steps(
    rank: int, pp: int, world: int, steps: tuple[int, int], folder: str
) -> list[tuple[float, float]]:
    """Load the last checkpoint, train some steps on so many ranks, save: return losses and
    norms."""
    torch.set_num_threads(1)
    knobs = Settings({"pp": pp}, {}, world)
    plan = Schedule(models.gpt2(), parse(Source("my.sched", FILE)), knobs).plan()
    results = []
    with enter_modes(Float64()):
        program = build(plan, BATCHES[0], optimizer=adamw)
        if steps[0]:
            program.load(f"{folder}/{steps[0]}")
        for step in range(*steps):
            loss = float(program.train_step(BATCHES[step]))
            results.append((loss, float(program.grad_norm)))
        program.save(f"{folder}/{steps[1]}")
    return results


def test_a_job_goes_on_with_other_ranks(tmp_path: Path) -> None:
    """Four ranks lose one: three go on as three stages, then two as copies of the whole model.

    Every loss and norm is that of one process; the batch of a step stays the same.
    """
    models.gpt2(layers=1)  # import once, before ranks are forked
    results: list[Any] = []
    for world, pp, steps in ((4, 2, (0, 2)), (3, 3, (2, 3)), (2, 1, (3, 4))):
        results += run_ranks(world, resume_steps, pp, world, steps, str(tmp_path))[0]
    reference = train_sequential(models.gpt2(), BATCHES, adamw)
    expected = [(float(reference[f"loss {k}"]), float(reference[f"norm {k}"])) for k in range(4)]
    torch.testing.assert_close(results, expected, rtol=1e-9, atol=0)
