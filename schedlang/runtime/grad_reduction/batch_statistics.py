"""Sums over all rows of a batch inside a model, made global over ranks.

`propagation.batch_sums` finds them; `gather_statistics` makes a forward sum over all parts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal
from schedlang.ir.model import quote_module
from schedlang.runtime import scope
from schedlang.runtime.batch import loss_of
from schedlang.runtime.comm.collectives import Group, sum_over_ranks
from schedlang.runtime.forward import layer_of
from schedlang.runtime.label_means import LabelMeans
from schedlang.runtime.modes import enter_modes
from schedlang.runtime.propagation.batch_sums import MEANS, SUMS, BatchSum
from schedlang.runtime.propagation.call_rules import ADDS, TIMES
from schedlang.runtime.tracing.meta_runs import name_of, tensors_in

# ---- Statistics of the full batch in a forward that sees a part of it: sums over rows become
# global.
# A part gets its share of the sum over all parts: for a part of m elements of M, m / M times that
# sum. So a quotient by a count of rows, tensor or plain number, is that of the full batch, equal on
# all ranks. Backward sums gradients in the same way, because the loss of every part depends on the
# rows of every other one.


Total = Callable[[Tensor], Tensor]  # the sum over all parts, forward and backward


@dataclass(frozen=True)
class BatchStatistics:
    """The sums of one model that are taken over the full batch, and the group that shares it.

    gathered  modules whose output's rows are all-gathered over the group
    """

    sums: tuple[BatchSum, ...]
    group: Group
    gathered: tuple[str, ...] = ()


def sum_over(group: Group) -> Total:
    """Return the sum over a group of ranks, of values that vary with their rows."""
    return partial(sum_over_ranks, group=group)


class ThreadSum:
    """A sum over threads of one process, which must call in the same order, and as often.

    Raises Refusal S669 in threads that would wait for one that has ended, and in a backward that
    goes through another thread's forward.
    """

    def __init__(self, parts: int) -> None:
        self.barrier = threading.Barrier(parts, timeout=600)  # seconds
        self.held: list[Tensor | None] = [None] * parts
        self._lock = threading.Lock()
        self._begun = [0] * parts  # sums that each thread has begun
        self._limit: int | None = None  # fewest sums of a thread that has ended
        self._places: dict[int, int] = {}  # of threads, by their identifiers

    def end(self, index: int) -> None:
        """Note that the thread at a place makes no more sums."""
        with self._lock:
            begun = self._begun[index]
            self._limit = begun if self._limit is None else min(begun, self._limit)
            if max(self._begun) > self._limit:
                self.barrier.abort()

    def sum_at(self, index: int) -> Total:
        """Return the sum function of this thread, at a place."""
        self._places[threading.get_ident()] = index

        def total(x: Tensor) -> Tensor:
            value: Tensor = _ThreadSumFunction.apply(x, self, index)  # type: ignore[no-untyped-call]
            return value

        return total

    def sum(self, x: Tensor, index: int) -> Tensor:
        """Wait for all threads, and return the sum."""
        with self._lock:
            self._begun[index] += 1
            beyond = self._limit is not None and self._begun[index] > self._limit
            if beyond or self._places.get(threading.get_ident(), index) != index:
                self.barrier.abort()
        self.held[index] = x.detach()
        try:
            self.barrier.wait()
            total = torch.stack([part for part in self.held if part is not None]).sum(0)
            self.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise Refusal(UNEQUAL_SUMS) from error
        return total


class _ThreadSumFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, thread_sum: ThreadSum, index: int) -> Tensor:
        ctx.meeting, ctx.place = thread_sum, index
        return thread_sum.sum(x, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.meeting.sum(grads[0], ctx.place), None, None


def gather_statistics(model: nn.Module, sums: Sequence[BatchSum], total: Total) -> None:
    """Let the forward of a model sum over all parts at these sums."""
    scope.named_sites(model)
    model.forward = _GlobalSumForward(model, sums, total)


class _GlobalSumForward:
    """The forward of such a model; a copy of the model has its own."""

    def __init__(self, model: nn.Module, sums: Sequence[BatchSum], total: Total) -> None:
        self.inner, self.total = model.forward, total
        self.places = {(item.fqn, item.name, item.turn): item for item in sums}
        self.modules = {item.fqn: model.get_submodule(item.fqn) for item in sums}
        above = {fqn[:end] for fqn in self.modules for end, c in enumerate(fqn) if c == "."}
        self.around = [model.get_submodule(fqn) for fqn in sorted({"", *above, *self.modules})]
        floats = (item.dtype for item in model.parameters() if item.is_floating_point())
        self.dtype = next(floats, torch.get_default_dtype())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.around:
            _run_eagerly(self.around, "it sums over the rows of all ranks")
            self.around = []
        module_names = {id(module): fqn for fqn, module in self.modules.items()}
        # a recomputation enters the mode again, and sums over ranks again
        with enter_modes(_GlobalSumMode(self.places, module_names, self.total, self.dtype)):
            return self.inner(*args, **kwargs)


def watch_losses(model: nn.Module, means: LabelMeans) -> None:
    """Let the losses of a model be seen by name, and not be compiled, to weigh their means."""
    fqns = {fqn for fqn, _ in means.calls}
    if fqns != {""}:
        scope.named_sites(model)
    above = {fqn[:end] for fqn in fqns for end, c in enumerate(fqn) if c == "."}
    modules = [model.get_submodule(fqn) for fqn in ("", *above, *fqns)]
    _run_eagerly(modules, "each of its losses is weighted by its own labels")


def _run_eagerly(modules: Sequence[nn.Module], reason: str) -> None:
    """Run modules eagerly whose calls are replaced: no compiled graph contains these."""
    from schedlang.runtime.fusion.fuse import FusedForward, FusedRegions

    for module in modules:
        layer = layer_of(module, "fuse")
        if isinstance(layer, FusedForward | FusedRegions):
            layer.eager = reason


class _GlobalSumMode(TorchFunctionMode):
    """A mode for one forward: counts the calls of modules, and makes the recorded sums global."""

    model_calls = True

    def __init__(
        self,
        sums: dict[tuple[str, str, int], BatchSum],
        module_names: dict[int, str],
        total: Total,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.places, self.known, self.total = sums, module_names, total
        # of shares of counts: float64 beside parameters in float64
        self.dtype = torch.promote_types(torch.get_default_dtype(), dtype)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, name_of(func)
        fraction = _fraction(args[0]) if args else None
        keeps_fraction = fraction is not None and _keeps_fraction(name, args)
        if fraction is not None and name in (BOUNDS | ADDS):
            args, kwargs = (_scale_numbers(batch_sum, fraction) for batch_sum in (args, kwargs))
        out = func(*args, **kwargs)
        if keeps_fraction:
            setattr(out, FRACTION, fraction)
        fqn = self.known.get(scope.innermost_module())
        if fqn is None or not (name in SUMS or name in MEANS):
            return out
        call_index = scope.count_call(f"{fqn}: {name}")  # as in the forward, in a recomputation
        batch_sum = self.places.get((fqn, name, call_index))
        if batch_sum is None:
            return out
        if not isinstance(out, Tensor) or tuple(out.shape) != batch_sum.shape:
            raise Refusal(_changed_forward(batch_sum))
        return self._global_share(out, tensors_in((args, kwargs))[batch_sum.given], batch_sum)

    def _global_share(self, local: Tensor, tensor: Tensor, batch_sum: BatchSum) -> Tensor:
        """Return this part's share of the sum over all parts; for a mean, the global mean."""
        count = tensor.numel()
        counts = not local.is_floating_point()
        narrow = local.dtype in (torch.float16, torch.bfloat16)
        wide = local.double() if counts else local.float() if narrow else local
        message = torch.cat(
            [(wide * count if batch_sum.mean else wide).flatten(), wide.new_full((1,), count)]
        )
        total = self.total(message)
        share = (total[:-1] / total[-1]).view(local.shape)
        share = share if batch_sum.mean else share * count
        share = share.to(self.dtype if counts else local.dtype)
        share = local.copy_(share) if batch_sum.name.endswith("_") else share
        if not batch_sum.mean:
            setattr(share, FRACTION, (count / total[-1]).to(share.dtype))
        return share


