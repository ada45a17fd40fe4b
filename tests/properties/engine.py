"""Run a drawn schedule on ranks and compare it with the original: `cheap` or `whole` proof."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import pytest

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import Source
from schedlang.ir.plan import Plan
from schedlang.language.syntax import parse
from schedlang.passes.elaborate.state import Settings
from schedlang.passes.prove import prove
from schedlang.passes.verify.compare import compare
from schedlang.passes.verify.observe import standard_conditions
from schedlang.passes.verify.original import Sequential
from schedlang.passes.verify.probe import check_parts
from schedlang.passes.verify.proof_case import (
    Case,
    copy_original,
    observe_on_rank,
    prepare_case,
    proof_modes,
    randomised_float64,
    run_original,
)
from schedlang.passes.verify.requirements import inexact_rules
from schedlang.report import Row
from schedlang.runtime.modes import enter_modes
from schedlang.schedule import Schedule
from tests.proofs import Observed, sgd, train_on_ranks
from tests.properties.models import Batch
from tests.properties.schedules import Drawn
from tests.properties.small_limits import small_limits

SEED = 5  # of dropout


class Engine(Protocol):
    """Runs ranks as local processes or threads."""

    def run(self, fn: Callable[..., Any], world: int, *args: Any, **options: Any) -> list[Any]:
        """Return the results of `fn(*args)` by rank."""


@dataclass
class Differs(Exception):  # noqa: N818
    """Raised with failed comparisons; records the drawn schedule, engine and proof."""

    rows: tuple[Row, ...]
    drawn: Drawn
    engine: Any = None
    form: Any = None

    def __str__(self) -> str:
        return "\n".join(
            f"{r.condition}: {r.kind} {r.name} (step {r.step}) error {r.error:.2e} {r.note}"
            for r in self.rows[:6]
        )


def schedule_of(drawn: Drawn) -> Schedule:
    """Return the schedule for a newly built model."""
    file = parse(Source("drawn.sched", drawn.text))
    return Schedule(drawn.config.model(), file, Settings())


def plan_of(drawn: Drawn) -> Plan:
    """Return the plan of a drawn schedule."""
    return schedule_of(drawn).plan()


def case_of(drawn: Drawn, steps: int = 2) -> Case:
    """Return the proof case: a ragged batch, a full one of another shape, and so on."""
    batches = tuple(batches_of(drawn, steps))
    return Case(plan_of(drawn), batches, drawn.config.loss, seed=drawn.config.seed, dtype="none")


def cheap(drawn: Drawn, engine: Engine) -> Sequence[Row]:
    """Prove one step of SGD on one batch, with all comparisons of `prove` except saving.

    Raises Refusal as `prove` does.
    """
    case = prepare_case(case_of(drawn, 1))
    case = randomised_float64(case)
    check_parts(case)
    modes, _ = proof_modes(case)
    with enter_modes(*modes):
        norm = Sequential(copy_original(case), loss=case.loss).gradient_norm(case.batches[0])
    conditions = standard_conditions(case.batches, norm)[:1]
    expected, _ = run_original(case, conditions)
    actual = engine.run(observe_on_rank, case.plan.mesh.world, case, conditions)[0]
    return compare(expected, actual, exact=not case.plan.gives_up)


def whole(drawn: Drawn, engine: Any) -> Sequence[Row]:
    """Run the full proof: two optimizers, three steps on different shapes, saved state.

    `verify(exact)` must be refused (S709) if a row gives up bitwise equality; then it is left out.
    """
    exact = [exact_step for exact_step in drawn.steps if exact_step.rows == ("verify(exact)",)]
    if exact and inexact_rules(plan_of(drawn)):
        with pytest.raises(Refusal, match="S709"):
            prove(case_of(drawn, 3), pool=engine)
        drawn = replace(
            drawn, steps=tuple(exact_step for exact_step in drawn.steps if exact_step not in exact)
        )
    return prove(case_of(drawn, 3), pool=engine).rows


def check(drawn: Drawn, engine: Any, form: Callable[..., Sequence[Row]] = cheap) -> None:
    """Raise Differs if a comparison fails."""
    with small_limits(drawn.little):
        failed = tuple(row for row in form(drawn, engine) if not row.ok)
    if failed:
        raise Differs(failed, drawn, engine, form)


def assert_holds(drawn: Drawn, engine: Any, form: Callable[..., Sequence[Row]] = cheap) -> None:
    """Assert that a drawn schedule equals its original, or is refused where it must or may be."""
    try:
        check(drawn, engine, form)
    except Refusal as refusal:
        if refusal.diagnostic.code not in (drawn.refused, *drawn.may):
            raise
    else:
        assert not drawn.refused, f"not refused with {drawn.refused}"


def batches_of(drawn: Drawn, count: int = 1, rows: int | None = None) -> list[Batch]:
    """Return batches: ragged, full with another length, and so on in turn."""
    rows = drawn.rows if rows is None else rows
    return [
        drawn.config.batch(rows + k, drawn.length * (1 + k % 2), k, ragged=k % 2 == 0)
        for k in range(count)
    ]


def run_training(
    drawn: Drawn,
    engine: Any,
    batches: Sequence[Batch] | None = None,
    optimizer: Any = sgd,
    loss: Any = None,
    **options: Any,
) -> Observed:
    """Train a drawn schedule one step per batch; returns what it leaves (`Seen`)."""
    batches_ = batches_of(drawn) if batches is None else batches
    loss = loss or drawn.config.loss
    with small_limits(drawn.little):
        return train_on_ranks(
            engine, plan_of(drawn), batches_, optimizer, loss=loss, seed=SEED, **options
        )
