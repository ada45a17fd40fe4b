"""The page of the matrix, docs/support.md, and the same as JSON beside the tests' data."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from tests.support.cells import FAILED, NO_MODEL, REFUSED, VERIFIED, Cell
from tests.support.features import NAMES, TRIPLES, Combination, combinations_of, ordered, together

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


def read() -> Cells:
    """The cells that are known."""
    if not DATA.exists():
        return {}
    known = json.loads(DATA.read_text())
    return {tuple(one["names"]): Cell(**{**one, "names": tuple(one["names"])}) for one in known}


def write(cells: Cells) -> None:
    """Both files."""
    told = [cells[names].plain() for names in combinations_of() if names in cells]
    DATA.write_text("[\n" + ",\n".join(json.dumps(one) for one in told) + "\n]\n")
    PAGE.write_text(page(cells))


def page(cells: Cells) -> str:
    """The whole page."""
    return "\n".join([HEAD, _counts(cells), _pairs(cells), _triples(cells), _reasons(cells)])


def _place(names: Combination) -> tuple[int, ...]:
    return len(names), *map(NAMES.index, names)


def mark(cells: Cells, names: Combination) -> str:
    """A cell in a word."""
    if not together(names):
        return "–"
    if (cell := cells.get(names)) is None:
        return ""
    if cell.status == REFUSED:
        return cell.why.split()[0]
    return MARKS[cell.status] + "*" * (cell.status == VERIFIED and bool(RELAXED & set(names)))


def _counts(cells: Cells) -> str:
    run = [cell for cell in cells.values() if cell.status != NO_MODEL]
    found = Counter(cell.status for cell in run)
    told = ", ".join(f"{found[status]} {status}" for status in (VERIFIED, REFUSED, FAILED))
    days = sorted({cell.day for cell in run})
    when = days[0] if len(days) < 2 else f"{days[0]} to {days[-1]}"
    return f"{len(run)} combinations, {when}: {told}.\n"


def _pairs(cells: Cells) -> str:
    """A triangle: each pair once."""
    lines = ["## Pairs\n", f"| | {' | '.join(NAMES)} |", "|---" * (len(NAMES) + 1) + "|"]
    for place, name in enumerate(NAMES):
        marks = [mark(cells, ordered({name, other})) for other in NAMES[: place + 1]]
        marks += [""] * (len(NAMES) - place - 1)
        lines.append(f"| **{name}** | {' | '.join(marks)} |")
    return "\n".join(lines) + "\n"


def _triples(cells: Cells) -> str:
    lines = ["## Triples\n", "| | model | ranks |  |", "|---|---|---|---|"]
    for triple in TRIPLES:
        names: Combination = ordered(triple)
        cell = cells.get(names)
        ranks = _ranks(cell.text) if cell else ""
        model = cell.model if cell else ""
        lines.append(f"| {' x '.join(names)} | {model} | {ranks} | {mark(cells, names)} |")
    return "\n".join(lines) + "\n"


def _ranks(text: str) -> int:
    head = next((line for line in text.splitlines() if line.startswith("mesh")), "")
    return 2 ** head.count("=2")


def _reasons(cells: Cells) -> str:
    """Texts of refusals, and what differs, each with those that it stands for."""
    told: dict[str, list[Combination]] = {}
    for names in sorted(cells, key=_place):
        if cells[names].status in (REFUSED, FAILED):
            told.setdefault(_escaped(cells[names].why), []).append(names)
    lines = ["## Reasons\n"]
    for why, which in told.items():
        lines.append(f"* {'; '.join(' x '.join(names) for names in which)}: {why}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("|", "/").replace("<", "(").replace(">", ")")
