"""Which tensors differ from rank to rank, through one forward and backward on the meta device.

The types are those of spmd_types, one for each mesh axis: a tensor is alike on all ranks (I, R) or
varies (V), and a varying tensor that is summed has to be a pending sum (P).  Nothing here knows
what the plan thinks that its sums are: types follow from what parameters are split, what the batch
is split over, and which collectives the modules were heard to send.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from schedlang.runtime.collectives import collective, moving, total
from schedlang.runtime.collectives.collective import Group, listening
from schedlang.runtime.following.pending import Made, trouble
from schedlang.runtime.following.trace import Stack
from schedlang.runtime.logits import vocab
from schedlang.runtime.recording.torch_calls import name_of, tensors_in
from schedlang.runtime.sharding import cube, grid, split_norm
from schedlang.runtime.sharding.grid import InParts
from schedlang.runtime.summing import statistics

Axes = frozenset[str]
NONE: Axes = frozenset()
SUMS = ("all-reduce", "reduce-scatter")
# what these give still differs from rank to rank: every rank gets parts of others, for its own
MOVES = ("all-to-all", "shift", "broadcast", "reduce")
# the modules whose functions of autograd communicate
TALKING = (collective, cube, grid, moving, split_norm, statistics, total, vocab)


@dataclass(frozen=True)
class Fault:
    """One call whose types do not fit: where, over which axis, and why."""

    kind: str  # "type" or "sum"
    fqn: str
    axis: str
    reason: str


@dataclass(frozen=True)
class Heard:
    """One collective: its kind, its plain axes, and for whose sake."""

    kind: str
    axes: tuple[str, ...]
    label: str


@dataclass
class Crossed:
    """What a communicating function did: types before and after, collectives both ways.

    `settles` are axes over which it has to sum gradients itself: what it gives for an input that
    varies over one is then that input's own.
    """

    fqn: str
    before: Axes
    after: Axes
    back: list[Heard] = field(default_factory=list)
    settles: Axes = NONE


class Typed(TorchFunctionMode):
    """Runs beside one forward of the local model; types stand on the tensors themselves."""

    def __init__(self, stack: Stack, fold: Callable[[tuple[str, ...]], tuple[str, ...]]) -> None:
        super().__init__()
        self.stack, self.fold = stack, fold
        self.varying: dict[tuple[Any, int], Axes] = {}  # (node of autograd, output) -> axes
        self.sites: dict[Any, str] = {}  # node -> the module that ran
        self.faults: list[Fault] = []
        self.calls = 0
        self.sums = 0  # collectives in forward that wanted a pending sum
        self.heard: list[list[Heard]] = []  # one list for each function that is running

    # -- types -----------------------------------------------------------------------------------

    def varies(self, tensor: Tensor) -> Axes:
        """The axes along which a tensor differs from rank to rank."""
        known: Axes | None = tensor.__dict__.get("_schedlang_varies")
        if known is None and tensor.grad_fn is not None:
            return self.varies_at(tensor.grad_fn, tensor.output_nr)
        return known or NONE

    def varies_at(self, node: Any, output: int) -> Axes:
        """The same of an output of a node of autograd.

        A node that ran unseen, inside one call, varies where anything that it was given does.
        """
        at = (node, output)
        if at not in self.varying:
            crossed: Crossed | None = getattr(node, "schedlang", None)
            if hasattr(node, "variable"):
                self.varying[at] = node.variable.__dict__.get("_schedlang_varies", NONE)
            elif crossed is not None:
                self.varying[at] = crossed.after
            else:
                edges = (edge for edge in node.next_functions if edge[0] is not None)
                self.varying[at] = NONE.union(*(self.varies_at(*edge) for edge in edges))
        return self.varying[at]

    def put(self, tensor: Tensor, axes: Axes, made: Made | None = None) -> None:
        """Write the type of a tensor down, and how it was made if it varies."""
        tensor.__dict__["_schedlang_varies"] = axes
        tensor.__dict__["_schedlang_made"] = made if axes else None
        if tensor.grad_fn is not None:
            self.varying[tensor.grad_fn, tensor.output_nr] = axes
            self.sites.setdefault(tensor.grad_fn, self.site)

    @property
    def site(self) -> str:
        """The module that is running."""
        return self.stack.frames[-1][0]

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the call; what it makes varies where anything that it was given does."""
        kwargs = dict(kwargs or {})
        out, heard = self._listened(lambda: func(*args, **kwargs))
        outputs = tensors_in(out)
        if outputs:
            self.calls += 1
        if outputs and not heard:  # else its own nodes tell more, see `varies_at`
            inputs = tensors_in((args, kwargs))
            axes = NONE.union(*(self.varies(t) for t in inputs))
            made = Made(name_of(func), tuple(inputs)) if axes else None
            for tensor in outputs:
                written = any(tensor is given for given in inputs)
                if not written or (name_of(func).endswith("_") and axes - self.varies(tensor)):
                    self.put(tensor, axes, made)
        return out

    # -- functions that communicate ----------------------------------------------------------------

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch every function of the runtime that communicates, forward and backward."""
        found: list[tuple[Any, bool]] = [
            (kind, module is collective)
            for module in TALKING
            for kind in vars(module).values()
            if isinstance(kind, type) and issubclass(kind, torch.autograd.Function)
        ]
        before = [(kind, kind.forward, kind.backward) for kind, _ in found]
        try:
            for kind, plain in found:
                made = self._forward(kind.forward, plain)
                if issubclass(kind, InParts):
                    made = self._product(kind.forward, kind.summed)
                kind.forward = staticmethod(made)
                kind.backward = staticmethod(self._backward(kind.backward))
            with listening(self._listen):
                yield
        finally:
            for kind, forward, backward in before:
                kind.forward, kind.backward = staticmethod(forward), staticmethod(backward)

    def _listen(self, kind: str, group: Group, size: int) -> None:
        for running in self.heard if group.size > 1 else ():
            running.append(Heard(kind, self.fold(group.axes), group.label))

    def _listened(self, run: Callable[..., Any], *args: Any) -> tuple[Any, list[Heard]]:
        self.heard.append([])
        try:
            out = run(*args)
        finally:
            heard = self.heard.pop()
        return out, heard

    def _forward(self, inner: Callable[..., Any], plain: bool) -> Callable[..., Any]:
        def forward(ctx: Any, *args: Any) -> Any:
            out, heard = self._listened(inner, ctx, *args)
            given = tensors_in(args)
            before = NONE.union(*(self.varies(t) for t in given))
            after = self._after(given[0], before, tensors_in(out)[0], args, heard, plain)
            ctx.schedlang = Crossed(self.site, before, after)
            # a plain sum over one axis leaves what is pending over another so
            linear = (*MOVES, "all-reduce", "reduce-scatter") if plain else MOVES
            moved = bool(heard) and all(one.kind in linear for one in heard)
            made = Made("moved", tuple(given)) if moved else Made("collective", ())
            for tensor in tensors_in(out):
                tensor.__dict__["_schedlang_varies"] = after
                tensor.__dict__["_schedlang_made"] = made if after else None
            return out

        return forward

    def _product(
        self, inner: Callable[..., Any], summed: Callable[[Any], tuple[Group, ...]]
    ) -> Callable[..., Any]:
        """A product in parts sums over the dim that its factors share, and all else varies on."""

        def forward(ctx: Any, x: Tensor, weight: Tensor, *args: Any) -> Any:
            out, _ = self._listened(inner, ctx, x, weight, *args)
            shared = frozenset(self.fold(args[0].down.axes))
            after = self.varies(x) | (self.varies(weight) - shared)
            due = frozenset(a for g in summed(ctx) for a in self.fold(g.axes))
            ctx.schedlang = Crossed(self.site, self.varies(x), after, settles=due)
            out.__dict__["_schedlang_varies"] = after
            out.__dict__["_schedlang_made"] = Made("collective", ()) if after else None
            return out

        return forward

    def _after(
        self, x: Tensor, before: Axes, out: Tensor, args: Any, heard: list[Heard], plain: bool
    ) -> Axes:
        """The type of what a communicating function gives."""
        after = before
        for one in heard:
            for axis in one.axes:
                if one.kind in SUMS:
                    self._summed(x, before, axis, one, plain)
                if one.kind not in ("reduce-scatter", *MOVES):
                    after -= {axis}
        if not heard and plain and out.shape != x.shape:  # every rank keeps a part of its own
            groups = (a for a in args if isinstance(a, Group))
            after |= {axis for group in groups for axis in self.fold(group.axes)}
        return after

    def _summed(self, x: Tensor, before: Axes, axis: str, one: Heard, plain: bool) -> None:
        self.sums += 1
        fqn = one.label or self.site
        if axis not in before:
            reason = f"its {one.kind} sums what is alike on all ranks of `{axis}`"
            self.faults.append(Fault("sum", fqn, axis, reason))
        elif plain:
            wrong = trouble(x, axis, self.varies)
            if wrong is not None:
                self.faults.append(Fault("type", fqn, axis, wrong))

    def _backward(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def backward(ctx: Any, *grads: Any) -> Any:
            out, heard = self._listened(inner, ctx, *grads)
            if hasattr(ctx, "schedlang"):
                ctx.schedlang.back.extend(heard)
            return out

        return backward
