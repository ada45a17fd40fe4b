"""Tuning of a model (`schedlang tune`): search, write the schedule, and simulate a step of it.

Derives the job from a model's batch, and repeats the search until the simulated step of the written
schedule fits; also writes the comments of that schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.tables import format_bytes, format_seconds
from schedlang.passes.autoshard import knob_tuning
from schedlang.passes.autoshard.propose import experts_of
from schedlang.passes.elaborate.expand import expand
from schedlang.passes.planner.profile import Profiles
from schedlang.passes.planner.reasons import RejectedSetting
from schedlang.passes.planner.schedule_writer import write_schedule
from schedlang.passes.planner.search import SearchResult
from schedlang.passes.planner.search_space import Job, check_job_limits
from schedlang.passes.simulate.node_cluster import Nodes
from schedlang.passes.simulate.one_rank_step import expand_rows

if TYPE_CHECKING:
    from schedlang.ir.limits import Limits
    from schedlang.language import nodes as n
    from schedlang.passes.simulate.machine import Cluster

# of a job; where the job has less memory than one before, with the result of that one
FindSetting = Callable[[Profiles, Job, SearchResult | None], SearchResult]
DescribeStep = Callable[[float], Iterable[str]]  # seconds of a step -> lines of text
MAX_SEARCHES = 4  # searches, each with less memory if the last one's best did not fit
MAX_REASONS = 3  # rejected settings in the comments


def length_of(batch: Mapping[str, Any]) -> int:
    """Return the tokens of a row; 0 where rows have none."""
    from schedlang.runtime.batch import named_tensors

    token_tensors = [v for v in named_tensors(batch).values() if v.ndim > 1]
    return next((v.shape[1] for v in token_tensors if not v.is_floating_point()), 0)


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
    from schedlang.runtime.batch import row_count

    batch = profiles.batch
    count = next(iter(experts_of(profiles.trial.blocks).values()), 0)
    rows = rows or row_count(batch)
    pinned = any(k != 1 for limit in limits for k in limit.pinned.get("slices", ()))
    allowed = all(limit.admits("slices", 2) for limit in limits) and profiles.has_values
    length = length_of(batch)
    sliced = bool(length and ranks > 1 and (pinned or allowed)) and profiles.slicing_refusal is None
    if pinned and profiles.slicing_refusal is not None:
        raise profiles.slicing_refusal
    sums_batch = profiles.sums_batch if ranks > 1 else False
    job = Job(ranks, rows, cluster, profiles.recipe, length, count, sliced, sums_batch)
    for limit in limits:
        check_job_limits(job, limit)
    return job


# -- search and simulation -------------------------------------------------------------------------


@dataclass(frozen=True)
class WrittenSchedule:
    """The schedule of a setting, and figures of its simulated step; `remarks` are its comments, by
    line."""

    file: n.File
    seconds: float
    peak: int
    fits: bool
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class TuningResult:
    """The result of a search, and its schedule (None: nothing fits).

    `room` is the job with the memory that prices may use, so that the schedules of these prices
    fit.
    """

    found: SearchResult
    written: WrittenSchedule | None
    room: Job


def tune_model(
    profiles: Profiles, job: Job, find: FindSetting, describe: DescribeStep = lambda took: ()
) -> TuningResult:
    """Search for the best setting whose simulated step fits: the bytes of a price are approximate.

    `describe` adds lines to the comments.  Raises Refusal where the written schedule is refused,
    and where no candidate exists at all.
    """
    room, result = job, None
    for _ in range(MAX_SEARCHES):
        result = find(profiles, room, result)
        if not result.counts.all and result.refused:  # the model is refused under every placement
            raise result.refused[0][1]
        if result.best is None or result.best.priced is None:
            return TuningResult(result, None, room)
        written = _simulated(profiles, job, result, describe)
        if written.fits:
            return TuningResult(result, written, room)
        share = min(0.99, result.best.priced.peak / written.peak)
        room = replace(room, cluster=room.cluster.with_memory_share(share))
    assert result is not None
    return TuningResult(result, None, room)


def _simulated(
    profiles: Profiles, job: Job, result: SearchResult, describe: DescribeStep
) -> WrittenSchedule:
    """Write the best setting, and simulate a step of it."""
    assert result.best is not None
    plan = expand(write_schedule(profiles, result.best.setting), profiles.facts).plan
    assert plan is not None
    knob_job = knob_tuning.Job(
        profiles.facts,
        expand_rows(profiles.batch, job.rows),
        profiles.loss,
        profiles.weight,
        job.cluster.in_order(result.best.setting.nodes),
        job.ranks,
    )
    tried = knob_tuning.price_plan(knob_job, plan, {})
    seconds = result.best.least if tried.time is None else tried.time.seconds
    comments = (*describe(seconds), *_figures(job, result, seconds, tried.peak))
    remarks = [*comments, *_reasons(result.rejected)]
    fits = tried.peak <= job.cluster.memory and tried.missing_bytes <= 0
    file = write_schedule(profiles, result.best.setting, remarks)
    return WrittenSchedule(file, seconds, tried.peak, fits, comments)


# -- comments --------------------------------------------------------------------------------------


def _figures(job: Job, result: SearchResult, seconds: float, peak: int) -> Iterator[str]:
    """Describe the simulated step: its time, the shares of the price, memory of a rank, the
    planner."""
    best = result.best
    assert best is not None and best.priced is not None
    parts = sorted(best.priced.parts.items(), key=lambda part: -part[1])
    shares = [f"{name} {part / best.priced.seconds:.0%}" for name, part in parts if part]
    step = f"{format_seconds(seconds)} a step of {job.rows} rows"
    yield f"Predicted on {job.ranks} ranks of {job.cluster.name}: {step}; {', '.join(shares)}."
    peaks = dict.fromkeys(format_bytes(int(place_peak)) for place_peak in best.priced.peaks)
    places = f"; by place in the pipeline about {', '.join(peaks)}" if len(peaks) > 1 else ""
    memory = format_bytes(job.cluster.memory)
    yield f"Memory of the fullest rank: {format_bytes(peak)} of {memory}{places}."
    if isinstance(job.cluster, Nodes):
        nodes, order_text = best.setting.nodes, ""
        order = list(job.cluster.in_order(nodes).numbers)
        if order != [*range(1, len(order) + 1)]:
            order_text = f": `order = {order}` in its file, with hosts in that order"
        yield f"Ranks lie node by node on {job.cluster.text(nodes)}{order_text}."
    yield from result.attribution


def _reasons(rejected: Sequence[RejectedSetting]) -> Iterator[str]:
    for rejection in rejected[:MAX_REASONS]:
        yield f"Rejected: {rejection.kind}: {rejection.reason}."
