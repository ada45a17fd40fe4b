"""Expectations of a schedule about its plan, held by the verbs: exit 1 for what does not hold."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

import typer

from schedlang.diagnostics.tables import for_messages
from schedlang.verbs.ending import FAILS

if TYPE_CHECKING:
    from schedlang.diagnostics.diagnostic import Diagnostic
    from schedlang.ir.plan import Plan
    from schedlang.passes.simulate.account import Account
    from schedlang.passes.simulate.step_time import Took


def step_of(plan: Plan, cost: str | None) -> Took | None:
    """Simulate a step with the times of `--cost`; None without them."""
    if cost is None:
        return None
    from schedlang.passes.simulate.step_time import simulated_step
    from schedlang.verbs.costs import times

    return simulated_step(plan, times(cost))


def demand_expected(plan: Plan, account: Account, took: Took | None = None) -> None:
    """Tell what an `expect` wants and the plan does not give; exit 1.

    Times are held where a step has one; else it is said that they are not.
    """
    from schedlang.passes.simulate.expected import late, unmet

    _say_left(plan, took)
    _fail([*unmet(plan, account), *(late(plan, took) if took is not None else ())])


def demand_costs(plan: Plan, account: Account) -> None:
    """The same before times are known."""
    from schedlang.passes.simulate.expected import unmet

    _fail(unmet(plan, account))


def demand_time(plan: Plan, took: Took) -> None:
    """The same of times alone."""
    from schedlang.passes.simulate.expected import late

    _fail(late(plan, took))


def _say_left(plan: Plan, took: Took | None) -> None:
    """Name the times that nothing here can be held against."""
    from schedlang.passes.simulate.expected import LEFT, timed

    for one in timed(plan) if took is None else ():
        print(f"`{one.said}` is not compared here: {LEFT}", file=sys.stderr)


def _fail(problems: Iterable[Diagnostic]) -> None:
    found = list(problems)
    for problem in found:
        print(problem.render(for_messages(sys.stderr)), file=sys.stderr)
    if found:
        raise typer.Exit(FAILS)
