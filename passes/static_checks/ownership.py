"""Static proofs of ownership, and of loss weights.

* Rows that replace a module's computation keep its names, hooks and state.
* Every parameter and buffer has its stage, and every trained parameter its optimizer.
* Weights of the parts of a step add up to one, and each agrees with the labels of its part.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.diagnostic import Diagnostic
from schedlang.ir.features import Lowered
from schedlang.ir.module_attributes import module_kind
from schedlang.ir.plan import Action, Plan
from schedlang.ir.primitive import Facet
from schedlang.passes.analyze.axis_rows import last_row_changing
from schedlang.passes.analyze.prepare import Prepared
from schedlang.passes.partition.staging import buffer_stages
from schedlang.passes.propagate.original_forward import weight_of
from schedlang.passes.propagate.propagate import Traced
from schedlang.passes.propagate.sequence_trials import weight_by_tokens
from schedlang.passes.simulate.one_rank_step import SimulatedStep
from schedlang.passes.static_checks.claims import Claim, join_problems, row_label
from schedlang.passes.static_checks.gradients import Gradients
from schedlang.passes.static_checks.rank_steps import RankStep, shorten_step

if TYPE_CHECKING:
    from torch import nn

    from schedlang.runtime.batch import BatchPart


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
    from schedlang.passes.lower.build import Builder
    from schedlang.runtime.tracing.meta_runs import meta_model

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
    from schedlang.pipeline.timeline.versions import update_versions

    count, tokens = step.plan.shares, step.plan.context_axes
    times = int(
        update_versions(shorten_step(step).prepared.staged.timeline).max()
    )  # updates of a step
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
