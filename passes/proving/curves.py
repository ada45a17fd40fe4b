"""Loss curves: the program's and the original's, side by side in the working dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from schedlang.passes.proving.asked import Curve
from schedlang.passes.proving.observe import Batch, conditions
from schedlang.passes.proving.sides import Case, twin
from schedlang.report import Row

if TYPE_CHECKING:
    from schedlang.runtime.launching.launch import Pool


def curve_rows(working: Case, curves: Sequence[Curve], pool: Pool) -> list[Row]:
    """One row for each curve: the step at which it is farthest from the original's."""
    if not curves:
        return []
    steps = max(curve.steps for curve in curves)
    right = _original(working, steps)
    seen = pool.run(_program, working.plan.mesh.world, working, steps)[0]
    rows = []
    for curve in curves:
        off = [abs(x - r) / (abs(r) or 1.0) for x, r in zip(seen, right)][: curve.steps]
        bad = next((k for k, error in enumerate(off) if not error <= curve.within), None)
        step = bad if bad is not None else max(range(len(off)), key=lambda k: off[k])
        name = f"{curve.steps} steps ({curve.place})"
        rows.append(
            Row("loss curve", "loss curve", name, off[step], curve.within, bad is None, step)
        )
    return rows


def _original(working: Case, steps: int) -> list[float]:
    from schedlang.passes.proving.original import Sequential
    from schedlang.runtime.drawing.random import LogicalDropout
    from schedlang.runtime.modes import ambient

    adamw = conditions(working.batches, 1.0)[1].optimizer
    with ambient(LogicalDropout(working.seed)):
        subject = Sequential(twin(working), adamw, loss=working.loss)
        return [float(subject.train_step(batch)) for batch in _cycled(working, steps)]


def _program(working: Case, steps: int) -> list[float]:
    """On a rank: the losses of the program, whole on each."""
    from schedlang.passes.running.build import build

    adamw = conditions(working.batches, 1.0)[1].optimizer
    program = build(
        working.plan, working.batches[0], loss=working.loss, optimizer=adamw,
        weight=working.weight, seed=working.seed, prepared=working.prepared,
    )  # fmt: skip
    return [float(program.train_step(batch)) for batch in _cycled(working, steps)]


def _cycled(working: Case, steps: int) -> list[Batch]:
    return [working.batches[k % len(working.batches)] for k in range(steps)]
