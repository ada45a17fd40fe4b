"""Bytes of activations that a rank keeps for a backward, counted by a step without data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from schedlang.passes.prepare import Prepared, prepare
from schedlang.plan import Plan

if TYPE_CHECKING:
    from schedlang.passes.dryrun import Loss


@dataclass(frozen=True)
class Activations:
    """Bytes of one microbatch on one rank that runs all stages.

    kept  between forward and backward, the loss included, other outputs not
    peak  at any time of the two, with what an operator takes while it runs
    """

    kept: int
    peak: int


def activations(
    plan: Plan,
    sample: Mapping[str, Any],
    loss: Loss | None = None,
    prepared: Prepared | None = None,
) -> Activations:
    """Run the plan's local model, with what it recomputes, forward and backward on meta.

    `sample` are the keyword arguments of a microbatch on one rank. Kernels of attention may keep
    something else on a device; everything else is kept there as here, byte for byte.
    """
    from schedlang.passes.context import seated
    from schedlang.passes.root import backward_root
    from schedlang.passes.staging import local_skeleton
    from schedlang.passes.traffic import at_skeleton
    from schedlang.runtime import crossing
    from schedlang.runtime.alive import Alive
    from schedlang.runtime.constants import OnMeta
    from schedlang.runtime.meta import hollow_batch

    made = prepared or prepare(plan, sample, loss)
    model = local_skeleton(plan, made.traced)
    model.train()
    at_skeleton(plan, model, made.chains)
    batch, sitting = seated(plan, model, made.tokens, sample)
    inputs = hollow_batch(dict(batch))
    with sitting, Alive(model) as alive:
        with OnMeta(dict(batch), inputs):
            value = backward_root(model, inputs, loss)
        kept = alive.bytes()
        if value is not None:
            value.backward()
    crossing.forget()
    return Activations(kept, alive.peak)
