"""Bounds of `expect` statements, compared with the plan's counted costs, or with times of a
step."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.diagnostic import Diagnostic, Label, Refusal
from schedlang.diagnostics.tables import DEFAULT_COLUMNS, format_bytes
from schedlang.ir.annotations import Expectation
from schedlang.ir.memory import find_heaviest
from schedlang.ir.mesh import offer_row
from schedlang.ir.plan import Plan
from schedlang.passes.elaborate.declare import TIME
from schedlang.passes.propagate.original_forward import Weight
from schedlang.passes.propagate.sharded_run import Loss
from schedlang.passes.simulate.account import Account, account
from schedlang.report import CostExpectation

if TYPE_CHECKING:
    from schedlang.passes.simulate.step_time import StepSeconds

# -- times -----------------------------------------------------------------------------------------


NOT_TIMED = (
    "a time can be compared only where it was measured or simulated: `schedlang run` measures"
    " them, and "
    "`schedlang plan FILE --cost F=18,B=37,step=4` simulates with milliseconds that you give"
)
FASTER_HELP = (
    "`schedlang simulate FILE` shows where ranks wait; docs/pipelines.md lists other orders"
)


def time_expectations(plan: Plan) -> tuple[Expectation, ...]:
    """Return the plan's expectations of times for its mesh."""
    return tuple(
        expectation
        for expectation in plan.expected
        if expectation.measure == TIME and expectation.applies(plan.mesh)
    )


def check_times(plan: Plan, step_seconds: StepSeconds) -> Iterator[Diagnostic]:
    """Yield a diagnostic (S860) for each expectation that a step of this length breaks."""
    for expectation in time_expectations(plan):
        if not expectation.holds(step_seconds.seconds):
            label = Label(expectation.span)
            title = f"`{expectation.said}` does not hold: it is {step_seconds.seconds * 1e3:.4g} ms"
            yield Diagnostic("S860", title, label, notes=step_seconds.how, helps=(FASTER_HELP,))


# -- counted costs ---------------------------------------------------------------------------------


NOT_COMPUTED = "S862"
Help = str | tuple[str, str]  # words; or words and a row over an axis of replicas
SHARD_STATE_HELP = ("shard it over replicas: ", "zero(stage=3, over={})")
RECOMPUTE_HELP = "recompute them: `layers.*  checkpoint()`"
HELP_BY_CLASS: Mapping[str, tuple[Help, ...]] = {
    "parameters": (SHARD_STATE_HELP, "or shard parameters: `shard`"),
    "gradients": (SHARD_STATE_HELP, "or shard parameters: `shard`"),
    "optimizer": ((SHARD_STATE_HELP[0], "zero(stage=1, over={})"), "or shard parameters: `shard`"),
    "activations": (
        RECOMPUTE_HELP,
        "or offload them: `layers.*  offload(activations)`",
        "or use smaller microbatches",
    ),
    "communication": (
        ("free gathered parameters between forward and backward: ", SHARD_STATE_HELP[1]),
    ),
    "temporary": ("use smaller microbatches", "or shard the modules that compute it: `shard`"),
}


def unmet_expectations(plan: Plan, account: Account) -> tuple[Diagnostic, ...]:
    """Return diagnostics of expectations that do not hold (S860), or cannot be computed (S862).

    Expectations of times are not included: see `check_times`.
    """
    return tuple(
        problem
        for expectation in cost_expectations(plan)
        for problem in _problems(plan, account, expectation)
    )


def list_bounds(
    plan: Plan, batch: Mapping[str, Any], loss: Loss | None = None, weight: Weight | None = None
) -> tuple[CostExpectation, ...]:
    """Return every expectation that applies, with the cost counted for a full step's batch.

    Where the plan cannot be built for this batch, each bound has the reason instead of a cost.
    """
    expectations = cost_expectations(plan)
    timed = [
        CostExpectation(item.said, None, why=(NOT_TIMED,), left=True)
        for item in time_expectations(plan)
    ]
    try:
        costs = count_costs(plan, batch, loss, weight) if expectations else None
    except Refusal as refusal:
        reasons = tuple(item.title for item in refusal.diagnostics)
        return (*(CostExpectation(item.said, None, why=reasons) for item in expectations), *timed)
    results = []
    for item in expectations:
        assert costs is not None
        value, problem = _found(plan, costs, item), next(_problems(plan, costs, item), None)
        text = "" if value is None else _text(item, value)
        reasons = () if problem is None else (*problem.notes, *problem.helps)
        results.append(
            CostExpectation(item.said, None if value is None else problem is None, text, reasons)
        )
    return (*results, *timed)


