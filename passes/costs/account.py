"""What a plan costs, counted, not guessed: bytes per rank, collectives, the timeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from schedlang.diagnostic import Refusal
from schedlang.passes.costs.gains import Gained, gains
from schedlang.passes.costs.memory import RankClass, rank_classes
from schedlang.passes.costs.sent import Collective
from schedlang.passes.costs.traffic import collectives
from schedlang.plan import Plan

if TYPE_CHECKING:
    from schedlang.memory import RankMemory
    from schedlang.passes.cutting.staging import Staged
    from schedlang.passes.laying.dryrun import Loss
    from schedlang.passes.laying.weigh import Weight
    from schedlang.passes.preparing.prepare import Prepared
    from schedlang.timeline import Timeline

T = TypeVar("T")
ACTIVATIONS = "not estimated"


@dataclass(frozen=True)
class Account:
    """Exact figures of one training step.

    classes      distinct kinds of ranks; None where stages are not known, for want of a batch
    collectives  None where there is no batch to count them with
    timeline     at unit cost: forward 1, backward 2; None without a pipeline
    stages       unit -> stage; empty without a pipeline
    notes        what is assumed or left out, in words
    memory       bytes over the step by class; None where it was not asked for, or cannot be told
    gains        kernels and bytes of fused modules, where memory was asked for
    """

    classes: tuple[RankClass, ...] | None
    collectives: tuple[Collective, ...] | None
    timeline: Timeline | None
    stages: Mapping[str, int]
    places: tuple[int, ...]
    notes: tuple[str, ...]
    memory: tuple[RankMemory, ...] | None = None
    gains: tuple[Gained, ...] = ()

    @property
    def bubble(self) -> float | None:
        """The idle share of the pipeline's ranks at unit cost."""
        from schedlang.timeline import timing

        return None if self.timeline is None else float(timing(self.timeline).bubble)

    def at(self, place: int | None) -> tuple[Collective, ...]:
        """The collectives in which a rank at one place of the pipeline takes part."""
        return tuple(
            one
            for one in self.collectives or ()
            if one.places is None or place is None or place in one.places
        )

    def to_json(self) -> dict[str, Any]:
        """As plain values; bytes throughout."""
        classes, found = self.classes, self.collectives
        memory = self.memory
        return {
            "activations": ACTIVATIONS if memory is None else max(m.activations for m in memory),
            "memory": None if memory is None else [one.to_json() for one in memory],
            "ranks": None if classes is None else [one.to_json() for one in classes],
            "collectives": None if found is None else [one.to_json() for one in found],
            "stages": dict(self.stages),
            "bubble": self.bubble,
            "timeline": None if self.timeline is None else self.timeline.text().split("\n"),
            "notes": list(self.notes),
            "fused": [one.to_json() for one in self.gains],
        }


def account(
    plan: Plan, batch: Mapping[str, Any] | None = None, loss: Loss | None = None, *,
    weight: Weight | None = None, memory: bool = False,
) -> Account:  # fmt: skip
    """Count what a plan costs; with `memory` also the bytes that ranks hold while a step runs.

    `batch` is the keyword arguments of one whole step; without it what depends on it is left out.
    Raises Refusal where the plan cannot be built for this batch.
    """
    if batch is None:
        return _without_batch(plan)
    from schedlang.passes.completing.complete import completed
    from schedlang.passes.cutting.chains import told
    from schedlang.passes.preparing import allotted
    from schedlang.passes.preparing.prepare import prepare
    from schedlang.passes.running.drawing import drawn_logically
    from schedlang.runtime import parts

    plan = completed(plan, batch, loss)
    sample = parts.sample(batch, plan.shares, plan.micro)
    prepared = prepare(plan, sample, loss, weight)
    notes = [_MOMENTS]
    if not parts.even(batch, plan.shares, plan.micro):
        notes.append("microbatches differ in rows; bytes are those of the largest")
    if why := drawn_logically(plan, prepared, parts.rows_of(sample)):
        notes.append(f"dropout is drawn logically in training, too: {why}")
    sent = collectives(plan, prepared, sample, loss)
    lodged, why = _lodgings(plan, sample, loss, prepared)
    sent, notes = (*sent, *lodged), [*notes, *([why] if why else [])]
    if any(one.what == "tokens" for one in sent):
        notes.append("tokens are counted as if all experts were chosen equally often")
    held: tuple[RankMemory, ...] | None = None
    gained: tuple[Gained, ...] = ()
    if memory:
        notes += [*told(plan, prepared.chains), *allotted.told(plan, prepared.bits)]
        gained = gains(plan, sample)
        held, why = _memory(plan, batch, loss, prepared)
        notes += [why] if why else []
        notes += dict.fromkeys(f"W703: {said}" for one in held or () for said in one.left)
    staged = prepared.staged
    return Account(
        rank_classes(plan, staged, prepared.holdings),
        sent,
        _timeline(staged), _stages(staged), staged.ranks, tuple(notes), held, gained,
    )  # fmt: skip


def _lodgings(
    plan: Plan, sample: Mapping[str, Any], loss: Loss | None, prepared: Prepared
) -> tuple[tuple[Collective, ...], str]:
    """What activations on a peer send; or nothing and why it cannot be told."""
    from schedlang.passes.costs.lodgings import lodgings

    return _told(
        lambda: tuple(lodgings(plan, sample, loss, prepared)), (),
        "what is sent to keep activations on a peer is not counted",
    )  # fmt: skip


def _memory(
    plan: Plan, batch: Mapping[str, Any], loss: Loss | None, prepared: Prepared
) -> tuple[tuple[RankMemory, ...] | None, str]:
    """Bytes over a step by class; or None and why they cannot be told."""
    from schedlang.passes.costs.estimate import estimate

    none: tuple[RankMemory, ...] | None = None
    return _told(lambda: estimate(plan, batch, loss, prepared), none, _UNTOLD)


def _told(play: Callable[[], T], otherwise: T, said: str) -> tuple[T, str]:
    """What a played step shows; or something else, and why it cannot be played."""
    from schedlang.runtime.collectives.tap import free

    if not free():
        return otherwise, f"{said}: this process is a rank of a job, and cannot simulate others"
    try:
        return play(), ""
    except Refusal as refusal:
        return otherwise, f"{said}: {refusal.diagnostics[0].title}"
    except Exception as error:  # a model may ask for what only values tell, a kernel for a device
        first = str(error).split("\n")[0]
        return otherwise, f"{said}: {type(error).__name__}: {first}"


_UNTOLD = "memory over the step is not estimated"
_MOMENTS = "optimizer state: two moments of AdamW in the parameter's dtype"
_NO_BATCH = "collectives are not counted: there is no batch to count them with"
_NO_STAGES = "what each stage holds is not known: there is no batch to cut the model with"


def _without_batch(plan: Plan) -> Account:
    from schedlang.passes.cutting.staging import stages_of
    from schedlang.passes.laying.propagate import Traced
    from schedlang.passes.preparing.holdings import holdings_of

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
