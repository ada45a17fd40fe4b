"""Sums over the rows of a batch in a loss: found on the meta device, reduced over ranks.

The router losses of Switch Transformers (Fedus et al. 2021) and of ST-MoE (Zoph et al. 2022) are
computed from means over all tokens. A rank that has a part of the tokens uses the means of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from schedlang.ir.plan import Plan
from schedlang.passes.propagate.batch_refusals import split_statistics

if TYPE_CHECKING:
    from torch import nn

    from schedlang.passes.propagate.original_forward import Loss
    from schedlang.passes.propagate.propagate import Traced
    from schedlang.runtime.grad_reduction.batch_statistics import BatchStatistics
    from schedlang.runtime.propagation.batch_sums import BatchSum, LossSums
    from schedlang.runtime.propagation.trace import ModuleStack
    from schedlang.runtime.tracing.equal_units import EqualUnits


class ManyRows(NamedTuple):
    """The results of a forward with a unique number of rows: shapes of masks, sums over rows."""

    mask_shapes: Mapping[tuple[str, int], tuple[int, ...]]
    sums: LossSums | None


def record_many_rows(
    plan: Plan,
    batch: Mapping[str, Any],
    loss: Loss | None,
    equal: Mapping[str, object] | None = None,
) -> ManyRows | None:
    """Run `run_many_rows` on a plan's model, once for a batch of these shapes."""
    from schedlang.runtime.pipeline.stage import signature

    cached: Any = plan.model.cache.setdefault("many rows", {})
    key = signature(batch), id(loss)
    if key not in cached:  # the cache holds the loss, so that its id is not used again
        cached[key] = run_many_rows(plan.model.model, batch, loss, equal), loss
    result: ManyRows | None = cached[key][0]
    return result


def run_many_rows(
    model: nn.Module,
    batch: Mapping[str, Any],
    loss: Loss | None,
    equal: Mapping[str, object] | None = None,
) -> ManyRows | None:
    """Record a forward with a unique number of rows.

    Returns None if the model accepts no other number of rows. `equal`: unit of the model -> its
    kind; two units of each kind run, if these neither draw nor get or return sums of rows.
    """
    from schedlang.runtime.global_state import restore_global_state
    from schedlang.runtime.propagation.trace import run_with_prime_rows

    with restore_global_state(model, loss):
        run = _ManyRowsRun(loss, equal or {})
        many_rows = run_with_prime_rows(model, batch, run)
        if run.is_different(failed=many_rows is None):
            many_rows = run_with_prime_rows(model, batch, _ManyRowsRun(loss, {}))
    return many_rows


@dataclass
class _ManyRowsRun:
    """One forward with many rows; `equal`: unit -> its kind, of which two run."""

    loss: Loss | None
    equal: Mapping[str, object]
    units: EqualUnits | None = None

    def __call__(
        self, bare: nn.Module, inputs: dict[str, Any], stack: ModuleStack, rows: int
    ) -> ManyRows:
        """Run the forward, and return what was recorded."""
        from schedlang.runtime.batch import run_forward
        from schedlang.runtime.propagation.batch_sums import BatchSumLattice
        from schedlang.runtime.propagation.imitated_units import Unmarked
        from schedlang.runtime.propagation.trace import RecordedForward, Trace
        from schedlang.runtime.tracing.equal_units import EqualUnits

        recorded = RecordedForward(stack, inputs, draws=True, calls=False)
        sums = BatchSumLattice(stack, rows, recorded.labels)
        self.units = EqualUnits(bare, self.equal, observer=Unmarked(sums, recorded.drawn))
        with Trace(stack, recorded, sums), self.units.using():
            _, value = run_forward(bare, inputs, sums.wrap_loss(self.loss))
        return ManyRows(recorded.drawn, None if value is None else sums.sums_of(value))

    def is_different(self, failed: bool) -> bool:
        """Return whether all units have to run: they differ, or the run with a few has failed."""
        units = self.units
        return units is not None and (units.different or failed and units.imitated > 0)


