"""Injected bugs of data parallelism and ZeRO: reductions, loss weights, slices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from schedlang.passes.lower import build
from schedlang.runtime import program
from schedlang.runtime.batch import split_batch
from schedlang.runtime.checkpointing import holdings
from schedlang.runtime.comm import collectives
from schedlang.runtime.grad_reduction import gradient, row_gathering, zero
from schedlang.runtime.pipeline import step
from schedlang.runtime.program import Program
from schedlang.runtime.propagation.label_flow import LabelRule
from schedlang.runtime.rng.logical_dropout import DrawObserver
from tests.zoo.bug import (
    ADJOINT,
    ALIAS,
    ARGUMENT,
    CONSTANT,
    FREEZE,
    GROUP,
    REDUCTION,
    SKIP,
    SLICE,
    Patch,
    Site,
    bug,
)
from tests.zoo.heads import drop_from_sums
from tests.zoo.trackers import program_tracker, rank


@bug(
    "D27",
    "",
    SKIP,
    "dp, drops inside",
    planning=True,
    credit="dropout of nn.MultiheadAttention, alone in a model",
)
def draws_unseen(patch: Patch, site: Site) -> None:
    """Dropout inside functions uses each rank's own generator."""
    patch.setattr(DrawObserver, "observe_operator", lambda self, func, args, kwargs: None)


def after_sums(patch: Patch, kind: str, change: Any) -> None:
    """Call `change(name, gradient, group)` after each reduction of a kind ("": any kind)."""
    original = gradient.sum_gradients

    def summed(parameters: Any, sums: Any) -> None:
        for reduction in sums:
            original(parameters, [reduction])
            for name in reduction.names if reduction.kind == kind or not kind else ():
                grad = gradient.local_gradient(parameters[name])
                if grad is not None:
                    change(name, grad, reduction.group)

    patch.setattr(program, "sum_gradients", summed)


@bug("D01", "zero", GROUP, "dp")
def averaged_twice(patch: Patch, site: Site) -> None:
    """The mean over replicas is divided by their number once more."""
    after_sums(patch, "replicas", lambda name, grad, group: grad.div_(group.size))


@bug("D01b", "zero", GROUP, "sliced", credit="as D01, in fully_shard")
def averaged_by_fully_shard(patch: Patch, site: Site) -> None:
    """FSDP's default mean is taken over parts that are already weighted."""
    original = zero.ShardedStage.add_unit

    def add(self: Any, module: Any, *args: Any) -> None:
        original(self, module, *args)
        module.set_force_sum_reduction_for_comms(False)
        module.set_gradient_divide_factor(2.0)

    patch.setattr(zero.ShardedStage, "add_unit", add)


@bug(
    "D02", "zero", GROUP, "dp", row="zero(stage=0", credit="prime-rl#1957; Megatron-LM#7513, #7452"
)
def mean_of_means(patch: Patch, site: Site) -> None:
    """Each part of the batch has equal weight, regardless of its counted labels."""
    patch.setattr(LabelRule, "count_on_device", lambda self, batch: 1.0)


@bug("D03", "zero", CONSTANT, "dp", credit="prime-rl#2562")
def ignored_labels_counted(patch: Patch, site: Site) -> None:
    """A part of the batch is weighted by all its labels, including ignored ones."""
    patch.setattr(
        LabelRule, "count_on_device", lambda self, batch: float(batch[self.source].numel())
    )


@bug(
    "D04",
    "zero",
    SKIP,
    "experts",
    credit="pytorch#69031",
    site="blocks.0.experts.1",
    here="sums know all parameters; one module's are left out",
)
def unused_at_last_not_summed(patch: Patch, site: Site) -> None:
    """A parameter that the last microbatch did not use is not summed over replicas."""
    drop_from_sums(patch, "replicas", site.covers)


@bug("D04b", "zero", REDUCTION, "dp", row="zero(stage=0", credit="as D04, all of them")
def replicas_not_summed(patch: Patch, site: Site) -> None:
    """Gradients are not summed over data-parallel ranks."""
    drop_from_sums(patch, "replicas", site.covers)


