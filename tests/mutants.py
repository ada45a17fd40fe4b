"""Bugs to inject into the runtime of a rank; each is one that such systems have had."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from schedlang import placement
from schedlang.runtime import collective, gradient, holding, program, recompute, replicas, shard
from schedlang.runtime import random as drawing
from schedlang.runtime.launch import Pool
from schedlang.runtime.moments import local
from schedlang.runtime.trace import LabelRule

Patch = pytest.MonkeyPatch
Mutant = Callable[[Patch], None]


class Mutated:
    """A pool whose ranks run every job with a bug in them."""

    def __init__(self, pool: Pool, mutant: Mutant) -> None:
        self.pool, self.mutant = pool, mutant

    def run(self, fn: Callable[..., Any], world: int, *args: Any, **options: Any) -> list[Any]:
        """As Pool.run."""
        if getattr(self.pool, "one_process", False):  # patched once, for all ranks
            with pytest.MonkeyPatch.context() as patch:
                self.mutant(patch)
                return self.pool.run(fn, world, *args, **options)
        return self.pool.run(_mutated, world, self.mutant, fn, args, **options)


def _mutated(mutant: Mutant, fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        mutant(patch)
        return fn(*args)


def enter_without_all_reduce(patch: Patch) -> None:
    """Gradients of what enters a column-parallel layer are not summed."""
    back = staticmethod(lambda ctx, *grads: (grads[0], None))
    patch.setattr(collective._Enter, "backward", back)


def reduce_reduces_again(patch: Patch) -> None:
    """An all-reduce taken for its own adjoint: gradients times the axis."""
    back = staticmethod(lambda ctx, *grads: (collective.all_reduce(grads[0], ctx.group), None))
    patch.setattr(collective._Reduce, "forward", staticmethod(_reduce_forward))
    patch.setattr(collective._Reduce, "backward", back)


def _reduce_forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
    ctx.group = group
    return collective.all_reduce(x, group)


def gather_turns_the_other_way(patch: Patch) -> None:
    """A gather before a split computation gives back its own part of the gradient only."""
    plain = collective._Gather.backward

    def back(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.differ = not ctx.differ
        return plain(ctx, *grads)

    patch.setattr(collective._Gather, "backward", staticmethod(back))


def bias_on_every_rank(patch: Patch) -> None:
    """The bias of a row-parallel layer is part of each rank's partial sum, too."""
    patch.setitem(shard.COMPUTES, "Conv1D", lambda module, x, _: shard._conv1d(module, x, True))


def embedding_without_mask(patch: Patch) -> None:
    """A rank that does not hold a word adds some other word's row."""

    def embedding(module: Any, kind: str, edges: Any) -> Any:
        (edge,) = edges
        width = module.weight.shape[0]

        def forward(ids: torch.Tensor) -> torch.Tensor:
            local = (ids - edge.group.rank * width).clamp(0, width - 1)
            return edge.exit()(F.embedding(local, module.weight))

        return forward

    patch.setitem(shard.FORWARDS, "Embedding", embedding)


def blocks_ignored(patch: Patch) -> None:
    """A fused weight is cut in two, straight through q, k and v."""
    patch.setattr(placement, "_blocks", lambda sizes: [placement.Segment(0, sum(sizes))])


def _without(kind: str) -> Mutant:
    plain = gradient.sum_gradients

    def mutant(patch: Patch) -> None:
        def less(parameters: Any, sums: Any) -> None:
            plain(parameters, [one for one in sums if one.kind != kind])

        patch.setattr(program, "sum_gradients", less)

    return mutant


def partial_sums_skipped(patch: Patch) -> None:
    """Norms between split tokens keep their own part of the gradient."""
    _without("partial")(patch)


def ties_not_summed(patch: Patch) -> None:
    """The two stages of a tied weight drift apart."""
    _without("tied")(patch)


def replicas_not_summed(patch: Patch) -> None:
    """Data-parallel ranks each go their own way."""
    _without("replicas")(patch)


