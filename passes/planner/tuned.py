"""A model tuned: what is found for it, written, and judged by a played step of just that schedule.

* The job of a model's batch.
* The best whose own step fits.
* What is told of it.
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
Say = Callable[[float], Iterable[str]]  # of the seconds of a step
TRIES = 4  # searches, each for the memory that the last one's best has shown to be there
REASONS = 3  # rejected settings that are told


def length_of(batch: Mapping[str, Any]) -> int:
    """Tokens of a row; 0 where rows have none."""
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
    """Steps of so many rows (None: of the batch's), and what of them can be split.

    Raises Refusal S109 for one of the limits that no value meets.
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


# -- the best --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Written:
    """The schedule of a setting, and what the simulated step of just this schedule takes; what of
    its figures is `said`, line by line."""

    file: n.File
    seconds: float
    peak: int
    fits: bool
    said: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tuned:
    """The result of a search, and its schedule (None: nothing fits); `room` is the job with the
    memory that prices may take, so that what they mean fits."""

    found: Found
    written: Written | None
    room: Job


def tuned(profiles: Profiles, job: Job, find: Find, say: Say = lambda took: ()) -> Tuned:
    """The best whose own simulated step fits: a price tells its bytes only nearly.

    What else there is to `say` stands beside its figures.

    Raises Refusal where the schedule that is written is refused, and where there is no way at all.
    """
    room = job
    for _ in range(TRIES):
        found = find(profiles, room)
        if not found.counts.all and found.refused:  # what is wrong is the model
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
    """Write the best, and play a step of it."""
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


# -- what is told ----------------------------------------------------------------------------------


def _figures(job: Job, found: Found, took: float, peak: int) -> Iterator[str]:
    """Time of the simulated step, where it goes by the planner's price, memory of a rank; whose
    the setting is."""
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
