"""All static proofs of a plan, without running a rank."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal
from schedlang.ir import pytree
from schedlang.ir.features import Lowered
from schedlang.ir.module_attributes import module_kind
from schedlang.ir.plan import Action, Plan
from schedlang.ir.primitive import Facet
from schedlang.passes.analyze.axis_rows import last_row_changing
from schedlang.passes.analyze.input_checks import add_forward_line
from schedlang.passes.analyze.prepare import Prepared, prepare
from schedlang.passes.lower.build import Builder
from schedlang.passes.partition.staging import buffer_stages
from schedlang.passes.propagate.original_forward import weight_of
from schedlang.passes.propagate.propagate import Traced
from schedlang.passes.propagate.sequence_trials import weight_by_tokens
from schedlang.passes.propagate.sharded_run import Loss
from schedlang.passes.simulate.one_rank_step import SimulatedStep
from schedlang.passes.static_checks.claims import Claim, join_problems, row_label
from schedlang.passes.static_checks.gradients import (
    Gradients,
    check_reductions,
    check_types,
    infer_gradients,
)
from schedlang.passes.static_checks.rank_steps import (
    GradientSum,
    RankStep,
    check_matching,
    executed_sums,
    planned_sums,
    shorten_step,
    simulate_ranks,
    sliced_sums,
)
from schedlang.pipeline.timeline.versions import update_versions
from schedlang.runtime.batch import BatchPart, largest_part
from schedlang.runtime.global_state import restore_global_state
from schedlang.runtime.tracing.meta_runs import meta_model

if TYPE_CHECKING:
    from torch import nn

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


# -- ownership and loss weights --------------------------------------------------------------------
# Rows that replace a module's computation keep its names, hooks and state. Every parameter and
# buffer has its stage, and every trained parameter its optimizer. Weights of the parts of a step
# add up to one, and each agrees with the labels of its part.

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_post_hooks",
)


def changed_facts(plan: Plan) -> Iterator[tuple[str, str, Action]]:
    """Apply kernels and regions to a copy, one module of each kind for a row; yield what changes.

    Yields module, reason and row if a parameter, its dtype or `requires_grad`, a buffer, a child
    module or a hook changes.
    """
    rows = [(a, row) for a, row in plan.rows_with(Lowered) if a.changes(Facet.STRUCTURE)]
    if not rows:
        return
    model: Any = meta_model(plan.model.model, {})
    builder = Builder(plan, model, Traced(), None)  # type: ignore[arg-type]
    for action, row in rows:
        seen_kinds = set()
        for fqn in action.sites:
            site = plan.model.sites[fqn]
            kind = module_kind(plan.model, fqn)
            if kind in seen_kinds:
                continue
            seen_kinds.add(kind)
            facts_before = _facts(model.get_submodule(fqn))
            row.lower(site, builder)
            facts_after = _facts(model.get_submodule(fqn))
            for fact_name in facts_before:
                if facts_before[fact_name] != facts_after[fact_name]:
                    yield fqn, f"`{action.name}` changes its {fact_name}", action


def _facts(module: nn.Module) -> dict[str, object]:
    """Return the facts of a module that must not change, by name."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    hooks = {
        (name, kind): tuple(getattr(part, kind, {}).values())
        for name, part in module.named_modules()
        for kind in HOOKS
    }
    return {
        "parameters": {name: id(p) for name, p in parameters.items()},
        "dtypes": {name: p.dtype for name, p in parameters.items()},
        "requires_grad": {name: p.requires_grad for name, p in parameters.items()},
        "buffers": {n: id(b) for n, b in module.named_buffers(remove_duplicate=False)},
        "children": [name for name, _ in module.named_modules()],
        "hooks": hooks,
        "mode": module.training,
    }


