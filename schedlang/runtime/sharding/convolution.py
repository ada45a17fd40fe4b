"""Convolutions and pools whose channels or positions are split over ranks, with halo exchange."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal
from schedlang.ir.placement import P, S
from schedlang.runtime.comm.collectives import Group, exchange_rows
from schedlang.runtime.sharding.edges import Edge, Forward, dim_of


def exchange_halo(
    x: Tensor, dim: int, before: int, after: int, group: Group, fill: float = 0.0
) -> Tensor:
    """Return this rank's shard along `dim` with rows of its neighbours around it.

    The last `before` rows of the previous rank are in front, the first `after` rows
    of the next rank behind; a negative `after` removes rows of the shard.  At both ends of
    the full tensor the halo is `fill`.  Gradients of exchanged rows are added to those of their
    owner, by the backward of the exchange and of the concatenation.
    Dryden et al. (2019), Hy-Fi (2022): spatial parallelism with halo exchange.
    """
    rows = x.movedim(dim, 0)
    size, rank, last = rows.shape[0], group.rank, group.size - 1
    lent = max(after, 0)
    assert before <= size and lent <= size, "a halo reaches beyond the neighbours"
    if before or lent:
        sends, receives = [0] * group.size, [0] * group.size
        parts = []
        if rank > 0:
            sends[rank - 1], receives[rank - 1] = lent, before
            parts.append(rows[:lent])
        if rank < last:
            sends[rank + 1], receives[rank + 1] = before, lent
            parts.append(rows[size - before :])
        received = exchange_rows(torch.cat(parts), group, sends, receives)
        leading = received[:before] if rank > 0 else rows.new_full((before, *rows.shape[1:]), fill)
        trailing = received[received.shape[0] - lent :] if rank < last else None
        if trailing is None:
            trailing = rows.new_full((lent, *rows.shape[1:]), fill)
        rows = torch.cat([leading, rows, trailing])
    if after < 0:
        rows = rows[:after]
    return rows.movedim(0, dim)


CONVOLUTIONS: Mapping[str, Callable[..., Tensor]] = {
    "Conv1d": F.conv1d,
    "Conv2d": F.conv2d,
    "Conv3d": F.conv3d,
}
CHANNELS = 1  # the dim of an activation, [batch, channels, positions...], that holds channels


@dataclass(frozen=True)
class Window:
    """The window of a convolution or pool along one dim: the input rows of one output position."""

    kernel: int
    stride: int
    dilation: int
    padding_before: int  # padding in front
    padding_behind: int  # padding at the end

    @property
    def halo_after(self) -> int:
        """The rows that a shard needs of the next rank; negative if its last rows are not used."""
        return self.dilation * (self.kernel - 1) - self.stride + 1 - self.padding_before

    def fits(self, rows: int) -> bool:
        """Return whether shards of `rows` rows give the full outputs with one neighbour's rows."""
        reach = max(self.padding_before, self.halo_after)
        return rows % self.stride == 0 and reach <= rows and self.has_even_outputs(rows)

    def has_even_outputs(self, rows: int) -> bool:
        """Return whether the full tensor gives one output for each `stride` rows, as shards do."""
        return 0 <= self.padding_behind - self.halo_after < self.stride and rows > 0


def windows_of(module: nn.Module) -> tuple[Window, ...]:
    """Return the windows of a convolution or pool, one for each dim of positions."""
    dims = int(count_position_dims(module))
    kernel, stride = _each(module.kernel_size, dims), _each(module.stride, dims)
    dilation = _each(getattr(module, "dilation", 1), dims)
    return tuple(
        Window(k, s, d, *_padding(module, k, d, index))
        for index, (k, s, d) in enumerate(zip(kernel, stride, dilation))
    )


def count_position_dims(module: nn.Module) -> int:
    """Return the number of position dims of a convolution or pool, from its class in torch."""
    names = [kind.__name__ for kind in type(module).__mro__]
    return next(int(name[-2]) for name in names if name[-2:] in ("1d", "2d", "3d"))


def _each(value: Any, dims: int) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (int(value),) * dims


def _padding(module: nn.Module, kernel: int, dilation: int, index: int) -> tuple[int, int]:
    padding: Any = module.padding
    if padding == "valid":
        return 0, 0
    if padding == "same":
        total = dilation * (kernel - 1)
        return total // 2, total - total // 2
    size = padding[index] if isinstance(padding, tuple | list) else padding
    return int(size), int(size)


