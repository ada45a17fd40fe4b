"""Stale weights: orders that update inside the step (PipeDream), and optimizers of full tensors.

* The version of the weights that each microbatch uses.
* Refusals (S625) of features that conflict with updates inside the step: tied weights, sliced
  state, clipping.
* Optimizers that update shards, and optimizers for which full parameters are gathered (S622).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.plan import Action, Plan, place_at_row
from schedlang.ir.primitive import Facet

if TYPE_CHECKING:
    import torch

    from schedlang.passes.partition.staging import Staged
    from schedlang.pipeline.timeline.table import Timeline
    from schedlang.runtime.assembly import Assembly
    from schedlang.runtime.optim.full_tensor_step import FullTensorStep


Versions = Mapping[int, int]  # stage -> version


@dataclass(frozen=True)
class VersionTable:
    """The versions of weights that each microbatch uses, and the update to which it contributes.

    forward, backward  for each microbatch, the version that each stage reads
    produced           for each microbatch, the version that its gradients produce (from 1)
    stage_of           parameter (first name) -> its stage
    """

    forward: tuple[Versions, ...]
    backward: tuple[Versions, ...]
    produced: tuple[int, ...]
    stage_of: Mapping[str, int]


def version_table_of(staged: Staged) -> VersionTable | None:
    """Return the version table of a plan; None without updates inside the step."""
    from schedlang.pipeline.timeline.versions import update_versions

    timeline = staged.timeline
    if not timeline.stale:
        return None
    versions = tuple(update_versions(timeline).tolist())
    if max(versions) == 1:
        return None  # one update a step, of all microbatches: the plain loop
    return VersionTable(*_versions_read(timeline), versions, _stage_of_parameters(staged))


def _versions_read(timeline: Timeline) -> tuple[tuple[Versions, ...], tuple[Versions, ...]]:
    from schedlang.pipeline.timeline.table import Kind

    forward: list[dict[int, int]] = [{} for _ in range(timeline.microbatches)]
    backward: list[dict[int, int]] = [{} for _ in range(timeline.microbatches)]
    for rank in range(timeline.ranks):
        for op in timeline.rows(rank):
            if op.kind is Kind.F:
                forward[op.microbatch][op.stage] = op.version
            elif op.kind in (Kind.B, Kind.I):
                backward[op.microbatch][op.stage] = op.version
    return tuple(forward), tuple(backward)


def _stage_of_parameters(staged: Staged) -> dict[str, int]:
    if staged.axis is None:
        return {}
    cut = staged.cut
    return {name: stage for stage in range(cut.stages) for name in cut.parameters(stage)}


HELP_SYNCHRONOUS = 'use a synchronous order: `pipeline(order="1F1B", micro=...)`'


def check_stale(plan: Plan, staged: Staged) -> None:
    """Refuse (S625) stale weights that conflict with other rows or whose versions are wrong."""
    from schedlang.pipeline.timeline.table import TimelineError
    from schedlang.pipeline.timeline.versions import check_versions

    if not staged.timeline.stale:
        return
    row = _row(plan, Facet.ORDER)
    try:
        check_versions(staged.timeline)
    except TimelineError as error:
        _refuse(
            f"the order uses wrong versions of weights: {error}", row, helps=(HELP_SYNCHRONOUS,)
        )
    clashes = chain(_stage_conflicts(plan, staged, row), _row_conflicts(plan, staged))
    for title, row_at, note, *helps in clashes:
        _refuse(title, row_at, notes=(note,), helps=tuple(helps))


def check_stale_options(staged: Staged, optimizer: Any, clip: float | None, on_meta: bool) -> None:
    """Refuse (S625) `clip` and a missing optimizer for an order that updates inside the step."""
    if not staged.timeline.stale:
        return
    if clip is not None:
        _refuse(
            "`clip` needs one norm of all gradients: a stale order has none",
            None,
            notes=("the first stage makes several updates before the last one makes its first",),
            helps=("leave `clip` out", HELP_SYNCHRONOUS),
        )
    if optimizer is None and not on_meta:
        _refuse(
            "this order updates weights inside the step, and needs an optimizer",
            None,
            helps=("give one: `sch.build(batch=batch, optimizer=...)`", HELP_SYNCHRONOUS),
        )


# title, row, note and two helps
Clash = tuple[str, Action | None, str, str, str]
_WHERE = {"cpu": "in host memory", "disk": "on disk", "peer": "on a peer"}


def _stage_conflicts(plan: Plan, staged: Staged, row: Action | None) -> Iterator[Clash]:
    """Yield conflicts over things that stages share: each stage is updated at its own time."""
    places = [position for replica in staged.homes for position in replica]
    if len(set(places)) != len(places):
        yield (
            "two stages of one rank would be updated at different times",
            row,
            "with stale weights each rank runs one stage, with its own optimizer",
            "use a table with one stage on each rank",
            HELP_SYNCHRONOUS,
        )
    if staged.axis is not None and staged.cut.shared:
        name, stages = next(iter(staged.cut.shared.items()))
        stages_text = " and ".join(map(str, stages))
        yield (
            f"`{name}` is used by the stages {stages_text}, which are updated at different times",
            row,
            "a tied weight needs one update for all stages that use it",
            "untie it (`tie_word_embeddings=False` in most configs)",
            HELP_SYNCHRONOUS,
        )
    if any(replicas.stage and plan.mesh.size(replicas.axes) > 1 for replicas in plan.replicas):
        yield (
            "sharded parameters cannot be kept in several versions",
            _row(plan, Facet.STATE),
            "the order keeps each version of the full weights, and shards are of one version",
            "replicate them: `zero(stage=0, ...)`",
            HELP_SYNCHRONOUS,
        )


def _row_conflicts(plan: Plan, staged: Staged) -> Iterator[Clash]:
    """Yield conflicts with rows that act once a step, or that use old versions of weights."""
    overlap = plan.find_overlap("gradients")
    if overlap is not None:
        yield (
            "`overlap(gradients)` has no effect: gradients are summed at every update of a stage",
            plan.origin(overlap),
            "the rank has no other stage whose backward could overlap with the sum",
            "use `overlap(transfers)` only",
            HELP_SYNCHRONOUS,
        )
    if plan.compression is not None:  # the error of one update would be added at other weights
        yield (
            "`compress` sums gradients once a step, but stages are updated several times in it",
            plan.origin(plan.compression),
            "the error of compression is added to the gradient of the next step",
            "drop this row: gradients are then summed uncompressed",
            HELP_SYNCHRONOUS,
        )
    if plan.loss_scaling is not None:
        yield (
            "loss scaling may skip a step, but this order updates stages inside the step",
            plan.origin(plan.loss_scaling),
            "whether gradients overflowed on any rank is known only at the end of a step",
            "use `cast(bf16)`, which needs no loss scale",
            HELP_SYNCHRONOUS,
        )
    # versions are stored with the weights, and no update waits for other ranks' files
    refused = [s for s in plan.stores if s.what != "activations"]
    refused = [s for s in refused if s.tier != "cpu" or s.what != "optimizer"]
    if refused:
        yield (
            f"the {refused[0].what} of several versions cannot be kept {_WHERE[refused[0].tier]}",
            plan.origin(refused[0]),
            "the order keeps the versions that it still needs on the device",
            "keep only the optimizer state in host memory: `offload(optimizer, to=cpu)`",
            HELP_SYNCHRONOUS,
        )
    recompute_row = _row(plan, Facet.RECOMPUTE)
    if recompute_row is not None and _is_backward_stale(staged):
        yield (
            "recomputation would use other weights than the forward",
            recompute_row,
            "the order keeps no versions: a backward uses the newest weights",
            'use an order that keeps them: `pipeline(order="PipeDream", micro=...)`',
            "or drop this row",
        )


def _is_backward_stale(staged: Staged) -> bool:
    """Return whether a backward reads another version of weights than its forward."""

    table = version_table_of(staged)
    return table is not None and table.forward != table.backward


def _row(plan: Plan, facet: Facet) -> Action | None:
    return next(iter(plan.rows_changing(facet)), None)


def _refuse(
    title: str, row: Action | None, *, notes: tuple[str, ...] = (), helps: tuple[str, ...] = ()
) -> NoReturn:
    refusal = Refusal.of("S625", title, notes=notes, helps=helps)
    raise place_at_row(refusal, row)


def find_gathered_step(
    a: Assembly, staged: Staged, optimizer: Callable[..., torch.optim.Optimizer] | None
) -> FullTensorStep | None:
    """Return the step that gathers full parameters for an optimizer, or None for shards.

    Refuses (S622), on all ranks, an optimizer that uses all parameters together, and an optimizer
    of full tensors where each stage updates by itself.
    """
    from schedlang.runtime.optim.full_tensor_step import (
        FullTensorStep,
        dims_of,
        is_elementwise,
        is_tensorwise,
    )

    holdings = a.holdings.values()
    dims = dims_of(a.holdings)
    split = next((h for h in holdings if h.layout.splits or h.sliced), None)
    if optimizer is None:
        return None
    if a.stage_axis is not None and not _is_separate(optimizer, dims):
        _refuse_optimizer(
            "this optimizer looks at all parameters together",
            "each stage of the pipeline steps separately: a norm would cover only one stage",
            "give the bound of the global norm to `clip=`, or use an optimizer that updates one"
            " parameter at a time",
        )
    if split is None or _tried(is_elementwise, optimizer, dims):
        return None
    if staged.timeline.stale:
        _refuse_optimizer(
            "this order updates each stage separately, and cannot gather parameters for a step",
            f"this optimizer needs full tensors, and `{split.name}` is sharded",
            "use a synchronous order, or an elementwise optimizer (SGD, Adam, AdamW, ...)",
        )
    if _tried(is_tensorwise, optimizer, dims):
        return FullTensorStep(a.parameters, a.holdings, a.ranks)
    _refuse_optimizer(
        "this optimizer does not update each parameter separately",
        f"`{split.name}` is sharded: it would be gathered for the step, a few parameters at a time,"
        " and the others would be updated differently",
        "use one that updates one parameter at a time (Muon, Adafactor, LAMB) or one element"
        " (SGD, Adam, AdamW, Adagrad, RMSprop, ...)",
    )


def _tried(
    trial: Callable[..., bool],
    optimizer: Callable[..., torch.optim.Optimizer],
    dims: Mapping[str, int],
) -> bool:
    """Return the result of a trial; refuse (S622) an optimizer that is made and fails in it."""
    is_made = True

    def make(parameters: Any) -> torch.optim.Optimizer:
        nonlocal is_made
        is_made = False
        instance = optimizer(parameters)
        is_made = True
        return instance

    try:
        return trial(make, dims)
    except Refusal:
        raise
    except Exception as error:  # of the user's code
        if not is_made:
            raise
        _refuse_optimizer(
            "this optimizer fails where its groups hold other parameters than it was made with",
            f"`{type(error).__name__}: {error}`, in a trial on small tensors, which shows whether"
            " it can step on shards",
            "keep what belongs to a parameter in `self.state[parameter]`, not by its position",
        )


def _is_separate(optimizer: Callable[..., torch.optim.Optimizer], dims: Mapping[str, int]) -> bool:
    """Return whether the update of a tensor does not depend on other tensors.

    Returns True for an optimizer that fails on the small tensors of this trial.
    """
    from schedlang.runtime.optim.full_tensor_step import is_tensorwise

    try:
        return is_tensorwise(optimizer, dims, in_turns=False)
    except Refusal:
        raise
    except Exception:  # the user's code, for example one that needs the model's sizes
        return True


def _refuse_optimizer(title: str, note: str, help_: str) -> NoReturn:
    raise Refusal.of("S622", title, notes=(note,), helps=(help_,))
