"""The page of the matrix, docs/support.md, and the same as JSON beside the tests' data."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from tests.support.cells import FAILED, NO_MODEL, REFUSED, VERIFIED, Cell
from tests.support.features import NAMES, TRIPLES, Combination, combinations_of, ordered, together

ROOT = Path(__file__).parents[2]
PAGE, DATA = ROOT / "docs" / "support.md", ROOT / "tests" / "data" / "support.json"
HEAD = """# What goes with what

Every pair of the ways in which a schedule splits or keeps things, and some triples, each proven on
a small model that has what both need (Llama, Mixtral, Whisper's encoder, a net of convolutions):
two steps with SGD, momentum, weight decay and clipping, in float64, on two to eight ranks that are
threads of one process, compared with the model as its authors wrote it: outputs, loss, every
gradient and its norm, and the parameters after each step; rows of the batches end early. On the
diagonal stands each by itself. `python -m tests.support` makes this page again.

* `✓`: all equal, to 1e-9. `✓*`: under `relax(updates)`, `relax(lossy)`, `relax(model)` or
  `relax(dtype)`, equal to the original with these parameters frozen, trained with the same
  rounding, with these tied, or as it is
* a code: refused, with the text that stands below
* `✗`: neither
* `–`: they exclude each other, or no small model has both
* empty: not run

Each has an axis of its own, of two ranks; a grid has two. Data is split over that of experts, of
sequences and of a grid's rows as well. `sequence` is Megatron's: regions between split projections
in which tokens are split. `tie` shares one block among all layers; `freeze` takes an embedding
and the first block; `compress` is PowerSGD under ZeRO 0. What stays inside a module is paired with
splits alone: `rotor` is a plan of checkpoints that fits a budget, `coded` activations of the last
block in eight bits, `peer` optimizer state on the next stage, `rope`, `add norm` and `held head`
are kernels, `rowwise` a generated one. In float64 `cast` and `rowwise` compute as the original
does: here they only show that they go along; their own pages hold them to their dtypes.
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
