"""Derive which tensors differ by rank in forward and backward, and what each gradient is.

`passes/static_checks` uses this to prove the gradients of a plan without ranks. Nothing here reads
the reductions that the plan lists: types follow from how parameters are sharded, over which axes
the batch is split, and which collectives the modules were observed to issue.

* Types of tensors, through one forward and backward on the meta device. The types are those of
  spmd_types, one for each mesh axis: a tensor is equal on all ranks (I, R) or varies (V), and a
  varying tensor that is summed must be partial (P).
* Is a tensor partial: is the full tensor the sum of the tensors of the ranks? Checked backward from
  the call that sums the tensor to the call that multiplied shards: only linear operations may stand
  between the two (P of spmd_types goes through linear operations only).
* What each gradient is, axis by axis: equal and complete on every rank, partial, or summed too
  often. A walk over the autograd graph of one forward of the local model, in the order of the
  backward, with the types of the forward and the observed collectives of the backward. The gradient
  of an input is a linear function of the gradient of the output, so its kind along an axis stays
  the same, except where a tensor that is equal on all ranks is combined with one that varies: there
  the gradient becomes partial.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from schedlang.runtime.comm import collectives
from schedlang.runtime.comm.collectives import Group, listen_to_collectives
from schedlang.runtime.grad_reduction import batch_statistics
from schedlang.runtime.lazy_logits import vocab_parallel
from schedlang.runtime.propagation.call_rules import ADDS, BIASED, LINEAR, SUMMING, TIMES
from schedlang.runtime.propagation.trace import Lattice, ModuleStack, RunningCall
from schedlang.runtime.sharding import grid, norms
from schedlang.runtime.sharding.grid import GridFunction
from schedlang.runtime.tracing.meta_runs import tensors_in

Axes = frozenset[str]
VaryingAxes = Callable[[Tensor], Axes]
NO_AXES: Axes = frozenset()
SUMMING_COLLECTIVES = ("all-reduce", "reduce-scatter")
# the outputs of these still differ from rank to rank: every rank receives data of others, for
# itself
MOVING_COLLECTIVES = ("all-to-all", "shift", "broadcast", "reduce")
# the modules with autograd functions that communicate
COMMUNICATING_MODULES = (collectives, grid, norms, batch_statistics, vocab_parallel)


@dataclass(frozen=True)
class TypeFault:
    """One call whose types do not fit: the module, the axis, and the reason.

    kind  "type": a tensor that is not partial is summed; "missing": a sum is missing; "often": a
      tensor that is complete is summed
    """

    kind: str
    fqn: str
    axis: str
    reason: str


@dataclass(frozen=True)
class ObservedCollective:
    """One observed collective: its kind, its plain axes, and the module that issued it
    (`label`)."""

    kind: str
    axes: tuple[str, ...]
    label: str


@dataclass
class CommunicationRecord:
    """Record of a communicating function: types before and after it, collectives of its backward.

    `reduced_axes` are axes over which the function must sum gradients itself: the gradient of an
    input that varies over such an axis is then complete for that input.
    """

    fqn: str
    before: Axes
    after: Axes
    backward_collectives: list[ObservedCollective] = field(default_factory=list)
    reduced_axes: Axes = NO_AXES


@dataclass(frozen=True)
class TensorOrigin:
    """Record of how a tensor was made: the function, and its input tensors."""

    name: str
    inputs: tuple[Tensor, ...]


def is_masked(tensor: Tensor) -> bool:
    """Return whether a tensor is a product with a mask, as noted by `mark_masked`."""
    return "_schedlang_masked" in tensor.__dict__


def mark_masked(name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """Mark the outputs of a call as masked if a factor of the call is a mask."""
    if name in TIMES and any(t.dtype == torch.bool or is_masked(t) for t in inputs):
        for tensor in outputs:
            tensor.__dict__["_schedlang_masked"] = True


def why_not_partial(tensor: Tensor, axis: str, varies: VaryingAxes) -> str | None:
    """Return why a tensor that varies along an axis is not partial over the axis; None: it is
    partial."""
    pending, seen = [tensor], set()
    while pending:
        current = pending.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        origin: TensorOrigin | None = current.__dict__.get("_schedlang_made")
        if origin is None:
            return f"a shard is summed over `{axis}`, as if it were a partial sum"
        partial_inputs = _partial_inputs(origin, axis, varies)
        if isinstance(partial_inputs, str):
            return partial_inputs
        pending += partial_inputs
    return None


def _partial_inputs(origin: TensorOrigin, axis: str, varies: VaryingAxes) -> list[Tensor] | str:
    """Return the inputs that must be partial for the result to be partial, or why it is not
    partial."""
    parts = [t for t in origin.inputs if axis in varies(t)]
    replicated = [t for t in origin.inputs if axis not in varies(t)]
    if origin.name in SUMMING:
        index = BIASED.get(origin.name)
        bias = origin.inputs[index] if index is not None and len(origin.inputs) == 3 else None
        if bias is not None and axis not in varies(bias):
            return f"`{origin.name}` adds its bias on each rank of `{axis}`, before the sum"
        return parts if len(parts) < 2 else []
    if origin.name in TIMES:
        # each rank keeps its own entries
        masked = any(t.dtype == torch.bool for t in origin.inputs)
        return parts if len(parts) == 1 and not masked else []
    if origin.name in ADDS:
        if replicated:
            return (
                f"`{origin.name}` adds a replicated tensor on every rank of `{axis}` before the sum"
            )
        return parts
    if origin.name == "index_add":  # adds to zeros at any indices: each rank has indices of its own
        return [t for t in parts if t is not origin.inputs[0] and t.is_floating_point()]
    if origin.name in LINEAR:
        return parts
    if origin.name == "embedding_bag":  # entries for rows of other ranks must have weight zero
        floats = [t for t in origin.inputs if t.is_floating_point()]
        if len(floats) == 2 and is_masked(floats[1]):
            return []
        return f"each rank of `{axis}` adds up rows, even for ids that it does not hold"
    if origin.name == "embedding":
        return f"each rank of `{axis}` looks up a row, even for ids that it does not hold"
    return f"`{origin.name}` is not linear, and runs before the sum over `{axis}`"


class VaryingTypes(Lattice):
    """The axes along which each tensor of the local model differs from rank to rank."""

    mark = "_schedlang_varies"

    def __init__(
        self, stack: ModuleStack, fold: Callable[[tuple[str, ...]], tuple[str, ...]]
    ) -> None:
        self.stack, self.fold = stack, fold
        self.varying: dict[tuple[Any, int], Axes] = {}  # (node of autograd, output) -> axes
        self.sites: dict[Any, str] = {}  # node -> the module that ran
        self.faults: list[TypeFault] = []
        self.calls = 0
        self.sums = 0  # collectives of the forward that need a partial tensor
        self.heard: list[list[ObservedCollective]] = []  # one list for each running function

    # -- types -----------------------------------------------------------------------------------

    def axes_of(self, tensor: Tensor) -> Axes:
        """Return the axes along which a tensor differs from rank to rank."""
        axes: Axes | None = self.of(tensor)
        if axes is None and tensor.grad_fn is not None:
            return self.axes_of_output(tensor.grad_fn, tensor.output_nr)
        return axes or NO_AXES

    def axes_of_output(self, node: Any, output: int) -> Axes:
        """Return the axes along which an output of an autograd node differs from rank to rank.

        A node that was not observed, because it ran inside one call, varies along the axes of its
        inputs.
        """
        key = (node, output)
        if key not in self.varying:
            record: CommunicationRecord | None = getattr(node, "schedlang", None)
            if hasattr(node, "variable"):
                self.varying[key] = self.of(node.variable) or NO_AXES
            elif record is not None:
                self.varying[key] = record.after
            else:
                edges = (edge for edge in node.next_functions if edge[0] is not None)
                self.varying[key] = NO_AXES.union(*(self.axes_of_output(*edge) for edge in edges))
        return self.varying[key]

    def record_type(self, tensor: Tensor, axes: Axes, origin: TensorOrigin | None = None) -> None:
        """Record the axes of a tensor, and how the tensor was made if it varies."""
        self.put(tensor, axes)
        tensor.__dict__["_schedlang_made"] = origin if axes else None
        if tensor.grad_fn is not None:
            self.varying[tensor.grad_fn, tensor.output_nr] = axes
            self.sites.setdefault(tensor.grad_fn, self.site)

    @property
    def site(self) -> str:
        """The module that is running."""
        return self.stack.frames[-1][0]

    def before_call(self, call: RunningCall) -> None:
        """Begin to record the collectives of the call."""
        self.heard.append([])

    def on_failure(self, call: RunningCall, error: Exception) -> None:
        """Drop the record of a call that raised."""
        self.heard.pop()

    def after_call(self, call: RunningCall) -> None:
        """Let the outputs of a call vary along every axis along which an input varies."""
        observed = self.heard.pop()
        if call.outputs:
            self.calls += 1
        # else the call's own nodes have been typed, see `axes_of_output`
        if call.outputs and not observed:
            axes = NO_AXES.union(*(self.axes_of(t) for t in call.inputs))
            origin = TensorOrigin(call.name, tuple(call.inputs)) if axes else None
            mark_masked(call.name, call.inputs, call.outputs)
            for tensor in call.outputs:
                written = any(tensor is source for source in call.inputs)
                if not written or (call.name.endswith("_") and axes - self.axes_of(tensor)):
                    self.record_type(tensor, axes, origin)

    # -- functions that communicate ----------------------------------------------------------------

    @contextmanager
    def observe(self) -> Iterator[None]:
        """Observe every communicating function of the runtime within the block, forward and
        backward."""
        functions: list[tuple[Any, bool]] = [
            (kind, kind in collectives.PLAIN_FUNCTIONS)
            for module in COMMUNICATING_MODULES
            for kind in vars(module).values()
            if isinstance(kind, type) and issubclass(kind, torch.autograd.Function)
        ]
        before = [(kind, kind.forward, kind.backward) for kind, _ in functions]
        try:
            for kind, is_plain in functions:
                observed = self._forward(kind.forward, is_plain)
                if issubclass(kind, GridFunction):
                    observed = self._product(kind.forward, kind.reduced_groups)
                kind.forward = staticmethod(observed)
                kind.backward = staticmethod(self._backward(kind.backward))
            with listen_to_collectives(self._listen):
                yield
        finally:
            for kind, forward, backward in before:
                kind.forward, kind.backward = staticmethod(forward), staticmethod(backward)

    def _listen(self, kind: str, group: Group, size: int) -> None:
        for running in self.heard if group.size > 1 else ():
            running.append(ObservedCollective(kind, self.fold(group.axes), group.label))

    def _listened(
        self, function: Callable[..., Any], *args: Any
    ) -> tuple[Any, list[ObservedCollective]]:
        self.heard.append([])
        try:
            out = function(*args)
        finally:
            observed = self.heard.pop()
        return out, observed

    def _forward(self, inner: Callable[..., Any], is_plain: bool) -> Callable[..., Any]:
        def forward(ctx: Any, *args: Any) -> Any:
            out, observed = self._listened(inner, ctx, *args)
            inputs = tensors_in(args)
            before = NO_AXES.union(*(self.axes_of(t) for t in inputs))
            after = self._after(inputs[0], before, tensors_in(out)[0], args, observed, is_plain)
            ctx.schedlang = CommunicationRecord(self.site, before, after)
            # a plain all-reduce over one axis keeps a tensor partial over the other axes
            linear = (
                (*MOVING_COLLECTIVES, "all-reduce", "reduce-scatter")
                if is_plain
                else MOVING_COLLECTIVES
            )
            moves = bool(observed) and all(c.kind in linear for c in observed)
            origin = (
                TensorOrigin("moved", tuple(inputs)) if moves else TensorOrigin("collective", ())
            )
            for tensor in tensors_in(out):
                self.put(tensor, after)
                tensor.__dict__["_schedlang_made"] = origin if after else None
            return out

        return forward

    def _product(
        self, inner: Callable[..., Any], summed: Callable[[Any], tuple[Group, ...]]
    ) -> Callable[..., Any]:
        """Type a sharded product: it sums over the dim that its factors share; other axes stay
        varying."""

        def forward(ctx: Any, x: Tensor, weight: Tensor, *args: Any) -> Any:
            out, _ = self._listened(inner, ctx, x, weight, *args)
            shared = frozenset(self.fold(args[0].down.axes))
            after = self.axes_of(x) | (self.axes_of(weight) - shared)
            sums = frozenset(a for g in summed(ctx) for a in self.fold(g.axes))
            ctx.schedlang = CommunicationRecord(
                self.site, self.axes_of(x), after, reduced_axes=sums
            )
            self.put(out, after)
            out.__dict__["_schedlang_made"] = TensorOrigin("collective", ()) if after else None
            return out

        return forward

    def _after(
        self,
        x: Tensor,
        before: Axes,
        out: Tensor,
        args: Any,
        observed: list[ObservedCollective],
        is_plain: bool,
    ) -> Axes:
        """Return the axes along which the output of a communicating function varies."""
        after = before
        for collective in observed:
            for axis in collective.axes:
                if collective.kind in SUMMING_COLLECTIVES:
                    self._summed(x, before, axis, collective, is_plain)
                if collective.kind not in ("reduce-scatter", *MOVING_COLLECTIVES):
                    after -= {axis}
        if not observed and is_plain and out.shape != x.shape:  # every rank keeps its own shard
            groups = (a for a in args if isinstance(a, Group))
            after |= {axis for group in groups for axis in self.fold(group.axes)}
        return after

    def _summed(
        self, x: Tensor, before: Axes, axis: str, collective: ObservedCollective, is_plain: bool
    ) -> None:
        self.sums += 1
        fqn = collective.label or self.site
        if axis not in before:
            reason = f"its {collective.kind} sums values that are equal on all ranks of `{axis}`"
            self.faults.append(TypeFault("often", fqn, axis, reason))
        elif is_plain:
            why = why_not_partial(x, axis, self.axes_of)
            if why is not None:
                self.faults.append(TypeFault("type", fqn, axis, why))

    def _backward(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def backward(ctx: Any, *grads: Any) -> Any:
            out, observed = self._listened(inner, ctx, *grads)
            if hasattr(ctx, "schedlang"):
                ctx.schedlang.backward_collectives.extend(observed)
            return out

        return backward


OWN, WHOLE, PART = "own", "whole", "part"


@dataclass(frozen=True)
class GradientShare:
    """The kind of a gradient along one axis.

    own    the gradient of a tensor that differs by rank
    whole  equal on all ranks, and complete
    part   partial: to be summed over the axis
    `extra_sums` counts the sums that were not needed: the gradient is n**times too large.
    """

    kind: str
    extra_sums: int = 0


GradientShares = Mapping[str, GradientShare]


@dataclass
class ParameterGradient:
    """The gradient of a parameter: shares by axis, the stages that compute one, and its users."""

    shares: dict[str, GradientShare] = field(default_factory=dict)
    stages: frozenset[int] = frozenset()
    sites: list[str] = field(default_factory=list)


def backward_order(root: Any) -> list[Any]:
    """Return the nodes of an autograd graph, each after all of its users: the order of a
    backward."""
    order: list[Any] = []
    seen: set[Any] = set()
    pending: list[tuple[Any, bool]] = [(root, False)]
    while pending:
        node, finished = pending.pop()
        if finished:
            order.append(node)
            continue
        if node in seen:
            continue
        seen.add(node)
        pending.append((node, True))
        pending += [(n, False) for n, _ in node.next_functions if n is not None and n not in seen]
    return order[::-1]


class BackwardWalk:
    """The walk over the autograd graph of a loss.

    parameters  identity -> the first name of a parameter, and the axes that shard it
    stage_of    gives the stages of a module
    """

    def __init__(
        self,
        loss: Tensor,
        typed: VaryingTypes,
        axes: tuple[str, ...],
        parameters: Mapping[int, tuple[str, Axes]],
        stage_of: Callable[[str], frozenset[int] | None],
    ) -> None:
        self.typed, self.axes, self.parameters = typed, axes, parameters
        self.stage_of = stage_of
        self.root = loss.grad_fn
        self.nodes = backward_order(self.root)
        self.root_varies = typed.axes_of(loss)
        self.faults: list[TypeFault] = []
        self.found: dict[str, ParameterGradient] = {}

    def run(self, last: int, weighted: Axes) -> dict[str, ParameterGradient]:
        """Return the gradient of every parameter that gets one; `last` is the stage of the loss.

        Each rank along the `weighted` axes weighs the loss by its part of the batch: the gradient
        of a loss that is equal on these ranks is partial.
        """
        equal = {axis: PART if axis in weighted else WHOLE for axis in self.axes}
        first = {a: GradientShare(OWN if a in self.root_varies else equal[a]) for a in self.axes}
        arrived: dict[Any, list[tuple[int, GradientShares]]] = {self.root: [(0, first)]}
        stages: dict[Any, frozenset[int]] = {self.root: frozenset([last])}
        sites = dict(self.typed.sites)
        sites.setdefault(self.root, "")
        for node in self.nodes:
            arrivals = arrived.pop(node, [])
            if not arrivals:
                continue
            site = sites[node]
            shares, outputs = self._joined(arrivals, site), frozenset(nr for nr, _ in arrivals)
            if hasattr(node, "variable"):
                self._reached(node.variable, shares, stages[node])
                continue
            module_stages = self.stage_of(site)
            node_stages = stages[node] if module_stages is None else module_stages
            for edge in node.next_functions:
                if edge[0] is None:
                    continue
                arrived.setdefault(edge[0], []).append(
                    (edge[1], self._through(node, outputs, edge, shares, site))
                )
                stages[edge[0]] = stages.get(edge[0], frozenset()) | node_stages
                sites.setdefault(edge[0], site)
                if hasattr(edge[0], "variable"):
                    self._used(edge[0].variable, site)
        return self.found

    def _used(self, parameter: Tensor, site: str) -> None:
        entry = self.parameters.get(id(parameter))
        if entry is not None:
            self.found.setdefault(entry[0], ParameterGradient()).sites.append(site)

    def _reached(self, parameter: Tensor, shares: GradientShares, stages: frozenset[int]) -> None:
        entry = self.parameters.get(id(parameter))
        if entry is not None:
            gradient = self.found.setdefault(entry[0], ParameterGradient())
            gradient.shares, gradient.stages = dict(shares), stages

    def _joined(self, arrivals: list[tuple[int, GradientShares]], site: str) -> GradientShares:
        """Return the sum of gradients from several uses; they must be of one kind."""
        joined = dict(arrivals[0][1])
        for _, shares in arrivals[1:]:
            for axis, share in shares.items():
                if share != joined[axis]:
                    other = joined[axis]
                    prefix = f"adds a gradient that is {_share_text(share)} over `{axis}`"
                    self._missing(site, axis, f"{prefix} to one that is {_share_text(other)}")
                    joined[axis] = max(share, other, key=lambda s: (s.kind == PART, s.extra_sums))
        return joined

    def _through(
        self, node: Any, outputs: frozenset[int], edge: Any, shares: GradientShares, site: str
    ) -> GradientShares:
        record = _crossed(node)
        outer = NO_AXES.union(*(self.typed.axes_of_output(node, nr) for nr in outputs))
        inner = self.typed.axes_of_output(*edge)
        result = {}
        if record is not None and record.reduced_axes:
            shares = self._settled(record, shares, inner, site)
            record = None
        for axis, share in shares.items():
            observed = (
                [h for h in record.backward_collectives if axis in h.axes]
                if record is not None
                else []
            )
            label = next((h.label for h in observed if h.label), site)
            result[axis] = self._along(axis, share, axis in outer, axis in inner, observed, label)
        return result

    def _along(
        self,
        axis: str,
        share: GradientShare,
        out_varies: bool,
        in_varies: bool,
        observed: list[ObservedCollective],
        site: str,
    ) -> GradientShare:
        """Return the share after one step of the backward along one axis."""
        kind, times = share.kind, share.extra_sums
        if out_varies and not in_varies:
            kind = PART  # the gradient on a rank covers only the rank's own shard of the result
        for c in observed:
            if c.kind in MOVING_COLLECTIVES:  # each shard returns to the rank that it came from
                continue
            if c.kind == "all-gather":
                kind = OWN if in_varies else WHOLE
                continue
            if kind != PART:
                times += 1
            kind = WHOLE if c.kind == "all-reduce" else OWN
        if in_varies:
            if kind == PART:
                gradient = f"a gradient that is a part over `{axis}`"
                self._missing(site, axis, f"{gradient} is used as the full gradient, without a sum")
            kind = OWN
        return (
            GradientShare(kind, times) if (kind, times) != (share.kind, share.extra_sums) else share
        )

    def _settled(
        self, record: CommunicationRecord, shares: GradientShares, in_axes: Axes, site: str
    ) -> GradientShares:
        """Return the shares of a factor's gradient, for a product that sums the gradients of its
        factors."""
        settled = dict(shares)
        for axis in sorted(record.reduced_axes):
            observed = [
                h
                for h in record.backward_collectives
                if axis in h.axes and h.kind.startswith("reduce")
            ]
            label = next((h.label for h in observed if h.label), site)
            if not observed:
                reason = f"its gradients are parts over `{axis}`"
                self._missing(label, axis, f"{reason}, and its backward does not sum them")
            elif shares[axis].kind == WHOLE:
                reason = f"its backward sums over `{axis}` values that are equal on all ranks"
                self.faults.append(TypeFault("often", label, axis, reason))
            if axis in in_axes:
                settled[axis] = GradientShare(OWN, shares[axis].extra_sums)
        return settled

    def _missing(self, fqn: str, axis: str, reason: str) -> None:
        self.faults.append(TypeFault("missing", fqn, axis, reason))


def _crossed(node: Any) -> CommunicationRecord | None:
    communication: CommunicationRecord | None = getattr(node, "schedlang", None)
    return communication


def _share_text(share: GradientShare) -> str:
    return (
        share.kind
        if not share.extra_sums
        else f"{share.kind}, summed {share.extra_sums} times too often"
    )