def ties_summed_twice(patch: Patch) -> None:
    """The reduction over a tie runs once too often."""
    plain = gradient.sum_gradients

    def more(parameters: Any, sums: Any) -> None:
        plain(parameters, [*sums, *(one for one in sums if one.kind == "tied")])

    patch.setattr(program, "sum_gradients", more)


def norm_counts_ties_twice(patch: Patch) -> None:
    """Every stage that holds a tied weight adds it to the norm."""
    plain = holding.Holding.primary

    def primary(self: Any, mesh: Any, rank: int) -> bool:
        if self.stages is None or len(self.stages) < 2 or not self.held(mesh, rank):
            return plain(self, mesh, rank)
        alone = replace(self, stages=frozenset([mesh.index(rank, self.axis)]))
        return plain(alone, mesh, rank)

    patch.setattr(holding.Holding, "primary", primary)


def mean_of_means(patch: Patch) -> None:
    """Each part of the batch weighs the same, however many of its labels count."""
    patch.setattr(LabelRule, "count", lambda self, batch: 1.0)


def last_microbatch_dropped(patch: Patch) -> None:
    """The gradient of the last microbatch never arrives."""
    plain = program.Program._run

    def run(self: Any, parts: Any, scale: Any, *, train: bool) -> Any:
        if scale is not None and len(scale) > 1:
            scale = [*scale[:-1], 0.0]
        return plain(self, parts, scale, train=train)

    patch.setattr(program.Program, "_run", run)


def tail_lost(patch: Patch) -> None:
    """The last element of a slice is forgotten when parts become a whole."""
    plain = holding.blocks

    def blocks(segments: Any, shape: Any) -> Any:
        found = list(plain(segments, shape))
        held = sum(run.length for run in segments[0]) if segments else 0
        for block in found:
            short = bool(shape) and held < shape[0] and block.size[0] > 1 and block is found[-1]
            yield replace(block, size=(block.size[0] - short, *block.size[1:])) if short else block

    patch.setattr(holding, "blocks", blocks)


def saved_wrong(patch: Patch) -> None:
    """What is saved of slices is not what the program holds."""
    plain = program.Program.save

    def save(self: Any, path: Any) -> None:
        held = [local(p) for p in self.assembly.parameters.values() if self.assembly.sliced]
        with torch.no_grad():
            for tensor in held:
                tensor.mul_(2)
            plain(self, path)
            for tensor in held:
                tensor.div_(2)

    patch.setattr(program.Program, "save", save)


def mask_not_sliced(patch: Patch) -> None:
    """Ranks with other heads draw the masks of the first ones."""
    plain = drawing.LogicalDropout.__init__

    def init(self: Any, seed: int, slices: Any = None) -> None:
        plain(self, seed)

    patch.setattr(drawing.LogicalDropout, "__init__", init)


def clip_ignored(patch: Patch) -> None:
    """The norm is right, and nobody is bounded by it."""
    patch.setattr(program, "scale_gradients", lambda parameters, factor: None)


def clip_by_local_norm(patch: Patch) -> None:
    """Each rank speaks for all it has: parts that several hold count several times."""
    patch.setattr(holding.Holding, "primary", lambda self, mesh, rank: self.held(mesh, rank))


def other_masks_in_recomputation(patch: Patch) -> None:
    """The second forward of a checkpoint draws other masks than the first."""
    again = [0]
    plain = drawing._key

    class Reentry(recompute.reentry):
        def __enter__(self) -> None:
            again[0] += 1
            super().__enter__()

        def __exit__(self, *error: object) -> None:
            super().__exit__(*error)
            again[0] -= 1

    patch.setattr(recompute, "reentry", Reentry)
    patch.setattr(
        drawing, "_key", lambda *what: plain(again[0], *what) if again[0] else plain(*what)
    )


def averaged_by_fully_shard(patch: Patch) -> None:
    """The mean that FSDP takes unless told otherwise, on parts that are already weighed."""
    plain = replicas.Sliced.add

    def add(self: Any, module: Any, **options: Any) -> None:
        plain(self, module, **options)
        module.set_force_sum_reduction_for_comms(False)
        module.set_gradient_divide_factor(2.0)

    patch.setattr(replicas.Sliced, "add", add)
