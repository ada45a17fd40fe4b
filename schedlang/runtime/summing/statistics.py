"""Statistics of the whole batch in a forward that sees a part of it: sums over rows become global.

What a part would sum if it were a fair sample is its share of the sum over all parts: for a part
of m elements of M, m / M times that.  So whatever is divided by a count of rows, be that a tensor
or a plain number, comes out as of the whole batch, alike on all ranks.  Backward sums gradients
likewise, because the loss of every part depends on the rows of every other one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from schedlang.diagnostic import Diagnostic, Refusal
from schedlang.runtime import scope
from schedlang.runtime.collectives.collective import Group
from schedlang.runtime.collectives.total import summed
from schedlang.runtime.recording.torch_calls import name_of, tensors_in
from schedlang.runtime.summing.batch_sums import MEANS, SUMS, BatchSum

Total = Callable[[Tensor], Tensor]  # the sum over all parts, forward and backward


@dataclass(frozen=True)
class Statistics:
    """The sums of one model that are those of the whole batch, over the ranks that share it."""

    sums: tuple[BatchSum, ...]
    group: Group


def over(group: Group) -> Total:
    """The sum over a group of ranks, of what varies with their rows."""
    return partial(summed, group=group)


class Meeting:
    """Threads of one process that sum what each of them has, in the same order on all."""

    def __init__(self, parts: int) -> None:
        self.barrier = threading.Barrier(parts, timeout=600)  # seconds
        self.held: list[Tensor | None] = [None] * parts

    def at(self, place: int) -> Total:
        """The sum, as the thread at a place asks for it."""

        def total(x: Tensor) -> Tensor:
            out: Tensor = _Met.apply(x, self, place)  # type: ignore[no-untyped-call]
            return out

        return total

    def sum(self, x: Tensor, place: int) -> Tensor:
        """Wait for all, and sum."""
        self.held[place] = x.detach()
        self.barrier.wait()
        found = torch.stack([one for one in self.held if one is not None]).sum(0)
        self.barrier.wait()
        return found


class _Met(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, meeting: Meeting, place: int) -> Tensor:
        ctx.meeting, ctx.place = meeting, place
        return meeting.sum(x, place)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.meeting.sum(grads[0], ctx.place), None, None


def gather_statistics(model: nn.Module, sums: Sequence[BatchSum], total: Total) -> None:
    """Let the forward of a model sum over all parts where these sums are made."""
    scope.named_sites(model)
    model.forward = _Sharing(model, sums, total)


class _Sharing:
    """The forward of such a model; a copy of the model has one of its own."""

    def __init__(self, model: nn.Module, sums: Sequence[BatchSum], total: Total) -> None:
        self.inner, self.total = model.forward, total
        self.places = {(one.fqn, one.name, one.turn): one for one in sums}
        self.modules = {one.fqn: model.get_submodule(one.fqn) for one in sums}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        known = {id(module): fqn for fqn, module in self.modules.items()}
        with _Global(self.places, known, self.total):
            return self.inner(*args, **kwargs)


class _Global(TorchFunctionMode):
    """One forward: counts the calls of the modules that sum over rows, and makes those sums."""

    def __init__(
        self, places: dict[tuple[str, str, int], BatchSum], known: dict[int, str], total: Total
    ) -> None:
        super().__init__()
        self.places, self.known, self.total = places, known, total
        self.turns: dict[tuple[str, str], int] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        fqn, name = self.known.get(scope.innermost()), name_of(func)
        if fqn is None or not (name in SUMS or name in MEANS):
            return out
        at = fqn, name
        turn = self.turns[at] = self.turns.get(at, -1) + 1
        one = self.places.get((fqn, name, turn))
        if one is None:
            return out
        if not isinstance(out, Tensor) or tuple(out.shape) != one.shape:
            raise Refusal(_other(one))
        return self._whole(out, tensors_in((args, kwargs))[one.given], one)

    def _whole(self, own: Tensor, given: Tensor, one: BatchSum) -> Tensor:
        """This part's share of the sum over all parts; of a mean the mean over all."""
        count = given.numel()
        counts = not own.is_floating_point()
        narrow = own.dtype in (torch.float16, torch.bfloat16)
        wide = own.double() if counts else own.float() if narrow else own
        told = torch.cat(
            [(wide * count if one.mean else wide).flatten(), wide.new_full((1,), count)]
        )
        total = self.total(told)
        found = (total[:-1] / total[-1]).view(own.shape)
        found = found if one.mean else found * count
        found = found.to(torch.get_default_dtype() if counts else own.dtype)
        return own.copy_(found) if one.name.endswith("_") else found


def _other(one: BatchSum) -> Diagnostic:
    """A forward that takes another way than the one that was followed."""
    where = f"`{one.fqn}`" if one.fqn else "the model"
    return Diagnostic(
        "S669", f"`{one.name}` in the forward of {where} is not the sum that was recorded there",
        notes=("statistics are summed over ranks at the calls recorded at build",),
        helps=("let the model make the same calls for every batch",
               "or allow statistics of each part: `step \"...\" relax(batch_stats) {`"),
    )  # fmt: skip
