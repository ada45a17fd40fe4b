"""Bugs of data parallelism and ZeRO: what is summed over replicas, weighed, and sliced."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from schedlang.passes.lower import build
from schedlang.runtime import program
from schedlang.runtime.batch import split_batch
from schedlang.runtime.checkpointing import holdings
from schedlang.runtime.comm import collectives
from schedlang.runtime.grad_reduction import gradient, zero
from schedlang.runtime.pipeline import step
from schedlang.runtime.program import Program
from schedlang.runtime.propagation.trace import LabelRule
from schedlang.runtime.rng.logical_dropout import DrawObserver
from tests.zoo.bug import (
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
from tests.zoo.heads import without
from tests.zoo.place import rank, running_program


@bug(
    "D27",
    "",
    SKIP,
    "dp, drops inside",
    planning=True,
    credit="dropout of nn.MultiheadAttention, alone in a model",
)
def draws_unseen(patch: Patch, site: Site) -> None:
    """Masks that are drawn inside of functions are left to each rank's own generator."""
    patch.setattr(DrawObserver, "observe_operator", lambda self, func, args, kwargs: None)


def after_sums(patch: Patch, kind: str, change: Any) -> None:
    """Gradients changed by `change(name, gradient, group)` after a sum of a kind ("": any)."""
    plain = gradient.sum_gradients

    def summed(held: Any, sums: Any) -> None:
        for one in sums:
            plain(held, [one])
            for name in one.names if one.kind == kind or not kind else ():
                grad = gradient.local_gradient(held[name])
                if grad is not None:
                    change(name, grad, one.group)

    patch.setattr(program, "sum_gradients", summed)


@bug("D01", "zero", GROUP, "dp")
def averaged_twice(patch: Patch, site: Site) -> None:
    """The mean over replicas is divided by their number once more."""
    after_sums(patch, "replicas", lambda name, grad, group: grad.div_(group.size))


@bug("D01b", "zero", GROUP, "sliced", credit="as D01, in fully_shard")
def averaged_by_fully_shard(patch: Patch, site: Site) -> None:
    """The mean that FSDP takes unless told otherwise, on parts that are already weighed."""
    plain = zero.ShardedStage.add_unit

    def add(self: Any, module: Any, *given: Any) -> None:
        plain(self, module, *given)
        module.set_force_sum_reduction_for_comms(False)
        module.set_gradient_divide_factor(2.0)

    patch.setattr(zero.ShardedStage, "add_unit", add)


@bug(
    "D02", "zero", GROUP, "dp", row="zero(stage=0", credit="prime-rl#1957; Megatron-LM#7513, #7452"
)
def mean_of_means(patch: Patch, site: Site) -> None:
    """Each part of the batch weighs the same, however many of its labels count."""
    patch.setattr(LabelRule, "count_on_device", lambda self, batch: 1.0)


@bug("D03", "zero", CONSTANT, "dp", credit="prime-rl#2562")
def ignored_labels_counted(patch: Patch, site: Site) -> None:
    """A part of the batch weighs by all its labels, also those that the loss ignores."""
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
    without(patch, "replicas", site.covers)


@bug("D04b", "zero", REDUCTION, "dp", row="zero(stage=0", credit="as D04, all of them")
def replicas_not_summed(patch: Patch, site: Site) -> None:
    """Data-parallel ranks each go their own way."""
    without(patch, "replicas", site.covers)


@bug("D05", "zero", FREEZE, "dp", credit="pytorch PR#187732, #109191")
def summed_in_the_first_step_only(patch: Patch, site: Site) -> None:
    """From the second step on gradients are not summed over replicas."""
    at_work, plain = running_program(patch), gradient.sum_gradients

    def summed(held: Any, sums: Any) -> None:
        now = at_work()
        first = now is not None and now.step == 0
        plain(held, [one for one in sums if first or one.kind != "replicas"])

    patch.setattr(program, "sum_gradients", summed)


@bug("D06", "zero", GROUP, "mesh of one", credit="verl#7493")
def group_of_one(patch: Patch, site: Site) -> None:
    """Of several axes one has size 1, and its group is taken for that of all."""
    plain = collectives.RankGroups.group

    def group(self: Any, over: Any) -> Any:
        axes = self.mesh.fold(over)
        if len(axes) > 1 and any(self.mesh.size(axis) == 1 for axis in axes):
            over = next(axis for axis in axes if self.mesh.size(axis) == 1)
        return plain(self, over)

    patch.setattr(collectives.RankGroups, "group", group)


@bug("D07", "pipeline", ALIAS, "accumulated", "pp", row="pipeline")
def overwritten_instead_of_added(patch: Patch, site: Site) -> None:
    """The gradient of a microbatch takes the place of those before it."""
    at_work, plain = running_program(patch), step.PipelineStep.backward

    def backward(self: Any, work: Any) -> None:
        now = at_work()
        for p in now.assembly.parameters.values() if now is not None else ():
            p.grad = None
        plain(self, work)

    patch.setattr(step.PipelineStep, "backward", backward)


