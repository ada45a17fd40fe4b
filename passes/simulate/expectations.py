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
    return tuple(one for one in plan.expected if one.measure == TIME and one.applies(plan.mesh))


def check_times(plan: Plan, took: StepSeconds) -> Iterator[Diagnostic]:
    """Yield a diagnostic (S860) for each expectation that a step of this length breaks."""
    for one in time_expectations(plan):
        if not one.holds(took.seconds):
            label = Label(one.span)
            title = f"`{one.said}` does not hold: it is {took.seconds * 1e3:.4g} ms"
            yield Diagnostic("S860", title, label, notes=took.how, helps=(FASTER_HELP,))


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
        problem for one in cost_expectations(plan) for problem in _problems(plan, account, one)
    )


def list_bounds(
    plan: Plan, batch: Mapping[str, Any], loss: Loss | None = None, weight: Weight | None = None
) -> tuple[CostExpectation, ...]:
    """Return every expectation that applies, with the cost counted for a full step's batch.

    Where the plan cannot be built for this batch, each bound has the reason instead of a cost.
    """
    mine = cost_expectations(plan)
    later = [
        CostExpectation(one.said, None, why=(NOT_TIMED,), left=True)
        for one in time_expectations(plan)
    ]
    try:
        costs = count_costs(plan, batch, loss, weight) if mine else None
    except Refusal as refusal:
        why = tuple(one.title for one in refusal.diagnostics)
        return (*(CostExpectation(one.said, None, why=why) for one in mine), *later)
    made = []
    for one in mine:
        assert costs is not None
        found, problem = _found(plan, costs, one), next(_problems(plan, costs, one), None)
        said = "" if found is None else _text(one, found)
        why = () if problem is None else (*problem.notes, *problem.helps)
        made.append(
            CostExpectation(one.said, None if found is None else problem is None, said, why)
        )
    return (*made, *later)


def count_costs(
    plan: Plan, batch: Mapping[str, Any], loss: Loss | None = None, weight: Weight | None = None
) -> Account:
    """Account for the plan, with memory only where an expectation needs it."""
    memory = any(one.measure == "peak_memory" for one in cost_expectations(plan))
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
    wrong = [problem for problem in problems if problem.code != NOT_COMPUTED]
    if wrong:
        raise Refusal(*wrong)


def cost_expectations(plan: Plan) -> list[Expectation]:
    """Return the expectations of this plan that are compared with counted costs."""
    return [one for one in plan.expected if one.measure != TIME and one.applies(plan.mesh)]


def _problems(plan: Plan, account: Account, one: Expectation) -> Iterator[Diagnostic]:
    label = Label(one.span)
    found = _found(plan, account, one)
    if found is None:
        title = f"`{one.said}` cannot be computed"
        batch = ("define `batch(seed)` in the model file",)
        yield Diagnostic(NOT_COMPUTED, title, label, notes=account.notes, helps=batch)
    elif not one.holds(found):
        notes, helps = _why(plan, account, one)
        title = f"`{one.said}` does not hold: it is {_text(one, found)}"
        yield Diagnostic("S860", title, label, notes=notes, helps=helps)


def _found(plan: Plan, account: Account, one: Expectation) -> float | None:
    """Return the measured cost; None where the plan does not have it."""
    if one.measure == "peak_memory":
        return None if not account.memory else find_heaviest(account.memory).peak
    if one.measure == "bubble":
        return 0.0 if account.bubble is None and not plan.cuts else account.bubble
    return None if account.collectives is None else max(_sent(plan, account, one).values())


def _sent(plan: Plan, account: Account, one: Expectation) -> dict[int | None, int]:
    """Return the bytes of sends over the axes, for each pipeline place."""
    wanted = set(plan.mesh.fold(one.axes)) if one.axes else set(plan.mesh.sizes)
    places = {each.place for each in account.classes or ()} or {None}
    return {
        place: sum(
            c.total for c in account.collectives_at(place) if wanted & set(plan.mesh.fold(c.axes))
        )
        for place in places
    }


def _why(plan: Plan, account: Account, one: Expectation) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Say where a cost is largest, what it consists of, and what would lower it."""
    if one.measure == "peak_memory":
        top = find_heaviest(account.memory or ())
        parts = sorted(top.classes.items(), key=lambda item: -item[1])
        said = ", ".join(f"{name} {format_bytes(count)}" for name, count in parts if count)
        where = f"rank {top.first}" if top.place is None else f"{plan.cuts[0].axis}={top.place}"
        return (f"on {where}, in {top.top.what}: {said}",), _helps(plan, parts[0][0])
    if one.measure == "bubble":
        return (), ("use more microbatches, or an order with a smaller bubble: docs/pipelines.md",)
    wanted = set(plan.mesh.fold(one.axes)) if one.axes else set(plan.mesh.sizes)
    totals: dict[str, int] = {}
    for each in account.collectives or ():
        if wanted & set(plan.mesh.fold(each.axes)):
            word = f"{each.kind} of {each.what}"
            totals[word] = totals.get(word, 0) + each.total
    most = sorted(totals.items(), key=lambda item: -item[1])[:3]
    said = ", ".join(f"{word} {format_bytes(count)}" for word, count in most)
    return (f"most of it: {said}",), ("use fewer ranks along the axis, or smaller microbatches",)


def _helps(plan: Plan, what: str) -> tuple[str, ...]:
    """Return help that lowers bytes of a class, on the mesh of the plan."""
    axes = plan.mesh.names
    return tuple(
        one if isinstance(one, str) else one[0] + offer_row(one[1], axes, "replicas")
        for one in HELP_BY_CLASS[what]
    )


def _text(one: Expectation, found: Any) -> str:
    return f"{found:.3g}" if one.measure == "bubble" else format_bytes(int(found))
