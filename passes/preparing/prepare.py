"""All that can be known of a plan with a batch before there are ranks: traced, cut and laid out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from schedlang.culprit import told
from schedlang.diagnostic import Diagnostic, Refusal
from schedlang.passes.cutting.chains import Chains, Counting, chains_of
from schedlang.passes.cutting.staging import Staged, stages_of
from schedlang.passes.laying.context import tokens_of
from schedlang.passes.laying.propagate import Traced, propagate
from schedlang.passes.laying.statistics import with_statistics
from schedlang.passes.laying.weigh import Weight
from schedlang.passes.preparing.allotted import Bits, allotted
from schedlang.passes.preparing.holdings import holdings_of
from schedlang.passes.preparing.kept_bits import check_kept
from schedlang.passes.preparing.kept_tokens import kept_by_ranks
from schedlang.passes.preparing.peers import check_peers
from schedlang.passes.preparing.repeats import check_repeats
from schedlang.passes.preparing.routing import check_routing
from schedlang.passes.preparing.sequence import slicing_of
from schedlang.passes.preparing.settled import check_settled
from schedlang.passes.preparing.staleness import check_stale
from schedlang.passes.preparing.taking import check_keys, check_loss, check_rows
from schedlang.plan import Plan

if TYPE_CHECKING:
    from schedlang.runtime.context.tokens import Tokens
    from schedlang.runtime.saving.holding import Holding
    from schedlang.runtime.slicing.slices import Slicing

Loss = Callable[..., Any]


@dataclass(frozen=True)
class Prepared:
    """The same on every rank, and for every dtype of the model; it can be made once and sent."""

    traced: Traced
    staged: Staged
    holdings: Mapping[str, Holding]
    slicing: Slicing | None = None  # of sequences, where the pipeline cuts them
    tokens: Tokens | None = None  # where ranks split them
    chains: Chains = field(default_factory=dict)  # of rows with a limit of memory
    bits: Bits = field(default_factory=dict)  # of saved tensors, of rows with a budget


def prepare(
    plan: Plan,
    sample: Mapping[str, Any],
    loss: Loss | None = None,
    weight: Weight | None = None,
    bits: Bits | None = None,
    *,
    trains: bool = True,
) -> Prepared:
    """Trace a plan with one microbatch and cut it; raises Refusal where it cannot run.

    `trains`: there has to be a loss; a program that is only evaluated needs none.
    `bits`: a table that is known, of this plan or of another one of the model; else it is measured.
    """
    assert not plan.completing, "rows are completed before a plan is prepared"
    check_axes(plan)
    check_routing(plan)
    if weight is not None:
        _check_weight(weight, sample)
    check_rows(plan, sample)
    traced = propagate(plan, sample, loss)
    _check_draws(plan, traced)
    if trains:
        check_loss(traced)
    if traced.lossless is None:  # else the key may be what a loss would read
        check_keys(plan, sample, loss, weight)
    check_settled(plan, traced)
    traced = with_statistics(plan, traced, sample, loss, weight is not None)
    staged = stages_of(plan, traced, sample, loss)
    check_stale(plan, staged)
    check_peers(plan, staged)
    slicing = slicing_of(plan, traced, staged, sample, loss, weight)
    check_kept(plan, traced, staged, slicing)
    tokens = tokens_of(plan, traced, sample, loss, weight)
    counting = Counting(plan, traced, staged, sample, loss, tokens)
    chains = chains_of(counting)
    traced = replace(traced, saved=kept_by_ranks(counting, chains))
    check_repeats(plan, sample, loss)
    bits = allotted(plan, sample, loss, chains) if bits is None else bits
    return Prepared(traced, staged, holdings_of(plan, staged), slicing, tokens, chains, bits)


def _check_draws(plan: Plan, traced: Traced) -> None:
    """Several ranks must draw alike: refuses (S812) what no rank could draw as the model does."""
    if plan.mesh.world > 1 and traced.apart:
        from schedlang.runtime.drawing.random import without_form

        raise without_form(*next(iter(traced.apart.items())))


def _check_weight(weight: Weight, sample: Mapping[str, Any]) -> None:
    """What a part weighs is a number; refuses (S865) at the line of a function that raises."""
    try:
        float(weight(sample))
    except Exception as error:
        raise told(error, "weight", weight) from error


def check_axes(plan: Plan) -> None:
    """Every axis must have work to do: ranks along an idle one would all do the same."""
    used = plan.used_axes
    for axis, size in plan.mesh.axes:
        if size > 1 and axis not in used:
            raise Refusal(
                Diagnostic(
                    "S205", f"no row uses the axis `{axis}`",
                    notes=(f"its {size} ranks would all do the same work",),
                    helps=(f"split the batch over it: `zero(stage=0, over={axis})`",
                           f"or set `{axis}` to 1: `--mesh {axis}=1`"),
                )
            )  # fmt: skip
