"""Bounds of `expect` statements, compared with the plan's counted costs, or with times of a
step."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.diagnostic import Diagnostic, Label, Refusal
from schedlang.diagnostics.tables import PLAIN, size
from schedlang.ir.annotations import Expectation
from schedlang.ir.memory import heaviest
from schedlang.ir.mesh import offered
from schedlang.ir.plan import Plan
from schedlang.passes.elaborate.declare import TIME
from schedlang.passes.propagate.dryrun import Loss
from schedlang.passes.propagate.original import Weight
from schedlang.passes.simulate.account import Account, account
from schedlang.report import Bound

if TYPE_CHECKING:
    from schedlang.passes.simulate.step_time import Took

# -- times -----------------------------------------------------------------------------------------


LEFT = (
    "a time can be compared only where it was measured or simulated: `schedlang run` measures"
    " them, and "
    "`schedlang plan FILE --cost F=18,B=37,step=4` simulates with milliseconds that you give"
)
FASTER = "`schedlang simulate FILE` shows where ranks wait; docs/pipelines.md lists other orders"


def timed(plan: Plan) -> tuple[Expectation, ...]:
    """Return the plan's expectations of times for its mesh."""
    return tuple(one for one in plan.expected if one.measure == TIME and one.applies(plan.mesh))


def late(plan: Plan, took: Took) -> Iterator[Diagnostic]:
    """Yield a diagnostic (S860) for each expectation that a step of this length breaks."""
    for one in timed(plan):
        if not one.holds(took.seconds):
            label = Label(one.span)
            title = f"`{one.said}` does not hold: it is {took.seconds * 1e3:.4g} ms"
            yield Diagnostic("S860", title, label, notes=took.how, helps=(FASTER,))


# -- counted costs ---------------------------------------------------------------------------------


UNTOLD = "S862"
Help = str | tuple[str, str]  # words; or words and a row over an axis of replicas
STATE = ("shard it over replicas: ", "zero(stage=3, over={})")
AGAIN = "recompute them: `layers.*  checkpoint()`"
LOWER: Mapping[str, tuple[Help, ...]] = {
    "parameters": (STATE, "or shard parameters: `shard`"),
    "gradients": (STATE, "or shard parameters: `shard`"),
    "optimizer": ((STATE[0], "zero(stage=1, over={})"), "or shard parameters: `shard`"),
    "activations": (
        AGAIN,
        "or offload them: `layers.*  offload(activations)`",
        "or use smaller microbatches",
    ),
    "communication": (("free gathered parameters between forward and backward: ", STATE[1]),),
    "temporary": ("use smaller microbatches", "or shard the modules that compute it: `shard`"),
}


def unmet(plan: Plan, account: Account) -> tuple[Diagnostic, ...]:
    """Return diagnostics of expectations that do not hold (S860), or cannot be computed (S862).

    Expectations of times are not included: see `late`.
    """
    return tuple(problem for one in counting(plan) for problem in _problems(plan, account, one))


def bounds(
    plan: Plan, batch: Mapping[str, Any], loss: Loss | None = None, weight: Weight | None = None
) -> tuple[Bound, ...]:
    """Return every expectation that applies, with the cost counted for a full step's batch.

    Where the plan cannot be built for this batch, each bound has the reason instead of a cost.
    """
    mine = counting(plan)
    later = [Bound(one.said, None, why=(LEFT,), left=True) for one in timed(plan)]
    try:
        costs = counted(plan, batch, loss, weight) if mine else None
    except Refusal as refusal:
        why = tuple(one.title for one in refusal.diagnostics)
        return (*(Bound(one.said, None, why=why) for one in mine), *later)
    made = []
    for one in mine:
        assert costs is not None
        found, problem = _found(plan, costs, one), next(_problems(plan, costs, one), None)
        said = "" if found is None else _text(one, found)
        why = () if problem is None else (*problem.notes, *problem.helps)
        made.append(Bound(one.said, None if found is None else problem is None, said, why))
    return (*made, *later)


def counted(
    plan: Plan, batch: Mapping[str, Any], loss: Loss | None = None, weight: Weight | None = None
) -> Account:
    """Account for the plan, with memory only where an expectation needs it."""
    memory = any(one.measure == "peak_memory" for one in counting(plan))
    return account(plan, batch, loss, weight=weight, memory=memory)


def demand(
    plan: Plan, batch: Mapping[str, Any], loss: Loss | None = None, weight: Weight | None = None
) -> None:
    """Refuse (S860) a plan that costs more than is expected, before anything is built.

    A cost that cannot be computed (memory, where this process is a rank of a job already) is no
    refusal, but a warning.
    """
    if not counting(plan):
        return
    problems = unmet(plan, counted(plan, batch, loss, weight))
    for problem in problems:
        if problem.code == UNTOLD:
            warnings.warn(problem.render(PLAIN), stacklevel=3)
    wrong = [problem for problem in problems if problem.code != UNTOLD]
    if wrong:
        raise Refusal(*wrong)


def counting(plan: Plan) -> list[Expectation]:
    """Return the expectations of this plan that are compared with counted costs."""
    return [one for one in plan.expected if one.measure != TIME and one.applies(plan.mesh)]


def _problems(plan: Plan, account: Account, one: Expectation) -> Iterator[Diagnostic]:
    label = Label(one.span)
    found = _found(plan, account, one)
    if found is None:
        title = f"`{one.said}` cannot be computed"
        batch = ("define `batch(seed)` in the model file",)
        yield Diagnostic(UNTOLD, title, label, notes=account.notes, helps=batch)
    elif not one.holds(found):
        notes, helps = _why(plan, account, one)
        title = f"`{one.said}` does not hold: it is {_text(one, found)}"
        yield Diagnostic("S860", title, label, notes=notes, helps=helps)


def _found(plan: Plan, account: Account, one: Expectation) -> float | None:
    """Return the measured cost; None where the plan does not have it."""
    if one.measure == "peak_memory":
        return None if not account.memory else heaviest(account.memory).peak
    if one.measure == "bubble":
        return 0.0 if account.bubble is None and not plan.cuts else account.bubble
    return None if account.collectives is None else max(_sent(plan, account, one).values())


def _sent(plan: Plan, account: Account, one: Expectation) -> dict[int | None, int]:
    """Return the bytes of sends over the axes, for each pipeline place."""
    wanted = set(plan.mesh.fold(one.axes)) if one.axes else set(plan.mesh.sizes)
    places = {each.place for each in account.classes or ()} or {None}
    return {
        place: sum(c.total for c in account.at(place) if wanted & set(plan.mesh.fold(c.axes)))
        for place in places
    }


def _why(plan: Plan, account: Account, one: Expectation) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Say where a cost is largest, what it consists of, and what would lower it."""
    if one.measure == "peak_memory":
        top = heaviest(account.memory or ())
        parts = sorted(top.classes.items(), key=lambda item: -item[1])
        said = ", ".join(f"{name} {size(count)}" for name, count in parts if count)
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
    said = ", ".join(f"{word} {size(count)}" for word, count in most)
    return (f"most of it: {said}",), ("use fewer ranks along the axis, or smaller microbatches",)


def _helps(plan: Plan, what: str) -> tuple[str, ...]:
    """Return help that lowers bytes of a class, on the mesh of the plan."""
    axes = plan.mesh.names
    return tuple(
        one if isinstance(one, str) else one[0] + offered(one[1], axes, "replicas")
        for one in LOWER[what]
    )


def _text(one: Expectation, found: Any) -> str:
    return f"{found:.3g}" if one.measure == "bubble" else size(int(found))