# A number that is added to a share of a sum, or bounds it, must be multiplied by the fraction of
# the share: as in `(2 * common + 1) / (a + b + 1)`, or `total / count.clamp(min=1)`.

FRACTION = "_schedlang_fraction"  # attribute of a tensor: its fraction of a sum over all parts
BOUNDS = {"clamp", "clamp_", "clamp_min", "clamp_min_", "clamp_max", "clip"}
PRESERVING = {
    *("to", "float", "double", "type", "view", "reshape", "squeeze", "unsqueeze", "clone", "sum"),
    *("contiguous", "neg", "__neg__", "__getitem__", "flatten", "expand", "detach"),
}


def _fraction(value: Any) -> Tensor | None:
    """Return the fraction that a tensor is of a sum over all parts; None for other values."""
    fraction = value.__dict__.get(FRACTION) if isinstance(value, Tensor) else None
    assert fraction is None or isinstance(fraction, Tensor)
    return fraction


def _scale_numbers(values: Any, fraction: Tensor) -> Any:
    """Return the arguments of a call with plain numbers multiplied by the fraction."""
    if isinstance(values, dict):
        return {k: v if k == "alpha" else _scale_numbers(v, fraction) for k, v in values.items()}
    if isinstance(values, tuple):
        return tuple(_scale_numbers(value, fraction) for value in values)
    number = isinstance(values, int | float) and not isinstance(values, bool)
    return values * fraction if number else values


