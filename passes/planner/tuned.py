"""Tuning of a model (`schedlang tune`): search, write the schedule, and simulate a step of it.

Derives the job from a model's batch, and repeats the search until the simulated step of the written
schedule fits; also writes the comments of that schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.tables import seconds, size
from schedlang.passes.autoshard import tune
from schedlang.passes.autoshard.propose import experts_of
from schedlang.passes.elaborate.expand import expand
from schedlang.passes.planner.profile import Profiles
from schedlang.passes.planner.reasons import Rejected
from schedlang.passes.planner.search import Found
from schedlang.passes.planner.space import Job, demand
from schedlang.passes.planner.write import written
from schedlang.passes.simulate.nodes import Nodes
from schedlang.passes.simulate.played_step import of_rows

if TYPE_CHECKING:
    from schedlang.ir.limits import Limits
    from schedlang.language import nodes as n
    from schedlang.passes.simulate.machine import Cluster

Find = Callable[[Profiles, Job], Found]
Say = Callable[[float], Iterable[str]]  # seconds of a step -> lines of text
TRIES = 4  # searches, each with less memory if the last one's best did not fit
REASONS = 3  # rejected settings in the comments


def length_of(batch: Mapping[str, Any]) -> int:
    """Return the tokens of a row; 0 where rows have none."""
    from schedlang.runtime.batch import named_tensors

    whole = [v for v in named_tensors(batch).values() if v.ndim > 1]
    return next((v.shape[1] for v in whole if not v.is_floating_point()), 0)


def job_of(
    profiles: Profiles,
    cluster: Cluster,
    ranks: int,
    rows: int | None = None,
    limits: Sequence[Limits] = (),
) -> Job:
    """Describe steps of `rows` rows (None: the batch's rows), and what of them can be split.

    Raises Refusal S109 for a limit that no value can meet.
    """
    from schedlang.runtime.batch import rows_of

    batch = profiles.batch
    count = next(iter(experts_of(profiles.trial.blocks).values()), 0)
    rows = rows or rows_of(batch)
    asked = any(k != 1 for one in limits for k in one.pinned.get("slices", ()))
    free = all(one.admits("slices", 2) for one in limits) and profiles.tried
    length = length_of(batch)
    sliced = bool(length and ranks > 1 and (asked or free)) and profiles.uncut is None
    if asked and profiles.uncut is not None:
        raise profiles.uncut
    job = Job(ranks, rows, cluster, profiles.recipe, length, count, sliced)
    for one in limits:
        demand(job, one)
    return job


# -- search and simulation -------------------------------------------------------------------------


@dataclass(frozen=True)
class Written:
    """The schedule of a setting, and figures of its simulated step; `said` are its comments, by
    line."""

    file: n.File
    seconds: float
    peak: int
    fits: bool
    said: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tuned:
    """The result of a search, and its schedule (None: nothing fits).

    `room` is the job with the memory that prices may use, so that the schedules of these prices
    fit.
    """

    found: Found
    written: Written | None
    room: Job


def tuned(profiles: Profiles, job: Job, find: Find, say: Say = lambda took: ()) -> Tuned:
    """Search for the best setting whose simulated step fits: the bytes of a price are approximate.

    `say` adds lines to the comments.  Raises Refusal where the written schedule is refused, and
    where no candidate exists at all.
    """
    room = job
    for _ in range(TRIES):
        found = find(profiles, room)
        if not found.counts.all and found.refused:  # the model is refused under every placement
            raise found.refused[0][1]
        if found.best is None or found.best.priced is None:
            return Tuned(found, None, room)
        made = _simulated(profiles, job, found, say)
        if made.fits:
            return Tuned(found, made, room)
        share = min(0.99, found.best.priced.peak / made.peak)
        room = replace(room, cluster=room.cluster.holding(share))
    return Tuned(found, None, room)


def _simulated(profiles: Profiles, job: Job, found: Found, say: Say) -> Written:
    """Write the best setting, and simulate a step of it."""
    assert found.best is not None
    plan = expand(written(profiles, found.best.setting), profiles.facts).plan
    assert plan is not None
    whole = tune.Job(
        profiles.facts,
        of_rows(profiles.batch, job.rows),
        profiles.loss,
        profiles.weight,
        job.cluster.ordered(found.best.setting.nodes),
        job.ranks,
    )
    tried = tune.priced(whole, plan, {})
    took = found.best.least if tried.time is None else tried.time.seconds
    said = (*say(took), *_figures(job, found, took, tried.peak))
    remarks = [*said, *_reasons(found.rejected)]
    fits = tried.peak <= job.cluster.memory and tried.lacks <= 0
    file = written(profiles, found.best.setting, remarks)
    return Written(file, took, tried.peak, fits, said)


# -- comments --------------------------------------------------------------------------------------


def _figures(job: Job, found: Found, took: float, peak: int) -> Iterator[str]:
    """Describe the simulated step: its time, the shares of the price, memory of a rank, the
    planner."""
    best = found.best
    assert best is not None and best.priced is not None
    parts = sorted(best.priced.parts.items(), key=lambda part: -part[1])
    shares = [f"{name} {part / best.priced.seconds:.0%}" for name, part in parts if part]
    step = f"{seconds(took)} a step of {job.rows} rows"
    yield f"Predicted on {job.ranks} ranks of {job.cluster.name}: {step}; {', '.join(shares)}."
    peaks = dict.fromkeys(size(int(one)) for one in best.priced.peaks)
    places = f"; by place in the pipeline about {', '.join(peaks)}" if len(peaks) > 1 else ""
    yield f"Memory of the fullest rank: {size(peak)} of {size(job.cluster.memory)}{places}."
    if isinstance(job.cluster, Nodes):
        nodes, said = best.setting.nodes, ""
        order = list(job.cluster.ordered(nodes).numbers)
        if order != [*range(1, len(order) + 1)]:
            said = f": `order = {order}` in its file, with hosts in that order"
        yield f"Ranks lie node by node on {job.cluster.text(nodes)}{said}."
    yield from found.by


def _reasons(rejected: Sequence[Rejected]) -> Iterator[str]:
    for one in rejected[:REASONS]:
        yield f"Rejected: {one.kind}: {one.reason}."
