"""Prove that a plan computes what the model computes: run the ranks, run the original, compare."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from schedlang.diagnostic import Diagnostic, Refusal
from schedlang.passes.observe import Condition, Observation, conditions, observe
from schedlang.passes.sides import (
    Case,
    as_worked,
    modes_of,
    observed,
    original,
    prepared,
    twin,
    widened,
)
from schedlang.passes.suspect import Failure, suspected
from schedlang.passes.trials import trials
from schedlang.plan import Plan
from schedlang.report import Report, Row

if TYPE_CHECKING:
    from schedlang.runtime.launch import Pool
    from schedlang.runtime.program import Program

MOST_RANKS = 8
Progress = Callable[[str], None]


def prove(
    case: Case, *, pool: Pool | None = None, title: str = "", command: str = "",
    progress: Progress = lambda stage: None,
) -> Report:  # fmt: skip
    """Compare a plan with its original in float64; on failure name the rows to blame.

    Raises Refusal for a plan or batch that cannot be run, RankDied or Hang for a run that failed.
    """
    from schedlang.passes.compare import compare
    from schedlang.runtime import launch

    start = time.perf_counter()
    check_world(case.plan)
    pool = pool or launch.shared()
    case = prepared(case)
    working, case = as_worked(case), widened(case)
    progress("the original")
    told = _conditions(case)
    check_parts(case)
    expected, drawn = original(case, told)
    progress(f"{case.plan.mesh.world} ranks")
    actual, rounded, archive = _ranks(case, working, told, pool)
    exact = not case.plan.gives_up
    rows = [*compare(expected, actual, exact=exact), *_archive_rows(case, archive, actual)]
    if working is not None:
        rows += _working_rows(working, told, expected, rounded)
    tried_rows, untried = (
        trials(working.plan, working.batches[0]) if working is not None else ([], [])
    )
    report = Report(
        (*rows, *tried_rows), title=title, facts=_facts(case), command=command,
        equivalence="exact" if exact else "algebraic", gaps=_gaps(case, actual, drawn),
        unchecked=tuple(untried),
    )  # fmt: skip
    if not report.ok and any(not row.ok for row in rows):
        progress("the row to blame")
        report = suspected(report, Failure(case, working, told, expected, actual), pool)
    return replace(report, seconds=time.perf_counter() - start)


def _working_rows(
    working: Case, told: Sequence[Condition], exact: Observation, program: Observation
) -> list[Row]:
    """The program in the working dtype, as near to float64 as the original's own rounding."""
    from schedlang.passes.original import Sequential
    from schedlang.passes.rounding import within_rounding
    from schedlang.runtime.modes import ambient
    from schedlang.runtime.random import LogicalDropout

    def make(condition: Condition) -> Sequential:
        return Sequential(
            twin(working), condition.optimizer, loss=working.loss, clip=condition.clip
        )

    first = [replace(condition, batches=working.batches) for condition in told[:1]]
    with ambient(LogicalDropout(working.seed)):
        plain = observe(make, first)
    names = {condition.name for condition in first}
    wanted = replace(
        exact, tensors={k: v for k, v in exact.tensors.items() if k.condition in names}
    )
    return list(within_rounding(wanted, plain, program))


def check_world(plan: Plan, verb: str = "verify") -> None:
    """Refuse more ranks than a laptop runs, naming a mesh that keeps every row (S702)."""
    if plan.mesh.world <= MOST_RANKS:
        return
    sizes = dict(plan.mesh.axes)
    for axis in sizes:  # two ranks along an axis show what more of them would
        sizes[axis] = min(sizes[axis], 2)
    for axis in list(sizes):
        if _product(sizes.values()) > MOST_RANKS:
            sizes[axis] = 1
    small = ",".join(f"{axis}={size}" for axis, size in sizes.items())
    raise Refusal(
        Diagnostic(
            "S702", f"{plan.mesh.world} ranks are more than `{verb}` starts on one machine",
            notes=(f"the mesh is {plan.mesh}; at most {MOST_RANKS} ranks run",),
            helps=(f"{verb} the same rows on a smaller mesh: `--mesh {small}`",),
        )
    )  # fmt: skip


def _product(values: Iterable[int]) -> int:
    out = 1
    for value in values:
        out *= value
    return out


# -- the two sides -----------------------------------------------------------------------------


def _conditions(case: Case) -> tuple[Condition, ...]:
    """The training runs; clipping is set by the gradient norm of the original."""
    from schedlang.passes.original import Sequential
    from schedlang.runtime.modes import ambient

    modes, _ = modes_of(case.seed)
    with ambient(*modes):
        norm = Sequential(twin(case), loss=case.loss).norm(case.batches[0])
    return conditions(case.batches, norm)


