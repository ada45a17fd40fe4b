"""The collectives of one training step: kind, axes, how often, how many bytes, and at whose row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from schedlang.memory import MOMENTS
from schedlang.passes.costs.activations import activations
from schedlang.passes.costs.memory import gathered_bytes
from schedlang.passes.costs.messages import messages
from schedlang.passes.costs.sent import Collective, Context
from schedlang.passes.cutting.parks import peer_rows
from schedlang.passes.preparing.gathers import gathers
from schedlang.passes.preparing.holdings import slicing
from schedlang.passes.preparing.peers import state_rounds
from schedlang.passes.preparing.reductions import reductions, sliced_names, sliced_over
from schedlang.plan import Plan

if TYPE_CHECKING:
    from schedlang.passes.cutting.staging import Staged
    from schedlang.passes.laying.dryrun import Loss
    from schedlang.passes.preparing.prepare import Prepared


def collectives(
    plan: Plan, prepared: Prepared, batch: Mapping[str, Any], loss: Loss | None = None
) -> tuple[Collective, ...]:
    """All collectives of a step; `batch` is one microbatch, the one that was prepared with.

    Sizes are those of that microbatch; smaller ones send less.
    """
    context, staged = Context(plan, prepared), prepared.staged
    found = [
        *(_by_slice(one, staged) for one in activations(context, batch, loss)),
        *(_by_slice(one, staged) for one in _transfers(context, batch)),
        *_slices(context),
        *_sums(context),
        *_states(context),
    ]
    if plan.mesh.world > 1:
        everyone = tuple(axis for axis, size in plan.mesh.axes if size > 1)
        both = "loss and gradient norm"
        flags = sum(
            bool(holding.sliced) for holding in prepared.holdings.values()
        )  # was each one used?
        flags += plan.scaled is not None  # did any rank's gradients overflow?
        found.append(Collective("all-reduce", everyone, "step", both, "", 1, 8 * (2 + flags)))
    return tuple(found)


def _by_slice(one: Collective, staged: Staged) -> Collective:
    """What a microbatch sends is sent slice by slice; of mean length, where they differ."""
    slices = staged.timeline.slices
    return replace(one, count=one.count * slices, bytes=one.bytes // slices)


# -- between stages, and over data-parallel ranks ----------------------------------------------


def _transfers(context: Context, batch: Mapping[str, Any]) -> Iterator[Collective]:
    """What stages send to each other, per value; only between stages of different ranks."""
    staged = context.staged
    local = context.tokens.sizes(batch) if context.tokens is not None else tuple
    if staged.axis is None:
        return
    for replica, homes in enumerate(staged.homes):
        for (source, target), tokens in staged.cut.routes.items():
            ends = homes[source], homes[target]
            for token in tokens if ends[0] != ends[1] else ():
                yield from _sent(context, token, (source, target), replica, local)


def _sent(
    context: Context, token: tuple[int, int], edge: tuple[int, int], replica: int,
    local: Callable[[Any], tuple[int, ...]],
) -> Iterator[Collective]:  # fmt: skip
    """One value of an edge between two places, and its gradient."""
    staged = context.staged
    assert staged.axis is not None
    ends = [staged.homes[replica][stage] for stage in edge]
    leaf, fqn = staged.cut.graph.leaves[token], staged.cut.graph.units[token[0]]
    count = staged.microbatches(edge[0], ends[0], replica)
    sent = Collective(
        "send", (staged.axis,), "forward", f"to stage {edge[1]}", fqn, count,
        _bytes(local(leaf.shape), leaf.dtype), frozenset(ends[:1]), context.row("stage"), ends[1],
    )  # fmt: skip
    yield sent
    if leaf.differentiable:
        what = f"grad to stage {edge[0]}"
        yield replace(sent, phase="backward", what=what, places=frozenset(ends[1:]), to=ends[0])


def _bytes(shape: Iterable[int], dtype: str) -> int:
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    return math.prod(shape) * kind.itemsize


def _states(context: Context) -> Iterator[Collective]:
    """Optimizer state that lies on the next rank: home before its step, and out again."""
    staged, plan = context.staged, context.plan
    row = next((a.row for a in peer_rows(plan, "optimizer")), None)
    if staged.axis is None or row is None:
        return
    places = plan.mesh.size(staged.axis)
    for place in range(places):
        rank, after = plan.mesh.member(0, staged.axis, place), (place + 1) % places
        for size in state_rounds(plan, context.holdings, rank):
            out = Collective(
                "send", (staged.axis,), "step", "state to a peer", "", 1, size * MOMENTS,
                frozenset({place}), row, after,
            )  # fmt: skip
            yield out
            yield replace(out, what="state to its owner", places=frozenset({after}), to=place)


def _slices(context: Context) -> Iterator[Collective]:
    """Gathers of sliced parameters and reductions of their gradients, unit by unit.

    As runtime/summing/replicas.py has them: parameters are gathered once a step, or for every
    forward and backward (stage 3); gradients are reduced once a step, or after every backward
    (stages 2, 3).  Stages that rows of the timeline hold gathered: both once for each run.  Whole
    copies of slices are summed once a step, as all other sums are.
    """
    plan, staged = context.plan, context.staged
    row, _ = slicing(plan)
    if row is None:
        return
    line = context.row("state")
    copies = [(s, *copy) for s in range(staged.cut.stages) for copy in context.copies(s)]
    found = [(c[0], *often) for c in copies for often in gathers(plan, staged, *c)]
    for stage, places, forwards, backwards in found:
        for fqn, names in sliced_names(plan, staged, context.holdings, stage).items():
            trained = tuple(n for n in names if plan.model.unique[n].requires_grad)
            axes = sliced_over(context.holdings, names)
            size = gathered_bytes(plan, context.holdings, names, cast=True)
            grads = gathered_bytes(plan, context.holdings, trained)
            times = backwards if row.stage > 1 else 1
            gather = Collective(
                "all-gather", axes, "forward", "parameters", fqn,
                forwards if row.stage == 3 else 1, size, places, line,
            )  # fmt: skip
            if names:
                yield gather
            if names and row.stage == 3 and row.reshard and fqn:  # the root's stay anyway
                yield replace(gather, phase="backward", count=backwards)
            if trained:
                reduce = replace(gather, kind="reduce-scatter", phase="backward", what="grads")
                yield replace(reduce, count=times, bytes=grads)


# -- after the last backward -------------------------------------------------------------------

FACETS = {"partial": "placement", "tied": "stage", "replicas": "state", "compressed": "state"}
WORDS = {"partial": "grads of parts", "tied": "grads of ties", "replicas": "grads"}


def _sums(context: Context) -> Iterator[Collective]:
    """Sums of gradients in buckets, which differ by stage."""
    plan, staged = context.plan, context.staged
    places = range(plan.mesh.size(staged.axis)) if staged.axis is not None else (None,)
    for one in reductions(plan, context.traced, context.holdings):
        row = context.row(FACETS[one.kind])
        for place in places:
            if one.stages is None or place in one.stages:
                at = None if place is None else frozenset([place])
                for kind, what, size, fqn in messages(plan, staged, context.holdings, one, place):
                    words = what or WORDS[one.kind]
                    yield Collective(kind, one.axes, "step", words, fqn, 1, size, at, row)
