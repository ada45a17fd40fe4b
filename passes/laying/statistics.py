"""Losses made of statistics over the batch: which of their sums parts of it have to share.

The router losses of Switch Transformers (Fedus et al. 2021) and of ST-MoE (Zoph et al. 2022) are
made of means over all tokens.  Where a rank sees a part of them its means are those of all parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from schedlang.diagnostic import Diagnostic, Refusal
from schedlang.passes.laying.propagate import Traced
from schedlang.plan import Plan

if TYPE_CHECKING:
    from torch import Tensor

    from schedlang.passes.proving.sides import Case
    from schedlang.runtime.summing.batch_sums import BatchSum
    from schedlang.runtime.summing.parts import Part
    from schedlang.runtime.summing.statistics import Statistics

Loss = Callable[..., Any]
ALLOW = 'or allow those of parts: `step "..." relax(batch_stats) {`'


def with_statistics(
    plan: Plan, traced: Traced, sample: Mapping[str, Any], loss: Loss | None, weighed: bool = False
) -> Traced:
    """What a forward showed, and the sums over rows that ranks have to share."""
    return replace(traced, statistics=statistics_of(plan, sample, loss, weighed))


def statistics_of(
    plan: Plan, sample: Mapping[str, Any], loss: Loss | None, weighed: bool
) -> Statistics | None:
    """The sums that the ranks which share a batch have to share; None where there are none.

    `weighed`: the user says what a part weighs.  A microbatch cannot know what later ones hold.
    """
    from schedlang.runtime.collectives.collective import Group
    from schedlang.runtime.summing.statistics import Statistics

    axes = tuple(axis for axis in plan.data_axes if plan.mesh.size(axis) > 1)
    if not axes or plan.micro > 1 or relaxed(plan):
        return None
    sums = shared_sums(plan, sample, loss, weighed)
    if not sums or plan.mesh.size(plan.context_axes) > 1 or any(_again(plan, s.fqn) for s in sums):
        return None
    return Statistics(sums, Group(axes, plan.mesh.group(0, axes), 0, None, sums[0].fqn))


def relaxed(plan: Plan) -> bool:
    """May statistics be those of parts?"""
    return any("batch_stats" in names for _, names in plan.relaxed)


def shared_sums(
    plan: Plan, sample: Mapping[str, Any], loss: Loss | None, weighed: bool
) -> tuple[BatchSum, ...]:
    """The sums over rows of which the loss is no mean that weights of parts take care of.

    A loss with labels is weighed by these, so that any other sum in it needs all rows; one without
    is weighed by rows, so that a mean over rows does not.
    """
    from schedlang.runtime.staging.stage import signature
    from schedlang.runtime.summing.batch_sums import batch_sums

    known: Any = plan.model.cache.setdefault("sums over rows", {})
    key = signature(sample), id(loss)
    if key not in known:  # the loss is kept with it, so that no other gets its identity
        known[key] = batch_sums(plan.model.model, sample, loss), loss
    found = known[key][0]
    if found is None:
        return ()
    counted = weighed or found.labels
    return tuple(one for one, linear in found.sums.items() if counted or not linear)


def _again(plan: Plan, fqn: str) -> bool:
    """Whether the forward of a module is run again in backward, where nothing is shared."""
    sites = {s for a in plan.actions if "recompute" in a.primitive.writes for s in a.sites}
    return any(not site or fqn == site or fqn.startswith(f"{site}.") for site in sites)


def check_microbatches(case: Case) -> None:
    """Refuse a loss whose statistics no microbatch sees (S668), where parts do not make it."""
    from schedlang.runtime.summing.parts import split

    plan, micro = case.plan, case.plan.micro
    sample = split(case.batches[0], plan.shares, micro)[0][0].inputs
    sums = shared_sums(plan, sample, case.loss, case.weight is not None)
    if micro == 1 or not sums:
        return
    where = f"`{sums[0].fqn}`" if sums[0].fqn else "the model"
    raise Refusal(
        Diagnostic(
            "S668", f"the loss has statistics of the batch, which {micro} microbatches take apart",
            notes=(f"the forward of {where} takes a {sums[0].name} over all rows, and its backward"
                   " begins before later microbatches are there",),
            helps=("one microbatch: `micro=1`; ranks that share the batch share its statistics",
                   ALLOW),
        )
    )  # fmt: skip


def together(
    case: Case, parts: Sequence[Part], weights: Sequence[float], sums: tuple[BatchSum, ...]
) -> list[dict[str, Tensor | None]]:
    """Weighed losses (under "") and gradients of parts of the original that share their sums.

    Each part runs on a copy of its own in a thread of this process.
    """
    from concurrent.futures import ThreadPoolExecutor

    from schedlang.passes.proving.original import Sequential
    from schedlang.passes.proving.sides import modes_of, twin
    from schedlang.runtime.modes import ambient
    from schedlang.runtime.summing.statistics import Meeting, gather_statistics

    meeting, total = Meeting(len(parts)), sum(weights)
    rules = case.prepared.traced.labels if case.prepared is not None else ()

    def run(place: int) -> dict[str, Tensor | None]:
        part, share = parts[place], weights[place] / total
        given = part.inputs if share or not rules else rules[0].filled(part.inputs)
        try:
            with ambient(*modes_of(case.seed)[0]):
                module = twin(case)
                gather_statistics(module, sums, meeting.at(place))
                subject = Sequential(module, loss=case.loss, scale=share)
                return {"": subject.derive(given, part.rows), **subject.gradients()}
        except BaseException:
            meeting.barrier.abort()  # the others would wait for this one
            raise

    with ThreadPoolExecutor(len(parts)) as threads:
        return list(threads.map(run, range(len(parts))))
