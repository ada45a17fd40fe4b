"""A step of each kind of rank, played on the meta device: what its operations hold, and do.

Of a pipeline a few microbatches are played; rehearsal.py tells which of them stands for one of a
whole step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from schedlang.memory import MOMENTS
from schedlang.passes.costs.memory import RankClass, rank_classes
from schedlang.passes.costs.rehearsal import LODGES, Played, Rehearsal, Run, key
from schedlang.passes.preparing.holdings import slicing
from schedlang.passes.preparing.prepare import Prepared
from schedlang.passes.preparing.residence import tiers_of
from schedlang.passes.statics.roles import fewer, places, repeated
from schedlang.plan import Plan
from schedlang.timeline import Kind

if TYPE_CHECKING:
    import torch
    from torch import nn

    from schedlang.passes.cutting.staging import Staged
    from schedlang.passes.laying.dryrun import Loss
    from schedlang.runtime.program import Program
    from schedlang.runtime.storage.footprint import Footprint

PLAYED = 3  # microbatches: the first, one between, the last
DEVICE = "device"


def rehearse(
    plan: Plan, batch: Mapping[str, Any], loss: Loss | None, prepared: Prepared,
    works: bool = False,
) -> Rehearsal:  # fmt: skip
    """Play a short step of each kind of rank; optimizer: AdamW's moments.

    `batch` is that of a whole step, `prepared` what is known of the plan; with `works` operations
    and bytes of every operator are counted too.  Raises what the model raises where it cannot be
    played.
    """
    from schedlang.runtime import parts

    sample = parts.sample(batch, plan.shares, plan.micro)
    return _rehearsed(_Step(plan, sample, loss, prepared, works))


def parked_bytes(
    plan: Plan, sample: Mapping[str, Any], loss: Loss | None, prepared: Prepared
) -> Mapping[int, int]:
    """What a microbatch's forward of a stage parks on a partner, by stage; raises as above."""
    return _rehearsed(_Step(plan, sample, loss, prepared, False)).parked


def _rehearsed(step: _Step) -> Rehearsal:
    plan, prepared = step.plan, step.prepared
    kinds = places(plan, prepared)
    classes = rank_classes(plan, prepared.staged, prepared.holdings)
    played: dict[int | None, Played] = {}
    found = {}
    for one in classes:
        kind = None if one.place is None else kinds[one.place]
        if kind not in played:
            of = next(c for c in classes if c.place == kind)
            played[kind] = _play(step, of)
        found[one] = played[kind]
    return Rehearsal(classes, found, _parked(prepared, kinds, played))


def _parked(
    prepared: Prepared, kinds: Mapping[int, int], played: Mapping[int | None, Played]
) -> dict[int, int]:
    staged = prepared.staged
    t, found = staged.timeline, {}
    for stage in sorted(set(t.stage[t.kind == Kind.EVICT].tolist())):
        place = staged.ranks[stage]
        turn, kind = staged.stages_at(place).index(stage), kinds[place]
        found[stage] = played[kind].parked[staged.stages_at(kind)[turn]]
    return found


# -- playing -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Step:
    """What is played, with one microbatch of it, and whether its work is counted."""

    plan: Plan
    sample: Mapping[str, Any]
    loss: Loss | None
    prepared: Prepared
    works: bool


def _play(step: _Step, of: RankClass) -> Played:
    """A short step of the first rank of a class, watched."""
    from schedlang.passes.running.build import build
    from schedlang.runtime.collectives.tap import playing
    from schedlang.runtime.keeping.offload import watched
    from schedlang.runtime.left import left_in
    from schedlang.runtime.played import play
    from schedlang.runtime.storage.footprint import Footprint
    from schedlang.runtime.storage.work import Message
    from schedlang.runtime.summing.gathered import without_values

    plan, prepared = step.plan, step.prepared
    short, staged = _short(plan, prepared.staged)
    ready = replace(prepared, staged=staged)
    few = repeated(step.sample, plan.shares * short.micro)
    footprint = Footprint("meta", step.works)
    with playing(of.first, plan.mesh.world) as tap, watched(footprint):
        state, tap.holds = _state_ranks(plan, of.first), False
        tap.touch = lambda tensor, lane: footprint.touched(tensor, lane.ranks == state)
        tap.heard = lambda op, lane, size, ends: footprint.sent(Message(op, lane.ranks, size, ends))
        program = build(short, few, loss=step.loss, optimizer=_adamw, prepared=ready, hollow=True)
        away = {name for name, one in tiers_of(plan).items() if one.each[2] != DEVICE}
        _start(program, footprint, away)
        units = [unit for one in program.assembly.sliced.values() for unit in one.units]
        with without_values(units):
            play(program, staged.cut, few, footprint)
    left = tuple(map(str, left_in(program.assembly.module)))
    sent = dict(program.assembly.pipeline.parking.sent)
    return _table(footprint, of, ready.staged, left, sent)


def _short(plan: Plan, staged: Staged) -> tuple[Plan, Staged]:
    """The plan with a few microbatches: as many as show each stage that parks what it saves."""
    from schedlang.passes.cutting.parks import lodged
    from schedlang.passes.cutting.staging import timeline_of

    def parking(one: Staged) -> set[int]:
        return set(one.timeline.stage[one.timeline.kind == Kind.EVICT].tolist())

    least = PLAYED
    while True:
        order, few = fewer(plan, staged, least)
        short = replace(plan, order=order)
        few = lodged(short, replace(few, timeline=timeline_of(short)))
        if order == plan.order or parking(few) >= parking(staged):
            return short, few
        least *= 2


def _state_ranks(plan: Plan, rank: int) -> tuple[int, ...]:
    """The ranks between which slices of parameters and gradients are sent."""
    row, _ = slicing(plan)
    return () if row is None else tuple(plan.mesh.group(rank, plan.mesh.fold(row.axes)))


def _adamw(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    from torch.optim import AdamW

    return AdamW([parameter for _, parameter in named])


def _start(program: Program, footprint: Footprint, away: Collection[str]) -> None:
    """What lies there before a step, but for the first: parameters, buffers, moments.

    `away` are parameters whose moments lie elsewhere.
    """
    import torch

    assembly, optimizer = program.assembly, program.optimizer
    footprint.hold("parameters", assembly.parameters.values())
    footprint.hold("parameters", assembly.buffers.values())
    for name, parameter in assembly.parameters.items() if optimizer is not None else ():
        if parameter.requires_grad:
            assert optimizer is not None
            moments = [torch.empty_like(parameter) for _ in range(MOMENTS)]
            optimizer.state[parameter] = {
                "step": torch.tensor(0.0), "exp_avg": moments[0], "exp_avg_sq": moments[1],
            }  # fmt: skip
            footprint.hold("optimizer", () if name in away else moments)


def _table(
    footprint: Footprint, of: RankClass, staged: Staged, left: tuple[str, ...],
    parked: Mapping[int, int],
) -> Played:  # fmt: skip
    marks = [one.what for one in footprint.stretches]
    ran = footprint.ran([op for op in marks if op is not None and op.kind is Kind.F])
    runs = [Run(a.end, b.most, b.end, b.passing, b.work) for a, b in zip(ran, ran[1:])]
    ops: dict[Any, list[Run]] = {}
    rest: list[Run] = []
    for one, run in zip(ran[1:], runs):
        if one.what is None:
            rest.append(run)
        elif one.what.kind not in LODGES:  # a partner's bytes are not known here
            ops.setdefault(key(staged, of.place, one.what), []).append(run)
    return Played(of, ran[0].end, ops, rest, footprint.host, left, parked)
