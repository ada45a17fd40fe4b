"""Norms over a hidden dim, or over positions, that is split over ranks.

* Over the hidden dim (`hidden_norm`): the module's own forward runs on this rank's shard under a
  function
  mode.  Elementwise calls pass, sums and means along the split last dim are reduced over the ranks,
  and any other call with a split tensor is refused.
* Over positions (`batch_norm`, `group_norm`): computed as torch does, with statistics that are
  reduced over the ranks.  Synchronised batch norm is by Peng et al. (2018).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.placement import S
from schedlang.runtime.comm import collectives
from schedlang.runtime.comm.collectives import Group, all_gather, local_shard, sum_over_ranks
from schedlang.runtime.modes import AmbientMode
from schedlang.runtime.sharding.convolution import CHANNELS, position_dim
from schedlang.runtime.sharding.edges import Edge, Forward
from schedlang.runtime.tracing.meta_runs import name_of, tensors_in

if TYPE_CHECKING:
    from schedlang.runtime.sharding.sharded_layer import ShardedLayer


HALVES = (torch.float16, torch.bfloat16)  # torch's norms compute these in float32


class NeedsFullDim(Exception):
    """Raised for a call that needs the full hidden dim."""


class SumLast(torch.autograd.Function):
    """Sum along the split last dim, equal on all ranks; its gradient is partial on each rank.

    The gradient is partial because each rank combines the sum with its own elements only.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        """Sum the local elements, then all-reduce."""
        ctx.group, ctx.width = group, x.shape[-1]
        return collectives.all_reduce(x.sum(-1, keepdim=True), group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """All-reduce the gradient, and expand it to every element."""
        total = collectives.all_reduce(grads[0], ctx.group)
        return total.expand(*total.shape[:-1], ctx.width), None


class SplitDimMode(AmbientMode):
    """Mode in which a norm's forward runs on tensors that are split along the last dim.

    Split tensors are marked with an attribute.
    """

    def __init__(self, group: Group, parameters: list[Tensor]) -> None:
        super().__init__()
        self.group = group
        self.parameters = {id(p) for p in parameters}

    # -- marks -----------------------------------------------------------------------------------

    def mark(self, tensor: Tensor) -> Tensor:
        """Mark a tensor as split along its last dim, and return it."""
        tensor.__dict__["_schedlang_along"] = True
        return tensor

    def is_split(self, tensor: Tensor) -> bool:
        """Return whether a tensor is split along its last dim."""
        return id(tensor) in self.parameters or "_schedlang_along" in tensor.__dict__

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute a call on shards so that the result equals the full one, or raise NotSplit."""
        kwargs, name = dict(kwargs or {}), name_of(func)
        parts = [t for t in tensors_in((args, kwargs)) if self.is_split(t)]
        if not parts:
            return self.run(func, types, args, kwargs)
        if name in ATTRIBUTES:
            return func(*args, **kwargs)
        if name in SIZES:
            return self._full_sizes(func, parts[0], args, kwargs)
        if name in REDUCTIONS:
            return self._reduce(name, parts[0], args, kwargs)
        if name in NORMS:
            return self.mark(NORMS[name](self, *args, **kwargs))
        if name not in ELEMENTWISE:
            raise NeedsFullDim(
                f"`{name}` needs the full hidden dim, but each rank has a shard of it"
            )
        result = func(*args, **kwargs)
        self._check_last_dim(name, parts[0], result)
        return self.mark(result)

    def _check_last_dim(self, name: str, part: Tensor, result: Any) -> None:
        if not isinstance(result, Tensor) or result.shape[-1:] != part.shape[-1:]:
            raise NeedsFullDim(f"`{name}` does not keep the hidden dim, which is sharded")

    def _full_sizes(self, func: Any, part: Tensor, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Return the sizes of the full tensor: the model may divide by them."""
        full_shape = (*part.shape[:-1], part.shape[-1] * self.group.size)
        if name_of(func) in ("shape", "size"):
            dim_arg = args[1] if len(args) > 1 else kwargs.get("dim")
            dim = dim_arg if isinstance(dim_arg, int) else None
            return torch.Size(full_shape) if dim is None else full_shape[dim]
        return math.prod(full_shape)

    # -- reductions over the ranks -----------------------------------------------------------------

    def total(self, x: Tensor) -> Tensor:
        """Return the sum along the full last dim, which is kept with size 1."""
        return cast(Tensor, SumLast.apply(x, self.group))  # type: ignore[no-untyped-call]

    def mean(self, x: Tensor) -> Tensor:
        """Return the mean along the full last dim, which is kept with size 1."""
        return self.total(x) / (x.shape[-1] * self.group.size)

    def _reduce(self, name: str, part: Tensor, args: Any, kwargs: dict[str, Any]) -> Tensor:
        """Compute a reduction along the last dim; raise NotSplit for any other dim."""
        x, dims, keep, options = REDUCTIONS[name](*args, **kwargs)
        dim_list = dims if isinstance(dims, list | tuple) else [dims]
        if x is not part or len(dim_list) != 1 or dim_list[0] not in (-1, part.ndim - 1):
            raise NeedsFullDim(f"`{name}` over {dims} mixes the sharded hidden dim with others")
        value = STATISTICS[name](self, x, **options)
        return value if keep else value.squeeze(-1)


# -- functions of torch ---------------------------------------------------------------------------

ATTRIBUTES = {
    "dtype",
    "device",
    "requires_grad",
    "ndim",
    "dim",
    "is_floating_point",
    "is_cuda",
    "grad_fn",
    "is_leaf",
    "layout",
    "is_meta",
    "get_device",
    "is_complex",
}
SIZES = {"shape", "size", "numel", "nelement"}
ELEMENTWISE = {
    *("add", "sub", "mul", "div", "neg", "abs", "pow", "square", "sqrt", "rsqrt", "reciprocal"),
    *("exp", "log", "tanh", "sigmoid", "relu", "silu", "gelu", "clamp", "clamp_min", "where"),
    *("add_", "sub_", "mul_", "div_", "true_divide", "multiply", "subtract", "addcmul", "lerp"),
    *("__add__", "__radd__", "__iadd__", "__sub__", "__rsub__", "__isub__", "__mul__", "__rmul__"),
    *("__imul__", "__truediv__", "__rtruediv__", "__itruediv__", "__pow__", "__neg__", "rsub"),
    *("to", "type", "type_as", "float", "double", "half", "bfloat16", "contiguous", "clone"),
    *("detach", "ones_like", "zeros_like", "nan_to_num", "addcdiv", "__rdiv__", "__div__"),
}


def _parse_mean(
    x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> tuple[Tensor, Any, bool, dict[str, Any]]:
    return x, dim, keepdim, {"dtype": dtype}


def _parse_variance(
    x: Tensor,
    dim: Any = None,
    unbiased: Any = True,
    keepdim: bool = False,
    *,
    correction: Any = None,
) -> tuple[Tensor, Any, bool, dict[str, Any]]:
    if isinstance(dim, bool):  # var(x, unbiased): over all dims
        return x, None, keepdim, {}
    return x, dim, keepdim, {"off": int(unbiased) if correction is None else correction}


def _parse_norm(
    x: Tensor, p: Any = "fro", dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> tuple[Tensor, Any, bool, dict[str, Any]]:
    return x, dim, keepdim, {"order": p, "dtype": dtype}


def _parse_vector_norm(
    x: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> tuple[Tensor, Any, bool, dict[str, Any]]:
    return x, dim, keepdim, {"order": ord, "dtype": dtype}


def _cast(x: Tensor, dtype: Any) -> Tensor:
    return x if dtype is None else x.to(dtype)


def _variance(mode: SplitDimMode, x: Tensor, off: float) -> Tensor:
    count = x.shape[-1] * mode.group.size
    return mode.total((x - mode.mean(x)).square()) / (count - off)


def _norm(mode: SplitDimMode, x: Tensor, order: Any, dtype: Any) -> Tensor:
    if order not in ("fro", 2, 2.0, None):
        raise NeedsFullDim(f"a norm of order {order} of a sharded tensor is not supported")
    return mode.total(_cast(x, dtype).square()).sqrt()


REDUCTIONS: Mapping[str, Callable[..., tuple[Tensor, Any, bool, dict[str, Any]]]] = {
    "sum": _parse_mean,
    "mean": _parse_mean,
    "var": _parse_variance,
    "std": _parse_variance,
    "norm": _parse_norm,
    "vector_norm": _parse_vector_norm,
    "linalg_vector_norm": _parse_vector_norm,
}
STATISTICS: Mapping[str, Callable[..., Tensor]] = {
    "sum": lambda mode, x, dtype: mode.total(_cast(x, dtype)),
    "mean": lambda mode, x, dtype: mode.mean(_cast(x, dtype)),
    "var": _variance,
    "std": lambda mode, x, off: _variance(mode, x, off).sqrt(),
    "norm": _norm,
    "vector_norm": _norm,
    "linalg_vector_norm": _norm,
}


def _layer_norm(
    mode: SplitDimMode,
    x: Tensor,
    shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    _check_one_dim(shape)
    upcast = x.float() if x.dtype in HALVES else x
    centred = upcast - mode.mean(upcast)
    normed = centred * (mode.mean(centred.square()) + eps).rsqrt()
    return _scale(normed, x, weight, bias)


def _rms_norm(
    mode: SplitDimMode,
    x: Tensor,
    shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    _check_one_dim(shape)
    upcast = x.float() if x.dtype in HALVES else x
    small = torch.finfo(upcast.dtype).eps if eps is None else eps
    return _scale(upcast * (mode.mean(upcast.square()) + small).rsqrt(), x, weight, None)


def _check_one_dim(shape: Any) -> None:
    if not isinstance(shape, int) and len(shape) != 1:
        raise NeedsFullDim(f"a norm over {len(shape)} dims, of which one is sharded")


def _scale(normed: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    normed = normed if weight is None else normed * weight
    return (normed if bias is None else normed + bias).to(x.dtype)


def _normalize(
    mode: SplitDimMode, x: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None
) -> Tensor:
    if p != 2 or dim not in (-1, x.ndim - 1) or out is not None:
        raise NeedsFullDim("`normalize` of a sharded tensor needs p=2 along the hidden dim")
    return x / mode.total(x.square()).sqrt().clamp_min(eps)


NORMS: Mapping[str, Callable[..., Tensor]] = {
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "normalize": _normalize,
}


# -- the module -----------------------------------------------------------------------------------


def hidden_norm(sharded: ShardedLayer, inner: Forward) -> Forward:
    """Return the forward of a module that normalises along a sharded hidden dim."""
    module, (edge,) = sharded.module, sharded.edges

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        x = edge.enter(x)
        mode = SplitDimMode(edge.group, list(module.parameters()))
        with mode:
            output = inner(mode.mark(x.view_as(x)), *args, **kwargs)
        if not isinstance(output, Tensor) or not mode.is_split(output):
            raise NeedsFullDim("its output is not sharded as its input")
        return edge.exit(output)

    return forward


def _mean(x: Tensor, dims: Sequence[int], groups: Sequence[Group]) -> tuple[Tensor, int]:
    """Return the mean over dims and ranks, with the dims kept, and the number of its elements."""
    total, count = x.sum(tuple(dims), keepdim=True), 1
    for dim in dims:
        count *= x.shape[dim]
    for group in groups:
        total = sum_over_ranks(total, group)  # each rank combines it with its own positions
        count *= group.size
    return total / count, count


def _normalize_over(
    x: Tensor, dims: Sequence[int], groups: Sequence[Group], eps: float
) -> tuple[Tensor, Tensor, Tensor, int]:
    mean, count = _mean(x, dims, groups)
    centred = x - mean
    variance, _ = _mean(centred * centred, dims, groups)
    return centred * torch.rsqrt(variance + eps), mean, variance, count


def _along_channels(values: Tensor, x: Tensor) -> Tensor:
    return values.view(1, -1, *(1,) * (x.ndim - 2))


def _affine(module: nn.Module, y: Tensor) -> Tensor:
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if weight is not None:
        y = y * _along_channels(weight, y)
    return y if bias is None else y + _along_channels(bias, y)


def batch_norm(module: nn.Module, kind: str, edges: tuple[Edge, ...]) -> Forward:
    """Return the forward of a batch norm whose statistics are reduced over the ranks' positions.

    In eval mode nothing is reduced.
    """
    assert isinstance(module, nn.modules.batchnorm._BatchNorm)
    groups = [edge.group for edge in edges if position_dim(edge) is not None]
    channels = [edge.group for edge in edges if edge.input_after == S(CHANNELS)]

    def compute(x: Tensor) -> Tensor:
        if not (module.training or module.running_mean is None):
            tracked = (module.running_mean, module.running_var)
            mean, variance = (_along_channels(_local_channels(t, channels), x) for t in tracked)
            return _affine(module, (x - mean) * torch.rsqrt(variance + module.eps))
        dims = [0, *range(2, x.ndim)]
        y, mean, variance, count = _normalize_over(x, dims, groups, module.eps)
        _track(module, mean, variance, count, channels)
        return _affine(module, y)

    return _cross_edges(compute, edges)


def _local_channels(statistic: Tensor | None, channels: Sequence[Group]) -> Tensor:
    """Return this rank's channels of a statistic; every rank tracks all channels."""
    assert statistic is not None
    for group in channels:
        statistic = local_shard(statistic, 0, group)
    return statistic


@torch.no_grad()
def _track(
    module: nn.modules.batchnorm._BatchNorm,
    mean: Tensor,
    variance: Tensor,
    count: int,
    channels: Sequence[Group],
) -> None:
    """Update the running statistics as torch's batch norm does."""
    if not (module.training and module.track_running_stats) or module.running_mean is None:
        return
    assert module.running_var is not None and module.num_batches_tracked is not None
    module.num_batches_tracked.add_(1)
    share: Any = module.momentum
    if share is None:
        share = 1.0 / module.num_batches_tracked.to(mean.dtype)
    statistics = torch.stack([mean.flatten(), variance.flatten() * (count / max(count - 1, 1))])
    for group in reversed(channels):
        statistics = all_gather(statistics, 1, group)
    module.running_mean.mul_(1 - share).add_(statistics[0] * share)
    module.running_var.mul_(1 - share).add_(statistics[1] * share)


def group_norm(module: nn.Module, kind: str, edges: tuple[Edge, ...]) -> Forward:
    """Return the forward of a group norm: over all ranks' positions, or of this rank's groups.

    Raises Refusal S402 if the ranks cannot split the groups evenly.
    """
    assert isinstance(module, nn.GroupNorm)
    groups = [edge.group for edge in edges if position_dim(edge) is not None]
    ranks = math.prod(edge.group.size for edge in edges if edge.input_after == S(CHANNELS))
    if module.num_groups % ranks:
        raise Refusal.of(
            "S402",
            f"cannot split {module.num_groups} groups evenly {ranks} ways",
            notes=(f"`{edges[0].group.label}` is a group norm",),
            facts=(("site", edges[0].group.label),),
        )

    def compute(x: Tensor) -> Tensor:
        grouped = x.view(x.shape[0], module.num_groups // ranks, -1, *x.shape[2:])
        y, *_ = _normalize_over(grouped, range(2, grouped.ndim), groups, module.eps)
        return _affine(module, y.view(x.shape))

    return _cross_edges(compute, edges)


def _cross_edges(compute: Any, edges: tuple[Edge, ...]) -> Forward:
    def forward(x: Tensor) -> Tensor:
        for edge in edges:
            x = edge.enter(x)
        y: Tensor = compute(x.contiguous())
        for edge in edges:
            y = edge.exit(y)
        return y

    return forward
