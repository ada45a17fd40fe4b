"""Steps of some ranks, played one by one without values: what each would send, in order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from schedlang.ir.plan import Plan
from schedlang.ir.primitive import Facet
from schedlang.passes.analyze.holdings import holdings_of, slicing
from schedlang.passes.analyze.prepare import Prepared
from schedlang.passes.analyze.reductions import Booked, sliced_over
from schedlang.passes.partition.parks import at_home
from schedlang.passes.simulate.played_step import Step, alone, fewer, places

if TYPE_CHECKING:
    from schedlang.runtime.comm.tap import Sent, Tap
    from schedlang.runtime.played import Letter

ALL = 8  # up to so many ranks each one is played


@dataclass(frozen=True)
class Role:
    """One rank's step.

    log      what it would send, in order
    sums     sums of gradients in it
    letters  its messages by name: which microbatch, from which stage to which
    weights  what its microbatches weigh in the loss of the step
    trained  the parameters that its optimizer was given; `held` those that it holds
    """

    rank: int
    place: int
    log: tuple[Sent, ...]
    letters: tuple[Letter, ...]
    sums: tuple[Booked, ...]
    weights: tuple[float, ...]
    trained: tuple[str, ...]
    held: frozenset[str]


def ranks_to_play(plan: Plan, prepared: Prepared) -> tuple[int, ...]:
    """All ranks of a small world; of a large one each kind of stage, with neighbours on each axis.

    Neighbours along the pipeline are those next to it, once for each two kinds; along other axes
    the last rank: ranks that differ along one axis can differ in what that axis decides.
    """
    mesh, axis = plan.mesh, prepared.staged.axis
    if mesh.world <= ALL:
        return tuple(range(mesh.world))
    zero = dict.fromkeys(mesh.sizes, 0)
    line = mesh.group(0, axis) if axis is not None else (0,)
    kinds = places(plan, prepared)
    pairs = {}
    for place in reversed(range(len(line) - 1)):
        pairs[kinds[place], kinds[place + 1]] = (place, place + 1)
    found = {line[place] for both in pairs.values() for place in both}
    for place in set(kinds.values()):
        found.add(line[place])
        for name, size in mesh.axes:
            if size > 1 and (axis is None or name not in mesh.fold(axis)):
                at = mesh.coordinates(line[place])
                found.add(mesh.rank(zero | at | {name: size - 1}))
    return tuple(sorted(found))


def shortened(step: Step) -> Step:
    """What is played: without kernels and slices, and with as few microbatches as the order takes.

    A microbatch sends what any other does; that all of them are in order is for the timeline.
    """
    plan = step.plan
    plain = _without_kernels(plan)
    whole = tuple(replace(one, stage=0) for one in plan.replicas)
    least, staged = fewer(plan, at_home(plan, step.prepared.staged), 2)
    short = replace(plain, replicas=whole, order=least)
    prepared = replace(step.prepared, staged=staged, holdings=holdings_of(short, staged))
    return replace(step, plan=short, prepared=prepared)


def _without_kernels(plan: Plan) -> Plan:
    """The plan, but what modules compute, and where what they save lies, is the original's."""
    away = plan.rows_changing(Facet.STRUCTURE, Facet.RESIDENCE)
    kept = tuple(action for action in plan.actions if action not in away)
    stores = tuple(one for one in plan.stores if one.what != "activations")
    return replace(plan, actions=kept, kept=(), stores=stores)


def roles(step: Step) -> list[Role]:
    """Play a step on every rank that has a role of its own."""
    short = shortened(step)
    return [_role(short, rank) for rank in ranks_to_play(short.plan, short.prepared)]


def _role(step: Step, rank: int) -> Role:
    from schedlang.runtime.played import play

    trained: list[str] = []

    def optimizer(named: Any) -> Any:
        import torch

        pairs = list(named)
        trained.clear()  # `build` asks it about parameters of its own first
        trained.extend(name for name, _ in pairs)
        return torch.optim.SGD([p for _, p in pairs], lr=0.0)

    plan, staged = step.plan, step.prepared.staged
    with alone(step, rank, optimizer) as (program, tap):
        played = play(program, staged.cut, step.batch)
    return Role(
        rank,
        plan.mesh.index(rank, staged.axis) if staged.axis is not None else 0,
        tuple(tap.log),
        tuple(played.letters),
        tuple(_sums(step, program, played.answers, tap)),
        tuple(played.weights),
        tuple(trained),
        frozenset(program.assembly.parameters),
    )


def _sums(step: Step, program: Any, answers: Any, tap: Tap) -> Any:
    """The sums of gradients: all-reduces of what gradients were put together in.

    A gradient that was multiplied beside them stands there as a sum over no axis.
    """
    from schedlang.runtime.played import lies, storage

    there = [(n, p.grad) for n, p in program.assembly.parameters.items() if p.grad is not None]
    names = {lies(grad): name for name, grad in there}
    for lane, tensor in tap.summed:
        _, parts = answers.together.get(id(tensor), (None, ()))
        # what lies together from the start is summed as it is
        lying = [name for (at, _), name in names.items() if at == storage(tensor)]
        of = frozenset([*lying, *(names[part] for part in parts if part in names)])
        if of:
            yield booked_at(step.plan, step.prepared, lane.ranks, of)
    for name, grad in there:
        factor = answers.scaled.get(lies(grad), 1.0)
        if factor != 1.0:
            yield Booked((), frozenset([name]), divisor=1 / factor)


def booked_at(
    plan: Plan, prepared: Prepared, ranks: tuple[int, ...], names: frozenset[str]
) -> Booked:
    """A sum over these ranks as one over axes, and over places of the pipeline."""
    mesh, axis = plan.mesh, prepared.staged.axis
    at = [mesh.coordinates(one) for one in ranks]
    axes = tuple(name for name in mesh.sizes if len({place[name] for place in at}) > 1)
    if axis is None:
        return Booked(axes, names)
    return Booked(axes, names, frozenset(mesh.index(one, axis) for one in ranks))


def slices(step: Step, rank: int) -> tuple[Booked, ...]:
    """The sums of sliced gradients on a rank, with their divisors; built, not run.

    Those that fully_shard does unit by unit, and those over whole copies of slices.
    """
    from schedlang.runtime.grad_reduction.zero import reduced

    row, _ = slicing(step.plan)
    if row is None:
        return ()
    plan, prepared = _without_kernels(step.plan), step.prepared
    cut = {name for name, holding in prepared.holdings.items() if holding.sliced}
    found = []
    with alone(replace(step, plan=plan), rank) as (program, _):
        for one in program.assembly.sliced.values():
            for names, divisor in reduced(one, program.assembly.parameters):
                axes = sliced_over(prepared.holdings, tuple(names))
                made = booked_at(plan, prepared, plan.mesh.group(rank, axes), names)
                found.append(replace(made, divisor=divisor))
        for copies in program.assembly.sums:
            names = frozenset(copies.names) & cut
            if copies.kind == "replicas" and names:
                found.append(booked_at(plan, prepared, copies.group.ranks, names))
    return tuple(found)