def count_costs(
    plan: Plan, batch: Mapping[str, Any], loss: Loss | None = None, weight: Weight | None = None
) -> Account:
    """Account for the plan, with memory only where an expectation needs it."""
    memory = any(expectation.measure == "peak_memory" for expectation in cost_expectations(plan))
    return account(plan, batch, loss, weight=weight, memory=memory)


def require_costs(
    plan: Plan, batch: Mapping[str, Any], loss: Loss | None = None, weight: Weight | None = None
) -> None:
    """Refuse (S860) a plan that costs more than is expected, before anything is built.

    A cost that cannot be computed (memory, where this process is a rank of a job already) is no
    refusal, but a warning.
    """
    if not cost_expectations(plan):
        return
    problems = unmet_expectations(plan, count_costs(plan, batch, loss, weight))
    for problem in problems:
        if problem.code == NOT_COMPUTED:
            warnings.warn(problem.render(DEFAULT_COLUMNS), stacklevel=3)
    unmet = [problem for problem in problems if problem.code != NOT_COMPUTED]
    if unmet:
        raise Refusal(*unmet)


def cost_expectations(plan: Plan) -> list[Expectation]:
    """Return the expectations of this plan that are compared with counted costs."""
    return [
        expectation
        for expectation in plan.expected
        if expectation.measure != TIME and expectation.applies(plan.mesh)
    ]


def _problems(plan: Plan, account: Account, expectation: Expectation) -> Iterator[Diagnostic]:
    label = Label(expectation.span)
    value = _found(plan, account, expectation)
    if value is None:
        title = f"`{expectation.said}` cannot be computed"
        batch = ("define `batch(seed)` in the model file",)
        yield Diagnostic(NOT_COMPUTED, title, label, notes=account.notes, helps=batch)
    elif not expectation.holds(value):
        notes, helps = _why(plan, account, expectation)
        title = f"`{expectation.said}` does not hold: it is {_text(expectation, value)}"
        yield Diagnostic("S860", title, label, notes=notes, helps=helps)


def _found(plan: Plan, account: Account, expectation: Expectation) -> float | None:
    """Return the measured cost; None where the plan does not have it."""
    if expectation.measure == "peak_memory":
        return None if not account.memory else find_heaviest(account.memory).peak
    if expectation.measure == "bubble":
        return 0.0 if account.bubble is None and not plan.cuts else account.bubble
    return None if account.collectives is None else max(_sent(plan, account, expectation).values())


def _sent(plan: Plan, account: Account, expectation: Expectation) -> dict[int | None, int]:
    """Return the bytes of sends over the axes, for each pipeline place."""
    axes = set(plan.mesh.fold(expectation.axes)) if expectation.axes else set(plan.mesh.sizes)
    positions = {rank_class.place for rank_class in account.classes or ()} or {None}
    return {
        position: sum(
            c.total for c in account.collectives_at(position) if axes & set(plan.mesh.fold(c.axes))
        )
        for position in positions
    }


def _why(
    plan: Plan, account: Account, expectation: Expectation
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Say where a cost is largest, what it consists of, and what would lower it."""
    if expectation.measure == "peak_memory":
        heaviest = find_heaviest(account.memory or ())
        parts = sorted(heaviest.classes.items(), key=lambda item: -item[1])
        parts_text = ", ".join(f"{name} {format_bytes(count)}" for name, count in parts if count)
        location = (
            f"rank {heaviest.first}"
            if heaviest.place is None
            else f"{plan.cuts[0].axis}={heaviest.place}"
        )
        return (f"on {location}, in {heaviest.top.what}: {parts_text}",), _helps(plan, parts[0][0])
    if expectation.measure == "bubble":
        return (), ("use more microbatches, or an order with a smaller bubble: docs/pipelines.md",)
    axes = set(plan.mesh.fold(expectation.axes)) if expectation.axes else set(plan.mesh.sizes)
    totals: dict[str, int] = {}
    for collective in account.collectives or ():
        if axes & set(plan.mesh.fold(collective.axes)):
            kind = f"{collective.kind} of {collective.what}"
            totals[kind] = totals.get(kind, 0) + collective.total
    largest = sorted(totals.items(), key=lambda item: -item[1])[:3]
    parts_text = ", ".join(f"{kind} {format_bytes(count)}" for kind, count in largest)
    return (f"most of it: {parts_text}",), (
        "use fewer ranks along the axis, or smaller microbatches",
    )


def _helps(plan: Plan, memory_class: str) -> tuple[str, ...]:
    """Return help that lowers bytes of a class, on the mesh of the plan."""
    axes = plan.mesh.names
    return tuple(
        help_ if isinstance(help_, str) else help_[0] + offer_row(help_[1], axes, "replicas")
        for help_ in HELP_BY_CLASS[memory_class]
    )


def _text(expectation: Expectation, value: Any) -> str:
    return f"{value:.3g}" if expectation.measure == "bubble" else format_bytes(int(value))
