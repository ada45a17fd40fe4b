"""Hunting injected bugs: run the proof of a scene with a bug and record what fails first."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.prove import prove
from schedlang.report import Report
from schedlang.runtime.launch.pool import Hang, Pool, RankDied
from tests.engine import Faults, Threads
from tests.zoo.bug import Bug, mutate, parse_spec
from tests.zoo.pool import Mutated
from tests.zoo.scenes import SCENES, scene_case


@dataclass(frozen=True)
class Verdict:
    """The result of one bug on one scene."""

    spec: str
    bug: Bug
    scene: str
    killed: bool
    by: str = ""  # the kind of the first failing row, or how the run ended
    place: str = ""  # which tensor that was
    blamed: tuple[str, ...] = ()
    diagnosis: str = ""
    localised: tuple[tuple[str, str], ...] = ()
    seconds: float = 0.0
    asked: bool = True  # whether a row to blame was looked for

    @property
    def right(self) -> bool | None:
        """Whether the guilty row is among the blamed rows; None if no row was looked for."""
        if (
            not self.asked
            or not self.killed
            or not self.bug.row
            or self.by.startswith(("refused", "died"))
        ):
            return None
        return any(self.bug.row in row for row in self.blamed)


def hunt(spec: str, scene: str, pool: Pool, *, blame: bool = True) -> Verdict:
    """Prove the scene with bug `T02` or `T02@site`; without `blame` no row is looked for."""
    bug, _ = parse_spec(spec)
    start = time.perf_counter()

    def verdict(
        killed: bool, found_by: str = "", tensor_name: str = "", report: Any = None
    ) -> Verdict:
        result = Verdict(
            spec,
            bug,
            scene,
            killed,
            found_by,
            tensor_name,
            seconds=time.perf_counter() - start,
            asked=blame,
        )
        if report is None:
            return result
        return replace(
            result, blamed=report.blamed, diagnosis=report.diagnosis, localised=report.localised
        )

    try:
        report = _run_proof(spec, bug, scene, pool, blame)
    except Refusal as refusal:
        if any(d.code == "S831" for d in refusal.diagnostics):
            raise  # no compiler: nothing was tested
        return verdict(True, f"refused {refusal.diagnostics[0].code}", refusal.diagnostics[0].title)
    except (RankDied, Hang) as error:
        assert bug.dies and bug.dies in str(error), f"the mutation {spec} fails: {error}"
        return verdict(True, "died", str(error).strip().splitlines()[-1])
    first_failure = report.first
    if first_failure is None:
        return verdict(False, report=report)
    return verdict(True, first_failure.kind, first_failure.place, report)


def _run_proof(spec: str, bug: Bug, scene: str, pool: Any, blame: bool) -> Report:
    with ExitStack() as stack:
        if bug.planning:
            stack.enter_context(mutate(spec))
        if SCENES[scene].optimizer is not None:
            stack.enter_context(_second_optimizer(SCENES[scene].optimizer))
        if not blame:
            stack.enter_context(mock.patch("schedlang.passes.prove.add_suspects", _keep_report))
        if bug.late:
            pool = stack.enter_context(Threads(Faults()))
        return prove(scene_case(scene), pool=Mutated(pool, spec))  # type: ignore[arg-type]


def _keep_report(report: Report, *_: Any) -> Report:
    return report


def _second_optimizer(optimizer: Any) -> Any:
    """Run the second condition of the proof with another optimizer."""
    from schedlang.passes import prove as proving

    plan_runs = proving.plan_runs

    def told(*args: Any, **kwargs: Any) -> Any:
        plan = plan_runs(*args, **kwargs)
        first_condition, second_condition, *others = plan.conditions
        return replace(
            plan,
            conditions=(first_condition, replace(second_condition, optimizer=optimizer), *others),
        )

    return mock.patch.object(proving, "plan_runs", told)