def check_owners(
    plan: Plan, prepared: Prepared, gradients: Gradients | None, rank_steps: Sequence[RankStep]
) -> Claim:
    """Check that parameters and buffers have stages, and optimizers their parameters (S715).

    A parameter belongs to one stage, or to several through a tie or code between units. Each
    simulated rank must have given its optimizer every trained parameter that it holds, once.
    """
    problems = [*_check_parameters(plan, prepared, gradients), *_check_buffers(plan, prepared)]
    problems += _check_optimizers(plan, rank_steps)
    stages = prepared.staged.cut.stages
    buffers = dict(plan.model.model.named_buffers())
    summary = (
        f"{len(plan.model.unique_parameters)} parameters, {len(buffers)} buffers,"
        f" {stages} stage{'s' * (stages != 1)}"
    )
    label = row_label(last_row_changing(plan, Facet.STAGE))
    diagnostics = [(name, Diagnostic("S715", text, label)) for name, text in problems]
    diagnostics += [
        (fqn, Diagnostic("S715", text, row_label(row))) for fqn, text, row in changed_facts(plan)
    ]
    return Claim("ownership", summary, join_problems(diagnostics))


def _stages_of_units(prepared: Prepared, names: tuple[str, ...]) -> frozenset[int]:
    """Return the stages of the units that contain a tensor with these names."""
    cut = prepared.staged.cut
    return frozenset(
        stage
        for unit, stage in zip(cut.graph.units, cut.stage_of)
        if any(name.startswith(f"{unit}.") for name in names)
    )


def _check_parameters(
    plan: Plan, prepared: Prepared, gradients: Gradients | None
) -> Iterator[tuple[str, str]]:
    staged = prepared.staged
    if prepared.holdings.keys() != plan.model.unique_parameters.keys():
        for name in prepared.holdings.keys() ^ plan.model.unique_parameters.keys():
            yield name, "a parameter has no place"
    if staged.axis is None:
        return
    for name, param in plan.model.unique_parameters.items():
        holders = prepared.holdings[name].stages if name in prepared.holdings else None
        if not holders:
            yield name, "a parameter is held by no stage"
            continue
        positions = staged.places(*_stages_of_units(prepared, param.names))
        gradient = gradients.found.get(name) if gradients is not None else None
        reads = staged.places(*gradient.stages) if gradient is not None else positions
        if reads - holders:
            yield name, f"stages at {sorted(reads - holders)} use it and do not hold it"


def _check_buffers(plan: Plan, prepared: Prepared) -> Iterator[tuple[str, str]]:
    """Yield buffers without a stage: of a unit, the unit's stage; else the stages that read them.

    A buffer that nothing reads needs no stage: a forward may take a view of it and discard the
    view.
    """
    staged = prepared.staged
    if staged.axis is None:
        return
    assigned = buffer_stages(staged)
    graph = staged.cut.graph
    read = frozenset().union(*(r.buffers for r in (*graph.reads, *graph.between, graph.final)))
    aliases = {names[0]: names for names in plan.model.shared_buffers}
    for name, _ in plan.model.model.named_buffers():
        used_at = staged.places(*_stages_of_units(prepared, aliases.get(name, (name,))))
        holders = assigned.get(name)
        if holders is not None and not holders:
            yield name, "a buffer is held by no stage"
        elif holders is None and used_at and name in read:
            yield name, f"a buffer of units at {sorted(used_at)} is assigned to no stage"


def _check_optimizers(plan: Plan, rank_steps: Sequence[RankStep]) -> Iterator[tuple[str, str]]:
    """Yield trained parameters that a rank does not give to its optimizer exactly once."""
    for role in rank_steps:
        trained_counts = Counter(role.trained)
        for name, param in plan.model.unique_parameters.items():
            expected = int(param.requires_grad and name in role.held)
            if trained_counts.pop(name, 0) != expected:
                yield name, f"the optimizer of rank {role.rank} does not train it exactly once"
        for name in trained_counts:
            yield name, f"the optimizer of rank {role.rank} trains what the model does not have"


NEAR = 1e-9


