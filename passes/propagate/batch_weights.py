"""What parts of a batch weigh in the loss of the whole, and which of its sums they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.diagnostic import Diagnostic, Label, Refusal
from schedlang.diagnostics.source import NOWHERE
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import Facet
from schedlang.passes.propagate.dryrun import with_many_rows
from schedlang.passes.propagate.propagate import Traced, propagate

if TYPE_CHECKING:
    from torch import Tensor

    from schedlang.runtime.grad_reduction.batch_statistics import BatchSum, Reaching, Statistics
    from schedlang.runtime.propagation.trace import LabelRule

# ---- What a part of a batch weighs in the mean loss of the whole.


Loss = Callable[..., Any]
Weight = Callable[[Mapping[str, Any]], float]


def part_weight(
    plan: Plan, sample: Mapping[str, Any], loss: Loss | None, weight: Weight | None, parts: int
) -> Weight:
    """What a part of a batch weighs, as `build` decides it from a sample part."""
    from schedlang.runtime.pipeline.stage import signature

    if weight is not None:
        return weight
    known: Any = plan.model.cache.get("labels", {})
    at = signature(sample), id(loss)
    if at in known:
        return weight_of(Traced(labels=known[at][0]), parts)
    return weight_of(propagate(Plan(plan.model), sample, loss), parts)


@dataclass(frozen=True)
class ByLabels:
    """By the labels that count; of a batch without any, which can be evaluated only, by rows."""

    rule: LabelRule

    def __call__(self, batch: Mapping[str, Any]) -> float:
        """What a part weighs."""
        return self.rule.count(batch)

    def counted(self, batch: Mapping[str, Any]) -> Tensor | float:
        """The same where the labels lie."""
        return self.rule.counted(batch)


def weight_of(traced: Traced, parts: int) -> Weight:
    """What a part of a batch weighs: its labels that count, else its rows."""
    from schedlang.runtime.batch import rows_of

    if len(traced.labels) == 1:
        return ByLabels(traced.labels[0])
    if len(traced.labels) > 1 and parts > 1:
        raise Refusal(
            Diagnostic(
                "S621",
                f"the model has {len(traced.labels)} losses, each with its own labels",
                notes=("a part of the batch would need a different weight in each",),
                helps=(
                    "define `weight(batch)` in the model file: the weight of a part of the batch",
                ),
            )
        )
    return lambda batch: float(rows_of(batch))


# ---- Losses made of statistics over the batch: which of their sums parts of it have to share.
# The router losses of Switch Transformers (Fedus et al. 2021) and of ST-MoE (Zoph et al. 2022) are
# made of means over all tokens.  Where a rank sees a part of them its means are those of all
# parts.


ALLOW = 'or allow statistics of each part: `step "..." relax(batch_stats) {`'


def with_statistics(
    plan: Plan, traced: Traced, sample: Mapping[str, Any], loss: Loss | None, weighed: bool = False
) -> Traced:
    """What a forward showed, and the sums over rows that ranks have to share."""
    if plan.micro > 1 and not relaxed(plan) and not weighed:
        found = _known_sums(plan, sample, loss)
        # beside a mean over labels none of these is a mean of means, whatever the rows are
        certain = [one for one, linear in found.sums.items() if not linear] if found else []
        if found is not None and found.labels and certain:
            raise _taken_apart(plan, certain[0])
    return replace(traced, statistics=statistics_of(plan, sample, loss, weighed))


def statistics_of(
    plan: Plan, sample: Mapping[str, Any], loss: Loss | None, weighed: bool
) -> Statistics | None:
    """The sums that the ranks which share a batch have to share; None where there are none.

    `weighed`: the user says what a part weighs.  A microbatch cannot know what later ones hold.
    """
    from schedlang.runtime.comm.collectives import Group
    from schedlang.runtime.grad_reduction.batch_statistics import Statistics

    axes = tuple(axis for axis in plan.data_axes if plan.mesh.size(axis) > 1)
    if not axes or plan.micro > 1 or relaxed(plan):
        return None
    sums = shared_sums(plan, sample, loss, weighed)
    if not sums or plan.mesh.size(plan.context_axes) > 1 or any(_again(plan, s.fqn) for s in sums):
        return None
    return Statistics(sums, Group(axes, plan.mesh.group(0, axes), 0, None, sums[0].fqn))


def check_microbatches(
    plan: Plan, sample: Mapping[str, Any], loss: Loss | None, weighed: bool
) -> None:
    """Refuse a loss whose statistics no microbatch sees (S668), unless those of parts will do."""
    sums = shared_sums(plan, sample, loss, weighed)
    if plan.micro > 1 and not relaxed(plan) and sums:
        raise _taken_apart(plan, sums[0])


def _taken_apart(plan: Plan, first: BatchSum) -> Refusal:
    micro = plan.micro
    where = f"`{first.fqn}`" if first.fqn else "the model"
    row = plan.origin(plan.order) if plan.order is not None else None
    return Refusal(
        Diagnostic(
            "S668",
            f"the loss needs statistics of the full batch, not of {micro} microbatches",
            Label((row and row.span) or NOWHERE),
            notes=(
                f"the forward of {where} takes a {first.name} over all rows"
                + (f", {first.line}" if first.line else ""),
                "the backward of a microbatch starts before later microbatches are computed",
            ),
            helps=("use one microbatch, `micro=1`: ranks compute the statistics together", ALLOW),
        )
    )


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
    found = _known_sums(plan, sample, loss)
    if found is None:
        return ()
    counted = weighed or found.labels
    return tuple(one for one, linear in found.sums.items() if counted or not linear)


def _known_sums(plan: Plan, sample: Mapping[str, Any], loss: Loss | None) -> Reaching | None:
    """The sums over rows that the loss is made of; None where it cannot be told."""
    found = with_many_rows(plan, sample, loss)
    return found.sums if found is not None else None


def _again(plan: Plan, fqn: str) -> bool:
    """Whether the forward of a module is run again in backward, where nothing is shared."""
    sites = {s for a in plan.rows_changing(Facet.RECOMPUTE) for s in a.sites}
    return any(not site or fqn == site or fqn.startswith(f"{site}.") for site in sites)