@bug("D05", "zero", FREEZE, "dp", credit="pytorch PR#187732, #109191")
def summed_in_the_first_step_only(patch: Patch, site: Site) -> None:
    """From the second step on gradients are not summed over replicas."""
    running, original = program_tracker(patch), gradient.sum_gradients

    def summed(parameters: Any, sums: Any) -> None:
        current = running()
        is_first = current is not None and current.step == 0
        original(
            parameters,
            [reduction for reduction in sums if is_first or reduction.kind != "replicas"],
        )

    patch.setattr(program, "sum_gradients", summed)


@bug("D06", "zero", GROUP, "mesh of one", credit="verl#7493")
def group_of_one(patch: Patch, site: Site) -> None:
    """The group of one axis of size 1 is used instead of the group of all axes."""
    original = collectives.RankGroups.group

    def group(self: Any, axes_spec: Any) -> Any:
        axes = self.mesh.fold(axes_spec)
        if len(axes) > 1 and any(self.mesh.size(axis) == 1 for axis in axes):
            axes_spec = next(axis for axis in axes if self.mesh.size(axis) == 1)
        return original(self, axes_spec)

    patch.setattr(collectives.RankGroups, "group", group)


@bug("D07", "pipeline", ALIAS, "accumulated", "pp", row="pipeline")
def overwritten_instead_of_added(patch: Patch, site: Site) -> None:
    """The gradient of a microbatch overwrites those of earlier microbatches."""
    running, original = program_tracker(patch), step.PipelineStep.backward

    def backward(self: Any, operation: Any) -> None:
        current = running()
        for p in current.assembly.parameters.values() if current is not None else ():
            p.grad = None
        original(self, operation)

    patch.setattr(step.PipelineStep, "backward", backward)


@bug("D08", "zero", SKIP, "odd", row="zero(stage=1")
def tail_lost(patch: Patch, site: Site) -> None:
    """The last element of a slice is lost when slices are joined."""
    original = holdings.Holding.sharding

    def shorter(part: Any, rows: int) -> Any:
        *initial, (offset, start, length) = part[0] or ((0, 0, 0),)
        if length < 2 or sum(n for *_, n in part[0]) == rows:
            return part
        return (*initial, (offset, start, length - 1)), *part[1:]

    def sharding(self: Any, *args: Any) -> Any:
        full = original(self, *args)
        if not full.shape:
            return full
        parts = tuple(shorter(part, full.shape[0]) for part in full.parts)
        return holdings.Sharding(
            full.shape,
            holdings.SliceArray.from_slices(parts, len(full.shape)),
            full.part_of_rank,
        )

    patch.setattr(holdings.Holding, "sharding", sharding)