def _keeps_fraction(name: str, args: tuple[Any, ...]) -> bool:
    """Return whether the result of a call of such a share is one, too."""
    values = [value for value in args[1:] if isinstance(value, Tensor | float | int)]
    if name in TIMES:  # a constant, or 1 / rows?  An integer is no such quotient
        return all(isinstance(value, int) for value in values)
    shares = all(_fraction(value) is not None or not isinstance(value, Tensor) for value in values)
    return name in PRESERVING or name in BOUNDS or name in ADDS and shares


def _changed_forward(recorded: BatchSum) -> Diagnostic:
    """Return the diagnostic for a forward that differs from the recorded one."""
    return Diagnostic(
        "S669",
        f"`{recorded.name}` in the forward of {quote_module(recorded.fqn)} is not the sum that was"
        " recorded there",
        notes=("statistics are summed over ranks at the calls recorded at build",),
        helps=_SAME_SUMS,
    )


_SAME_SUMS = (
    "let the model make the same calls for every batch",
    'or allow statistics of each part: `step "..." relax(batch_stats) {`',
)
UNEQUAL_SUMS = Diagnostic(
    "S669",
    "parts of the batch, run together, do not use the same sums over the batch",
    notes=("they share what a forward keeps in a global list: the check runs them in one process",),
    helps=("let modules return such values, or keep them as attributes", *_SAME_SUMS),
)


# ---- A scaled loss, to train as with a loss scale.


@dataclass(frozen=True)
class ScaledLoss:
    """The model's loss, or `loss(output, batch)`, times `factor`; None without a loss."""

    loss: Callable[[Any, Mapping[str, Any]], Tensor] | None
    factor: float

    def __call__(self, output: Any, batch: Mapping[str, Any]) -> Tensor | None:
        value = loss_of(output, batch, self.loss)
        return None if value is None else value * self.factor
