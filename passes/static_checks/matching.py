"""Proof that ranks agree: on the groups that they make, on collectives, and on messages.

The logs of played ranks are run against each other.  A collective waits until all played members
of its group have come to the same one, so that two groups in opposite orders are found as well as
two operations that differ; messages are paired in order on each channel, as torch pairs them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from schedlang.diagnostics.diagnostic import Diagnostic
from schedlang.ir.plan import Action, Plan
from schedlang.ir.primitive import Facet
from schedlang.passes.analyze.prepare import Prepared
from schedlang.passes.static_checks.claim import Claim, axis_row, facet_row, folded, placed
from schedlang.passes.static_checks.roles import Role

if TYPE_CHECKING:
    from schedlang.runtime.comm.tap import Lane, Sent
    from schedlang.runtime.played import Letter

Logs = Mapping[int, Sequence["Sent"]]


def matching(plan: Plan, prepared: Prepared, played: Sequence[Role]) -> Claim:
    """Compare the logs of played ranks (S714), and pair the messages of all microbatches."""
    logs = {role.rank: role.log for role in played}
    problems = [("all ranks", d) for d in (*_groups(plan, logs), *_met(plan, logs))]
    problems += [
        ("messages", d)
        for d in (*_messages(plan, logs), *_letters(plan, played), *_timeline(plan, prepared))
    ]
    sent = [one for log in logs.values() for one in log if one.lane is not None]
    groups = {one.lane for one in sent if one.ends is None}
    channels = {(one.lane, one.ends) for one in sent if one.ends is not None}
    ranks = f"{len(logs)} of {plan.mesh.world}" if len(logs) < plan.mesh.world else f"{len(logs)}"
    said = (
        f"{ranks} ranks simulated, {sum(one.ends is None for one in sent)} collectives in"
        f" {len(groups)} groups, {sum(one.ends is not None for one in sent)} messages in"
        f" {len(channels)} channels"
    )
    return Claim("matching", said, folded(problems), unseen=_unseen(plan, prepared, logs))


def _unseen(plan: Plan, prepared: Prepared, logs: Logs) -> tuple[str, ...]:
    found = []
    if any(holding.sliced for holding in prepared.holdings.values()):
        found.append(
            "what torch's fully_shard sends for shards: simulated with full copies instead"
        )
    if len(logs) < plan.mesh.world:
        found.append("ranks that were not simulated: assumed to do the same as those that were")
    if prepared.staged.axis is not None:
        found.append("the headers of first messages, which hold sizes")
    return tuple(found)


def _groups(plan: Plan, logs: Logs) -> Iterator[Diagnostic]:
    """All ranks make the same groups in the same order, those that are not in them too."""
    made = {rank: [one for one in log if one.lane is None] for rank, log in logs.items()}
    first, *others = made
    for rank in others:
        for count, (one, other) in enumerate(zip(made[first], made[rank])):
            if one != other:
                said = f"as group {count + 1} ranks {first} and {rank} make different ones"
                notes = (f"{list(one.shape)} and {list(other.shape)}",)
                yield Diagnostic("S714", said, notes=notes)
                return
        if len(made[first]) != len(made[rank]):
            said = f"ranks {first} and {rank} make {len(made[first])} and {len(made[rank])} groups"
            yield Diagnostic("S714", said)
            return


def _met(plan: Plan, logs: Logs) -> Iterator[Diagnostic]:
    """Run collectives against each other until all are done, two differ, or nobody can go on."""
    left = {
        rank: [one for one in reversed(log) if one.lane is not None and one.ends is None]
        for rank, log in logs.items()
    }
    ready = list(left)[::-1]
    while ready:
        rank = ready.pop()
        while left[rank]:
            mine = left[rank][-1]
            assert mine.lane is not None
            members = [r for r in mine.lane.ranks if r in left]
            heads = {r: left[r][-1] if left[r] else None for r in members}
            if any(head is None or head.lane != mine.lane for head in heads.values()):
                break
            other = next((r for r, head in heads.items() if head != mine), None)
            if other is not None:
                yield _differ(plan, mine.lane, rank, mine, other, heads[other])
                return
            for member in members:
                left[member].pop()
            ready += members
    stuck = {rank: rest[-1] for rank, rest in left.items() if rest}
    if stuck:
        yield _stuck(plan, stuck, left)


def _row(plan: Plan, lane: Lane, one: Sent) -> Action | None:
    """The row that brings the axis along which a group lies."""
    at = [plan.mesh.coordinates(rank) for rank in lane.ranks]
    axes = [name for name in plan.mesh.sizes if len({place[name] for place in at}) > 1]
    return axis_row(plan, one.fqn, axes[0]) if len(axes) == 1 else None


def _differ(
    plan: Plan, lane: Lane, rank: int, mine: Sent, other: int, theirs: Sent | None
) -> Diagnostic:
    said = f"ranks {rank} and {other} do not agree on a collective of {lane}"
    at = f" at `{mine.fqn}`" if mine.fqn else ""
    notes = (f"rank {rank} sends {mine}{at}", f"rank {other} sends {theirs}")
    return Diagnostic("S714", said, placed(_row(plan, lane, mine)), notes=notes)


def _stuck(plan: Plan, stuck: Mapping[int, Sent], left: Mapping[int, list[Sent]]) -> Diagnostic:
    """Ranks that wait for ever, for each other or for one that is done."""
    rank, mine = next(iter(stuck.items()))
    assert mine.lane is not None
    other = next(
        r for r in mine.lane.ranks if r in left and (r not in stuck or stuck[r].lane != mine.lane)
    )
    theirs = f"waits in {stuck[other]} of {stuck[other].lane}" if other in stuck else "is done"
    notes = (f"rank {rank} waits in {mine} of {mine.lane}", f"rank {other} {theirs}")
    said = f"ranks {rank} and {other} wait for each other, or for ever"
    return Diagnostic("S714", said, placed(_row(plan, mine.lane, mine)), notes=notes)


def _messages(plan: Plan, logs: Logs) -> Iterator[Diagnostic]:
    """On every channel between two played ranks, what is sent is what is expected, in order."""
    channels: dict[tuple[Lane, tuple[int, int]], dict[str, list[Sent]]] = {}
    for log in logs.values():
        for one in log:
            if one.lane is not None and one.ends is not None and set(one.ends) <= logs.keys():
                both = channels.setdefault((one.lane, one.ends), {"send": [], "recv": []})
                both[one.op].append(one)
    label = placed(facet_row(plan, Facet.STAGE))
    for (_, (source, target)), both in channels.items():
        sent, got = both["send"], both["recv"]
        for count, (one, other) in enumerate(zip(sent, got)):
            if (one.shape, one.dtype) != (other.shape, other.dtype):
                said = (
                    f"message {count + 1} from rank {source} to rank {target} is expected otherwise"
                )
                yield Diagnostic("S714", said, label, notes=(f"{one}, {other}",))
                return
        if len(sent) != len(got):
            counts = f"{len(sent)} messages to rank {target}, which expects {len(got)}"
            said = f"rank {source} sends {counts}"
            yield Diagnostic("S714", said, label)
            return


def _letters(plan: Plan, played: Sequence[Role]) -> Iterator[Diagnostic]:
    """What one end sends is what the other expects next: the same value of the same microbatch."""
    ranks = {role.rank for role in played}
    channels: dict[tuple[int, int], dict[bool, list[Letter]]] = {}
    for role in played:
        for one in role.letters:
            if set(one.ends) <= ranks:
                channels.setdefault(one.ends, {True: [], False: []})[one.sends].append(one)
    for (source, target), both in channels.items():
        for sent, due in zip_longest(both[True], both[False]):
            if sent is None or due is None or (sent.name, sent.tensors) != (due.name, due.tensors):
                said = f"rank {target} takes a message of rank {source} for another one"
                notes = (f"{_called(sent)} is sent, {_called(due)} is expected",)
                yield Diagnostic("S714", said, placed(facet_row(plan, Facet.STAGE)), notes=notes)
                return


def _called(letter: Letter | None) -> str:
    if letter is None:
        return "nothing"
    name = letter.name
    what = "the gradient" if name.back else "the output"
    return f"{what} of microbatch {name.microbatch} from stage {name.source} to stage {name.target}"


def _timeline(plan: Plan, prepared: Prepared) -> Iterator[Diagnostic]:
    """The table that every rank runs ends for all microbatches, and its transfers are paired."""
    from schedlang.pipeline.timeline import TimelineError, check, check_queues, with_transfers

    staged = prepared.staged
    if staged.axis is None:
        return
    try:
        order = with_transfers(staged.timeline.with_edges(staged.cut.edges))
        check(order)
        check_queues(order)  # as with NCCL; one that ends there ends with gloo
    except TimelineError as error:
        yield Diagnostic("S714", str(error), placed(facet_row(plan, Facet.ORDER)))
