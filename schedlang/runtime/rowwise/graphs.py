"""The ATen graphs of a function of tensors, forward and backward; what is kept between them.

torch's own tracing gives one joint graph, and its min-cut partition decides what forward keeps and
what backward computes again.  This is the one file that touches them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import RLock
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_lock = RLock()  # tracing changes state of the whole process while it lasts


@dataclass(frozen=True)
class Sort:
    """What a kernel is made for: shape and type of one tensor, and whether it is differentiated."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    wanted: bool = False


@dataclass(frozen=True)
class Graphs:
    """Forward and backward of one function of tensors for one set of shapes.

    forward    from what is given to (results ..., what else is kept ...)
    backward   from (what is kept ..., gradients of the results ...) to gradients of what is given,
               None for what is not differentiated; None as a whole where nothing is
    results    how many there are
    """

    forward: fx.Graph
    backward: fx.Graph | None
    results: int


def sorts_of(given: Sequence[Tensor], wanted: Sequence[bool]) -> tuple[Sort, ...]:
    """What tensors are, as a key."""
    return tuple(
        Sort(tuple(int(n) for n in t.shape), t.dtype, t.device.type, asked)
        for t, asked in zip(given, wanted, strict=True)
    )


def graphs(function: Callable[..., Any], given: Sequence[Sort]) -> Graphs:
    """Both graphs of a function; whatever torch cannot trace is raised as torch raises it.

    It is traced in a thread of its own, where none of the modes hold that may hold here: those of
    a verification, or of a compiler that looks at the operator.
    """
    with ThreadPoolExecutor(1) as alone:
        return alone.submit(_traced, function, given).result()


def _traced(function: Callable[..., Any], given: Sequence[Sort]) -> Graphs:
    from torch._functorch.aot_autograd import aot_export_joint_simple
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses import FakeTensorMode

    count = [0]

    def flat(*values: Tensor) -> tuple[Tensor, ...]:
        made = function(*values)
        found = tuple(made) if isinstance(made, tuple | list) else (made,)
        count[0] = len(found)
        return found

    with _lock, FakeTensorMode(), _Once():
        inputs = tuple(
            torch.empty(s.shape, dtype=s.dtype, device=s.device).requires_grad_(s.wanted)
            for s in given
        )
        both = any(s.wanted for s in given)
        joint: Any = aot_export_joint_simple(
            flat, inputs, trace_joint=both, decompositions=select_decomp_table()
        )
        if not both:
            return Graphs(joint.graph, None, count[0])
        forward, backward = min_cut_rematerialization_partition(
            joint, list(inputs), num_fwd_outputs=count[0]
        )
    return Graphs(forward.graph, backward.graph, count[0])


class _Silu(torch.autograd.Function):
    """SiLU in float32, rounded once, as torch's own kernels compute it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """x / (1 + exp(-x))."""
        ctx.save_for_backward(x)
        value = x.to(torch.promote_types(x.dtype, torch.float32))
        return (value / (1 + torch.exp(-value))).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Its derivative, in torch's order of products."""
        (x,) = ctx.saved_tensors
        value = x.to(torch.promote_types(x.dtype, torch.float32))
        slope = 1 / (1 + torch.exp(-value))
        made: Tensor = (grad.to(value.dtype) * slope * (1 + value * (1 - slope))).to(x.dtype)
        return made


class _Once(TorchFunctionMode):
    """Puts `_Silu` for SiLU, whose derivative is traced as steps that are rounded one by one."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the call."""
        named = dict(kwargs or {})
        if func in (F.silu, torch._C._nn.silu) and not named.get("inplace") and len(args) == 1:
            return _Silu.apply(args[0])  # type: ignore[no-untyped-call]
        return func(*args, **named)
