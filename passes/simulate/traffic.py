"""The collectives of one training step: kind, axes, count, bytes, and the row that causes them.

`account` lists them for `plan`; `expect` compares their bytes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from schedlang.ir.features import Lowered
from schedlang.ir.memory import ADAMW_MOMENTS
from schedlang.ir.model import common_parent
from schedlang.ir.placement import P, Placement, Replicate, S
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import Facet
from schedlang.passes.analyze.holdings import (
    Reduction,
    gathers_by_place,
    reductions,
    sliced_names_by_unit,
    slicing_axes_of,
    state_slicing,
)
from schedlang.passes.analyze.residence import state_rounds
from schedlang.passes.lower.build import compress_activations
from schedlang.passes.partition.recomputed_chains import Skeleton
from schedlang.passes.partition.staging import Staged, peer_stores
from schedlang.passes.propagate.propagate import backward_root
from schedlang.passes.propagate.sequence_trials import first_rank_inputs, refusals_at_context_row
from schedlang.passes.simulate.equal_units import Exchange, expand_to_all, unit_kinds
from schedlang.passes.simulate.memory import gathered_bytes

if TYPE_CHECKING:
    from schedlang.passes.analyze.prepare import Prepared
    from schedlang.passes.propagate.sharded_run import Loss
    from schedlang.runtime.sharding.edges import Edge

# -- collectives as values -------------------------------------------------------------------------


@dataclass(frozen=True)
class Collective:
    """One collective operation of a step, counted as often as one rank takes part in it.

    phase    "forward", "backward" (with recomputed forwards) or "step" (after the last backward)
    what     the tensor, in words: "output", "input grad", "parameters", ...
    fqn      the module where it happens; empty for the model as a whole
    bytes    of the full tensor, once; of the largest shard where ranks reduce shards of their own
    places   along the pipeline's axis where it happens; None: everywhere
    row      the row of the plan that causes it, if there is one
    to       the receiving place along the pipeline's axis; None: no single one
    """

    kind: str
    axes: tuple[str, ...]
    phase: str
    what: str
    fqn: str
    count: int
    bytes: int
    places: frozenset[int] | None = None
    row: int | None = None
    to: int | None = None

    @property
    def total(self) -> int:
        """Bytes of all of them."""
        return self.count * self.bytes

    def to_json(self) -> dict[str, object]:
        """Return plain values."""
        places = None if self.places is None else sorted(self.places)
        return {**asdict(self), "axes": list(self.axes), "places": places, "total": self.total}


PhaseAndTensor = tuple[str, str]  # a phase, and words for the tensor


def send_and_return(
    axis: str,
    ends: tuple[int, int],
    there: PhaseAndTensor,
    back: PhaseAndTensor | None,
    size: int,
    row: int | None,
    *,
    fqn: str = "",
    count: int = 1,
) -> Iterator[Collective]:
    """Yield a send from one pipeline place to another, and the send back, if there is one."""
    for (source, target), labels in ((ends, there), (ends[::-1], back)):
        if labels is not None:
            sender = frozenset({source})
            yield Collective("send", (axis,), *labels, fqn, count, size, sender, row, target)


@dataclass(frozen=True)
class TrafficContext:
    """A plan with its prepared facts, for counting."""

    plan: Plan
    prepared: Prepared

    def row(self, facet: Facet) -> int | None:
        """Return the last row that writes a facet."""
        row_numbers = [action.row for action in self.plan.rows_changing(facet)]
        return row_numbers[-1] if row_numbers else None

    def runs(self, fqn: str) -> list[tuple[frozenset[int] | None, int]]:
        """Return the pipeline places where a module runs, each with its number of microbatches.

        Code between units runs on several stages, which are not distinguished.
        """
        cut = self.prepared.staged.cut
        for unit, name in enumerate(
            cut.graph.units if self.prepared.staged.axis is not None else ()
        ):
            if fqn == name or fqn.startswith(f"{name}."):
                return self.copies(cut.stage_of[unit])
        return [(None, self.plan.micro)]

    def copies(self, stage: int) -> list[tuple[frozenset[int] | None, int]]:
        """Return the places that hold a stage, each with the number of microbatches that it
        runs."""
        if self.prepared.staged.axis is None:
            return [(None, self.plan.micro)]
        by_count: dict[int, set[int]] = {}
        for position in self.prepared.staged.places(stage):
            by_count.setdefault(
                self.prepared.staged.count_microbatches(stage, position), set()
            ).add(position)
        return [(frozenset(places), count) for count, places in by_count.items()]


# -- gradient reductions: buckets, and compressed gradients ----------------------------------------


Message = tuple[str, str, int, str]  # kind, content in words ("": gradients), bytes, module

COMPRESSED_MESSAGES = {  # names of contents in runtime/grad_reduction/compressed.py -> kind, words
    "there": ("all-reduce", "which grads there are"),
    "small": ("all-reduce", "grads"),
    "p": ("all-reduce", "grads, low rank"),
    "q": ("all-reduce", "grads, low rank"),
    "codes": ("all-gather", "grads, coded"),
    "scales": ("all-gather", "scales of grads"),
}


def reduction_messages(
    plan: Plan, prepared: Prepared, reduction: Reduction, position: int | None
) -> Iterator[Message]:
    """Yield the messages of one reduction at a pipeline place; sizes are full, as they arrive."""
    rank, staged, holdings = 0, prepared.staged, prepared.holdings
    if position is not None and staged.axis is not None:
        rank = plan.mesh.member(0, staged.axis, position)
    names = [n for n in reduction.names if holdings[n].is_held(plan.mesh, rank)]
    shapes = [holdings[n].local_shape(plan.mesh, rank) for n in names]
    if reduction.kind == "compressed":
        yield from _coded(plan, reduction, names, shapes)
        return
    for size, fqn in _buckets(plan, names, shapes, reduction.bucket):
        yield "all-reduce", "", size, fqn


def _buckets(
    plan: Plan, names: list[str], shapes: list[tuple[int, ...]], bytes_: int | None
) -> Iterator[tuple[int, str]]:
    """Yield the bytes of each bucket, with the module that contains all of it.

    A bucket has one more number for each parameter.
    """
    from schedlang.runtime.grad_reduction.gradient import bucket_indices

    params = [plan.model.unique_parameters[n] for n in names]
    counts = [math.prod(shape) for shape in shapes]
    sizes = [(count * param.itemsize, param.dtype) for count, param in zip(counts, params)]
    for bucket in bucket_indices(sizes, bytes_):
        elements = sum(counts[k] for k in bucket) + len(bucket)
        fqn = common_parent(names[k] for k in bucket)
        yield elements * params[bucket[0]].itemsize, fqn


def _coded(
    plan: Plan, reduction: Reduction, names: list[str], shapes: list[tuple[int, ...]]
) -> Iterator[Message]:
    from schedlang.runtime.grad_reduction.compressed import message_bytes

    coding = plan.compression
    assert coding is not None
    sizes = [plan.model.unique_parameters[n].itemsize for n in names]
    sizes_of = message_bytes(coding.codec, list(zip(shapes, sizes)), plan.mesh.size(reduction.axes))
    for message, size in sizes_of.items():
        kind, description = COMPRESSED_MESSAGES[message]
        yield kind, description, size, ""


# -- within the forward and backward of a microbatch -----------------------------------------------


def module_collectives(
    context: TrafficContext, batch: Mapping[str, Any], loss: Loss | None
) -> Iterator[Collective]:
    """Yield the collectives around modules, each as often as its module runs."""
    traced = context.prepared.traced
    sends = traced.edges or context.prepared.tokens is not None or traced.statistics is not None
    exchanges = _record_exchanges(context, batch, loss) if sends else []
    for (exchange, tensor), count in Counter((e, _what(context, e)) for e in exchanges).items():
        for places, micro in context.runs(exchange.fqn):
            yield Collective(
                exchange.kind,
                exchange.axes,
                "backward" if exchange.backward else "forward",
                tensor,
                exchange.fqn,
                count * micro,
                exchange.bytes,
                places,
                _row_of(context.plan, exchange.fqn, tensor),
            )


def _row_of(plan: Plan, fqn: str, tensor: str) -> int | None:
    """Return the row that gathers the module's rows, or the last row that places this module, else
    one inside it (it gathers for its children)."""
    for gather in plan.row_gathers if tensor in _GATHERED_ROWS else ():
        if gather.fqn == fqn:
            return gather.row
    rows = plan.rows_changing(Facet.PLACEMENT)
    own_rows = [a.row for a in rows if fqn in a.sites]
    rows_below = (a.row for a in rows if any(site.startswith(f"{fqn}.") for site in a.sites))
    return own_rows[-1] if own_rows else next(rows_below, None)


def _record_exchanges(
    context: TrafficContext, batch: Mapping[str, Any], loss: Loss | None
) -> list[Exchange]:
    """Record the sends of a microbatch: the sharded model on meta, with its recomputation.

    Of equal units two are run; all, if it turns out that they are not called, or do not send,
    equally.
    """
    from schedlang.runtime.tracing.equal_units import DifferentUnits

    kinds = unit_kinds(context.plan, context.prepared)
    if kinds:
        with suppress(DifferentUnits):
            recorded, reached = _run_and_record(context, batch, loss, kinds)
            expanded = expand_to_all(recorded, kinds, reached)
            if expanded is not None:
                return expanded
    return _run_and_record(context, batch, loss, {})[0]


def _run_and_record(
    context: TrafficContext,
    batch: Mapping[str, Any],
    loss: Loss | None,
    kinds: Mapping[str, object],
) -> tuple[list[Exchange], Mapping[str, object]]:
    """Run once; return the exchanges in order (those of a skipped unit as one), and the results of
    each unit that backward has reached."""
    from schedlang.passes.partition.staging import local_skeleton
    from schedlang.runtime.comm.collectives import Group, listen_to_collectives
    from schedlang.runtime.tracing.equal_units import EqualUnits
    from schedlang.runtime.tracing.meta_runs import without_values

    plan = context.plan
    model = local_skeleton(plan, context.prepared.traced)
    model.train()
    lower_skeleton(plan, model, context.prepared)
    exchanges: list[Exchange] = []
    backward = False

    def listen(kind: str, group: Group, size: int) -> None:
        exchanges.append(Exchange(kind, group.axes, size, group.label, backward))

    def passed(name: str, backward: bool) -> None:
        exchanges.append(Exchange("", (), 0, name, backward))

    units = EqualUnits(model, kinds, passed)
    batch, within_shard = first_rank_inputs(plan, model, context.prepared.tokens, batch)
    # a model may read values of masks, and so does the backward of an index by a mask
    with (
        refusals_at_context_row(plan),
        listen_to_collectives(listen),
        within_shard,
        without_values(batch) as (inputs, _),
    ):
        with units.using():
            value = backward_root(model, inputs, loss)
        backward = True
        if value is not None:
            value.backward()
    return exchanges, units.reached


def lower_skeleton(plan: Plan, model: Any, prepared: Prepared) -> None:
    """Apply rows that change what a local model on meta saves (recomputed, coded) or the order of
    sends.

    Activations that are offloaded and come back unchanged count as saved.
    """
    skeleton = Skeleton(plan, model, prepared.chains, prepared.bits)
    for action, row in plan.rows_with(Lowered):
        coded = action.changes(Facet.RESIDENCE) and bool(row.gives_up)
        if action.changes(Facet.RECOMPUTE, Facet.ORDER) or coded:
            for target in plan.targets(action):
                row.lower(target, skeleton)
    for coding in plan.activation_codings:
        compress_activations(coding, skeleton, skeleton.bits)


# (from, to) -> kind in forward, kind in backward; at an entry backward only where ranks differ
_ENTRY: Mapping[tuple[type, type], tuple[str, str]] = {
    (Replicate, Replicate): ("", "all-reduce"),
    (S, Replicate): ("all-gather", "reduce-scatter"),
    (Replicate, S): ("", "all-gather"),
}
_EXIT: Mapping[tuple[type, type], tuple[str, str]] = {
    (P, Replicate): ("all-reduce", ""),
    (P, S): ("reduce-scatter", "all-gather"),
    (S, Replicate): ("all-gather", ""),
    (Replicate, S): ("", "all-gather"),
}


_GATHERED_ROWS = ("rows", "rows grad")  # of `RowGather`: forward, backward

# contents that a module of experts sends, assuming equally many tokens for each expert
_ROUTED = {"all-to-all": "token", "all-gather": "expert", "reduce-scatter": "expert"}


def _what(context: TrafficContext, exchange: Exchange) -> str:
    """Name the tensor of its module that an exchange moves."""
    traced, plan = context.prepared.traced, context.plan
    if exchange.fqn in plan.contexts and set(plan.mesh.fold(exchange.axes)) <= set(
        plan.context_axes
    ):
        return "keys and values"
    edge = next(
        (e for e in traced.edges.get(exchange.fqn, ()) if e.group.axes == exchange.axes), None
    )
    if edge is None and traced.statistics is not None:
        is_gathered = exchange.fqn in traced.statistics.gathered
        return _GATHERED_ROWS[exchange.backward] if is_gathered else "statistics"
    if edge is None:
        return "activation"
    if edge.variant is not None and exchange.kind in _ROUTED:
        return _ROUTED[exchange.kind] + (" grads" if exchange.backward else "s")
    enters, leaves = _ends(edge)
    entry = enters[exchange.backward] == exchange.kind
    leave = leaves[exchange.backward] == exchange.kind
    if edge.is_head and not exchange.backward and not entry:
        return "loss"
    if exchange.kind not in (*enters, *leaves):  # within the module
        return "parts, backward" if exchange.backward else "parts"
    side = "input or output" if entry and leave else "output" if leave else "input"
    if exchange.backward and not (entry or leave):  # recomputed
        return "input again" if enters[False] == exchange.kind else "output again"
    return f"{side} grad" if exchange.backward else side


def _ends(edge: Edge) -> tuple[tuple[str, str], tuple[str, str]]:
    from schedlang.runtime.sharding.edges import is_all_to_all

    def kinds(table: Mapping[Any, Any], a: Placement, b: Placement) -> tuple[str, str]:
        if is_all_to_all(a, b):
            return "all-to-all", "all-to-all"
        collective_kinds: tuple[str, str] = table.get((type(a), type(b)), ("", ""))
        return collective_kinds

    forward, backward = kinds(_ENTRY, edge.input_before, edge.input_after)
    needed = (
        edge.differ
        or not isinstance(edge.input_before, Replicate | S)
        or edge.input_after != Replicate()
    )
    enters = (forward, backward if needed else "")
    return enters, kinds(_EXIT, edge.output_before, edge.output_after)


# -- all of a step ---------------------------------------------------------------------------------


def list_collectives(
    plan: Plan, prepared: Prepared, batch: Mapping[str, Any], loss: Loss | None = None
) -> tuple[Collective, ...]:
    """List all collectives of a step; `batch` is one microbatch, the one that `prepared` was made
    with.

    Sizes are those of that microbatch; smaller ones send less.
    """
    context, staged = TrafficContext(plan, prepared), prepared.staged
    collectives = [
        *(_by_slice(collective, staged) for collective in module_collectives(context, batch, loss)),
        *(_by_slice(collective, staged) for collective in _transfers(context, batch)),
        *_slices(context),
        *_sums(context),
        *_states(context),
    ]
    if plan.mesh.world > 1:
        axes = tuple(axis for axis, size in plan.mesh.axes if size > 1)
        label = "loss and gradient norm"
        # one flag for each sharded parameter: was it used?
        flags = sum(bool(holding.sliced) for holding in prepared.holdings.values())
        flags += plan.loss_scaling is not None  # one flag: did any rank's gradients overflow?
        collectives.append(Collective("all-reduce", axes, "step", label, "", 1, 8 * (2 + flags)))
    return tuple(collectives)


def _by_slice(collective: Collective, staged: Staged) -> Collective:
    """Divide the sends of a microbatch among its slices, with the mean length where slices
    differ."""
    slices = staged.timeline.slices
    return replace(collective, count=collective.count * slices, bytes=collective.bytes // slices)


# -- between stages, and over data-parallel ranks ----------------------------------------------


def _transfers(context: TrafficContext, batch: Mapping[str, Any]) -> Iterator[Collective]:
    """Yield the sends between stages of different ranks, one for each value."""
    staged = context.prepared.staged
    local = context.prepared.tokens.sizes(batch) if context.prepared.tokens is not None else tuple
    if staged.axis is None:
        return
    for replica, homes in enumerate(staged.homes):
        for (source, target), tokens in staged.cut.routes.items():
            ends = homes[source], homes[target]
            for token in tokens if ends[0] != ends[1] else ():
                yield from _sent(context, token, (source, target), replica, local)


def _sent(
    context: TrafficContext,
    token: tuple[int, int],
    edge: tuple[int, int],
    replica: int,
    local: Callable[[Any], tuple[int, ...]],
) -> Iterator[Collective]:
    """Yield the sends of one value between two places, and of its gradient."""
    staged = context.prepared.staged
    assert staged.axis is not None
    ends = [staged.homes[replica][stage] for stage in edge]
    leaf, fqn = staged.cut.graph.leaves[token], staged.cut.graph.units[token[0]]
    count = staged.count_microbatches(edge[0], ends[0], replica)
    send_label = "forward", f"to stage {edge[1]}"
    return_label = ("backward", f"grad to stage {edge[0]}") if leaf.differentiable else None
    size, row = tensor_bytes(local(leaf.shape), leaf.dtype), context.row(Facet.STAGE)
    yield from send_and_return(
        staged.axis, (ends[0], ends[1]), send_label, return_label, size, row, fqn=fqn, count=count
    )


def tensor_bytes(shape: Iterable[int], dtype: str) -> int:
    """Return the bytes of a tensor, given its shape and the name of its dtype."""
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    return math.prod(shape) * kind.itemsize


def _states(context: TrafficContext) -> Iterator[Collective]:
    """Yield the sends of optimizer state on a peer: to its owner before the step, and back
    after."""
    staged, plan = context.prepared.staged, context.plan
    row = next((store.row for store in peer_stores(plan, "optimizer")), None)
    if staged.axis is None or row is None:
        return
    places = plan.mesh.size(staged.axis)
    for position in range(places):
        rank, after = plan.mesh.member(0, staged.axis, position), (position + 1) % places
        for size in state_rounds(plan, context.prepared.holdings, rank):
            send_label, return_label = ("step", "state to a peer"), ("step", "state to its owner")
            yield from send_and_return(
                staged.axis, (position, after), send_label, return_label, size * ADAMW_MOMENTS, row
            )


def _slices(context: TrafficContext) -> Iterator[Collective]:
    """Yield gathers of parameter shards and reductions of their gradients, unit by unit.

    As in runtime/grad_reduction/zero.py: parameters are gathered once a step, or for every forward
    and backward (stage 3); gradients are reduced once a step, or after every backward (stages 2,
    3).  Stages that rows of the timeline keep gathered do both once for each run.  Replicas of
    shards are reduced once a step, as all other reductions are.
    """
    plan, staged = context.plan, context.prepared.staged
    row, _ = state_slicing(plan)
    if row is None:
        return
    line = context.row(Facet.STATE)
    copies = [(s, *copy) for s in range(staged.cut.stages) for copy in context.copies(s)]
    counts = [
        (c[0], *forward_count)
        for c in copies
        for forward_count in gathers_by_place(plan, staged, *c)
    ]
    for stage, places, forwards, backwards in counts:
        for fqn, names in sliced_names_by_unit(
            plan, staged, context.prepared.holdings, stage
        ).items():
            trained = tuple(n for n in names if plan.model.unique_parameters[n].requires_grad)
            axes = slicing_axes_of(context.prepared.holdings, names)
            size = gathered_bytes(plan, context.prepared.holdings, names, cast=True)
            grads = gathered_bytes(plan, context.prepared.holdings, trained)
            times = backwards if row.stage > 1 else 1
            forward_count = forwards if row.stage == 3 else 1
            labels = "forward", "parameters", fqn
            gather = Collective("all-gather", axes, *labels, forward_count, size, places, line)
            if names:
                yield gather
            if names and row.stage == 3 and row.reshard and fqn:  # the root's stay gathered
                yield replace(gather, phase="backward", count=backwards)
            if trained:
                reduce = replace(gather, kind="reduce-scatter", phase="backward", what="grads")
                yield replace(reduce, count=times, bytes=grads)


# -- after the last backward -------------------------------------------------------------------

REDUCTION_FACETS = {
    "partial": Facet.PLACEMENT,
    "tied": Facet.STAGE,
    "replicas": Facet.STATE,
    "compressed": Facet.STATE,
}
REDUCTION_WORDS = {"partial": "grads of parts", "tied": "grads of ties", "replicas": "grads"}


def _sums(context: TrafficContext) -> Iterator[Collective]:
    """Yield gradient reductions in buckets, which differ by stage."""
    plan, staged = context.plan, context.prepared.staged
    places = range(plan.mesh.size(staged.axis)) if staged.axis is not None else (None,)
    for reduction in reductions(plan, context.prepared.traced, context.prepared.holdings):
        row = context.row(REDUCTION_FACETS[reduction.kind])
        for position in places:
            if reduction.stages is None or position in reduction.stages:
                positions = None if position is None else frozenset([position])
                for kind, text, size, fqn in reduction_messages(
                    plan, context.prepared, reduction, position
                ):
                    label = text or REDUCTION_WORDS[reduction.kind]
                    yield Collective(
                        kind, reduction.axes, "step", label, fqn, 1, size, positions, row
                    )