def check_weights(
    step: SimulatedStep, batch: Mapping[str, Any], rank_steps: Sequence[RankStep]
) -> Claim:
    """Check that loss weights of parts add up to the batch's, and in a step to one (S716)."""
    from schedlang.runtime.batch import split_batch

    plan = step.plan
    micro = plan.micro
    shares = split_batch(batch, plan.share_weights, micro)
    parts = [part for row in shares for whole in row for part in _weighed_inputs(step, whole)]
    if len(parts) == 1:
        return Claim("loss weights", "one part, which is the whole")
    weight_factory = weight_of if step.prepared.tokens is None else weight_by_tokens
    weigh = step.weight or weight_factory(step.prepared.traced, len(parts))
    weights, whole = [float(weigh(part)) for part in parts], float(weigh(batch))
    problems = [
        *_check_total(step, weights, whole),
        *_check_label_count(step, weigh),
        *_check_step(step, rank_steps),
    ]
    summary = f"{len(weights)} parts of {whole:g}, {len(rank_steps)} ranks"
    unseen = (
        () if _counts_labels(step) else ("that the loss is a mean over rows; `verify` measures it",)
    )
    return Claim("loss weights", summary, tuple(problems), unseen=unseen)


def _weighed_inputs(step: SimulatedStep, part: BatchPart) -> list[Mapping[str, Any]]:
    """Return the inputs that determine a part's weight, one for each rank with own tokens."""
    tokens = step.prepared.tokens
    if tokens is None:
        return [part.inputs]
    shards = [tokens.take_part(part, position, None) for position in range(tokens.ranks)]
    return [
        shard.weight_inputs if shard.weight_inputs is not None else shard.inputs for shard in shards
    ]


def _counts_labels(step: SimulatedStep) -> bool:
    return step.weight is None and len(step.prepared.traced.labels) == 1


def _weight_row(step: SimulatedStep) -> Any:
    plan = step.plan
    return row_label(last_row_changing(plan, Facet.STATE if plan.data_axes else Facet.ORDER))


def _check_total(step: SimulatedStep, weights: list[float], total: float) -> Iterator[Diagnostic]:
    if not math.isclose(sum(weights), total, rel_tol=NEAR):
        message = f"the weights of all parts add up to {sum(weights):g}; the batch weighs {total:g}"
        yield Diagnostic("S716", message, _weight_row(step))


def _check_label_count(step: SimulatedStep, weigh: Any) -> Iterator[Diagnostic]:
    """Compare a part's weight with the number of labels that the loss averages over."""
    if not _counts_labels(step):
        return
    counts, weight = step.prepared.traced.label_counts, float(weigh(step.sample))
    if len(counts) == 1 and counts[0] != weight:
        title = f"the loss averages over {counts[0]:g} labels of a part that weighs {weight:g}"
        yield Diagnostic("S716", title, _weight_row(step))


def _check_step(step: SimulatedStep, rank_steps: Sequence[RankStep]) -> Iterator[Diagnostic]:
    """Check that weights of corresponding parts of all replicas add up to 1 (S716)."""
    count, tokens = step.plan.shares, step.plan.context_axes
    # updates of a step
    times = int(update_versions(shorten_step(step).prepared.staged.timeline).max())
    for role in rank_steps:
        weights = [
            sum(rank_step.weights) for rank_step in rank_steps if _same_rows(step, rank_step, role)
        ]
        if len(weights) < step.plan.mesh.size(tokens):
            continue  # not all ranks with tokens of these rows were simulated
        total = sum(weights) * count / times
        if not math.isclose(total, 1.0, rel_tol=NEAR):
            message = f"the microbatches of rank {role.rank} weigh {total:g} of their share"
            yield Diagnostic("S716", message, _weight_row(step))
            return


def _same_rows(step: SimulatedStep, rank_step: RankStep, other_step: RankStep) -> bool:
    """Return whether two ranks have the same rows, maybe with other tokens of them."""
    mesh, tokens = step.plan.mesh, step.plan.context_axes
    a, b = mesh.coordinates(rank_step.rank), mesh.coordinates(other_step.rank)
    return all(a[axis] == b[axis] for axis in mesh.sizes if axis not in tokens)