@bug("D08b", "zero", SKIP, "odd", row="zero(stage=1", credit="as D08, in the update")
def tail_not_updated(patch: Patch, site: Site) -> None:
    """Rows beyond an even split get no gradient."""
    original = Program._clip_and_reduce

    def finish(self: Any, *args: Any) -> Tensor:
        mesh = self.assembly.ranks.mesh
        for name, p in self.assembly.parameters.items():
            holding, grad = self.assembly.holdings[name], gradient.local_gradient(p)
            parts_count = mesh.size(holding.sliced) if holding.sliced else 1
            full_rows = holding.layout.shape[0] if holding.layout.shape else 0
            part_index = (
                mesh.index(self.assembly.ranks.rank, holding.sliced) if holding.sliced else 0
            )
            beyond = part_index * -(-full_rows // parts_count) + (
                0 if grad is None else grad.shape[0]
            )
            if (
                grad is not None
                and full_rows % parts_count
                and beyond > full_rows // parts_count * parts_count
            ):
                grad[full_rows // parts_count * parts_count - beyond :] = 0.0
        return original(self, *args)

    patch.setattr(Program, "_clip_and_reduce", finish)


@bug(
    "D09",
    "zero",
    SKIP,
    "sliced",
    row="zero(stage=2",
    site="transformer.h.1",
    credit="FSDP's prefetch class",
)
def one_module_not_gathered(patch: Patch, site: Site) -> None:
    """A module computes with parameters gathered in the previous step."""
    original, stale_modules = zero.ShardedStage.before_backward, list[Any]()
    slices = build.slice_state

    def noting(plan: Any, module: Any, *args: Any) -> Any:
        stale_modules[:] = [
            submodule for name, submodule in module.named_modules() if name == str(site)
        ]
        return slices(plan, module, *args)

    def before(self: Any, last: bool, reduces: bool = True) -> None:
        original(self, last, reduces)
        for unit in self.units:
            if unit in stale_modules:
                unit.set_reshard_after_backward(False, recurse=False)

    def reshard(self: Any) -> None:
        for unit in self.units:
            if unit not in stale_modules:
                unit.reshard()

    patch.setattr(build, "slice_state", noting)
    patch.setattr(zero.ShardedStage, "before_backward", before)
    patch.setattr(zero.ShardedStage, "free_gathered", reshard)


@bug(
    "D72", "zero", ALIAS, "sliced, keys in a dict", credit="torch's fully_shard; transformers#45663"
)
def writes_into_copies(patch: Patch, site: Site) -> None:
    """Layers get copies of the dict in which they store keys for later layers."""
    patch.setattr(zero, "keep_containers", lambda unit, overwrites: None)


@bug("D28", "zero", ARGUMENT, "dp", credit="anemoi-core#595")
def all_read_the_same_rows(patch: Patch, site: Site) -> None:
    """All replicas read the rows of the first one."""
    original = Program._parts

    def parts(self: Any, batch: Any, *args: bool) -> Any:
        a = self.assembly
        local_parts, weights, total = original(self, batch, *args)
        if a.ranks.mesh.size(a.replicas) == 1:
            return local_parts, weights, total
        all_parts = split_batch(batch, a.ranks.mesh.size(a.replicas), a.microbatches)
        return all_parts[0], [a.weight(part.inputs) for part in all_parts[0]], total

    patch.setattr(Program, "_parts", parts)


@bug(
    "D29",
    "zero",
    SLICE,
    "dp",
    credit="torchtitan#3106; OLMo-core#307, #319",
    here="the model comes with its values; replicas get them perturbed, as from seeds of their own",
)
def replicas_start_differently(patch: Patch, site: Site) -> None:
    """Replicas of a parameter are initialised differently."""
    original = build._local_copy

    def copied(plan: Any, holdings: Any, ranks_: Any, *args: Any) -> Any:
        module = original(plan, holdings, ranks_, *args)
        with torch.no_grad():
            for name, p in module.named_parameters():
                if site.covers(name) and not p.is_meta:
                    p.mul_(1 + 0.1 * rank())
        return module

    patch.setattr(build, "_local_copy", copied)


@bug("D29b", "shard", SLICE, "tp", credit="as D29, of shards")
def all_take_the_first_part(patch: Patch, site: Site) -> None:
    """Every rank initialises its part of a parameter as the first does."""
    from schedlang.runtime.checkpointing import holdings as held

    original = held.shard_of

    def take(full: Any, holding: Any, mesh: Any, _: int) -> Any:
        return original(full, holding, mesh, 0)

    patch.setattr(held, "shard_of", take)


@bug(
    "D30",
    "zero",
    CONSTANT,
    "dp",
    here="no primitive compresses; the sum over replicas rounds in the same way",
)
def summed_in_bfloat16(patch: Patch, site: Site) -> None:
    """Gradients are rounded to bfloat16 before they are summed."""
    original = gradient.begin_bucket

    def rounded(group: Any, members: Any) -> Any:
        for p in getattr(members, "parameters", members):
            grad = gradient.local_gradient(p)
            if grad is not None:
                with torch._C.DisableTorchFunction():
                    grad.copy_(grad.to(torch.bfloat16))
        return original(group, members)

    patch.setattr(gradient, "begin_bucket", rounded)


@bug("D32", "zero", CONSTANT, "dp", credit="pytorch#160285")
def all_gradients_doubled(patch: Patch, site: Site) -> None:
    """All gradients are doubled, which clipping and Adam hide."""
    after_sums(patch, "replicas", lambda name, grad, group: grad.mul_(2))


@bug("D73", "gather_rows", ADJOINT, "paired", credit="open_clip's `gather_with_grad=False`")
def gathered_rows_keep_own_gradients(patch: Patch, site: Site) -> None:
    """Gathered rows get the gradient of this rank's loss only, not the sum over ranks."""

    def gather(x: Any, dim: int, group: Any, *, consumers_differ: bool) -> Any:
        return collectives.gather(x, dim, group, consumers_differ=False)

    patch.setattr(row_gathering, "gather", gather)
