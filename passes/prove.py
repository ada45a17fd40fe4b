"""Prove that a plan computes what the model computes: run the ranks, run the original, compare."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from schedlang.diagnostic import Diagnostic, Refusal
from schedlang.passes.again import Failure
from schedlang.passes.observe import Condition, Observation, observe
from schedlang.passes.runs import Runs, check_parts, runs
from schedlang.passes.sides import (
    Case,
    as_worked,
    observed,
    original,
    prepared,
    twin,
    widened,
)
from schedlang.passes.suspect import suspected
from schedlang.passes.trials import trials
from schedlang.plan import Plan
from schedlang.report import Report, Row

if TYPE_CHECKING:
    from schedlang.runtime.launch import Pool
    from schedlang.runtime.program import Program

MOST_RANKS = 8
Progress = Callable[[str], None]
_Ran = tuple[Observation, Observation, dict[str, Any]]  # in float64, in the working dtype, saved


def prove(
    case: Case, *, pool: Pool | None = None, title: str = "", command: str = "",
    progress: Progress = lambda stage: None,
) -> Report:  # fmt: skip
    """Compare a plan with its original in float64; on failure name the rows to blame.

    Raises Refusal for a plan or batch that cannot be run, RankDied or Hang for a run that failed.
    """
    from schedlang.runtime import launch

    start = time.perf_counter()
    check_world(case.plan)
    pool = pool or launch.shared()
    case = prepared(case)
    working, case = as_worked(case), widened(case)
    progress("the original")
    check_parts(case)
    ran = runs(case)
    told = ran.told
    expected, drawn = original(case, told)
    progress(f"{case.plan.mesh.world} ranks")
    seen = _ranks(case, working, told, pool)
    actual, exact = seen[0], not case.plan.gives_up
    rows = _compared(case, working, told, expected, seen)
    tried_rows, untried = (
        trials(working.plan, working.batches[0]) if working is not None else ([], [])
    )
    report = Report(
        (*rows, *tried_rows), title=title, facts=_facts(case, ran), command=command,
        equivalence="exact" if exact else "algebraic", unchecked=tuple(untried),
        gaps=_gaps(case, ran, expected, actual, drawn),
    )  # fmt: skip
    if not report.ok and any(not row.ok for row in rows):
        progress("the row to blame")
        failure = Failure(
            case, working, told, expected, actual,
            lambda c, w, t, right: _compared(c, w, t, right, _ranks(c, w, t, pool)),
        )  # fmt: skip
        report = suspected(report, failure, pool)
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


def _ranks(case: Case, working: Case | None, told: Sequence[Condition], pool: Pool) -> _Ran:
    """What the ranks saw in float64 and in the working dtype, and their saved state, loaded."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="schedlang-") as folder:
        world = case.plan.mesh.world
        seen, rounded = pool.run(_rank, world, case, working, tuple(told), folder)[0]
        return seen, rounded, _loaded(case, told, folder)


def _compared(
    case: Case, working: Case | None, told: Sequence[Condition], expected: Observation, ran: _Ran
) -> list[Row]:
    """The rows of one run of the ranks."""
    from schedlang.passes.compare import compare

    actual, rounded, archive = ran
    rows = [*compare(expected, actual, exact=not case.plan.gives_up)]
    rows += _archive_rows(case, archive, actual)
    return rows if working is None else rows + _working_rows(working, told, expected, rounded)


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

    case = told[-1].case or case  # what was saved last
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


def _facts(case: Case, ran: Runs) -> tuple[tuple[str, str], ...]:
    import torch

    mesh = case.plan.mesh
    derived = (("derived", ", ".join(ran.derived)),) if ran.derived else ()
    return (
        ("mesh", f"{mesh} ({mesh.world} ranks)" if mesh.axes else "one rank"),
        ("seed", str(case.seed)),
        ("dtype", "float64"),
        ("torch", torch.__version__),
        *derived,
    )


def _gaps(
    case: Case, ran: Runs, expected: Observation, actual: Observation, drawn: int
) -> tuple[Any, ...]:
    from schedlang.passes.coverage import gaps, idle, repeating, unoffered

    plan = case.plan
    names = {name: fact.numel for name, fact in plan.model.unique.items()}
    found = gaps(ran.batches, sizes=dict(plan.mesh.axes), drawn=drawn, parameters=names)
    return (*found, *ran.gaps, *repeating(plan), *idle(expected), *unoffered(actual))
