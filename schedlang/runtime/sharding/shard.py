"""Sharded modules: each rank computes with its part of the parameters, between two crossings."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.ir.placement import P, Placement, S, positions
from schedlang.runtime.comm.collectives import Group
from schedlang.runtime.lazy_logits.lazy import waiting
from schedlang.runtime.lazy_logits.vocab_parallel import ShardedLogits
from schedlang.runtime.sharding.redistribute import Arrivals, block_sizes, dim_of, redistribute


@dataclass(frozen=True)
class Edge:
    """One axis of a sharded module: how tensors arrive, what it wants, computes and hands on.

    `differ`: the module computes differently on each rank, so that gradients of a whole input are
    parts, to be summed on the way in.  `cut` is the true size of the output's last dim where
    padding must be cut off, `head` tells that the output stays split over the vocabulary for a
    parallel loss, `hoisted` that children need the gathered input and this module was the first to
    get it.
    """

    group: Group
    arrives: Placement
    wants: Placement
    computes: Placement
    leaves: Placement
    differ: bool
    cut: int | None = None
    head: bool = False
    hoisted: bool = False
    told: Any = None  # what a row says of how a module of its kind computes
    arrivals: Arrivals | None = field(default=None, compare=False)  # of modules that are near

    def enter(self, x: Tensor) -> Tensor:
        """A tensor that arrives, as the module wants it; what another one just made of it."""
        change = redistribute if self.arrivals is None else self.arrivals.redistribute
        return change(x, self.arrives, self.wants, self.group, self.differ)

    def exit(self, x: Tensor) -> Tensor:
        """A tensor that was computed, as it is handed on."""
        return redistribute(x, self.computes, self.leaves, self.group)


Compute = Callable[[nn.Module, Tensor, bool], Tensor]


def _linear(module: nn.Module, x: Tensor, with_bias: bool) -> Tensor:
    return F.linear(x, module.weight, module.bias if with_bias else None)  # type: ignore[arg-type]


def _conv1d(module: nn.Module, x: Tensor, with_bias: bool) -> Tensor:
    weight = module._parameters["weight"]
    assert weight is not None
    flat = x.reshape(-1, x.shape[-1])
    bias = module._parameters["bias"] if with_bias else None
    out = flat @ weight if bias is None else torch.addmm(bias, flat, weight)
    return out.view(*x.shape[:-1], weight.shape[-1])


CLASSES = ("Linear", "Conv1D", "Embedding")
COMPUTES: Mapping[str, Compute] = {"Linear": _linear, "Conv1D": _conv1d}


Forward = Callable[..., Any]


def projection(
    module: nn.Module, kind: str, edges: tuple[Edge, ...], biased: bool = True
) -> Forward:
    """A Linear or Conv1D on its parts: enter, multiply, reduce, add the bias once.

    Not `biased`: whoever calls it adds the bias.
    """
    compute = COMPUTES[kind]
    sums = [edge for edge in edges if isinstance(edge.computes, P)]
    others = [edge for edge in edges if edge not in sums]
    is_head = [edge.head for edge in edges] == [True]
    padded = any(is_padded(end) for edge in edges for end in (edge.wants, edge.computes))

    def forward(x: Tensor) -> Any:
        for edge in edges:
            x = edge.enter(x)
            x = without_padding(x, edge.wants, edge.group) if padded else x
        layer = waiting(module) if is_head else None
        if layer is not None:
            return layer.lazy(x, edges[0].group, edges[0].cut or 0)
        y = compute(module, x, biased and not sums)
        for edge in sums:
            y = edge.exit(y)
        bias = module._parameters.get("bias") if sums and biased else None
        y = y if bias is None else y + bias  # once, before others' positions are gathered
        for edge in others:
            if edge.head:
                return head_of(y, edge)
            y = without_padding(y, edge.computes, edge.group) if padded else y
            y = edge.exit(y)
        return y

    return forward


def is_padded(placement: Placement) -> bool:
    """Return whether the parts of a placement may end in zeros."""
    return isinstance(placement, S) and placement.uneven.wide != placement.uneven.repeat


def without_padding(x: Tensor, placement: Placement, group: Group) -> Tensor:
    """The tensor with zeros where it is padded, and in backward its gradient.

    What a model computes between two projections need not keep zeros (`exp`, a division), and no
    such value may reach a sum, nor a gradient the padding of a weight.
    """
    if not isinstance(placement, S) or not is_padded(placement):
        return x
    dim = dim_of(placement) % x.ndim
    size = placement.uneven.true(x.shape[dim], group.size)
    where = positions(block_sizes(placement, size), placement.uneven, group.size, group.rank)
    if max(where) < size:
        return x
    mask = torch.tensor([index >= size for index in where], device=x.device)
    return x.masked_fill(mask.view([-1] + [1] * (x.ndim - 1 - dim)), 0.0)


def head_of(y: Tensor, edge: Edge) -> ShardedLogits:
    """Logits that stay split over the vocabulary; padding gets none."""
    assert edge.cut is not None
    true, width = edge.cut, y.shape[-1]
    mine = max(0, min(width, true - edge.group.rank * width))
    if mine < width:  # padding rows of the weight have no class
        y = y.masked_fill(torch.arange(width, device=y.device) >= mine, -torch.inf)
    return ShardedLogits(y, edge.group, true)


def region(inner: Forward, edges: tuple[Edge, ...]) -> Forward:
    """A module of any class as it is, between two crossings of its main tensor.

    The main tensor is the first floating-point one among the arguments, and among the results.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        for edge in edges:
            args, kwargs = on_first(edge.enter, args, kwargs)
        out = inner(*args, **kwargs)
        for edge in edges:
            if edge.computes != edge.leaves:
                out = on_result(edge.exit, out)
        return out

    return forward


def is_main(value: Any) -> bool:
    """Return whether a value is a floating-point tensor, as activations are."""
    return isinstance(value, Tensor) and value.is_floating_point()


def on_first(
    cross: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with the main tensor changed."""
    for place, value in enumerate(args):
        if is_main(value):
            return (*args[:place], cross(value), *args[place + 1 :]), kwargs
    for name, value in kwargs.items():
        if is_main(value):
            return args, {**kwargs, name: cross(value)}
    return args, kwargs


def on_result(cross: Callable[[Tensor], Tensor], out: Any) -> Any:
    """The results with the main tensor changed."""
    if is_main(out):
        return cross(out)
    if isinstance(out, tuple | list):
        for place, value in enumerate(out):
            if is_main(value):
                changed = [*out[:place], cross(value), *out[place + 1 :]]
                return changed if isinstance(out, list) else tuple(changed)
    if isinstance(out, MutableMapping):  # the named outputs of transformers are dicts too
        name = next((name for name, value in out.items() if is_main(value)), None)
        if name is not None:
            made = copy.copy(out)
            made[name] = cross(out[name])
            return made
    return out
