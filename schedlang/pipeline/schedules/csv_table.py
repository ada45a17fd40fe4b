"""Orders as tables: one line per rank, one cell per operation, as torch reads and writes them.

A cell is `[stage][kind][microbatch]`: `0F0`, `2I1`, `2W1`, `3B0`; an empty one is idle. Two that
torch overlaps, `(0F1;1B0)OVERLAP_F_B`, run one after the other. Kinds are F, B (full backward), I
(input gradient), W (weight gradient), RECOMPUTE, OFFLOAD, RELOAD, EVICT, LOAD, STEP, BARRIER.
Sends, receives, gathers and reductions, which torch's `compute_comms` form lists too, are derived
from these and are skipped. What torch has no word for comes after the microbatch, in this order,
each omitted where it is 0: `r1` the replica of the stage, `s2` the slice of the sequence, `v1` the
version of the weights, `~3` the partner rank of EVICT and LOAD: `0F5r1`, `2B0s3`, `1EVICT4~2`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from schedlang.diagnostics.source import read_utf8
from schedlang.pipeline.schedules.registry import Order, OrderError, Size, SizeProblem
from schedlang.pipeline.timeline.simulation import simulate_timeline
from schedlang.pipeline.timeline.table import Kind, Op, Timeline, TimelineError, timeline_from_rows

COMPUTE_KINDS = (Kind.F, Kind.B, Kind.I, Kind.W)
MEMORY_KINDS = (Kind.RECOMPUTE, Kind.OFFLOAD, Kind.RELOAD, Kind.EVICT, Kind.LOAD)
LISTED_KINDS = (*COMPUTE_KINDS, *MEMORY_KINDS, Kind.STEP, Kind.BARRIER)
SKIPPED_KINDS = {kind.name for kind in Kind if kind not in LISTED_KINDS} | {"REDUCE_GRAD"}
KIND_NAMES = sorted({kind.name for kind in Kind} | SKIPPED_KINDS, key=lambda word: -len(word))
CELL = re.compile(
    rf"(\d{{1,9}})({'|'.join(KIND_NAMES)})(\d{{0,9}})"
    r"(?:r(\d{1,9}))?(?:s(\d{1,9}))?(?:v(\d{1,9}))?(?:~(\d{1,9}))?",
    re.ASCII,
)
QUOTABLE = re.compile(r"[\w~();]{1,40}")  # text that messages quote: a misspelt cell
OVERLAPPED_CELL = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
LEGAL_CELLS = (
    "cells are like 0F0, 2I1, 2W1, 3B0, or empty; with replica, slice and version 0F5r1s2v1"
)


class Cell(NamedTuple):
    """An operation and its position: line and column, counted from 1."""

    op: Op
    line: int
    column: int

    @property
    def place(self) -> str:
        """The position in words: line and column."""
        return f"line {self.line}, column {self.column}"


def read_table(text: str, ranks: int | None = None, micro: int | None = None) -> Timeline:
    """Parse the timeline of a table; `ranks` and `micro` are its required sizes, if known.

    Raises OrderError with line and column for cells that are unknown or repeated, for stages on two
    ranks, and for tables that are incomplete or would never end.
    """
    lines = text.removeprefix("\ufeff").splitlines()
    while ranks is not None and len(lines) > ranks and not lines[-1].strip():
        lines.pop()
    cells = [list(_cells(line, number)) for number, line in enumerate(lines, 1)]
    if not any(cells):
        raise OrderError("the table lists no operation", LEGAL_CELLS)
    _check_ranks(cells)
    _check_complete(cells)
    rows = [[cell.op for cell in row] for row in cells]
    count = 1 + max(op.microbatch for row in rows for op in row)
    for quantity, actual, required in (("ranks", len(rows), ranks), ("microbatches", count, micro)):
        if required is not None and actual != required:
            argument = "micro" if quantity == "microbatches" else quantity
            raise OrderError(
                f"the table is for {actual} {quantity}, not {required}", f"{argument}={actual}"
            )
    timeline = timeline_from_rows(rows)
    try:
        simulate_timeline(timeline)
    except TimelineError as error:
        raise OrderError(str(error), "move the operation that is waited for further up") from error
    return timeline


def table_order(path: str) -> Order:
    """Return the order that a table in a file lists, for the sizes that the table is for.

    Raises OrderError where the file cannot be read, and as `read_table`.
    """
    try:
        t = read_table(read_utf8(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise OrderError(
            f"cannot read the table `{path}`: {reason}", 'name a table, or an order: "1F1B"'
        ) from error

    def problem(size: Size) -> SizeProblem | None:
        sizes = (t.ranks, t.microbatches)
        if (size.ranks, size.micro) == sizes:
            return None
        return "the table is for {} ranks and {} microbatches".format(*sizes), (
            f"{t.ranks} ranks with micro={t.microbatches}"
        )

    chunks = -(-t.stages // t.ranks)
    return Order(
        path,
        "a table",
        lambda size: t,
        problem=problem,
        chunks=(chunks,),
        replicas=t.replicas,
        sliced=t.slices > 1,
    )


def write_table(t: Timeline) -> str:
    """Write the table of a timeline, one line per rank; derived operations are left out."""
    lines = []
    for rank in range(t.ranks):
        lines.append(",".join(_text(op) for op in t.rows(rank) if op.kind in LISTED_KINDS))
    return "\n".join(lines) + "\n"


def _text(op: Op) -> str:
    parts = ((op.replica, "r"), (op.slice, "s"), (op.version, "v"))
    tail = "".join(f"{letter}{value}" for value, letter in parts if value)
    return f"{op.stage}{op.kind.name}{op.microbatch}{tail}" + (f"~{op.peer}" * (op.peer >= 0))


def _cells(line: str, number: int) -> Iterator[Cell]:
    column = 1
    for cell in line.split(","):
        start = column + len(cell) - len(cell.lstrip())
        inner = cell.strip().strip('"')
        for op in _ops(inner, f"line {number}, column {start}"):
            yield Cell(op, number, start)
        column += len(cell) + 1


def _ops(cell: str, location: str) -> Iterator[Op]:
    if overlapped := OVERLAPPED_CELL.fullmatch(cell):
        for part in overlapped[1].split(";"):
            yield from _ops(part.strip(), location)
        return
    if not cell:
        return
    match = CELL.fullmatch(cell)
    if match is None:
        quoted = f"`{cell}`" if QUOTABLE.fullmatch(cell) else "what stands there"
        raise OrderError(f"{location}: {quoted} is no operation", LEGAL_CELLS)
    stage, name, *numbers = match.groups()
    if name in SKIPPED_KINDS:
        return
    kind = Kind[name]
    microbatch, replica, part, version = (int(n or 0) for n in numbers[:4])
    if kind in COMPUTE_KINDS and not numbers[0]:
        raise OrderError(f"{location}: `{cell}` does not say of which microbatch", f"{cell}0")
    peer = int(numbers[4]) if numbers[4] else -1
    if (kind in (Kind.EVICT, Kind.LOAD)) != (peer >= 0):
        raise OrderError(
            f"{location}: `{cell}`: EVICT and LOAD, and no other, name a partner rank",
            f"{stage}EVICT{microbatch}~1",
        )
    yield Op(kind, int(stage), microbatch, replica, part, version, peer)


def _check_ranks(cells: list[list[Cell]]) -> None:
    """Refuse a stage of one replica on two ranks."""
    homes: dict[tuple[int, int], tuple[int, Cell]] = {}
    for rank, row in enumerate(cells):
        for cell in row:
            first_rank, first = homes.setdefault((cell.op.replica, cell.op.stage), (rank, cell))
            if first_rank != rank:
                raise OrderError(
                    f"{cell.place}: stage {cell.op.stage} is on rank {rank}, "
                    f"and at {first.place} on rank {first_rank}",
                    "a stage has one rank; a copy of it is another replica: "
                    f"`{_text(cell.op._replace(replica=cell.op.replica + 1))}`",
                )


def _check_complete(cells: list[list[Cell]]) -> None:
    """Refuse operations that are repeated, or missing."""
    seen: dict[tuple[str, int, int, int], Cell] = {}
    for cell in (cell for row in cells for cell in row if cell.op.kind in COMPUTE_KINDS):
        op = cell.op
        role = "B" if op.kind is Kind.I else op.kind.name
        first = seen.setdefault((role, op.stage, op.microbatch, op.slice), cell)
        if first is not cell:
            raise OrderError(
                f"{cell.place}: `{_text(op)}` does again what `{_text(first.op)}` "
                f"does at {first.place}",
                "each stage does each microbatch once: drop one of the two",
            )
    ops = [cell.op for row in cells for cell in row if cell.op.kind in COMPUTE_KINDS]
    if not ops:
        raise OrderError("the table has no forward and no backward", LEGAL_CELLS)
    stages, micro = (1 + max(column) for column in list(zip(*ops))[1:3])
    slices = 1 + max(op.slice for op in ops)
    lines = {cell.op.stage: cell for row in cells for cell in row}
    for stage in range(stages):
        for microbatch in range(micro):
            for part in range(slices):
                _check_slice(seen, lines, stage, microbatch, part)


def _check_slice(
    seen: dict[tuple[str, int, int, int], Cell],
    lines: dict[int, Cell],
    stage: int,
    microbatch: int,
    part: int,
) -> None:
    """Refuse a stage that lacks its forward, its backward or its W of one slice."""
    unit = (stage, microbatch, part)
    backward = seen.get(("B", *unit))
    roles = ["F", "B"] + (["W"] if backward is not None and backward.op.kind is Kind.I else [])
    location = f"line {lines[stage].line}: " if stage in lines else ""
    for role in roles:
        if (role, *unit) not in seen:
            name = _text(Op(Kind[role], stage, microbatch, slice=part))
            raise OrderError(
                f"{location}`{name}` is missing", f"add `{name}` to the rank of its stage"
            )
    weight, forward = seen.get(("W", *unit)), seen[("F", *unit)]
    if weight is not None and "W" not in roles:
        raise OrderError(
            f"{weight.place}: `{_text(weight.op)}` has no input gradient",
            f"write the backward as `{_text(weight.op._replace(kind=Kind.I))}`",
        )
    for cell in (backward, weight):
        if cell is not None and cell.op.replica != forward.op.replica:
            raise OrderError(
                f"{cell.place}: `{_text(cell.op)}` is of another replica than "
                f"`{_text(forward.op)}` at {forward.place}",
                "a microbatch goes through one replica",
            )
