"""--cost of a command line: times of operations; and checks of a schedule's expectations.

An expectation that does not hold ends a verb with exit code 1.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from schedlang.diagnostics.diagnostic import Facts, Refusal, facts_of_unknown, suggest_name
from schedlang.diagnostics.source import read_utf8
from schedlang.diagnostics.tables import message_columns
from schedlang.pipeline.cost import Cost, Number
from schedlang.verbs.exits import FAILS, bad_option

if TYPE_CHECKING:
    from schedlang.diagnostics.diagnostic import Diagnostic
    from schedlang.ir.plan import Plan
    from schedlang.passes.simulate.account import Account
    from schedlang.passes.simulate.step_time import Measurement, StepSeconds


# written name -> field of a Cost; B stands for I and W together
FIELDS = {"F": "f", "I": "i", "W": "w"} | {
    name: name
    for name in (
        *("comm", "kept", "inputs", "recompute", "evict", "load", "offload"),
        *("reload", "unshard", "reshard", "reduce", "step", "barrier"),
    )
}
SHARES = ("kept", "inputs")  # of a microbatch's activations, none above one
NAMES = ("F", "I", "W", "B", *list(FIELDS)[3:])


def parse_costs(text: str | None) -> Cost:
    """Parse a cost, `F=18.5,I=18.1,W=9.3,comm=0.6`; refuses S109.

    Defaults: F is 1, I and W are as F, everything else takes no time. `B=` stands for both halves
    of a backward. Whole numbers and fractions (`1/3`) are exact.
    """
    values: dict[str, Number] = {}
    for part in (text or "").split(","):
        if not part.strip():
            continue
        name, equals, value = (piece.strip() for piece in part.partition("="))
        key = {n.lower(): n for n in NAMES}.get(name.lower())
        if key is None:
            help_ = suggest_name(name, NAMES, "costs:")
            _refuse_cost(part, f"there is no cost `{name}`", help_, facts_of_unknown(name, NAMES))
        if not equals or key in values:
            reason = "it is given twice" if equals else "it needs a value"
            _refuse_cost(part, reason, f"write it once, as `{key}=1.5`")
        values[key] = _parse_value(key, part, value)
    return _make_cost(values)


def parse_times(text: str) -> Cost | Measurement:
    """Parse times in milliseconds, or read a file that `run` wrote; refuses S109, S915."""
    from schedlang.passes.simulate.step_time import MEASURE_HELP, read_measurement

    if not text.strip().lower().endswith(".json"):
        return parse_costs(text)
    try:
        data = json.loads(read_utf8(text.strip()))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not JSON"
        title = f"cannot read `{text.strip()}`: {reason}"
        raise Refusal.of("S915", title, helps=(MEASURE_HELP,)) from None
    try:
        return read_measurement(data)
    except (KeyError, TypeError, ValueError, IndexError):
        title = f"`{text.strip()}` has no times of a pipeline"
        helps = (MEASURE_HELP, "or give the times of a microbatch in ms: `--cost F=18,B=37,step=4`")
        raise Refusal.of("S915", title, helps=helps) from None


def _make_cost(values: dict[str, Number]) -> Cost:
    if "B" in values and values.keys() & {"I", "W"}:
        _refuse_cost("B", "`B` is `I` and `W` together", "give either `B`, or `I` and `W`")
    forward = values.get("F", 1)
    if "B" in values:
        backward = values.pop("B")
        half = backward / 2 if isinstance(backward, float) else Fraction(backward) / 2
        values |= {"I": half, "W": half}
    cost = Cost(f=forward, i=forward, w=forward)
    fields: dict[str, Any] = {FIELDS[name]: value for name, value in values.items()}
    cost = replace(cost, **fields)
    if not cost.f + cost.i + cost.w:
        _refuse_cost("F=0", "all times are 0", "one of `F`, `I` and `W` must be above 0")
    return cost


def _parse_value(name: str, part: str, text: str) -> Number:
    """Parse a number; a whole number or a fraction stays exact."""
    try:
        value: Number = Fraction(text) if "/" in text or text.isdigit() else float(text)
    except (ValueError, ZeroDivisionError):
        _refuse_cost(part, "this is not a number", f"write `{name}=1.5` or `{name}=3/2`")
    if not math.isfinite(value) or value < 0:
        _refuse_cost(part, "a time must be finite, and not below 0", f"write `{name}=1.5`")
    if name in SHARES and value > 1:
        _refuse_cost(
            part, f"`{name}` is a share of a microbatch's activations", f"write `{name}=0.5`"
        )
    return value


def _refuse_cost(part: str, reason: str, help_: str, facts: Facts = ()) -> NoReturn:
    title = f"cannot read `--cost {part.strip()}`: {reason}"
    bad_option(title, help_, facts)


def simulate_step(plan: Plan, cost: str | None) -> StepSeconds | None:
    """Simulate a step with the times of `--cost`; None without them."""
    if cost is None:
        return None
    from schedlang.passes.simulate.step_time import simulate_step

    return simulate_step(plan, parse_times(cost))


def check_expectations(plan: Plan, account: Account, took: StepSeconds | None = None) -> None:
    """Print the expectations that the plan does not meet; exit 1 if there are any.

    Expected times are compared with `took`, a simulated or measured step; without one they are
    reported as not compared.
    """
    from schedlang.passes.simulate.expectations import check_times, unmet_expectations

    _report_uncompared(plan, took)
    _exit_with(
        [*unmet_expectations(plan, account), *(check_times(plan, took) if took is not None else ())]
    )


def check_expected_costs(plan: Plan, account: Account) -> None:
    """Check the expectations on costs alone, before times are known; exit 1."""
    from schedlang.passes.simulate.expectations import unmet_expectations

    _exit_with(unmet_expectations(plan, account))


def check_expected_time(plan: Plan, measured: StepSeconds) -> None:
    """Check the expectations on times alone; exit 1."""
    from schedlang.passes.simulate.expectations import check_times

    _exit_with(check_times(plan, measured))


def _report_uncompared(plan: Plan, measured: StepSeconds | None) -> None:
    """Print the expected times that are not compared."""
    from schedlang.passes.simulate.expectations import NOT_TIMED, time_expectations

    for expectation in time_expectations(plan) if measured is None else ():
        print(f"`{expectation.said}` is not compared here: {NOT_TIMED}", file=sys.stderr)


def _exit_with(problems: Iterable[Diagnostic]) -> None:
    failures = list(problems)
    for problem in failures:
        print(problem.render(message_columns(sys.stderr)), file=sys.stderr)
    if failures:
        raise typer.Exit(FAILS)
