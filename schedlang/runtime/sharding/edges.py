"""Sharded modules: what each rank computes with its shard, and redistribution at the edges.

An edge is one mesh axis of a sharded module.  The functions here run in every step of a program.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal
from schedlang.ir.placement import EVEN, P, Placement, Replicate, S, held_runs, positions
from schedlang.runtime.comm import collectives
from schedlang.runtime.comm.collectives import Group
from schedlang.runtime.lazy_logits.lazy import lazy_head_of
from schedlang.runtime.lazy_logits.vocab_parallel import ShardedLogits
from schedlang.runtime.low_rank_adapters import AdaptedProjection

# the dims of an activation (batch, seq, hidden) by name
ACTIVATION_DIMS = {"batch": 0, "seq": 1, "hidden": -1, "out": -1, "in": -1, "vocab": -1}


def dim_of(placement: S) -> int:
    """Return the number of the activation's dim that a placement splits."""
    return placement.dim if isinstance(placement.dim, int) else ACTIVATION_DIMS[placement.dim]


def redistribute(
    x: Tensor, source: Placement, target: Placement, group: Group, differ: bool = False
) -> Tensor:
    """Return the tensor in another placement over one group.

    `differ`: the computation behind this call differs by rank, so gradients that come back are
    partial and must be summed over the ranks.
    """
    if isinstance(source, Replicate) and isinstance(target, Replicate):
        return collectives.enter(x, group) if differ else x
    if isinstance(source, S) and isinstance(target, Replicate):
        return _gathered(x, source, group, differ)
    if isinstance(source, P) and isinstance(target, Replicate):
        return collectives.reduce(x, group)
    if source == target:
        return x
    assert isinstance(target, S), (source, target)
    reordered, dim = reorder_for_split(x, target, group), dim_of(target)
    if isinstance(source, Replicate):
        return collectives.split(reordered, dim, group)
    if isinstance(source, P):
        return collectives.scatter_sum(reordered, dim, group)
    assert is_all_to_all(source, target), (source, target)
    return collectives.switch_sharded_dim(reordered, dim_of(source) % x.ndim, dim % x.ndim, group)


def is_all_to_all(source: Placement, target: Placement) -> bool:
    """Return whether an all-to-all changes `source` to `target`: equal shards of two dims."""
    even = [p for p in (source, target) if isinstance(p, S) and p.blocks == 1 and p.uneven == EVEN]
    return len(even) == 2 and dim_of(even[0]) != dim_of(even[1])


def _gathered(x: Tensor, source: S, group: Group, differ: bool) -> Tensor:
    dim = dim_of(source)
    gathered = collectives.gather(x, dim, group, consumers_differ=differ)
    if source.blocks == 1 and source.uneven == EVEN:
        return gathered
    # every rank's shard has the concatenated pieces of all blocks: put each block together
    sizes = block_sizes(source, source.uneven.true_size(x.shape[dim], group.size))
    runs = held_runs(sizes, source.uneven, group.size)
    first_runs = [r for r in runs if r.start < sum(sizes) and r.rank % source.uneven.repeat == 0]
    first_runs.sort(key=lambda run: run.start)
    parts = [gathered.narrow(dim, r.rank * x.shape[dim] + r.at, r.length) for r in first_runs]
    return torch.cat(parts, dim)