@bug("D08", "zero", SKIP, "odd", row="zero(stage=1")
def tail_lost(patch: Patch, site: Site) -> None:
    """The last element of a slice is forgotten when parts become a whole."""
    plain = holdings.Holding.sharding

    def shorter(part: Any, rows: int) -> Any:
        *some, (at, start, length) = part[0] or ((0, 0, 0),)
        if length < 2 or sum(n for *_, n in part[0]) == rows:
            return part
        return (*some, (at, start, length - 1)), *part[1:]

    def sharding(self: Any, *given: Any) -> Any:
        found = plain(self, *given)
        if not found.shape:
            return found
        parts = tuple(shorter(part, found.shape[0]) for part in found.parts)
        return holdings.Sharding(
            found.shape,
            holdings.SliceArray.from_slices(parts, len(found.shape)),
            found.part_of_rank,
        )

    patch.setattr(holdings.Holding, "sharding", sharding)


@bug("D08b", "zero", SKIP, "odd", row="zero(stage=1", credit="as D08, in the update")
def tail_not_updated(patch: Patch, site: Site) -> None:
    """Rows behind an even cut get no gradient."""
    plain = Program._clip_and_reduce

    def finish(self: Any, *args: Any) -> Tensor:
        mesh = self.assembly.ranks.mesh
        for name, p in self.assembly.parameters.items():
            held, grad = self.assembly.holdings[name], gradient.local_gradient(p)
            count = mesh.size(held.sliced) if held.sliced else 1
            whole = held.layout.shape[0] if held.layout.shape else 0
            place = mesh.index(self.assembly.ranks.rank, held.sliced) if held.sliced else 0
            beyond = place * -(-whole // count) + (0 if grad is None else grad.shape[0])
            if grad is not None and whole % count and beyond > whole // count * count:
                grad[whole // count * count - beyond :] = 0.0
        return plain(self, *args)

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
    """A module computes with what it gathered a step ago."""
    plain, kept = zero.ShardedStage.before_backward, list[Any]()
    slices = build.slice_state

    def noting(plan: Any, module: Any, *args: Any) -> Any:
        kept[:] = [one for name, one in module.named_modules() if name == str(site)]
        return slices(plan, module, *args)

    def before(self: Any, last: bool, reduces: bool = True) -> None:
        plain(self, last, reduces)
        for unit in self.units:
            if unit in kept:
                unit.set_reshard_after_backward(False, recurse=False)

    def reshard(sliced: Any) -> None:
        for one in sliced.values():
            for unit in one.units:
                if unit not in kept:
                    unit.reshard()

    patch.setattr(build, "slice_state", noting)
    patch.setattr(zero.ShardedStage, "before_backward", before)
    patch.setattr(program, "reshard_all", reshard)


@bug(
    "D72", "zero", ALIAS, "sliced, keys in a dict", credit="torch's fully_shard; transformers#45663"
)
def writes_into_copies(patch: Patch, site: Site) -> None:
    """Layers are given copies of the dict into which they write keys for later ones."""
    patch.setattr(zero, "keep_containers", lambda unit, overwrites: None)


@bug("D28", "zero", ARGUMENT, "dp", credit="anemoi-core#595")
def everyone_reads_the_same(patch: Patch, site: Site) -> None:
    """All replicas are given the rows of the first."""
    plain = Program._parts

    def parts(self: Any, batch: Any, *how: bool) -> Any:
        a = self.assembly
        mine, weights, total = plain(self, batch, *how)
        if a.ranks.mesh.size(a.replicas) == 1:
            return mine, weights, total
        everyone = split_batch(batch, a.ranks.mesh.size(a.replicas), a.microbatches)
        return everyone[0], [a.weight(part.inputs) for part in everyone[0]], total

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
    """Replicas of a parameter are not initialised alike."""
    plain = build._local_copy

    def copied(plan: Any, holdings: Any, ranks_: Any, *more: Any) -> Any:
        module = plain(plan, holdings, ranks_, *more)
        with torch.no_grad():
            for name, p in module.named_parameters():
                if site.covers(name) and not p.is_meta:
                    p.mul_(1 + 0.1 * rank())
        return module

    patch.setattr(build, "_local_copy", copied)


@bug("D29b", "shard", SLICE, "tp", credit="as D29, of shards")
def everyone_takes_the_first_part(patch: Patch, site: Site) -> None:
    """Every rank initialises its part of a parameter as the first does."""
    from schedlang.runtime.checkpointing import holdings as held

    plain = held.shard_of

    def take(whole: Any, one: Any, mesh: Any, _: int) -> Any:
        return plain(whole, one, mesh, 0)

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
    plain = gradient.begin_bucket

    def rounded(group: Any, members: Any) -> Any:
        for p in getattr(members, "parameters", members):
            grad = gradient.local_gradient(p)
            if grad is not None:
                with torch._C.DisableTorchFunction():
                    grad.copy_(grad.to(torch.bfloat16))
        return plain(group, members)

    patch.setattr(gradient, "begin_bucket", rounded)


@bug("D32", "zero", CONSTANT, "dp", credit="pytorch#160285")
def all_gradients_doubled(patch: Patch, site: Site) -> None:
    """All gradients are twice what they should be, which clipping and Adam hide."""
    after_sums(patch, "replicas", lambda name, grad, group: grad.mul_(2))
