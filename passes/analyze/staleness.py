"""What cannot go with updates inside the step, and optimizers that look at whole parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal
from schedlang.ir.plan import Action, Plan
from schedlang.ir.primitive import Facet

if TYPE_CHECKING:
    import torch

    from schedlang.passes.partition.staging import Staged
    from schedlang.pipeline.timeline import Timeline
    from schedlang.runtime.assembly import Assembly
    from schedlang.runtime.optim.whole_step import WholeStep

# ---- Which version of the weights every microbatch meets, where updates come inside the step.


Versions = Mapping[int, int]  # stage -> version


@dataclass(frozen=True)
class Table:
    """Which weights every microbatch meets, and the update that it goes into.

    forward, backward  of each microbatch, the version that each stage reads
    made               of each microbatch, the version that its gradients make (from 1)
    stage              parameter (first name) -> its stage
    """

    forward: tuple[Versions, ...]
    backward: tuple[Versions, ...]
    made: tuple[int, ...]
    stage: Mapping[str, int]


def table_of(staged: Staged) -> Table | None:
    """The table of a plan that updates inside the step; None where every version is 0."""
    from schedlang.pipeline.timeline.versions import is_stale, updates

    timeline = staged.timeline
    if not is_stale(timeline):
        return None
    made = tuple(updates(timeline).tolist())
    if max(made) == 1:
        return None  # one update a step, of all microbatches: the plain loop
    return Table(*_reads(timeline), made, _stages(staged))


def _reads(timeline: Timeline) -> tuple[tuple[Versions, ...], tuple[Versions, ...]]:
    from schedlang.pipeline.timeline import Kind

    forward: list[dict[int, int]] = [{} for _ in range(timeline.microbatches)]
    backward: list[dict[int, int]] = [{} for _ in range(timeline.microbatches)]
    for rank in range(timeline.ranks):
        for op in timeline.rows(rank):
            if op.kind is Kind.F:
                forward[op.microbatch][op.stage] = op.version
            elif op.kind in (Kind.B, Kind.I):
                backward[op.microbatch][op.stage] = op.version
    return tuple(forward), tuple(backward)


def _stages(staged: Staged) -> dict[str, int]:
    if staged.axis is None:
        return {}
    cut = staged.cut
    return {name: stage for stage in range(cut.stages) for name in cut.parameters(stage)}


# ---- What cannot go with updates inside the step: shared weights, sliced state, clipping.


SYNCHRONOUS = 'use a synchronous order: `pipeline(order="1F1B", micro=...)`'


def check_stale(plan: Plan, staged: Staged) -> None:
    """Refuse a plan with stale weights that has no clear meaning (S625), or no proven table."""
    from schedlang.pipeline.timeline import TimelineError
    from schedlang.pipeline.timeline.versions import check_versions, is_stale

    if not is_stale(staged.timeline):
        return
    row = _row(plan, Facet.ORDER)
    try:
        check_versions(staged.timeline)
    except TimelineError as error:
        _refuse(f"the order uses wrong versions of weights: {error}", row, helps=(SYNCHRONOUS,))
    _check_stages(staged, row)
    _check_shared(staged, row)
    _check_sliced(plan)
    _check_early(plan)
    _check_coded(plan)
    _check_scaled(plan)
    _check_residence(plan)
    _check_recomputed(plan, staged)


def check_build(staged: Staged, optimizer: Any, clip: float | None, hollow: bool) -> None:
    """Refuse to clip by a norm that does not exist, and updates without an optimizer (S625)."""
    from schedlang.pipeline.timeline.versions import is_stale

    if not is_stale(staged.timeline):
        return
    if clip is not None:
        _refuse(
            "`clip` needs one norm of all gradients: a stale order has none",
            None,
            notes=("the first stage makes several updates before the last one makes its first",),
            helps=("leave `clip` out", SYNCHRONOUS),
        )
    if optimizer is None and not hollow:
        _refuse(
            "this order updates weights inside the step, and needs an optimizer",
            None,
            helps=("give one: `sch.build(batch=batch, optimizer=...)`", SYNCHRONOUS),
        )


def _check_stages(staged: Staged, row: Action | None) -> None:
    places = [place for replica in staged.homes for place in replica]
    if len(set(places)) == len(places):
        return
    _refuse(
        "two stages of one rank would be updated at different times",
        row,
        notes=("with stale weights each rank runs one stage, with its own optimizer",),
        helps=("use a table with one stage on each rank", SYNCHRONOUS),
    )


def _check_shared(staged: Staged, row: Action | None) -> None:
    """A weight of two stages would be updated by each at its own time."""
    if staged.axis is None or not staged.cut.shared:
        return
    name, stages = next(iter(staged.cut.shared.items()))
    said = " and ".join(map(str, stages))
    _refuse(
        f"`{name}` is used by the stages {said}, which are updated at different times",
        row,
        notes=("a tied weight needs one update for all stages that use it",),
        helps=("untie it (`tie_word_embeddings=False` in most configs)", SYNCHRONOUS),
    )


def _check_sliced(plan: Plan) -> None:
    if not any(one.stage and plan.mesh.size(one.axes) > 1 for one in plan.replicas):
        return
    _refuse(
        "sharded parameters cannot be kept in several versions",
        _row(plan, Facet.STATE),
        notes=("the order keeps each version of the full weights, and shards are of one version",),
        helps=("replicate them: `zero(stage=0, ...)`", SYNCHRONOUS),
    )


def _check_early(plan: Plan) -> None:
    early = plan.overlapping("gradients")
    if early is None:
        return
    _refuse(
        "`overlap(gradients)` has no effect: gradients are summed at every update of a stage",
        plan.origin(early),
        notes=("the rank has no other stage whose backward could overlap with the sum",),
        helps=("use `overlap(transfers)` only", SYNCHRONOUS),
    )


def _check_coded(plan: Plan) -> None:
    """What one update leaves out would be added to gradients at other weights, stage by stage."""
    if plan.compression is None:
        return
    _refuse(
        "`compress` sums gradients once a step, but stages are updated several times in it",
        plan.origin(plan.compression),
        notes=("the error of compression is added to the gradient of the next step",),
        helps=("drop this row: gradients are then summed uncompressed", SYNCHRONOUS),
    )


def _check_scaled(plan: Plan) -> None:
    """Whether a step overflowed is heard when all ranks have ended it, and these update before."""
    if plan.scaled is None:
        return
    _refuse(
        "loss scaling may skip a step, but this order updates stages inside the step",
        plan.origin(plan.scaled),
        notes=("whether gradients overflowed on any rank is known only at the end of a step",),
        helps=("use `cast(bf16)`, which needs no loss scale", SYNCHRONOUS),
    )


def _check_residence(plan: Plan) -> None:
    """Versions are kept where the weights are, and an update cannot wait for other ranks' files."""
    bad = [s for s in plan.stores if s.what != "activations"]
    bad = [s for s in bad if s.tier != "cpu" or s.what != "optimizer"]
    if not bad:
        return
    _refuse(
        f"the {bad[0].what} of several versions cannot be kept {_WHERE[bad[0].tier]}",
        plan.origin(bad[0]),
        notes=("the order keeps the versions that it still needs on the device",),
        helps=(
            "keep only the optimizer state in host memory: `offload(optimizer, to=cpu)`",
            SYNCHRONOUS,
        ),
    )


