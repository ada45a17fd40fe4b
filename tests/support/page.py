"""The page of the support matrix, docs/support.md, and the same data as JSON."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from tests.support.cells import FAILED, NO_MODEL, REFUSED, VERIFIED, Cell
from tests.support.features import (
    NAMES,
    TRIPLES,
    Combination,
    can_combine,
    combinations_of,
    in_order,
)

ROOT = Path(__file__).parents[2]
PAGE, DATA = ROOT / "docs" / "support.md", ROOT / "tests" / "data" / "support.json"
HEAD = """# Combinations of techniques

Look up whether two techniques work together: the table shows every pair, and some triples. The
diagonal shows each technique alone.

Each cell is a proof on a small model that both techniques apply to (Llama, Mixtral, Whisper's
encoder, a convolutional net). The model trains two steps in float64 with SGD, momentum, weight
decay and clipping, on two to eight ranks, which are threads of one process. Some rows of the
batches end early. The proof compares outputs, loss, every gradient and its norm, and the parameters
after each step with the unmodified model. `python -m tests.support` writes this page.

* `✓`: all equal, to 1e-9.
* `✓*`: the schedule needs a `relax`. Under `relax(updates)` it equals the original with the same
  frozen parameters, under `relax(lossy)` the original trained with the same rounding, under
  `relax(model)` the original with the same ties, under `relax(dtype)` the unchanged original.
* a code: refused; the text is below
* `✗`: not equal
* `–`: they exclude each other, or no small model has both
* empty: not run

The names mean:

* axes: each technique has its own axis of two ranks; `grid` has two axes. The batch is also split
  over the axes of experts and sequences, and over the rows of a grid.
* `sequence`: Megatron's sequence parallelism, with tokens sharded between sharded projections
* `tie`: one block shared among all layers; `freeze`: a frozen embedding and first block
* `compress`: PowerSGD under ZeRO 0

The last techniques act inside a module, and are paired only with techniques that split a model:

* `rotor`: checkpoints planned for a memory limit
* `coded`: activations of the last block in eight bits
* `peer`: optimizer state on the next stage
* `rope`, `add norm`, `held head`: kernels; `rowwise`: a generated kernel
* `cast`: mixed precision. In float64 `cast` and `rowwise` compute like the original, so their cells
  only show that the combination runs. Their own pages compare them in their dtypes.
"""
MARKS = {VERIFIED: "✓", FAILED: "✗", NO_MODEL: "–"}
RELAXED = {"freeze", "compress", "tie", "coded", "cast"}
Cells = dict[Combination, Cell]


def read_cells() -> Cells:
    """The recorded cells."""
    if not DATA.exists():
        return {}
    records = json.loads(DATA.read_text())
    return {
        tuple(record["names"]): Cell(**{**record, "names": tuple(record["names"])})
        for record in records
    }


def write_files(cells: Cells) -> None:
    """Write the JSON file and the page."""
    records = [cells[names].plain() for names in combinations_of() if names in cells]
    DATA.write_text("[\n" + ",\n".join(json.dumps(record) for record in records) + "\n]\n")
    PAGE.write_text(page_text(cells))


def page_text(cells: Cells) -> str:
    """The text of the page."""
    return "\n".join([HEAD, _counts(cells), _pairs(cells), _triples(cells), _reasons(cells)])


def _sort_key(names: Combination) -> tuple[int, ...]:
    return len(names), *map(NAMES.index, names)


def cell_mark(cells: Cells, names: Combination) -> str:
    """A cell as one word of the table."""
    if not can_combine(names):
        return "–"
    if (cell := cells.get(names)) is None:
        return ""
    if cell.status == REFUSED:
        return cell.why.split()[0]
    return MARKS[cell.status] + "*" * (cell.status == VERIFIED and bool(RELAXED & set(names)))


def _counts(cells: Cells) -> str:
    finished = [cell for cell in cells.values() if cell.status != NO_MODEL]
    statuses = Counter(cell.status for cell in finished)
    summary = ", ".join(f"{statuses[status]} {status}" for status in (VERIFIED, REFUSED, FAILED))
    days = sorted({cell.day for cell in finished})
    dates = days[0] if len(days) < 2 else f"{days[0]} to {days[-1]}"
    return f"{len(finished)} combinations, {dates}: {summary}.\n"


def _pairs(cells: Cells) -> str:
    """The triangle of pairs, each once."""
    lines = ["## Pairs\n", f"| | {' | '.join(NAMES)} |", "|---" * (len(NAMES) + 1) + "|"]
    for index, name in enumerate(NAMES):
        marks = [cell_mark(cells, in_order({name, column})) for column in NAMES[: index + 1]]
        marks += [""] * (len(NAMES) - index - 1)
        lines.append(f"| **{name}** | {' | '.join(marks)} |")
    return "\n".join(lines) + "\n"


def _triples(cells: Cells) -> str:
    lines = ["## Triples\n", "| | model | ranks |  |", "|---|---|---|---|"]
    for triple in TRIPLES:
        names: Combination = in_order(triple)
        cell = cells.get(names)
        ranks = _ranks(cell.text) if cell else ""
        model = cell.model if cell else ""
        lines.append(f"| {' x '.join(names)} | {model} | {ranks} | {cell_mark(cells, names)} |")
    return "\n".join(lines) + "\n"


def _ranks(text: str) -> int:
    head = next((line for line in text.splitlines() if line.startswith("mesh")), "")
    return 2 ** head.count("=2")


def _reasons(cells: Cells) -> str:
    """The messages of refusals and differences, each with its combinations."""
    reasons: dict[str, list[Combination]] = {}
    for names in sorted(cells, key=_sort_key):
        if cells[names].status in (REFUSED, FAILED):
            reasons.setdefault(_escape_cell(cells[names].why), []).append(names)
    lines = ["## Reasons\n"]
    for reason, combinations in reasons.items():
        lines.append(f"* {'; '.join(' x '.join(names) for names in combinations)}: {reason}")
    return "\n".join(lines) + "\n"


def _escape_cell(text: str) -> str:
    return text.replace("|", "/").replace("<", "(").replace(">", ")")
