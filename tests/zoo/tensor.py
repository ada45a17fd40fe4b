"""Bugs of tensor and sequence parallelism: the crossings at the edges of sharded modules."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from schedlang.ir import placement
from schedlang.runtime.comm import collectives
from schedlang.runtime.sharding import edges, sharded_layer
from tests.zoo.bug import ADJOINT, ALIAS, DETACH, REDUCTION, SKIP, SLICE, Patch, Site, bug
from tests.zoo.place import sharded_module

STRIPS = placement.block_segments


@bug(
    "T02",
    "shard",
    ADJOINT,
    "tp",
    row="shard(style=",
    credit="spmd_types docs; Megatron-LM#1699; bigcode Megatron-LM#35",
)
def enter_without_all_reduce(patch: Patch, site: Site) -> None:
    """Gradients of what enters a column-parallel layer are not summed."""
    here, plain = sharded_module(patch), collectives._Enter.backward

    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group, ctx.wrong = group, site.covers(here())
        return x.view_as(x)

    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (grads[0], None) if ctx.wrong else plain(ctx, *grads)

    patch.setattr(collectives._Enter, "forward", staticmethod(forward))
    patch.setattr(collectives._Enter, "backward", staticmethod(backward))


@bug("T03", "shard", ADJOINT, "tp", row="shard(style=", credit="pytorch#58005")
def reduce_reduces_again(patch: Patch, site: Site) -> None:
    """An all-reduce taken for its own adjoint: gradients times the axis."""
    here = sharded_module(patch)

    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group, ctx.wrong = group, site.covers(here())
        return collectives.all_reduce(x, group)

    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (collectives.all_reduce(grads[0], ctx.group) if ctx.wrong else grads[0]), None

    patch.setattr(collectives._Reduce, "forward", staticmethod(forward))
    patch.setattr(collectives._Reduce, "backward", staticmethod(backward))


def _gather_back(patch: Patch, site: Site, differ: bool) -> None:
    """Where consumers differ as said, the adjoint of gather is the one for the other case."""
    here, plain = sharded_module(patch), collectives._Gather.forward

    def forward(ctx: Any, x: Tensor, dim: int, group: Any, consumers_differ: bool) -> Tensor:
        out = plain(ctx, x, dim, group, consumers_differ)
        if consumers_differ is differ and site.covers(here()):
            ctx.differ = not differ
        return out

    patch.setattr(collectives._Gather, "forward", staticmethod(forward))


@bug(
    "T04", "shard", ADJOINT, "sp", row="S(seq)", credit="Slapo, `tensor_parallel_output_grad=False`"
)
def gather_turns_the_other_way(patch: Patch, site: Site) -> None:
    """A gather before a split computation gives back its own part of the gradient only."""
    _gather_back(patch, site, True)


@bug("T05", "shard", ADJOINT, "gathered", row="output=R", credit="Megatron-LM PR#6839")
def gather_sums_what_is_whole(patch: Patch, site: Site) -> None:
    """A gather before a computation that all ranks do alike sums their gradients."""
    _gather_back(patch, site, False)


def _straight(*given: Any) -> list[list[placement.Segment]]:
    """All blocks as one."""
    return [[run for strip in STRIPS(*given) for run in strip]]


@bug(
    "T08",
    "shard",
    SLICE,
    "tp",
    row="attn.c_attn",
    credit="Slapo PR#46; DeepSpeed#3844; tensor_parallel#103; nnsight#719",
)
def blocks_ignored(patch: Patch, site: Site) -> None:
    """A fused weight is cut in two, straight through q, k and v."""
    patch.setattr(placement, "block_segments", _straight)


@bug("T09", "shard", SLICE, "packed", row="gate_up", credit="HF packed_colwise")
def gate_and_up_cut_through(patch: Patch, site: Site) -> None:
    """A packed gate and up projection is cut between the two."""
    patch.setattr(
        placement,
        "block_segments",
        lambda sizes, *more: (_straight if len(sizes) == 2 else STRIPS)(sizes, *more),
    )


@bug("T12", "shard", SKIP, "tp", row="transformer.wte  shard(style=vocab")
def embedding_without_mask(patch: Patch, site: Site) -> None:
    """A rank that does not hold a word adds some other word's row."""

    def embedding(module: Any, kind: str, edges: Any) -> Any:
        (edge,) = edges
        width = module.weight.shape[0]

        def forward(ids: Tensor) -> Tensor:
            local = (ids - edge.group.rank * width).clamp(0, width - 1)
            return edge.exit(F.embedding(local, module.weight))

        return forward

    patch.setitem(sharded_layer.FORWARDS, "Embedding", embedding)