def check_parts(case: Case) -> None:
    """Refuse a model whose loss over the parts, weighed, is not the loss of the whole."""
    from schedlang.passes.compare import parts_agree
    from schedlang.passes.original import Sequential
    from schedlang.passes.weigh import part_weight
    from schedlang.runtime.modes import ambient
    from schedlang.runtime.parts import split

    plan = case.plan
    micro = plan.order.micro if plan.order is not None else 1
    batch = case.batches[0]
    parts = [p for share in split(batch, plan.mesh.size(plan.data_axes), micro) for p in share]
    if len(parts) == 1:
        return
    weigh = part_weight(plan, parts[0].inputs, case.loss, case.weight, len(parts))
    modes, _ = modes_of(case.seed)
    with ambient(*modes):
        rows = parts_agree(
            Sequential(twin(case), loss=case.loss), batch,
            [(part.inputs, part.rows) for part in parts], [weigh(part.inputs) for part in parts],
        )  # fmt: skip
    bad = next((row for row in rows if not row.ok), None)
    relaxed = {name for _, names in plan.relaxed for name in names}
    if bad is None or "batch_stats" in relaxed:
        return
    raise Refusal(
        Diagnostic(
            "S703", "the loss of this model is not the weighed mean of the losses of parts",
            notes=(f"on the original in {len(parts)} parts {bad.place} differs by {bad.error:.1e}",
                   "statistics over the batch (batch norm, router losses) would differ by rank"),
            helps=("say what a part weighs: `weight(batch)` in the model file",
                   "or allow it: `step \"...\" relax(batch_stats) {`"),
        )
    )  # fmt: skip


def _ranks(
    case: Case, working: Case | None, told: Sequence[Condition], pool: Pool
) -> tuple[Observation, Observation, dict[str, Any]]:
    """What the ranks saw in float64 and in the working dtype, and their saved state, loaded."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="schedlang-") as folder:
        world = case.plan.mesh.world
        seen, rounded = pool.run(_rank, world, case, working, tuple(told), folder)[0]
        return seen, rounded, _loaded(case, told, folder)


def _rank(
    case: Case, working: Case | None, told: Sequence[Condition], folder: str
) -> tuple[Observation, Observation]:
    """One rank's part of the proof; only rank 0 keeps what it saw."""
    from schedlang.runtime.float64 import Float64
    from schedlang.runtime.modes import ambient

    made: list[Program] = []
    with ambient(Float64()):
        seen = observed(case, told, made)
        made[-1].save(f"{folder}/state")
    if working is None:
        return seen, Observation()
    first = [replace(condition, batches=working.batches) for condition in told[:1]]
    return seen, observed(working, first, [])


def _loaded(case: Case, told: Sequence[Condition], folder: str) -> dict[str, Any]:
    """The saved state, loaded by a program of one rank with no rows."""
    from schedlang.mesh import Mesh
    from schedlang.passes.build import build
    from schedlang.runtime.float64 import Float64
    from schedlang.runtime.modes import ambient

    plain = Plan.empty(case.plan.model, Mesh())
    with ambient(Float64()):
        program = build(plain, case.batches[0], loss=case.loss, optimizer=told[-1].optimizer)
        program.load(f"{folder}/state")
        return {"state": program.state_dict(), "optimizer": program.optimizer_state()}


def _archive_rows(case: Case, archive: Mapping[str, Any], actual: Observation) -> list[Row]:
    """Saved under this layout and loaded by one rank: equal to the last bit."""
    import torch

    last = max(key.step for key in actual.tensors if key.kind == "parameters")
    condition = list(actual.tensors)[-1].condition
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


# -- what is said about it ---------------------------------------------------------------------


def _facts(case: Case) -> tuple[tuple[str, str], ...]:
    import torch

    mesh = case.plan.mesh
    return (
        ("mesh", f"{mesh} ({mesh.world} ranks)" if mesh.axes else "one rank"),
        ("seed", str(case.seed)),
        ("dtype", "float64"),
        ("torch", torch.__version__),
    )


def _gaps(case: Case, actual: Observation, drawn: int) -> tuple[Any, ...]:
    from schedlang.passes.coverage import gaps, unoffered

    plan = case.plan
    micro = plan.order.micro if plan.order is not None else 1
    names = {name: fact.numel for name, fact in plan.model.unique.items()}
    found = gaps(
        case.batches, sizes=dict(plan.mesh.axes), parts=plan.mesh.size(plan.data_axes) * micro,
        drawn=drawn, parameters=names,
    )  # fmt: skip
    return (*found, *unoffered(actual))
