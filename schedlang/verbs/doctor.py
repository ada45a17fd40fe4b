"""doctor: find why a job is slow or stuck, from the records of its ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from schedlang.diagnostics.tables import format_bytes
from schedlang.verbs.exits import FAILS, show_json
from schedlang.verbs.options import AsJson, verb

if TYPE_CHECKING:
    from schedlang.verbs.diagnosis import Diagnosis, PendingOp
    from schedlang.verbs.ledgers import Ledger, Op

_CALLS = 6  # shown of a rank that did not arrive


@verb
def doctor(
    folder: Annotated[
        Path,
        typer.Argument(help="Folder of records, or of flight-recorder dumps.", metavar="FOLDER"),
    ],
    *,
    stuck_after: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0.1,
            help="Time in one operation after which a job counts as stuck.",
        ),
    ] = 30.0,
    as_json: AsJson = False,
) -> None:
    """Show which rank a job waits for and in which operation, slow ranks, and the speed of
    links.

    If the variable SCHEDLANG_RECORD names a folder, ranks write records into it while they run.
    Read the folder during the run, or after a hang.  Dumps of torch's flight recorder work, too.

    Exit 1: a rank is slow, stuck or gone.
    """
    from schedlang.verbs.diagnosis import diagnose
    from schedlang.verbs.ledgers import read_job

    found = diagnose(read_job(folder), stuck_after)
    code = 0 if found.is_healthy else FAILS
    if as_json:
        show_json({"exit": code, **_facts(found)})
    else:
        print("\n".join(_report_lines(folder, found)))
    if code:
        raise typer.Exit(code)


# -- as text ---------------------------------------------------------------------------------------


def _report_lines(folder: Path, found: Diagnosis) -> list[str]:
    job = found.job
    lines = [_head_line(folder, found), *_gone_lines(found)]
    for rank in found.causes:
        if found.is_stuck:
            lines += ["", *_cause_lines(found, rank)]
    if found.is_stuck and not found.causes:
        lines += ["", *_circle_lines(found)]
    lines += [
        line for one in found.differs for line in ("", *_difference_lines(one.ranks, one.ops))
    ]
    if found.missing:
        lines += ["", "pending"]
        lines += [f"  {_pending_line(one)}" for one in found.missing]
    if found.paces:
        lines += ["", "steps  median of the last, in seconds: from end to end, without waiting"]
        slow = {one.rank for one in found.slow}
        for pace in found.paces:
            mark = "  slow" if pace.rank in slow else ""
            lines.append(f"  rank {pace.rank:<5} {pace.cycle:9.3f} {pace.own:9.3f}{mark}")
        lines += [line for pace in found.slow for line in _slow_place(job.ledgers[pace.rank])]
    if found.links:
        lines += ["", "links  bytes a second of each rank, median"]
        for link in found.links:
            what = f"{link.op}, {link.count} of {format_bytes(link.size)}"
            lines.append(
                f"  ranks {_list_ranks(link.ranks):<16} {format_bytes(int(link.rate))}/s   {what}"
            )
    return lines


def _head_line(folder: Path, found: Diagnosis) -> str:
    job = found.job
    steps = [one.step for one in job.ledgers.values() if one.step >= 0]
    at = f", step {min(steps)}" if steps else ""
    at += f" to {max(steps)}" if steps and min(steps) != max(steps) else ""
    state = (
        "stuck"
        if found.is_stuck
        else "slow"
        if found.slow
        else "well"
        if found.is_healthy
        else "failed"
    )
    if len(found.ended) == len(job.ledgers):
        state = f"ended, {state}"
    return f"{folder.name}   {len(job.ledgers)} of {job.world} ranks{at}   {state}"


def _gone_lines(found: Diagnosis) -> list[str]:
    lines = [f"  rank {rank} has written nothing" for rank in found.unrecorded]
    if found.silent.keys() == found.job.ledgers.keys():
        return [*lines, f"  no rank has written for {min(found.silent.values()):.0f} s"]
    for rank, seconds in found.silent.items():
        how = "its process has ended without a message, or is stopped"
        host = found.job.ledgers[rank].host
        lines.append(f"  rank {rank} ({host}) has not written for {seconds:.0f} s: {how}")
    for rank, one in found.job.ledgers.items():
        if one.error:
            lines.append(f"  rank {rank} ended by {one.error}")
        elif one.over and len(found.ended) < len(found.job.ledgers):
            lines.append(f"  rank {rank} has ended normally")
    return lines


def _cause_lines(found: Diagnosis, rank: int) -> list[str]:
    """Describe a rank that others wait for, and where the rank is instead."""
    lines = []
    for one in found.missing:
        if rank in one.absent:
            lines.append(f"rank {rank} has not reached {_describe_op(one.op, one.ranks)}")
            lines += [f"  row {one.op.row}"] * bool(one.op.row)
            lines.append(f"  {_who_waits(one.waiting)} in it for {one.seconds:.0f} s")
    ledger = found.job.ledgers.get(rank)
    if ledger is not None and not ledger.over:
        lines.append("  it is in")
        lines += [f"    {call}" for call in _user_calls(ledger)]
    return lines


def _user_calls(ledger: Ledger) -> list[str]:
    """Return the innermost call, and the calls in the user's files."""
    first, *rest = ledger.stack or ("an unknown place",)
    others = ("site-packages", "/lib/python", "schedlang/", "<")
    own = [call for call in rest if not any(part in call for part in others)]
    return [first, *own][:_CALLS]


