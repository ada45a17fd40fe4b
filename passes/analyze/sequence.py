"""How the model of a plan runs on slices of its sequences, where its pipeline cuts them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import Facet
from schedlang.passes.partition.staging import Staged, placed
from schedlang.passes.propagate.batch_weights import Weight
from schedlang.passes.propagate.context import Question, Subject, answer, weight_by_tokens
from schedlang.passes.propagate.dryrun import Loss
from schedlang.passes.propagate.propagate import Traced

if TYPE_CHECKING:
    from torch import nn

    from schedlang.runtime.sequence_pipelining.sliced import Slices
    from schedlang.runtime.sequence_pipelining.slices import Slicing


def slicing_of(
    plan: Plan,
    traced: Traced,
    staged: Staged,
    sample: Mapping[str, Any],
    loss: Loss | None,
    weight: Weight | None,
) -> Slicing | None:
    """What the probe finds for a microbatch; None where sequences stay whole.

    Raises Refusal S655 at the row that asks for slices if the model cannot be cut so. A model
    without values is not tried: it cannot be built either.
    """
    count = staged.timeline.slices
    if count == 1:
        return None
    try:
        found = _found(Subject(plan, traced, sample, loss, weight), count)
        found = replace(found, grain=_grain(traced))
        found.pieces(sample)  # are there enough tokens?
        return found
    except Refusal as refusal:
        raise placed(refusal, plan, Facet.ORDER) from refusal


def _found(subject: Subject, count: int) -> Slicing:
    from schedlang.runtime.sequence_pipelining.probe import guess, probe, refusal
    from schedlang.runtime.sequence_pipelining.slices import Slicing

    Slicing(count, "calls").pieces(subject.sample)
    ask = Question(lambda one: guess(one, count), lambda one: probe(one, count), refusal)
    return answer(subject, count, ask)


def _grain(traced: Traced) -> int:
    """What lengths must be multiples of: over how many ranks activations are split by tokens."""
    from schedlang.ir.placement import S
    from schedlang.runtime.sharding.redistribute import dim_of

    edges = [edge for edges in traced.edges.values() for edge in edges]
    return math.lcm(
        *(
            edge.group.size
            for edge in edges
            for place in (edge.arrives, edge.wants, edge.computes, edge.leaves)
            if isinstance(place, S) and dim_of(place) == 1
        )
    )


def slices_of(
    slicing: Slicing | None, model: nn.Module, traced: Traced, weight: Weight | None
) -> Slices | None:
    """What cuts the microbatches of the local model, if they are cut; `weight` is a user's own."""
    from schedlang.runtime.sequence_pipelining.sliced import Slices

    if slicing is None:
        return None
    return Slices(model, slicing, weight or weight_by_tokens(traced, slicing.count))
