"""Derive which tensors differ by rank through forward and backward, and what each gradient is.

* Which tensors differ from rank to rank, through one forward and backward on the meta device. The
  types are those of spmd_types, one for each mesh axis: a tensor is alike on all ranks (I, R) or
  varies (V), and a varying tensor that is summed has to be a pending sum (P).  Nothing here knows
  what the plan thinks that its sums are: types follow from what parameters are split, what the
  batch is split over, and which collectives the modules were heard to send.
* Is a tensor a pending sum: is the whole the sum of what the ranks hold of it? Asked backward
  from where it is summed, to where parts were multiplied: between the two only linear operations
  may stand (P of spmd_types goes through linear operations only).
* The types of a forward, call by call.
* What each gradient is, axis by axis: whole on every rank, a part of a sum, or summed too often.
  A walk over the graph that autograd made of one forward of the local model, in the order of the
  backward, with the types that the forward had and the collectives that the backward was heard to
  send.  A gradient is a linear function of the one behind it, so along an axis it stays what it
  was, except where a tensor that is alike on all ranks meets one that varies: there it becomes a
  part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from schedlang.runtime.comm import collectives
from schedlang.runtime.comm.collectives import Group, listening
from schedlang.runtime.grad_reduction import batch_statistics
from schedlang.runtime.lazy_logits import vocab_parallel
from schedlang.runtime.propagation.call_rules import ADDS, BIASED, LINEAR, SUMMING, TIMES
from schedlang.runtime.propagation.trace import Lattice, Running, Stack
from schedlang.runtime.sharding import grid, norms
from schedlang.runtime.sharding.grid import InParts
from schedlang.runtime.tracing.meta import tensors_in

Axes = frozenset[str]
Varies = Callable[[Tensor], Axes]
NONE: Axes = frozenset()
SUMS = ("all-reduce", "reduce-scatter")
# what these give still differs from rank to rank: every rank gets parts of others, for its own
MOVES = ("all-to-all", "shift", "broadcast", "reduce")
# the modules whose functions of autograd communicate
TALKING = (collectives, grid, norms, batch_statistics, vocab_parallel)


@dataclass(frozen=True)
class Fault:
    """One call whose types do not fit: where, over which axis, and why.

    kind   "type": no pending sum is summed; "missing": a sum; "often": what is whole is summed
    """

    kind: str
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
    """Record of a communicating function: types before and after it, collectives both ways.

    `settles` are axes over which it has to sum gradients itself: what it gives for an input that
    varies over one is then that input's own.
    """

    fqn: str
    before: Axes
    after: Axes
    back: list[Heard] = field(default_factory=list)
    settles: Axes = NONE


@dataclass(frozen=True)
class Made:
    """Record of how a tensor was made: the function, and its input tensors."""

    name: str
    inputs: tuple[Tensor, ...]


def is_masked(tensor: Tensor) -> bool:
    """Return whether a tensor is a product with a mask, as noted by `note_mask`."""
    return "_schedlang_masked" in tensor.__dict__


def note_mask(name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """Note on what a call makes that a factor of it is a mask."""
    if name in TIMES and any(t.dtype == torch.bool or is_masked(t) for t in inputs):
        for tensor in outputs:
            tensor.__dict__["_schedlang_masked"] = True


def trouble(tensor: Tensor, axis: str, varies: Varies) -> str | None:
    """Return why a tensor that varies along an axis is no partial sum over it; None if it is
    one."""
    open_, seen = [tensor], set()
    while open_:
        one = open_.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        made: Made | None = one.__dict__.get("_schedlang_made")
        if made is None:
            return f"a shard is summed over `{axis}`, as if it were a partial sum"
        found = _step(made, axis, varies)
        if isinstance(found, str):
            return found
        open_ += found
    return None


def _step(made: Made, axis: str, varies: Varies) -> list[Tensor] | str:
    """The inputs that have to be pending sums for the result to be one, or why it is not."""
    parts = [t for t in made.inputs if axis in varies(t)]
    alike = [t for t in made.inputs if axis not in varies(t)]
    if made.name in SUMMING:
        place = BIASED.get(made.name)
        bias = made.inputs[place] if place is not None and len(made.inputs) == 3 else None
        if bias is not None and axis not in varies(bias):
            return f"`{made.name}` adds its bias on each rank of `{axis}`, before the sum"
        return parts if len(parts) < 2 else []
    if made.name in TIMES:
        masked = any(t.dtype == torch.bool for t in made.inputs)  # each rank keeps what it holds
        return parts if len(parts) == 1 and not masked else []
    if made.name in ADDS:
        if alike:
            return (
                f"`{made.name}` adds a replicated tensor on every rank of `{axis}` before the sum"
            )
        return parts
    if made.name == "index_add":  # onto zeros, wherever: each rank has places of its own
        return [t for t in parts if t is not made.inputs[0] and t.is_floating_point()]
    if made.name in LINEAR:
        return parts
    if made.name == "embedding_bag":  # entries of other ranks' rows must weigh nothing
        floats = [t for t in made.inputs if t.is_floating_point()]
        if len(floats) == 2 and is_masked(floats[1]):
            return []
        return f"each rank of `{axis}` adds up rows, even for ids that it does not hold"
    if made.name == "embedding":
        return f"each rank of `{axis}` looks up a row, even for ids that it does not hold"
    return f"`{made.name}` is not linear, and runs before the sum over `{axis}`"


class Typed(Lattice):
    """The axes along which each tensor of the local model differs from rank to rank."""

    mark = "_schedlang_varies"

    def __init__(self, stack: Stack, fold: Callable[[tuple[str, ...]], tuple[str, ...]]) -> None:
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
        known: Axes | None = self.of(tensor)
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
                self.varying[at] = self.of(node.variable) or NONE
            elif crossed is not None:
                self.varying[at] = crossed.after
            else:
                edges = (edge for edge in node.next_functions if edge[0] is not None)
                self.varying[at] = NONE.union(*(self.varies_at(*edge) for edge in edges))
        return self.varying[at]

    def type(self, tensor: Tensor, axes: Axes, made: Made | None = None) -> None:
        """Write the type of a tensor down, and how it was made if it varies."""
        self.put(tensor, axes)
        tensor.__dict__["_schedlang_made"] = made if axes else None
        if tensor.grad_fn is not None:
            self.varying[tensor.grad_fn, tensor.output_nr] = axes
            self.sites.setdefault(tensor.grad_fn, self.site)

    @property
    def site(self) -> str:
        """The module that is running."""
        return self.stack.frames[-1][0]

    def before(self, call: Running) -> None:
        """Listen to the collectives that the call sends."""
        self.heard.append([])

    def failed(self, call: Running, error: Exception) -> None:
        """Listen no more."""
        self.heard.pop()

    def after(self, call: Running) -> None:
        """Let the outputs of a call vary along every axis along which an input varies."""
        heard = self.heard.pop()
        if call.outputs:
            self.calls += 1
        if call.outputs and not heard:  # else its own nodes tell more, see `varies_at`
            axes = NONE.union(*(self.varies(t) for t in call.inputs))
            made = Made(call.name, tuple(call.inputs)) if axes else None
            note_mask(call.name, call.inputs, call.outputs)
            for tensor in call.outputs:
                written = any(tensor is given for given in call.inputs)
                if not written or (call.name.endswith("_") and axes - self.varies(tensor)):
                    self.type(tensor, axes, made)

    # -- functions that communicate ----------------------------------------------------------------

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch every function of the runtime that communicates, forward and backward."""
        found: list[tuple[Any, bool]] = [
            (kind, kind in collectives.PLAIN)
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
                self.put(tensor, after)
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
            self.put(out, after)
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
            reason = f"its {one.kind} sums values that are equal on all ranks of `{axis}`"
            self.faults.append(Fault("often", fqn, axis, reason))
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


OWN, WHOLE, PART = "own", "whole", "part"


@dataclass(frozen=True)
class Share:
    """A gradient along one axis.

    own     of a tensor that differs by rank; whole  alike on all ranks; part  to be summed.
    `times` counts how often a sum ran that was not due: the gradient is n**times too large.
    """

    kind: str
    times: int = 0


Shares = Mapping[str, Share]


@dataclass
class Gradient:
    """The gradient that reaches a parameter: shares by axis, stages that give it one, and users."""

    shares: dict[str, Share] = field(default_factory=dict)
    stages: frozenset[int] = frozenset()
    sites: list[str] = field(default_factory=list)


def nodes_of(root: Any) -> list[Any]:
    """The nodes of a graph, each after all that use it: the order of a backward."""
    order: list[Any] = []
    seen: set[Any] = set()
    open_: list[tuple[Any, bool]] = [(root, False)]
    while open_:
        node, left = open_.pop()
        if left:
            order.append(node)
            continue
        if node in seen:
            continue
        seen.add(node)
        open_.append((node, True))
        open_ += [(n, False) for n, _ in node.next_functions if n is not None and n not in seen]
    return order[::-1]


class Adjoint:
    """The walk: `split` are the axes that split each parameter, `stage_of` a module's stages."""

    def __init__(
        self,
        loss: Tensor,
        typed: Typed,
        axes: tuple[str, ...],
        parameters: Mapping[int, tuple[str, Axes]],
        stage_of: Callable[[str], frozenset[int] | None],
    ) -> None:
        self.typed, self.axes, self.parameters = typed, axes, parameters
        self.stage_of = stage_of
        self.root = loss.grad_fn
        self.nodes = nodes_of(self.root)
        self.root_varies = typed.varies(loss)
        self.faults: list[Fault] = []
        self.found: dict[str, Gradient] = {}

    def run(self, last: int) -> dict[str, Gradient]:
        """The gradient of every parameter that gets one; `last` is the stage of the loss."""
        first = {a: Share(OWN if a in self.root_varies else WHOLE) for a in self.axes}
        arrived: dict[Any, list[tuple[int, Shares]]] = {self.root: [(0, first)]}
        stages: dict[Any, frozenset[int]] = {self.root: frozenset([last])}
        sites = dict(self.typed.sites)
        sites.setdefault(self.root, "")
        for node in self.nodes:
            came = arrived.pop(node, [])
            if not came:
                continue
            site = sites[node]
            shares, outputs = self._joined(came, site), frozenset(nr for nr, _ in came)
            if hasattr(node, "variable"):
                self._reached(node.variable, shares, stages[node])
                continue
            own = self.stage_of(site)
            here = stages[node] if own is None else own
            for edge in node.next_functions:
                if edge[0] is None:
                    continue
                arrived.setdefault(edge[0], []).append(
                    (edge[1], self._through(node, outputs, edge, shares, site))
                )
                stages[edge[0]] = stages.get(edge[0], frozenset()) | here
                sites.setdefault(edge[0], site)
                if hasattr(edge[0], "variable"):
                    self._used(edge[0].variable, site)
        return self.found

    def _used(self, parameter: Tensor, site: str) -> None:
        known = self.parameters.get(id(parameter))
        if known is not None:
            self.found.setdefault(known[0], Gradient()).sites.append(site)

    def _reached(self, parameter: Tensor, shares: Shares, stages: frozenset[int]) -> None:
        known = self.parameters.get(id(parameter))
        if known is not None:
            made = self.found.setdefault(known[0], Gradient())
            made.shares, made.stages = dict(shares), stages

    def _joined(self, came: list[tuple[int, Shares]], site: str) -> Shares:
        """The sum of gradients from several uses; they have to be of one kind."""
        joined = dict(came[0][1])
        for _, more in came[1:]:
            for axis, share in more.items():
                if share != joined[axis]:
                    mine = joined[axis]
                    said = f"adds a gradient that is {_said(share)} over `{axis}`"
                    self._missing(site, axis, f"{said} to one that is {_said(mine)}")
                    joined[axis] = max(share, mine, key=lambda s: (s.kind == PART, s.times))
        return joined

    def _through(
        self, node: Any, outputs: frozenset[int], edge: Any, shares: Shares, site: str
    ) -> Shares:
        crossed = _crossed(node)
        out = NONE.union(*(self.typed.varies_at(node, nr) for nr in outputs))
        into = self.typed.varies_at(*edge)
        found = {}
        if crossed is not None and crossed.settles:
            shares = self._settled(crossed, shares, into, site)
            crossed = None
        for axis, share in shares.items():
            heard = [h for h in crossed.back if axis in h.axes] if crossed is not None else []
            label = next((h.label for h in heard if h.label), site)
            found[axis] = self._along(axis, share, axis in out, axis in into, heard, label)
        return found

    def _along(
        self, axis: str, share: Share, out: bool, into: bool, heard: list[Heard], site: str
    ) -> Share:
        """One step of the backward along one axis."""
        kind, times = share.kind, share.times
        if out and not into:
            kind = PART  # every rank has only what its own part of the result gives
        for one in heard:
            if one.kind in MOVES:  # each part goes back to where it came from
                continue
            if one.kind == "all-gather":
                kind = OWN if into else WHOLE
                continue
            if kind != PART:
                times += 1
            kind = WHOLE if one.kind == "all-reduce" else OWN
        if into:
            if kind == PART:
                said = f"a gradient that is a part over `{axis}`"
                self._missing(site, axis, f"{said} is used as the full gradient, without a sum")
            kind = OWN
        return Share(kind, times) if (kind, times) != (share.kind, share.times) else share

    def _settled(self, crossed: Crossed, shares: Shares, into: Axes, site: str) -> Shares:
        """The gradient of a factor, from a product that sums those of its factors itself."""
        found = dict(shares)
        for axis in sorted(crossed.settles):
            heard = [h for h in crossed.back if axis in h.axes and h.kind.startswith("reduce")]
            label = next((h.label for h in heard if h.label), site)
            if not heard:
                said = f"its gradients are parts over `{axis}`"
                self._missing(label, axis, f"{said}, and its backward does not sum them")
            elif shares[axis].kind == WHOLE:
                said = f"its backward sums over `{axis}` values that are equal on all ranks"
                self.faults.append(Fault("often", label, axis, said))
            if axis in into:
                found[axis] = Share(OWN, shares[axis].times)
        return found

    def _missing(self, fqn: str, axis: str, reason: str) -> None:
        self.faults.append(Fault("missing", fqn, axis, reason))


def _crossed(node: Any) -> Crossed | None:
    found: Crossed | None = getattr(node, "schedlang", None)
    return found


def _said(share: Share) -> str:
    return share.kind if not share.times else f"{share.kind}, summed {share.times} times too often"