def _circle_lines(found: Diagnosis) -> list[str]:
    """Describe ranks that wait for each other, or an operation that all ranks have reached."""
    lines = []
    for one in found.missing:
        for rank in one.absent:
            lines.append(
                f"rank {rank} has not reached {_describe_op(one.op, one.ranks)}: it waits, too"
            )
    return lines or [
        "all ranks have reached the operation that they wait for: the network does not deliver it"
    ]


def _difference_lines(ranks: tuple[int, int], ops: tuple[Op, Op]) -> list[str]:
    one, other = ops
    lines = [f"ranks {ranks[0]} and {ranks[1]} differ from collective {one.number} of a group on"]
    for rank, op in zip(ranks, ops):
        lines.append(f"  rank {rank}: {op.op}{_op_details(op)}")
        lines += [f"    row {op.row}"] * bool(op.row)
    return [*lines, "  the other rank has skipped what only one of them does"]


def _pending_line(one: PendingOp) -> str:
    text = f"{_who_waits(one.waiting)} for {one.seconds:.1f} s in {_describe_op(one.op, one.ranks)}"
    return text + (f", for {_ranks_phrase(one.absent)}" if one.absent else "")


def _who_waits(ranks: tuple[int, ...]) -> str:
    return _ranks_phrase(ranks) + (" wait" if len(ranks) > 1 else " waits")


def _ranks_phrase(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {_list_ranks(ranks)}"


def _list_ranks(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _describe_op(op: Op, ranks: tuple[int, ...]) -> str:
    if op.ends is not None:
        return f"message {op.number} from rank {op.ends[0]} to rank {op.ends[1]}{_op_details(op)}"
    return f"{op.op} {op.number} of ranks {_list_ranks(ranks)}{_op_details(op)}"


def _op_details(op: Op) -> str:
    whose = f" for `{op.whose}`" if op.whose else ""
    held = f", {format_bytes(op.size)}" if op.size else ""
    return whose + (" in backward" if op.backward else "") + held


def _slow_place(ledger: Ledger) -> list[str]:
    """Describe the place where a slow rank was seen at work most often."""
    looks = sum(n for *_, n in ledger.where)
    lines = []
    for module, line, row, n in ledger.where[:1]:
        what = f"`{module}`, " if module else ""
        lines.append(
            f"  rank {ledger.rank} was found at work in {what}{line} ({n} of {looks} looks)"
        )
        lines += [f"    row {row}"] * bool(row)
    return lines


# -- for machines ----------------------------------------------------------------------------------


def _facts(found: Diagnosis) -> dict[str, Any]:
    job = found.job
    return {
        "world": job.world,
        "ranks": sorted(job.ledgers),
        "stuck": found.is_stuck,
        "never": list(found.unrecorded),
        "silent": {str(rank): seconds for rank, seconds in found.silent.items()},
        "over": list(found.ended),
        "errors": {str(rank): one.error for rank, one in job.ledgers.items() if one.error},
        "causes": list(found.causes),
        "pending": [
            {
                **_op_json(one.op),
                "ranks": list(one.ranks),
                "waiting": list(one.waiting),
                "absent": list(one.absent),
                "seconds": one.seconds,
            }
            for one in found.missing
        ],
        "differs": [
            {"ranks": list(one.ranks), "ops": [_op_json(op) for op in one.ops]}
            for one in found.differs
        ],
        "steps": [vars(one) for one in found.paces],
        "slow": [one.rank for one in found.slow],
        "where": {
            str(one.rank): [
                dict(zip(("module", "line", "row", "looks"), each))
                for each in job.ledgers[one.rank].where
            ]
            for one in found.slow
        },
        "links": [{**vars(one), "ranks": list(one.ranks)} for one in found.links],
        "stacks": {str(rank): list(one.stack) for rank, one in job.ledgers.items()},
    }


def _op_json(op: Op) -> dict[str, Any]:
    return {
        "op": op.op,
        "number": op.number,
        "module": op.whose,
        "row": op.row,
        "bytes": op.size,
        "backward": op.backward,
        "ends": list(op.ends) if op.ends is not None else None,
    }
