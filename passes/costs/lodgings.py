"""Activations that lie on the next rank of the pipeline: what is sent for them in a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from schedlang.passes.costs.rehearse import parked_bytes
from schedlang.passes.costs.sent import Collective
from schedlang.plan import Plan

if TYPE_CHECKING:
    from schedlang.passes.laying.dryrun import Loss
    from schedlang.passes.preparing.prepare import Prepared


def lodgings(
    plan: Plan, sample: Mapping[str, Any], loss: Loss | None, prepared: Prepared
) -> Iterator[Collective]:
    """Once out and once home for each microbatch that leaves; what tells sizes is not counted.

    `sample` is one microbatch.  A step is played to see what forwards save, so this raises what the
    model raises where it cannot be played.
    """
    from schedlang.timeline import Kind

    axis, t = prepared.staged.axis, prepared.staged.timeline
    away = t.pick(t.kind == Kind.EVICT)
    if axis is None or not len(away):
        return
    sizes = parked_bytes(plan, sample, loss, prepared)
    row = _row(plan)
    ends = zip(away.stage.tolist(), away.rank.tolist(), away.peer.tolist())
    counts: dict[tuple[int, int, int], int] = {}
    for end in ends:
        counts[end] = counts.get(end, 0) + 1
    for (stage, place, to), count in sorted(counts.items()):
        out = Collective(
            "send", (axis,), "forward", "activations to a peer", "", count, sizes[stage],
            frozenset({place}), row, to,
        )  # fmt: skip
        yield out
        yield replace(
            out, phase="backward", what="activations to their owner", places=frozenset({to}),
            to=place,
        )  # fmt: skip


def _row(plan: Plan) -> int | None:
    """The row that asks for it: of activations, or of the order."""
    from schedlang.passes.cutting.parks import peer_rows

    rows = peer_rows(plan, "activations") or [
        a for a in plan.actions if "order" in a.primitive.writes
    ]
    return rows[0].row if rows else None
