"""Saved state: written by the ranks, read by a program of one rank, equal to the last bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from schedlang.passes.observe import Condition, Observation
from schedlang.passes.sides import Case
from schedlang.plan import Plan
from schedlang.report import Row


def saved(told: Sequence[Condition]) -> int:
    """The run whose last state is saved: AdamW's, if it is among them."""
    return min(1, len(told) - 1)


def loaded(case: Case, told: Sequence[Condition], folder: str) -> dict[str, Any]:
    """The saved state, loaded by a program of one rank with no rows."""
    from schedlang.mesh import Mesh
    from schedlang.passes.build import build
    from schedlang.runtime.float64 import Float64
    from schedlang.runtime.modes import ambient

    condition = told[saved(told)]
    case = condition.case or case
    plain = Plan.empty(case.plan.model, Mesh())
    with ambient(Float64()):
        program = build(plain, case.batches[0], loss=case.loss, optimizer=condition.optimizer)
        program.load(f"{folder}/state")
        return {"state": program.state_dict(), "optimizer": program.optimizer_state()}


def archive_rows(condition: str, archive: Mapping[str, Any], actual: Observation) -> list[Row]:
    """Saved under this layout and loaded by one rank: equal to the last bit."""
    import torch

    steps = [k.step for k in actual.tensors if k[:2] == (condition, "parameters")]
    last = max(steps)
    rows = []
    for key, value in actual.tensors.items():
        if key.condition != condition or key.step != last or value is None:
            continue
        if key.kind in ("parameters", "other state"):
            got = archive["state"].get(key.name)
        elif key.kind.startswith("optimizer "):
            got = archive["optimizer"].get(key.name, {}).get(key.kind.removeprefix("optimizer "))
        else:
            continue
        same = got is not None and torch.equal(torch.as_tensor(got).to(value.dtype), value)
        note = "" if same else "lost" if got is None else "not what was saved"
        shape = tuple(value.shape)
        rows.append(
            Row(
                condition,
                "saved state",
                key.name,
                0.0 if same else 1.0,
                0.0,
                same,
                last,
                note,
                shape,
            )
        )
    return rows
