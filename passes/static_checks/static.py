"""All static proofs of a plan, without running a rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from schedlang.ir.plan import Plan
from schedlang.passes.analyze.input_checks import add_forward_line
from schedlang.passes.analyze.prepare import Prepared, prepare
from schedlang.passes.simulate.one_rank_step import SimulatedStep
from schedlang.passes.static_checks.claims import Claim
from schedlang.passes.static_checks.gradients import check_reductions, check_types, infer_gradients
from schedlang.passes.static_checks.ownership import check_owners, check_weights
from schedlang.passes.static_checks.rank_steps import (
    GradientSum,
    RankStep,
    check_matching,
    executed_sums,
    planned_sums,
    simulate_ranks,
    sliced_sums,
)

if TYPE_CHECKING:
    from schedlang.diagnostics.diagnostic import Diagnostic
    from schedlang.passes.propagate.sharded_run import Loss

UNSEEN = (
    "values: nothing is computed; whether calls compute the right values is for `verify`",
    "kernels, compiled regions and recomputation: assumed to compute what they replace",
)


@dataclass(frozen=True)
class Static:
    """The claims of all static proofs, and what no static proof can see."""

    claims: tuple[Claim, ...]
    unseen: tuple[str, ...]

    @property
    def problems(self) -> tuple[Diagnostic, ...]:
        """All problems of all claims."""
        return tuple(one for claim in self.claims for one in claim.problems)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {"proofs": [c.to_json() for c in self.claims], "unseen": list(self.unseen)}


def static(
    plan: Plan, batch: Mapping[str, Any], loss: Loss | None = None, weight: Any = None
) -> Static:
    """Prove what follows from shapes and types alone, for one microbatch of a batch.

    Raises Refusal if the plan cannot be built for this batch.
    """
    from schedlang.runtime.batch import largest_part
    from schedlang.runtime.global_state import restore_global_state

    if plan.activation_codings:  # the same tensors, except for rounding
        result = static(replace(plan, activation_codings=()), batch, loss, weight)
        return replace(result, unseen=(*result.unseen, "rounding of saved activations"))
    if plan.compression is not None:  # the same sums, except for the codec
        result = static(replace(plan, compression=None), batch, loss, weight)
        return replace(
            result, unseen=(*result.unseen, "compressed gradients: simulated as uncompressed sums")
        )
    with add_forward_line(plan.model.model):
        sample = largest_part(batch, plan.share_weights, plan.micro)
    step = SimulatedStep(plan, prepare(plan, sample, loss, weight), sample, loss, weight)
    with restore_global_state(plan.model.model, loss):
        inferred = infer_gradients(plan, step.prepared, sample, loss)
        rank_steps, sliced, reason = _simulate(step)
    assert inferred is not None, "a model without a loss is refused before"
    executed = executed_sums(plan, step.prepared, rank_steps, sliced)
    return _join_claims(
        check_reductions(plan, step.prepared, inferred, executed),
        check_types(plan, inferred),
        check_weights(step, batch, rank_steps),
        check_matching(plan, step.prepared, rank_steps)
        if not reason
        else Claim("matching", reason, checked=False),
        check_owners(plan, step.prepared, inferred, rank_steps),
    )


def check_sums(
    plan: Plan,
    batch: Mapping[str, Any],
    prepared: Prepared,
    *,
    loss: Loss | None = None,
    local: bool = False,
) -> None:
    """Refuse (S711, S712) a program that would sum a gradient too seldom or too often.

    Called before training if gradients are partial over an axis that shards activations: such a sum
    depends on every use of a parameter, and a wrong one raises no error. `batch` are the keyword
    arguments of a step, of this rank alone if `local`.
    """
    from schedlang.diagnostics.diagnostic import Refusal
    from schedlang.runtime.batch import largest_part
    from schedlang.runtime.global_state import restore_global_state

    if not prepared.traced.partial or prepared.traced.missing_loss is not None:
        return
    with restore_global_state(plan.model.model, loss):
        sample = largest_part(batch, 1 if local else plan.share_weights, plan.micro)
        inferred = infer_gradients(plan, prepared, sample, loss)
    if inferred is not None:
        for problem in check_reductions(
            plan, prepared, inferred, planned_sums(plan, prepared)
        ).problems:
            raise Refusal(problem)


def _simulate(
    step: SimulatedStep,
) -> tuple[list[RankStep], dict[int, tuple[GradientSum, ...]], str]:
    """Simulate ranks; return their steps and sliced sums by stage, or nothing and the reason."""
    from schedlang.diagnostics.diagnostic import Refusal
    from schedlang.ir import pytree
    from schedlang.runtime.comm.fake_rank import can_fake_rank

    if not can_fake_rank():
        return [], {}, "this process is a rank of a job, and cannot simulate others"
    if any(
        map(
            pytree.is_sample_batch,
            pytree.tree_leaves(dict(step.sample), is_leaf=pytree.is_sample_batch),
        )
    ):
        return [], {}, "a batch of graphs is split by its values, and simulated ranks have none"
    try:
        rank_steps = simulate_ranks(step)
        first_ranks = {role.place: role.rank for role in reversed(rank_steps)}
        return (
            rank_steps,
            {position: sliced_sums(step, rank) for position, rank in first_ranks.items()},
            "",
        )
    except Refusal:
        raise
    except Exception as error:  # a model may need values
        first_line = str(error).split("\n")[0]
        return (
            [],
            {},
            f"no rank can be simulated without values: {type(error).__name__}: {first_line}",
        )


def _join_claims(*claims: Claim) -> Static:
    return Static(claims, (*(u for claim in claims for u in claim.unseen), *UNSEEN))
