"""Injected bugs of tensor and sequence parallelism: collectives at edges of sharded modules."""

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
from tests.zoo.trackers import module_tracker

BLOCK_SEGMENTS = placement.block_segments


@bug(
    "T02",
    "shard",
    ADJOINT,
    "tp",
    row="shard(style=",
    credit="spmd_types docs; Megatron-LM#1699; bigcode Megatron-LM#35",
)
def enter_without_all_reduce(patch: Patch, site: Site) -> None:
    """Gradients of the input of a column-parallel layer are not summed."""
    current_module, original = module_tracker(patch), collectives._Enter.backward

    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group, ctx.wrong = group, site.covers(current_module())
        return x.view_as(x)

    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (grads[0], None) if ctx.wrong else original(ctx, *grads)

    patch.setattr(collectives._Enter, "forward", staticmethod(forward))
    patch.setattr(collectives._Enter, "backward", staticmethod(backward))


@bug("T03", "shard", ADJOINT, "tp", row="shard(style=", credit="pytorch#58005")
def reduce_reduces_again(patch: Patch, site: Site) -> None:
    """The backward of an all-reduce is an all-reduce again: gradients times the axis size."""
    current_module = module_tracker(patch)

    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group, ctx.wrong = group, site.covers(current_module())
        return collectives.all_reduce(x, group)

    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (collectives.all_reduce(grads[0], ctx.group) if ctx.wrong else grads[0]), None

    patch.setattr(collectives._Reduce, "forward", staticmethod(forward))
    patch.setattr(collectives._Reduce, "backward", staticmethod(backward))


def _wrong_gather_backward(patch: Patch, site: Site, differ: bool) -> None:
    """If `consumers_differ is differ`, use the backward of gather for the opposite case."""
    current_module, original = module_tracker(patch), collectives._Gather.forward

    def forward(ctx: Any, x: Tensor, dim: int, group: Any, consumers_differ: bool) -> Tensor:
        result = original(ctx, x, dim, group, consumers_differ)
        if consumers_differ is differ and site.covers(current_module()):
            ctx.differ = not differ
        return result

    patch.setattr(collectives._Gather, "forward", staticmethod(forward))


@bug(
    "T04", "shard", ADJOINT, "sp", row="S(seq)", credit="Slapo, `tensor_parallel_output_grad=False`"
)
def gather_returns_local_grad(patch: Patch, site: Site) -> None:
    """The backward of a gather before a sharded computation returns only the local part."""
    _wrong_gather_backward(patch, site, True)


@bug("T05", "shard", ADJOINT, "gathered", row="output=R", credit="Megatron-LM PR#6839")
def gather_sums_full_grads(patch: Patch, site: Site) -> None:
    """The backward of a gather before a replicated computation sums equal gradients."""
    _wrong_gather_backward(patch, site, False)


def _single_block(*args: Any) -> list[list[placement.Segment]]:
    """Return all blocks as one."""
    return [[segment for block in BLOCK_SEGMENTS(*args) for segment in block]]


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
    patch.setattr(placement, "block_segments", _single_block)


@bug("T09", "shard", SLICE, "packed", row="gate_up", credit="HF packed_colwise")
def gate_up_cut_through(patch: Patch, site: Site) -> None:
    """A packed gate and up projection is cut between the two."""
    patch.setattr(
        placement,
        "block_segments",
        lambda sizes, *args: (_single_block if len(sizes) == 2 else BLOCK_SEGMENTS)(sizes, *args),
    )


@bug("T12", "shard", SKIP, "tp", row="transformer.wte  shard(style=vocab")
def embedding_without_mask(patch: Patch, site: Site) -> None:
    """A rank that does not hold a token's row adds another row."""

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
    """The parts of an all-gather are joined in another order than the ranks."""
    current_module, original = module_tracker(patch), collectives.all_gather

    def all_gather(x: Tensor, dim: int, group: Any) -> Tensor:
        gathered = original(x, dim, group)
        if not site.covers(current_module()):
            return gathered
        return torch.cat([*reversed(gathered.chunk(group.size, dim))], dim)

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
    current_module = module_tracker(patch)

    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group, ctx.wrong = group, site.covers(current_module())
        return collectives.all_reduce(x, group)

    def backward(ctx: Any, *grads: Tensor) -> Any:
        if ctx.wrong:
            local_grad = grads[0].clone()
            dist.all_reduce(grads[0], group=ctx.group.pg)
            return local_grad, None
        return grads[0], None

    patch.setattr(collectives._Reduce, "forward", staticmethod(forward))
    patch.setattr(collectives._Reduce, "backward", staticmethod(backward))


@bug("T25", "shard", DETACH, "gathered", row="output=R", credit="Slapo, reshard_ops.py")
def gathered_without_history(patch: Patch, site: Site) -> None:
    """A gather calls the raw collective: no gradient reaches its input."""
    current_module, original = module_tracker(patch), collectives.gather

    def gather(x: Tensor, dim: int, group: Any, *, consumers_differ: bool) -> Tensor:
        if site.covers(current_module()):
            return collectives.all_gather(x.detach(), dim, group)
        return original(x, dim, group, consumers_differ=consumers_differ)

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
def negative_dim_as_first(patch: Patch, site: Site) -> None:
    """A gather along dim -1 joins parts along dim 0 and reshapes the result."""
    current_module, original = module_tracker(patch), collectives.all_gather

    def all_gather(x: Tensor, dim: int, group: Any) -> Tensor:
        gathered = original(x, dim, group)
        if dim % x.ndim != x.ndim - 1 or not site.covers(current_module()):
            return gathered
        return torch.cat(gathered.chunk(group.size, dim)).reshape(gathered.shape)

    patch.setattr(collectives, "all_gather", all_gather)


@bug("T34", "shard", REDUCTION, "tp", row="style=row", credit="spmd_types, P + constant")
def bias_on_every_rank(patch: Patch, site: Site) -> None:
    """The bias of a row-parallel layer is part of each rank's partial sum, too."""
    patch.setitem(
        edges.PRODUCTS_BY_KIND, "Conv1D", lambda module, x, _: edges._conv1d(module, x, True)
    )


@bug("T24", "shard", ALIAS, "turned", credit="SkyRL#1886 on Megatron")
def sum_of_a_copy_dropped(patch: Patch, site: Site) -> None:
    """The sum is written into a contiguous copy, but the unreduced tensor is returned."""

    def all_reduce(x: Tensor, group: Any) -> Tensor:
        result = x.clone()
        dist.all_reduce(result.contiguous(), group=group.pg)
        return result

    patch.setattr(collectives, "all_reduce", all_reduce)


@bug("T35", "shard", REDUCTION, "adapted", site="blocks.0.up.b", credit="Megatron-Bridge#5634")
def adapter_gets_part_of_its_gradient(patch: Patch, site: Site) -> None:
    """A low-rank adapter: the whole A gets its gradient from this rank's part of B only."""
    enter_without_all_reduce(patch, site)


@bug("T28", "pad", SLICE, "tp", credit="pytorch#162692, #172812, #103306")
def padding_counts(patch: Patch, site: Site) -> None:
    """Padding rows of the vocabulary count as classes of the softmax."""

    patch.setattr(
        edges, "shard_logits", lambda y, edge: edges.ShardedLogits(y, edge.group, edge.true_size)
    )
