"""All that can be known of a plan with a batch before there are ranks: traced, cut and laid out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.culprit import told
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.features import Settled
from schedlang.ir.plan import Plan, at_its_row
from schedlang.ir.primitive import Facet
from schedlang.passes.analyze.cast_trial import check_casts
from schedlang.passes.analyze.fewer_bits import Bits, allotted, check_kept, kept_by_ranks
from schedlang.passes.analyze.holdings import holdings_of
from schedlang.passes.analyze.repeats import check_repeats
from schedlang.passes.analyze.residence import check_peers
from schedlang.passes.analyze.routing import check_routing
from schedlang.passes.analyze.staleness import check_stale
from schedlang.passes.analyze.taking import check_keys, check_rows
from schedlang.passes.partition.chains import Chains, Counting, chains_of
from schedlang.passes.partition.staging import Staged, stages_of
from schedlang.passes.propagate.context import slicing_of, tokens_of
from schedlang.passes.propagate.original import Weight, with_statistics
from schedlang.passes.propagate.propagate import Traced, propagate

if TYPE_CHECKING:
    from schedlang.runtime.checkpointing.holding import Holding, Ways
    from schedlang.runtime.context_parallel.local_tokens import Tokens
    from schedlang.runtime.sequence_pipelining.slices import Slicing


def check_settled(plan: Plan, traced: Traced) -> None:
    """Ask every row about its sites; a refusal is placed at its row."""
    for action, row in plan.rows_with(Settled):
        for target in plan.targets(action):
            try:
                row.settled(target, plan, traced)
            except Refusal as refusal:
                raise refusal.at(action.span) from refusal


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
    # of units of earlier stages: their outputs, where they were found before there are ranks
    outputs: Mapping[Any, Any] = field(default_factory=dict, repr=False)
    # by which parts have become whole: the programs of a proof, one an optimizer, hold alike
    ways: Ways = field(default_factory=dict, repr=False, compare=False)


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
    from schedlang.runtime.kept_outside import kept_outside

    assert not plan.completing, "rows are completed before a plan is prepared"
    with kept_outside(plan.model.model):
        check_axes(plan)
        parts = plan.shares * plan.micro
        if plan.told:
            check_routing(plan)
        if weight is not None:
            _check_weight(weight, sample)
        if parts > 1:
            check_rows(plan, sample)
        traced = propagate(plan, sample, loss)
        if traced.apart and plan.mesh.world > 1:
            raise _apart(traced)
        if traced.lossless is not None:
            if trains:  # without a loss any key may be what one would read
                raise Refusal(traced.lossless)
        elif any(getattr(one, "sparse", False) is True for one in plan.model.model.modules()):
            _check_dense(plan)
        if traced.lossless is None and traced.unread:
            check_keys(plan, sample, traced, loss, weight)
        check_settled(plan, traced)
        if plan.casts:
            check_casts(plan, sample, loss)
        if parts > 1 or plan.contexts:
            traced = with_statistics(plan, traced, sample, loss, weight is not None)
        staged = stages_of(plan, traced, sample, loss)
        slicing, tokens = None, None
        chains: Chains = {}
        if plan.order is not None:
            check_stale(plan, staged)
            _check_reentrant(plan, traced, staged)
            slicing = slicing_of(plan, traced, staged.timeline.slices, sample, loss, weight)
        if plan.stores:
            check_peers(plan, staged)
        if plan.kept:
            check_kept(plan, traced, staged, slicing)
        if plan.contexts:
            tokens = tokens_of(plan, traced, sample, loss, weight)
        counting = Counting(plan, traced, staged, sample, loss, tokens)
        again = plan.rows_changing(Facet.RECOMPUTE)
        if again:
            chains = chains_of(counting)
        if plan.kept:
            traced = replace(traced, saved=kept_by_ranks(counting, chains))
        if again:
            check_repeats(plan, again, sample, loss)
        if bits is None:
            bits = allotted(plan, sample, loss, chains) if plan.kept else {}
        return Prepared(traced, staged, holdings_of(plan, staged), slicing, tokens, chains, bits)


def _check_dense(plan: Plan) -> None:
    """Refuse (S868) tables whose gradients are sparse: sums over ranks and norms are of dense
    ones."""
    for fqn, module in plan.model.model.named_modules():
        weight = getattr(module, "weight", None)
        if getattr(module, "sparse", False) is True and getattr(weight, "requires_grad", False):
            raise Refusal.of(
                "S868",
                f"the gradient of `{fqn}.weight` would be sparse",
                notes=(f"`{type(module).__name__}` was made with `sparse=True`",),
                helps=(
                    f"make it dense: `model.get_submodule({fqn!r}).sparse = False`",
                    f"or freeze it: `{fqn}  freeze()`",
                ),
            )


def _check_reentrant(plan: Plan, traced: Traced, staged: Staged) -> None:
    """Refuse (S608) an order that halves backwards where the model has reentrant checkpoints."""
    from schedlang.pipeline.timeline.table import Kind

    if traced.reenters and (staged.timeline.kind == Kind.W).any():
        note = "torch runs their backward for all inputs at once: no half of it can wait"
        helps = (
            "let the model say `torch.utils.checkpoint.checkpoint(.., use_reentrant=False)`",
            'use an order of whole backwards: `order="1F1B"`, `order="Interleaved1F1B"`',
        )
        title = "this order runs backwards in two halves, and the model has reentrant checkpoints"
        assert plan.order is not None
        refusal = Refusal.of("S608", title, notes=(note,), helps=helps)
        raise at_its_row(refusal, plan.origin(plan.order))


def _apart(traced: Traced) -> Refusal:
    """S812: several ranks must draw alike, and cannot draw this as the model does."""
    from schedlang.runtime.rng.logical_dropout import without_form

    name, (site, line) = next(iter(traced.apart.items()))
    return without_form(name, site, line)


def _check_weight(weight: Weight, sample: Mapping[str, Any]) -> None:
    """Check that a part's weight is a number; refuse (S865) at the line of a function that
    raises."""
    try:
        value = float(weight(sample))
    except Exception as error:
        raise told(error, "weight", weight) from error
    if not 0 <= value < float("inf"):
        raise Refusal.of(
            "S621",
            f"`weight` gives {value:g} for a part of the batch",
            notes=("losses of parts are added up, each by its share of all weights",),
            helps=("return a count of what the loss is a mean over: rows, tokens",),
        )


def check_axes(plan: Plan) -> None:
    """Every axis must have work to do: ranks along an idle one would all do the same."""
    used = plan.used_axes
    for axis, size in plan.mesh.axes:
        if size > 1 and axis not in used:
            raise Refusal.of(
                "S205",
                f"no row uses the axis `{axis}`",
                notes=(f"its {size} ranks would all do the same work",),
                helps=(
                    f"split the batch over it: `zero(stage=0, over={axis})`",
                    f"or set `{axis}` to 1: `--mesh {axis}=1`",
                ),
            )