def convolution(module: nn.Module, kind: str, edges: tuple[Edge, ...]) -> Forward:
    """Return the forward of a sharded convolution.

    It enters, exchanges halos, convolves, reduces, adds the bias once, and exits.
    """
    sums = [edge for edge in edges if isinstance(edge.output_before, P)]
    pending = bool(sums)
    compute = CONVOLUTIONS[kind]
    spatial = {dim: edge for edge in edges if (dim := position_dim(edge)) is not None}

    def forward(x: Tensor) -> Tensor:
        for edge in edges:
            x = edge.enter(x)
        weight = module._parameters["weight"]
        assert weight is not None
        check_windows(module, x, spatial)
        x = _padded(module, x, spatial, 0.0)
        bias = None if pending else module._parameters.get("bias")
        groups = x.shape[CHANNELS] // weight.shape[1]
        y = compute(x, weight, bias, module.stride, 0, module.dilation, groups)
        for edge in sums:
            y = edge.exit(y)
        late = module._parameters.get("bias") if pending else None
        if late is not None:  # before positions are gathered: its gradient is of local positions
            y = y + late.view(-1, *(1,) * (y.ndim - 2))
        for edge in edges:
            y = y if edge in sums else edge.exit(y)
        return y

    return forward


def position_dim(edge: Edge) -> int | None:
    """Return the dim of positions that an edge splits; None if it splits none."""
    if not isinstance(edge.input_after, S) or dim_of(edge.input_after) <= CHANNELS:
        return None
    return dim_of(edge.input_after)


def check_windows(module: nn.Module, x: Tensor, spatial: Mapping[int, Edge]) -> None:
    """Refuse shards that do not fit the windows (S419), on all ranks, before any communication."""
    windows = windows_of(module)
    for dim, edge in spatial.items():
        window, rows, ranks = windows[dim - 2], x.shape[dim], edge.group.size
        if not window.fits(rows):
            raise Refusal(_misfit(edge.group.label, dim, window, rows, ranks))


def _misfit(fqn: str, dim: int, window: Window, rows: int, ranks: int) -> Diagnostic:
    reach = max(window.padding_before, window.halo_after)
    wants = f"shards of at least {max(reach, 1)}, a multiple of {window.stride}"
    if not window.has_even_outputs(max(rows, 1)):
        wants = f"a padding of {window.dilation * (window.kernel - 1) // 2}"
    return Diagnostic(
        "S419",
        f"dim {dim} of `{fqn}` cannot be split over {ranks} ranks",
        notes=(
            f"each rank has {rows} of {rows * ranks} positions",
            f"its kernel of {window.kernel} with stride {window.stride} and padding"
            f" {window.padding_before} needs {wants}",
        ),
        helps=(f"gather its input: `output=R` on the row of the module before `{fqn}`",),
        facts=(("site", fqn),),
    )


def _padded(module: nn.Module, x: Tensor, spatial: Mapping[int, Edge], fill: float) -> Tensor:
    """Return the input with its padding, or with halos along split dims."""
    sides: list[int] = []
    for index, window in reversed(list(enumerate(windows_of(module)))):
        dim = index + 2
        if dim in spatial:
            x = exchange_halo(
                x, dim, window.padding_before, window.halo_after, spatial[dim].group, fill
            )
        sides += [0, 0] if dim in spatial else [window.padding_before, window.padding_behind]
    if not any(sides):
        return x
    mode = getattr(module, "padding_mode", "zeros")
    if mode == "zeros":
        return F.pad(x, sides, value=fill)
    return F.pad(x, sides, mode=mode)


POOLS: Mapping[str, Callable[..., Tensor]] = {
    "MaxPool1d": F.max_pool1d,
    "MaxPool2d": F.max_pool2d,
    "MaxPool3d": F.max_pool3d,
    "AvgPool1d": F.avg_pool1d,
    "AvgPool2d": F.avg_pool2d,
    "AvgPool3d": F.avg_pool3d,
}


def pool(module: nn.Module, kind: str, edges: tuple[Edge, ...]) -> Forward:
    """Return the forward of a pool over split positions, with halo exchange."""
    spatial = {dim: edge for edge in edges if (dim := position_dim(edge)) is not None}
    greatest = kind.startswith("Max")

    def forward(x: Tensor) -> Tensor:
        for edge in edges:
            x = edge.enter(x)
        check_windows(module, x, spatial)
        x = _padded(module, x, spatial, -torch.inf if greatest else 0.0)
        options = (0, module.dilation) if greatest else ()
        y = POOLS[kind](x, module.kernel_size, module.stride, *options)
        for edge in edges:
            y = edge.exit(y)
        return y

    return forward