@bug("T16", "shard", SLICE, "gathered", row="output=R")
def gathered_in_another_order(patch: Patch, site: Site) -> None:
    """The parts of an all-gather are put together in another order than that of the ranks."""
    here, plain = sharded_module(patch), collectives.all_gather

    def all_gather(x: Tensor, dim: int, group: Any) -> Tensor:
        whole = plain(x, dim, group)
        if not site.covers(here()):
            return whole
        return torch.cat([*reversed(whole.chunk(group.size, dim))], dim)

    patch.setattr(collectives, "all_gather", all_gather)


@bug(
    "T23",
    "shard",
    ALIAS,
    "gated",
    row="shard(style=",
    credit="Slapo, ReduceBackward",
    here="what enters a sharded layer is multiplied first, so its gradient is nobody else's; what"
    " leaves one is added to a residual, with which it shares its gradient",
)
def gradient_reduced_in_place(patch: Patch, site: Site) -> None:
    """A reduction in backward writes into a gradient that autograd gave to two branches."""
    here = sharded_module(patch)

    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group, ctx.wrong = group, site.covers(here())
        return collectives.all_reduce(x, group)

    def backward(ctx: Any, *grads: Tensor) -> Any:
        if ctx.wrong:
            mine = grads[0].clone()
            dist.all_reduce(grads[0], group=ctx.group.pg)
            return mine, None
        return grads[0], None

    patch.setattr(collectives._Reduce, "forward", staticmethod(forward))
    patch.setattr(collectives._Reduce, "backward", staticmethod(backward))


@bug("T25", "shard", DETACH, "gathered", row="output=R", credit="Slapo, reshard_ops.py")
def gathered_without_history(patch: Patch, site: Site) -> None:
    """A gather calls the collective itself: no gradient reaches what was gathered."""
    here, plain = sharded_module(patch), collectives.gather

    def gather(x: Tensor, dim: int, group: Any, *, consumers_differ: bool) -> Tensor:
        if site.covers(here()):
            return collectives.all_gather(x.detach(), dim, group)
        return plain(x, dim, group, consumers_differ=consumers_differ)

    patch.setattr(collectives, "gather", gather)


@bug(
    "T27",
    "shard",
    SLICE,
    "gathered",
    row="output=R",
    credit="torch 2.13: DTensor's cumsum(-1) on Shard(last)",
    here="activations are no DTensors here; the crossing is where a negative dim is resolved",
)
def negative_dim_taken_for_the_first(patch: Patch, site: Site) -> None:
    """A gather along dim -1 puts parts one after the other, and takes that for side by side."""
    here, plain = sharded_module(patch), collectives.all_gather

    def all_gather(x: Tensor, dim: int, group: Any) -> Tensor:
        whole = plain(x, dim, group)
        if dim % x.ndim != x.ndim - 1 or not site.covers(here()):
            return whole
        return torch.cat(whole.chunk(group.size, dim)).reshape(whole.shape)

    patch.setattr(collectives, "all_gather", all_gather)


@bug("T34", "shard", REDUCTION, "tp", row="style=row", credit="spmd_types, P + constant")
def bias_on_every_rank(patch: Patch, site: Site) -> None:
    """The bias of a row-parallel layer is part of each rank's partial sum, too."""
    patch.setitem(
        edges.PRODUCTS_BY_KIND, "Conv1D", lambda module, x, _: edges._conv1d(module, x, True)
    )


@bug("T24", "shard", ALIAS, "turned", credit="SkyRL#1886 on Megatron")
def sum_of_a_copy_dropped(patch: Patch, site: Site) -> None:
    """The sum goes into a contiguous copy, and what is returned is the tensor it was made of."""

    def all_reduce(x: Tensor, group: Any) -> Tensor:
        out = x.clone()
        dist.all_reduce(out.contiguous(), group=group.pg)
        return out

    patch.setattr(collectives, "all_reduce", all_reduce)


@bug("T35", "shard", REDUCTION, "adapted", site="blocks.0.up.b", credit="Megatron-Bridge#5634")
def adapter_gets_part_of_its_gradient(patch: Patch, site: Site) -> None:
    """A low-rank adapter: the whole A gets its gradient from this rank's part of B only."""
    enter_without_all_reduce(patch, site)


@bug("T28", "pad", SLICE, "tp", credit="pytorch#162692, #172812, #103306")
def padding_counts(patch: Patch, site: Site) -> None:
    """Rows that only pad the vocabulary are classes of the softmax, too."""

    patch.setattr(
        edges, "shard_logits", lambda y, edge: edges.ShardedLogits(y, edge.group, edge.true_size)
    )