def block_sizes(placement: S, size: int) -> tuple[int, ...]:
    """Return the sizes of a placement's blocks in a dim of size `size`."""
    blocks = placement.blocks
    if isinstance(blocks, int):
        return (size // blocks,) * blocks
    return tuple(block * size // sum(blocks) for block in blocks)


def reorder_for_split(x: Tensor, placement: S, group: Group) -> Tensor:
    """Return the full tensor reordered along the split dim: equally large shards in rank order.

    Raises Refusal S420 if the dim cannot be split evenly.
    """
    dim, ranks = dim_of(placement), group.size
    size = x.shape[dim]
    if placement.blocks == 1 and placement.uneven == EVEN:
        if size % ranks:
            raise Refusal(_uneven_diagnostic(placement, size, group))
        return x
    sizes = block_sizes(placement, size)
    parts = []
    for run in held_runs(sizes, placement.uneven, ranks):
        if run.start < size:
            parts.append(x.narrow(dim, run.start, run.length))
        else:
            shape = list(x.shape)
            shape[dim] = run.length
            parts.append(x.new_zeros(shape))
    return torch.cat(parts, dim)


def _uneven_diagnostic(placement: S, size: int, group: Group) -> Diagnostic:
    axis, dim = group.axes[0], dim_of(placement)
    names = [f"`S({name})`" for name, number in ACTIVATION_DIMS.items() if number == dim >= 0]
    row = " or ".join([f"`S({placement.dim})`", *names])
    allowed = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
    return Diagnostic(
        "S420",
        f"a dim of {size} cannot be split evenly over `{axis}`={group.size}",
        notes=(f"{row} in a row of `{group.label or 'a module'}` splits this dim",),
        helps=(
            f"`{axis}` may be one of {allowed}",
            f"or pad the batch to a multiple of {group.size} along this dim, if it is one of the"
            " batch (tokens, not channels)",
            "or drop that placement from the row: `input=`, `output=`",
        ),
        facts=(("site", group.label),),
    )


@dataclass(eq=False)
class RedistributionCache:
    """Cache of redistributions for the modules inside of one module; the layer of that module.

    Within one call of the outer module, consecutive modules that take the same tensor object (q, k
    and v projections) redistribute it once.  After the call the cache is empty.

    written  whether a tensor is written into between two modules that take it: then a graph of
             torch.compile, which cannot read tensor versions, redistributes for each module
    """

    written: bool = False
    _last: dict[tuple[Any, ...], tuple[Tensor, int, Tensor]] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> RedistributionCache:
        return RedistributionCache(self.written)

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `inner`, then clear the cache."""
        try:
            return inner(*args, **kwargs)
        finally:
            self._last.clear()

    def redistribute(
        self, x: Tensor, source: Placement, target: Placement, group: Group, differ: bool
    ) -> Tensor:
        """Return the tensor in its new placement, from the cache if the module before used it."""
        key = (source, target, group.axes, differ, torch.is_grad_enabled())
        # how often the tensor was written into; None if not known
        version: int | None
        if torch.compiler.is_compiling():
            version = None if self.written else 0
        else:
            version = None if x.is_inference() else x._version
        entry = self._last.get(key)
        if entry is not None and entry[0] is x:
            if entry[1] == version:
                return entry[2]
            self.written = True
        crossed = redistribute(x, source, target, group, differ)
        if crossed is not x and version is not None:
            self._last[key] = (x, version, crossed)
        return crossed


@dataclass(frozen=True)
class Edge:
    """One axis of a sharded module: the placements of its input and output, before and after.

    input_before   placement of the input that arrives
    input_after    placement of the input for the module's computation
    output_before  placement of the output that the module computes
    output_after   placement of the output that the module returns
    differ         the module computes differently on each rank: gradients of a full input are
                   partial, and are summed where the input enters
    true_size      the size of the output's last dim without padding, if padding must be removed
    is_head        the output stays split over the vocabulary, for a parallel loss
    hoisted        this module gathers the input because modules inside need the full tensor
    """

    group: Group
    input_before: Placement
    input_after: Placement
    output_before: Placement
    output_after: Placement
    differ: bool
    true_size: int | None = None
    is_head: bool = False
    hoisted: bool = False
    variant: Any = None  # the variant of the computation that a row chooses
    # shared with nearby modules
    cache: RedistributionCache | None = field(default=None, compare=False)

    def enter(self, x: Tensor) -> Tensor:
        """Return an arriving tensor in the placement that the module's computation needs."""
        change = redistribute if self.cache is None else self.cache.redistribute
        return change(x, self.input_before, self.input_after, self.group, self.differ)

    def exit(self, x: Tensor) -> Tensor:
        """Return a computed tensor in the placement that the module returns."""
        return redistribute(x, self.output_before, self.output_after, self.group)


Compute = Callable[[nn.Module, Tensor, bool], Tensor]


def _conv1d(module: nn.Module, x: Tensor, with_bias: bool) -> Tensor:
    weight = module._parameters["weight"]
    assert weight is not None
    flat = x.reshape(-1, x.shape[-1])
    bias = module._parameters["bias"] if with_bias else None
    product = flat @ weight if bias is None else torch.addmm(bias, flat, weight)
    return product.view(*x.shape[:-1], weight.shape[-1])


CLASSES = ("Linear", "Conv1D", "Embedding")
PRODUCTS_BY_KIND: Mapping[str, Compute] = {
    "Linear": lambda m, x, with_bias: F.linear(x, m.weight, m.bias if with_bias else None),  # type: ignore[arg-type]
    "Conv1D": _conv1d,
}


Forward = Callable[..., Any]


def projection(
    module: nn.Module, kind: str, edges: tuple[Edge, ...], biased: bool = True
) -> Forward:
    """Return the forward of a sharded Linear or Conv1D: enter, multiply, reduce, add the bias once.

    Not `biased`: the caller adds the bias.
    """
    compute = PRODUCTS_BY_KIND[kind]
    adapt = module.add_adapter if isinstance(module, AdaptedProjection) else None
    sums = [edge for edge in edges if isinstance(edge.output_before, P)]
    unsummed = [edge for edge in edges if edge not in sums]
    is_head = [edge.is_head for edge in edges] == [True]
    padded = any(is_padded(end) for edge in edges for end in (edge.input_after, edge.output_before))

    def forward(x: Tensor) -> Any:
        for edge in edges:
            x = edge.enter(x)
            x = mask_padding(x, edge.input_after, edge.group) if padded else x
        layer = lazy_head_of(module) if is_head else None
        if layer is not None:
            return layer.make_lazy(x, edges[0].group, edges[0].true_size or 0)
        y = compute(module, x, biased and not sums)
        if adapt is not None:
            y = adapt(x, y, biased and not sums, partial(_all_reduce_edges, sums) if sums else None)
        for edge in sums:
            y = edge.exit(y)
        bias = module._parameters.get("bias") if sums and biased else None
        y = y if bias is None else y + bias  # once, before positions of other ranks are gathered
        for edge in unsummed:
            if edge.is_head:
                return shard_logits(y, edge)
            y = mask_padding(y, edge.output_before, edge.group) if padded else y
            y = edge.exit(y)
        return y

    return forward


def _all_reduce_edges(edges: Sequence[Edge], x: Tensor) -> Tensor:
    """All-reduce a tensor over the groups of some edges, without a gradient."""
    for edge in edges:
        x = collectives.all_reduce(x, edge.group)
    return x


def is_padded(placement: Placement) -> bool:
    """Return whether shards of a placement may end in zeros."""
    return isinstance(placement, S) and placement.uneven.wide != placement.uneven.repeat


def mask_padding(x: Tensor, placement: Placement, group: Group) -> Tensor:
    """Set the padding of a shard to zero; in backward the padding of its gradient.

    Computations between two projections may change the zeros (`exp`, a division).  Such values must
    not reach a sum, and their gradients must not reach the padding of a weight.
    """
    if not isinstance(placement, S) or not is_padded(placement):
        return x
    dim = dim_of(placement) % x.ndim
    size = placement.uneven.true_size(x.shape[dim], group.size)
    indices = positions(block_sizes(placement, size), placement.uneven, group.size, group.rank)
    if max(indices) < size:
        return x
    mask = torch.tensor([index >= size for index in indices], device=x.device)
    return x.masked_fill(mask.view([-1] + [1] * (x.ndim - 1 - dim)), 0.0)


def shard_logits(y: Tensor, edge: Edge) -> ShardedLogits:
    """Return logits that stay split over the vocabulary; padding gets -inf."""
    assert edge.true_size is not None
    true, width = edge.true_size, y.shape[-1]
    own_classes = max(0, min(width, true - edge.group.rank * width))
    if own_classes < width:  # padding rows of the weight are no classes
        y = y.masked_fill(torch.arange(width, device=y.device) >= own_classes, -torch.inf)
    return ShardedLogits(y, edge.group, true)


def wrap_forward(inner: Forward, edges: tuple[Edge, ...]) -> Forward:
    """Return a forward that redistributes the main tensor before and after a module's own forward.

    The main tensor is the first floating-point tensor among the arguments, and among the results.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        for edge in edges:
            args, kwargs = map_argument(edge.enter, args, kwargs)
        output = inner(*args, **kwargs)
        for edge in edges:
            if edge.output_before != edge.output_after:
                output = map_result(edge.exit, output)
        return output

    return forward


def is_activation(value: Any) -> bool:
    """Return whether a value is a floating-point tensor, as activations are."""
    return isinstance(value, Tensor) and value.is_floating_point()


def map_argument(
    cross: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with `cross` applied to the main tensor."""
    for index, value in enumerate(args):
        if is_activation(value):
            return (*args[:index], cross(value), *args[index + 1 :]), kwargs
    for name, value in kwargs.items():
        if is_activation(value):
            return args, {**kwargs, name: cross(value)}
    return args, kwargs


def map_result(cross: Callable[[Tensor], Tensor], result: Any) -> Any:
    """Return the results with `cross` applied to the main tensor."""
    if is_activation(result):
        return cross(result)
    if isinstance(result, tuple | list):
        for index, value in enumerate(result):
            if is_activation(value):
                changed = [*result[:index], cross(value), *result[index + 1 :]]
                return changed if isinstance(result, list) else tuple(changed)
    if isinstance(result, MutableMapping):  # outputs of transformers are dicts too
        name = next((name for name, value in result.items() if is_activation(value)), None)
        if name is not None:
            copied = copy.copy(result)
            copied[name] = cross(result[name])
            return copied
    return result