_WHERE = {"cpu": "in host memory", "disk": "on disk", "peer": "on a peer"}


def _check_recomputed(plan: Plan, staged: Staged) -> None:
    """A recomputed forward would meet other weights than the first one, where nothing is kept."""
    row = _row(plan, Facet.RECOMPUTE)
    if row is None or not _moves(staged):
        return
    _refuse(
        "recomputation would use other weights than the forward",
        row,
        notes=("the order keeps no versions: a backward uses the newest weights",),
        helps=(
            'use an order that keeps them: `pipeline(order="PipeDream", micro=...)`',
            "or drop this row",
        ),
    )


def _moves(staged: Staged) -> bool:
    """Whether some backward reads other weights than its forward."""

    table = table_of(staged)
    return table is not None and table.forward != table.backward


def _row(plan: Plan, facet: Facet) -> Action | None:
    return next(iter(plan.rows_changing(facet)), None)


def _refuse(
    title: str, row: Action | None, *, notes: tuple[str, ...] = (), helps: tuple[str, ...] = ()
) -> NoReturn:
    refusal = Refusal(Diagnostic("S625", title, notes=notes, helps=helps))
    raise refusal.at(row.span) if row is not None and row.span is not None else refusal


# ---- Which optimizers step on parts, and which on parameters that are put together for them.


def whole_step(
    a: Assembly, staged: Staged, optimizer: Callable[..., torch.optim.Optimizer] | None
) -> WholeStep | None:
    """How to step where parameters lie in parts and the optimizer looks at whole ones; else None.

    Refuses, alike on all ranks, an optimizer that looks at all parameters together, and one that
    would have to wait for other stages where each updates by itself (S622).
    """
    from schedlang.pipeline.timeline.versions import is_stale
    from schedlang.runtime.optim.whole_step import WholeStep, is_elementwise, is_tensorwise

    holdings = a.holdings.values()
    split = next((h for h in holdings if h.layout.splits or h.sliced), None)
    if optimizer is None or split is None or is_elementwise(optimizer):
        return None
    if is_stale(staged.timeline):
        _of_whole(
            "this order updates each stage separately, and cannot gather parameters for a step",
            f"this optimizer needs full tensors, and `{split.name}` is sharded",
            "use a synchronous order, or an elementwise optimizer (SGD, Adam, AdamW, ...)",
        )
    if is_tensorwise(optimizer):
        return WholeStep(a.parameters, a.holdings, a.ranks)
    _of_whole(
        "this optimizer does not update each parameter separately",
        f"`{split.name}` is sharded: it would be gathered for the step, a few parameters at a time,"
        " and the others would be updated differently",
        "use one that updates one parameter at a time (Muon, Adafactor, LAMB) or one element"
        " (SGD, Adam, AdamW, Adagrad, RMSprop, ...)",
    )


def _of_whole(title: str, note: str, help_: str) -> NoReturn:
    raise Refusal(Diagnostic("S622", title, notes=(note,), helps=(help_,)))
