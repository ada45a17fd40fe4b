"""Account of a plan for `schedlang plan`: bytes per rank and collectives; and differences of
two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, TypeVar

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.tables import format_bytes
from schedlang.ir.memory import CLASSES, RankMemory, find_heaviest
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import Facet
from schedlang.passes.analyze import compressed_activations
from schedlang.passes.analyze.holdings import holdings_of
from schedlang.passes.analyze.input_checks import add_forward_line
from schedlang.passes.analyze.prepare import Prepared
from schedlang.passes.complete.complete import complete_plan
from schedlang.passes.lower.dropout import why_logical
from schedlang.passes.partition.recomputed_chains import describe_chains
from schedlang.passes.partition.staging import Staged, peer_stores, stages_of
from schedlang.passes.propagate.original_forward import Weight
from schedlang.passes.propagate.propagate import Traced
from schedlang.passes.propagate.sharded_run import Loss
from schedlang.passes.simulate.kernel_gains import RowGain, count_gains
from schedlang.passes.simulate.memory import RankClass, rank_classes
from schedlang.passes.simulate.simulated_ranks import (
    SimulatedRanks,
    memory_of_ranks,
    simulate_ranks,
)
from schedlang.passes.simulate.traffic import Collective, list_collectives, send_and_return
from schedlang.pipeline.timeline.table import Kind, Timeline

# -- activations on a peer -------------------------------------------------------------------------


def peer_activation_sends(
    plan: Plan, prepared: Prepared, simulate: Callable[[], SimulatedRanks]
) -> Iterator[Collective]:
    """Yield the sends of activations to a peer and back, once each for each such microbatch.

    Messages with sizes are not counted.  A step is simulated (`simulate`) only where something is
    moved, to find the bytes that forwards save.
    """
    axis, t = prepared.staged.axis, prepared.staged.timeline
    evictions = t.pick(t.kind == Kind.EVICT)
    if axis is None or not len(evictions):
        return
    bytes_by_stage, row = simulate().partner_bytes, _row(plan)
    counts = Counter(
        zip(evictions.stage.tolist(), evictions.rank.tolist(), evictions.peer.tolist())
    )
    sent = "forward", "activations to a peer"
    returned = "backward", "activations to their owner"
    for (stage, *ends), count in sorted(counts.items()):
        size = bytes_by_stage[stage]
        yield from send_and_return(axis, (ends[0], ends[1]), sent, returned, size, row, count=count)


def _row(plan: Plan) -> int | None:
    """Return the row that moves activations: of `offload`, or of the order."""
    rows = peer_stores(plan, "activations") or plan.rows_changing(Facet.ORDER)
    return rows[0].row if rows else None


# -- the account -----------------------------------------------------------------------------------


T = TypeVar("T")
NOT_ESTIMATED = "not estimated"


@dataclass(frozen=True)
class Account:
    """Exact figures of one training step.

    classes      distinct kinds of ranks; None where stages are unknown, for want of a batch
    collectives  None without a batch
    timeline     at unit cost: forward 1, backward 2; None without a pipeline
    stages       unit -> stage; empty without a pipeline
    notes        assumptions and omissions, in words
    memory       bytes over the step by class; None where not requested, or impossible to simulate
    gains        kernels and bytes of fused modules, where memory was requested
    """

    classes: tuple[RankClass, ...] | None
    collectives: tuple[Collective, ...] | None
    timeline: Timeline | None
    stages: Mapping[str, int]
    places: tuple[int, ...]
    notes: tuple[str, ...]
    memory: tuple[RankMemory, ...] | None = None
    gains: tuple[RowGain, ...] = ()

    @property
    def bubble(self) -> float | None:
        """The idle share of the pipeline's ranks at unit cost."""
        from schedlang.pipeline.timeline.simulation import simulate_timeline

        return None if self.timeline is None else float(simulate_timeline(self.timeline).bubble)

    def collectives_at(self, position: int | None) -> tuple[Collective, ...]:
        """Return the collectives in which a rank at one pipeline place takes part."""
        return tuple(
            collective
            for collective in self.collectives or ()
            if collective.places is None or position is None or position in collective.places
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain values; bytes throughout."""
        classes, collectives = self.classes, self.collectives
        memory = self.memory
        return {
            "activations": NOT_ESTIMATED if memory is None else max(m.activations for m in memory),
            "memory": None if memory is None else [item.to_json() for item in memory],
            "ranks": None if classes is None else [item.to_json() for item in classes],
            "collectives": None
            if collectives is None
            else [item.to_json() for item in collectives],
            "stages": dict(self.stages),
            "bubble": self.bubble,
            "timeline": None if self.timeline is None else self.timeline.text().split("\n"),
            "notes": list(self.notes),
            "fused": [item.to_json() for item in self.gains],
        }


def account(
    plan: Plan,
    batch: Mapping[str, Any] | None = None,
    loss: Loss | None = None,
    *,
    weight: Weight | None = None,
    memory: bool = False,
) -> Account:
    """Count the costs of a plan; with `memory` also the bytes that ranks hold during a step.

    `batch` is the keyword arguments of one full step; without it, figures that depend on it are
    left out.  Raises Refusal where the plan cannot be built for this batch.
    """
    if batch is None:
        return _without_batch(plan)
    from schedlang.runtime.global_state import restore_global_state

    with restore_global_state(plan.model.model, loss):
        return _of_a_step(plan, batch, loss, weight, memory)


def _of_a_step(
    plan: Plan, batch: Mapping[str, Any], loss: Loss | None, weight: Weight | None, memory: bool
) -> Account:
    from schedlang.passes.analyze.prepare import prepare
    from schedlang.runtime.batch import largest_part, row_count, splits_evenly

    plan = complete_plan(plan, batch, loss)
    with add_forward_line(plan.model.model):
        sample = largest_part(batch, plan.share_weights, plan.micro)
    prepared = prepare(plan, sample, loss, weight)
    notes = [_MOMENTS]
    if not splits_evenly(batch, plan.share_weights, plan.micro):
        notes.append("microbatches differ in rows; bytes are those of the largest")
    if reason := why_logical(plan, prepared, row_count(sample)):
        notes.append(f"dropout is drawn logically in training, too: {reason}")
    staged = prepared.staged
    classes = rank_classes(plan, staged, prepared.holdings)
    # at most once
    simulate = cache(lambda: simulate_ranks(plan, batch, loss, prepared, classes=classes))
    collectives = list_collectives(plan, prepared, sample, loss)
    peer_sends, reason = _try_simulation(
        lambda: [*peer_activation_sends(plan, prepared, simulate)], _UNSENT
    )
    collectives = (*collectives, *(peer_sends or ()))
    notes = [*notes, *([reason] if reason else [])]
    if any(item.what == "tokens" for item in collectives):
        notes.append("tokens are counted as if all experts were chosen equally often")
    memories: tuple[RankMemory, ...] | None = None
    gains: tuple[RowGain, ...] = ()
    if memory:
        notes += [
            *describe_chains(plan, prepared.chains),
            *compressed_activations.describe_bits(prepared.bits),
        ]
        gains = count_gains(plan, sample)
        memories, reason = _try_simulation(
            lambda: memory_of_ranks(plan, prepared, simulate()), _UNTOLD
        )
        notes += [reason] if reason else []
        notes += dict.fromkeys(f"W703: {calls}" for item in memories or () for calls in item.left)
    return Account(
        classes,
        collectives,
        _timeline(staged),
        _stages(staged),
        staged.ranks,
        tuple(notes),
        memories,
        gains,
    )


def _try_simulation(simulation: Callable[[], T], prefix: str) -> tuple[T | None, str]:
    """Return the result of a simulated step; or None, and the reason why it cannot be simulated."""
    from schedlang.runtime.comm.fake_rank import can_fake_rank

    if not can_fake_rank():
        return None, f"{prefix}: this process is a rank of a job, and cannot simulate others"
    try:
        return simulation(), ""
    except Refusal as refusal:
        return None, f"{prefix}: {refusal.diagnostics[0].title}"
    except Exception as error:  # a model may read values, a kernel may need a device
        message = f"{type(error).__name__}: {error}".split("\n")[0]
        return None, f"{prefix}: {message}"


_UNTOLD = "memory over the step is not estimated"
_UNSENT = "what is sent to keep activations on a peer is not counted"
_MOMENTS = "optimizer state: two moments of AdamW in the parameter's dtype"
_NO_BATCH = "collectives are not counted: there is no batch to count them with"
_NO_STAGES = "what each stage holds is not known: there is no batch to cut the model with"


def _without_batch(plan: Plan) -> Account:
    if any(plan.mesh.size(cut.axis) > 1 for cut in plan.cuts):
        return Account(None, None, None, {}, (), (_NO_BATCH, _NO_STAGES))
    staged = stages_of(plan, Traced(), {}, None)
    classes = rank_classes(plan, staged, holdings_of(plan, staged))
    return Account(classes, None, None, {}, staged.ranks, (_MOMENTS, _NO_BATCH))


def _timeline(staged: Staged) -> Timeline | None:
    return staged.timeline if staged.axis is not None else None


def _stages(staged: Staged) -> dict[str, int]:
    if staged.axis is None:
        return {}
    return dict(zip(staged.cut.graph.units, staged.cut.stage_of))


# -- differences of two accounts -------------------------------------------------------------------


PEAK = "peak of the fullest rank"


@dataclass(frozen=True)
class CostChange:
    """One figure before and after; None where it is not counted."""

    name: str
    unit: str  # "bytes", "share" or "times"
    old: float | None
    new: float | None

    def to_json(self) -> dict[str, object]:
        """Return plain values."""
        return asdict(self)

    def __str__(self) -> str:
        if self.old == self.new:
            return f"{self.name} unchanged ({self.format(self.new)})"
        change = f" ({self.change})" if self.change else ""
        return f"{self.name} {self.format(self.old)} -> {self.format(self.new)}{change}"

    @property
    def change(self) -> str:
        """The difference, relative or in points; "" where there is none."""
        if self.old is None or self.new is None or self.old == self.new:
            return ""
        if self.unit == "share":
            return f"{100 * (self.new - self.old):+.1f} points"
        return f"{self.new / self.old - 1:+.1%}" if self.old else ""

    def format(self, value: float | None) -> str:
        """Format a value of this figure."""
        if value is None:
            return "not counted"
        if self.unit == "bytes":
            return format_bytes(int(value))
        return f"{value:.1%}" if self.unit == "share" else f"{value:g}"


def compare_accounts(old: Account, new: Account) -> tuple[CostChange, ...]:
    """Compare bytes of the fullest rank at its peak (by class) and between steps, collectives, the
    bubble.

    A figure that neither plan has (the peak, where no memory was requested) is left out.
    """
    return tuple(
        CostChange(name, unit, old_value, new_value)
        for (name, unit, old_value), (_, _, new_value) in zip(_figures(old), _figures(new))
        if not (name.startswith(PEAK) and old_value is None and new_value is None)
    )


def _peaks(costs: Account) -> Iterator[tuple[str, str, float | None]]:
    """Yield the peak of the fullest rank, and its bytes by class at that moment."""
    heaviest = find_heaviest(costs.memory) if costs.memory else None
    yield PEAK, "bytes", None if heaviest is None else heaviest.peak
    for name in CLASSES:
        yield f"{PEAK}: {name}", "bytes", None if heaviest is None else heaviest.classes[name]


def _figures(costs: Account) -> Iterator[tuple[str, str, float | None]]:
    yield from _peaks(costs)
    classes = costs.classes
    for name in ("parameters", "gradients", "optimizer"):
        largest = None if classes is None else max(getattr(c, name) for c in classes)
        yield f"{name} per rank, at most", "bytes", largest
    counted = costs.collectives is not None
    by_rank = [costs.collectives_at(c.place) for c in classes or ()]
    yield (
        "collectives of a step per rank, at most",
        "times",
        max((sum(x.count for x in of_rank) for of_rank in by_rank), default=None)
        if counted
        else None,
    )
    yield (
        "their bytes, at most",
        "bytes",
        max((sum(x.total for x in of_rank) for of_rank in by_rank), default=None)
        if counted
        else None,
    )
    yield "bubble", "share", costs.bubble or 0.0
