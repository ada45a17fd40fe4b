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

    diag = diagnose(read_job(folder), stuck_after)
    code = 0 if diag.is_healthy else FAILS
    if as_json:
        show_json({"exit": code, **_facts(diag)})
    else:
        print("\n".join(_report_lines(folder, diag)))
    if code:
        raise typer.Exit(code)


# -- as text ---------------------------------------------------------------------------------------


def _report_lines(folder: Path, diag: Diagnosis) -> list[str]:
    job = diag.job
    lines = [_head_line(folder, diag), *_gone_lines(diag)]
    for rank in diag.causes:
        if diag.is_stuck:
            lines += ["", *_cause_lines(diag, rank)]
    if diag.is_stuck and not diag.causes:
        lines += ["", *_circle_lines(diag)]
    lines += [
        line for item in diag.differs for line in ("", *_difference_lines(item.ranks, item.ops))
    ]
    if diag.missing:
        lines += ["", "pending"]
        lines += [f"  {_pending_line(item)}" for item in diag.missing]
    if diag.paces:
        lines += ["", "steps  median of the last, in seconds: from end to end, without waiting"]
        slow = {item.rank for item in diag.slow}
        for pace in diag.paces:
            mark = "  slow" if pace.rank in slow else ""
            lines.append(f"  rank {pace.rank:<5} {pace.cycle:9.3f} {pace.own:9.3f}{mark}")
        lines += [line for pace in diag.slow for line in _slow_place(job.ledgers[pace.rank])]
    if diag.links:
        lines += ["", "links  bytes a second of each rank, median"]
        for link in diag.links:
            text = f"{link.op}, {link.count} of {format_bytes(link.size)}"
            lines.append(
                f"  ranks {_list_ranks(link.ranks):<16} {format_bytes(int(link.rate))}/s   {text}"
            )
    return lines


def _head_line(folder: Path, diag: Diagnosis) -> str:
    job = diag.job
    steps = [ledger.step for ledger in job.ledgers.values() if ledger.step >= 0]
    progress = f", step {min(steps)}" if steps else ""
    progress += f" to {max(steps)}" if steps and min(steps) != max(steps) else ""
    state = (
        "stuck"
        if diag.is_stuck
        else "slow"
        if diag.slow
        else "well"
        if diag.is_healthy
        else "failed"
    )
    if len(diag.ended) == len(job.ledgers):
        state = f"ended, {state}"
    return f"{folder.name}   {len(job.ledgers)} of {job.world} ranks{progress}   {state}"


def _gone_lines(diag: Diagnosis) -> list[str]:
    lines = [f"  rank {rank} has written nothing" for rank in diag.unrecorded]
    if diag.silent.keys() == diag.job.ledgers.keys():
        return [*lines, f"  no rank has written for {min(diag.silent.values()):.0f} s"]
    for rank, seconds in diag.silent.items():
        fate = "its process has ended without a message, or is stopped"
        host = diag.job.ledgers[rank].host
        lines.append(f"  rank {rank} ({host}) has not written for {seconds:.0f} s: {fate}")
    for rank, ledger in diag.job.ledgers.items():
        if ledger.error:
            lines.append(f"  rank {rank} ended by {ledger.error}")
        elif ledger.over and len(diag.ended) < len(diag.job.ledgers):
            lines.append(f"  rank {rank} has ended normally")
    return lines


def _cause_lines(diag: Diagnosis, rank: int) -> list[str]:
    """Describe a rank that others wait for, and where the rank is instead."""
    lines = []
    for wait in diag.missing:
        if rank in wait.absent:
            lines.append(f"rank {rank} has not reached {_describe_op(wait.op, wait.ranks)}")
            lines += [f"  row {wait.op.row}"] * bool(wait.op.row)
            lines.append(f"  {_who_waits(wait.waiting)} in it for {wait.seconds:.0f} s")
    ledger = diag.job.ledgers.get(rank)
    if ledger is not None and not ledger.over:
        lines.append("  it is in")
        lines += [f"    {call}" for call in _user_calls(ledger)]
    return lines


def _user_calls(ledger: Ledger) -> list[str]:
    """Return the innermost call, and the calls in the user's files."""
    first, *rest = ledger.stack or ("an unknown place",)
    others = ("site-packages", "/lib/python", "schedlang/", "<")
    user_calls = [call for call in rest if not any(part in call for part in others)]
    return [first, *user_calls][:_CALLS]


def _circle_lines(diag: Diagnosis) -> list[str]:
    """Describe ranks that wait for each other, or an operation that all ranks have reached."""
    lines = []
    for wait in diag.missing:
        for rank in wait.absent:
            lines.append(
                f"rank {rank} has not reached {_describe_op(wait.op, wait.ranks)}: it waits, too"
            )
    return lines or [
        "all ranks have reached the operation that they wait for: the network does not deliver it"
    ]


def _difference_lines(ranks: tuple[int, int], ops: tuple[Op, Op]) -> list[str]:
    first, second = ops
    lines = [f"ranks {ranks[0]} and {ranks[1]} differ from collective {first.number} of a group on"]
    for rank, op in zip(ranks, ops):
        lines.append(f"  rank {rank}: {op.op}{_op_details(op)}")
        lines += [f"    row {op.row}"] * bool(op.row)
    return [*lines, "  the other rank has skipped what only one of them does"]


def _pending_line(op: PendingOp) -> str:
    text = f"{_who_waits(op.waiting)} for {op.seconds:.1f} s in {_describe_op(op.op, op.ranks)}"
    return text + (f", for {_ranks_phrase(op.absent)}" if op.absent else "")


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
    owner = f" for `{op.whose}`" if op.whose else ""
    size_text = f", {format_bytes(op.size)}" if op.size else ""
    return owner + (" in backward" if op.backward else "") + size_text


def _slow_place(ledger: Ledger) -> list[str]:
    """Describe the place where a slow rank was seen at work most often."""
    total = sum(n for *_, n in ledger.where)
    lines = []
    for module, line, row, n in ledger.where[:1]:
        owner = f"`{module}`, " if module else ""
        lines.append(
            f"  rank {ledger.rank} was found at work in {owner}{line} ({n} of {total} looks)"
        )
        lines += [f"    row {row}"] * bool(row)
    return lines


# -- for machines ----------------------------------------------------------------------------------


def _facts(diag: Diagnosis) -> dict[str, Any]:
    job = diag.job
    return {
        "world": job.world,
        "ranks": sorted(job.ledgers),
        "stuck": diag.is_stuck,
        "never": list(diag.unrecorded),
        "silent": {str(rank): seconds for rank, seconds in diag.silent.items()},
        "over": list(diag.ended),
        "errors": {str(rank): item.error for rank, item in job.ledgers.items() if item.error},
        "causes": list(diag.causes),
        "pending": [
            {
                **_op_json(item.op),
                "ranks": list(item.ranks),
                "waiting": list(item.waiting),
                "absent": list(item.absent),
                "seconds": item.seconds,
            }
            for item in diag.missing
        ],
        "differs": [
            {"ranks": list(item.ranks), "ops": [_op_json(op) for op in item.ops]}
            for item in diag.differs
        ],
        "steps": [vars(item) for item in diag.paces],
        "slow": [item.rank for item in diag.slow],
        "where": {
            str(item.rank): [
                dict(zip(("module", "line", "row", "looks"), look))
                for look in job.ledgers[item.rank].where
            ]
            for item in diag.slow
        },
        "links": [{**vars(item), "ranks": list(item.ranks)} for item in diag.links],
        "stacks": {str(rank): list(item.stack) for rank, item in job.ledgers.items()},
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