def with_statistics(
    plan: Plan, traced: Traced, sample: Mapping[str, Any], loss: Loss | None, weighed: bool = False
) -> Traced:
    """Add to a trace the sums over rows that are reduced over ranks, and means that are weighted.

    Refuses (S668) sums that microbatches split. `weighed`: the user gave a weight function.
    """
    from schedlang.runtime.label_means import LabelMeans

    several = len(traced.labels) > 1
    if plan.micro > 1 and not is_statistics_relaxed(plan) and not weighed:
        sums = known_sums(plan, sample, loss, traced.equal_units)
        # with a mean over labels, no other sum is a mean of means, for any number of rows
        nonlinear = [term for term, linear in sums.sums.items() if not linear] if sums else []
        if sums is not None and sums.means and nonlinear:
            raise split_statistics(plan, nonlinear[0])
    unknown = weighed or is_statistics_relaxed(plan) and not several
    known = None if unknown else known_sums(plan, sample, loss, traced.equal_units)
    weighs = several and known is not None and known.can_weigh_means
    if known is not None and known.means and len(traced.labels) == 1:
        is_metric = all(mean.call is None for mean in known.means)  # its mean is not in the loss
        weighs = is_metric and not (traced.labels[0].class_weights or traced.labels[0].rewritten)
    # otherwise parts are weighted by the labels of one mean, or by the user
    counted = weighed or not weighs and known is not None and bool(known.means)
    statistics = statistics_of(plan, sample, loss, counted, traced.equal_units)
    paired = known.paired if known is not None and not is_statistics_relaxed(plan) else ""
    return replace(
        traced,
        statistics=statistics,
        paired_rows=paired,
        label_means=LabelMeans(traced.labels, traced.loss_calls) if weighs else None,
    )


def statistics_of(
    plan: Plan,
    sample: Mapping[str, Any],
    loss: Loss | None,
    weighed: bool,
    equal: Mapping[str, object] | None = None,
) -> BatchStatistics | None:
    """Return the sums to be reduced over the ranks that share a batch; None where there are none.

    `weighed`: the user gave a weight function. `equal`: equal units of the model. With several
    microbatches the result is None: a microbatch cannot know the values of later ones.
    """
    from schedlang.runtime.comm.collectives import Group
    from schedlang.runtime.grad_reduction.batch_statistics import BatchStatistics

    axes = tuple(axis for axis in plan.data_axes if plan.mesh.size(axis) > 1)
    if not axes or plan.micro > 1:
        return None
    gathered = tuple(row.fqn for row in plan.row_gathers)
    sums: tuple[BatchSum, ...] = ()
    if not is_statistics_relaxed(plan) and not (gathered and plan.contexts):
        sums = find_shared_sums(plan, sample, loss, weighed, equal)
    if not sums and not gathered:
        return None
    label = sums[0].fqn if sums else gathered[0]
    return BatchStatistics(sums, Group(axes, plan.mesh.group(0, axes), 0, None, label), gathered)


def check_microbatches(
    plan: Plan, sample: Mapping[str, Any], loss: Loss | None, weighed: bool
) -> None:
    """Refuse (S668) a loss with statistics of the full batch, unless the plan relaxes them."""
    sums = find_shared_sums(plan, sample, loss, weighed)
    if plan.micro > 1 and not is_statistics_relaxed(plan) and sums:
        raise split_statistics(plan, sums[0])


def is_statistics_relaxed(plan: Plan) -> bool:
    """Return whether a step relaxes `batch_stats`: statistics of parts are allowed."""
    return any("batch_stats" in names for _, names in plan.relaxed)


def find_shared_sums(
    plan: Plan,
    sample: Mapping[str, Any],
    loss: Loss | None,
    weighed: bool,
    equal: Mapping[str, object] | None = None,
) -> tuple[BatchSum, ...]:
    """Return the sums over rows in a plan's loss that need all rows of the batch."""
    return sums_of_all_rows(known_sums(plan, sample, loss, equal), weighed)


def sums_of_all_rows(loss_sums: LossSums | None, weighed: bool) -> tuple[BatchSum, ...]:
    """Return the sums in a loss that need all rows of the batch; () for None.

    A loss with labels is weighted by labels: any other sum in the loss needs all rows. A loss
    without labels is weighted by rows: a mean over rows (a linear sum) needs no other rows.
    """
    if loss_sums is None:
        return ()
    counted = weighed or loss_sums.weighs_by_labels
    return tuple(batch_sum for batch_sum, linear in loss_sums.sums.items() if counted or not linear)


def known_sums(
    plan: Plan,
    sample: Mapping[str, Any],
    loss: Loss | None,
    equal: Mapping[str, object] | None = None,
) -> LossSums | None:
    """Return the sums over rows in a plan's loss; None where they are unknown."""
    many_rows = record_many_rows(plan, sample, loss, equal)
    return many_rows.sums if many_rows is not None else None
