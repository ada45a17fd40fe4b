"""Arguments that are full on every rank, and that a sharded module needs as this rank's shard.

Biases of attention scores (ALiBi, one slope for each head) are made once for all heads and passed
down: a rank takes the shard of its heads where its attention takes the argument.  A residual of all
tokens that is added to a sum that is split along the sequence (BERT) is cut to this rank's tokens.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.ir.placement import R, S
from schedlang.runtime.comm.collectives import local_shard
from schedlang.runtime.propagation.follower import Follower
from schedlang.runtime.propagation.trace import Note, Tag
from schedlang.runtime.sharding.edges import Edge, block_sizes, redistribute, reorder_for_split


@dataclass(frozen=True)
class ArgumentShard:
    """An argument of a module that is split along `dim`; each `unit` of the dim is split by itself.

    A unit is all heads.  A dim with the concatenated heads of all rows of the batch has several
    units; with `unit` 0 the dim is one unit of any length (tokens).  `summed`: the argument was
    gathered, and the gather's backward sums the ranks' gradients: each rank gives the gradient of
    its own shard only.
    """

    name: str
    dim: int
    unit: int
    edge: Edge
    summed: bool = False

    def placement(self, x: Tensor) -> S:
        """Return the placement of this argument after the split."""
        return S(self.dim, x.shape[self.dim] // self.unit if self.unit else 1)

    def cut(self, x: Tensor) -> Tensor:
        """Return this rank's shard of the full tensor `x`."""
        if self.summed:
            return local_shard(
                reorder_for_split(x, self.placement(x), self.edge.group), self.dim, self.edge.group
            )
        if not x.requires_grad:  # calls that other modes follow: a rank may know more of its tokens
            full, group = reorder_for_split(x, self.placement(x), self.edge.group), self.edge.group
            size = full.shape[self.dim] // group.size
            return full.narrow(self.dim, group.rank * size, size).contiguous()
        return redistribute(x, R, self.placement(x), self.edge.group)


def replace_argument(
    module: nn.Module, name: str, change: Callable[[Tensor], Tensor], args: Any, kwargs: Any
) -> tuple[Any, Any]:
    """Return a call's arguments with `change` applied to the tensor of one parameter, if passed."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    position = names.index(name)
    if isinstance(kwargs.get(name), Tensor):
        return args, {**kwargs, name: change(kwargs[name])}
    if position < len(args) and isinstance(args[position], Tensor):
        return (*args[:position], change(args[position]), *args[position + 1 :]), kwargs
    return args, kwargs


class ArgumentLayer:
    """The layer around a module's forward that splits some of its arguments."""

    def __init__(self, module: nn.Module, parts: tuple[ArgumentShard, ...]) -> None:
        self.module, self.parts = module, parts

    def __deepcopy__(self, memo: dict[int, Any]) -> ArgumentLayer:
        return ArgumentLayer(copy.deepcopy(self.module, memo), self.parts)  # groups are not copied

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `inner` with this rank's shards of the arguments."""
        for part in self.parts:
            args, kwargs = replace_argument(self.module, part.name, part.cut, args, kwargs)
        return inner(*args, **kwargs)


def dry_run_arguments(
    module: nn.Module,
    parts: tuple[ArgumentShard, ...],
    follower: Follower,
    on_split: Callable[[ArgumentShard, ArgumentShard | None], None],
) -> Callable[..., Any]:
    """Return a forward that splits the arguments like `ArgumentLayer`, and notes the layouts of
    the shards.

    `on_split` is called with each argument, and with its split in this call; None: the argument
    arrives as a shard, or does not have all heads.
    """
    inner = module.forward

    def cut(part: ArgumentShard, x: Tensor) -> Tensor:
        note, axis = follower.of(x), part.edge.group.axes[0]
        if axis in note.tags or (part.unit and x.shape[part.dim] % part.unit):
            on_split(part, None)
            return x
        shard = replace(part, summed=axis in note.entered)
        on_split(part, shard)
        local = follower.run_muted(shard.cut, x)
        tag = Tag(
            part.dim, block_sizes(part.placement(x), x.shape[part.dim]), shard.edge.group.label
        )
        if not part.unit:
            follower.tokens.add((shard.edge.group.label, axis))
        entered = note.entered - {axis}
        follower.put(local, Note({**note.tags, axis: tag}, frozenset(), True, entered))
        return local

    def forward(*args: Any, **kwargs: Any) -> Any:
        shards: list[tuple[ArgumentShard, Tensor]] = []

        def kept(part: ArgumentShard, x: Tensor) -> Tensor:
            local = cut(part, x)
            if local is not x:
                shards.append((part, local))
            return local

        for part in parts:
            args, kwargs = replace_argument(module, part.name, partial(kept, part), args, kwargs)
        with torch._C.DisableTorchFunction():  # not seen by function modes
            versions = [local._version for _, local in shards]
        output = inner(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            new_versions = [local._version for _, local in shards]
        for (part, _), *counted in zip(shards, versions, new_versions):
            if len({*counted}) > 1:  # the caller's full tensor would not be changed
                raise follower.refuse(
                    f"`{part.name}` is changed in place, but a rank has only a shard of it",
                    part.edge.group.axes[0],
                    "write `x = x + y` in the model, not `x += y`",
                )
        return output

    return forward


def find_full_arguments(
    module: nn.Module, call_arguments: tuple[Any, Any], axis: str, unit: int, tokens: bool
) -> list[tuple[str, int]]:
    """Return (name, dim) of the full arguments of a call that have all heads or tokens in a dim.

    `unit` is the number of heads (a dim may have the heads of several rows) or, if `tokens`, of
    tokens.
    """
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    args, kwargs = call_arguments
    full_dims = []
    for name, value in [*zip(names, args), *((k, v) for k, v in kwargs.items() if k in names)]:
        if isinstance(value, Tensor) and axis not in Follower.of(value).tags:
            dims = range(value.ndim)
            sizes = {unit} if tokens else {n for n in value.shape if n and n % unit == 0}
            full_dims += [(name, d) for d in dims if value.shape[d] in sizes]
    return full_dims
