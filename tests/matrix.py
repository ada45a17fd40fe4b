"""Which orders have been verified on which models: python -m tests.matrix [--only ORDER ...]

Each order of the registry trains each small model for three steps on the threads engine, in
float64, and is compared with the untouched original: losses, every gradient of every step, and the
state after the last.  Orders with stale weights are compared with their sequential oracle, by
`prove`.  The table goes into docs/orders.md, between its marks; with `--only` the rows of the other
orders stay as they are there.  What is refused is listed with its reason.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import Source
from schedlang.language.syntax import parse
from schedlang.passes.prove import Case, prove
from schedlang.pipeline.schedules import ORDERS, Order, OrderError, Size, checked_size, find_order
from schedlang.schedule import Schedule
from tests.engine import Threads
from tests.proofs import assert_near, sequential, trained
from tests.small_models import SMALL, Small, small, states

PAGE = Path(__file__).parent.parent / "docs" / "orders.md"
BEGIN, END = "<!-- matrix -->\n", "<!-- end of matrix -->\n"
STEPS, FEWEST = 3, 4
SIZES = ((2, 4), (2, 8), (4, 8), (4, 4))  # (ranks, microbatches): an order runs the first it has
VERIFIED, ORACLE = "✓", "✓ oracle"
DIFFERS, NOT_RUN = "✗", "–"


@dataclass(frozen=True)
class Cell:
    """What came of an order on a model: a mark, or the code and reason of a refusal."""

    mark: str
    reason: str = ""

    @property
    def ok(self) -> bool:
        """Whether it was run and held."""
        return self.mark in (VERIFIED, ORACLE)


@functools.cache
def size_of(known: Order) -> Size:
    """The smallest of a few sizes at which an order is not the same as another one before it."""
    found = None
    for ranks, micro in SIZES:
        try:
            found = checked_size(known, ranks, micro, slices=2 if known.sliced else 1)
        except OrderError:
            continue
        if not any(_same(known, other, found) for other in ORDERS[: ORDERS.index(known)]):
            return found
    assert found is not None, f"{known.name} has none of the sizes {SIZES}"
    return found


def _same(known: Order, other: Order, size: Size) -> bool:
    try:
        return other.make(checked_size(other, size.ranks, size.micro)) == known.make(size)
    except OrderError:
        return False


def layers_of(known: Order) -> int:
    """Layers enough for a stage each, an even number."""
    stages = known.make(size_of(known)).stages
    return max(FEWEST, stages + stages % 2)


def schedule(known: Order, model: Small) -> str:
    """The rows that run an order on a model."""
    size = size_of(known)
    sliced = f", slices={size.slices}" if size.slices > 1 else ""
    relaxed = f" relax({', '.join(sorted(known.relaxed))})" if known.relaxed else ""
    return (
        f'schedule 1\n\nmesh(pp={size.ranks})\n\nstep "pipeline"{relaxed} {{\n'
        f"  {model.trunk}  pipeline_split(over=pp)\n"
        f'  pipeline(order="{known.name}", micro={size.micro}{sliced})\n}}\n'
    )


@functools.cache
def original(name: str, layers: int) -> Any:
    """What the untouched model does in some steps."""
    model = small(name)
    return sequential(model.make(layers), states(model.batch, STEPS))


def cell(known: Order, model: Small, threads: Threads) -> Cell:
    """Run an order on a model, and compare."""
    layers, batches = layers_of(known), states(model.batch, STEPS)
    try:
        tree = parse(Source("rows.sched", schedule(known, model)))
        plan = Schedule(model.make(layers), tree).plan()
        if known.relaxed:
            report = prove(Case(plan, batches, dtype="none"), pool=threads)  # type: ignore[arg-type]
            return Cell(ORACLE) if report.ok else Cell(DIFFERS, _last(str(report)))
        found = trained(threads, plan, batches)
        assert_near(found, original(model.name, layers))
    except Refusal as refusal:
        first = refusal.diagnostics[0]
        return Cell(first.code, first.title)
    except AssertionError as error:
        return Cell(DIFFERS, _last(str(error)))
    except Exception as error:
        return Cell(NOT_RUN, _last(str(error)))
    return Cell(VERIFIED)


def _last(text: str) -> str:
    """The last line that says something, on one line of a page."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200].replace("|", "/").replace("<", "(").replace(">", ")") if lines else ""


def diagonal() -> Iterator[tuple[Order, Small]]:
    """Each order with one model, and each model with one order at least.

    Orders with stale weights take the first model: their proof runs everything several times.
    """
    for place in range(max(len(ORDERS), len(SMALL))):
        known = ORDERS[place % len(ORDERS)]
        yield known, SMALL[0 if known.relaxed else place % len(SMALL)]


Cells = dict[tuple[str, str], Cell]


def table(cells: Cells) -> str:
    """The cells as Markdown: a row for each order, a column for each model, reasons below."""
    heads = [one.name for one in SMALL]
    lines = [f"| order | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]
    orders = [known.name for known in ORDERS if (known.name, heads[0]) in cells]
    for name in orders:
        lines.append(f"| {name} | {' | '.join(cells[name, head].mark for head in heads)} |")
    shown = [cells[name, head] for name in orders for head in heads]
    lines += ["", f"{sum(one.ok for one in shown)} of {len(shown)} cells are verified.", ""]
    for name in orders:
        reasons: dict[Cell, list[str]] = {}
        for head in heads:
            if not cells[name, head].ok:
                reasons.setdefault(cells[name, head], []).append(head)
        lines += [
            f"* {name} on {', '.join(who)}. {c.mark}: {c.reason}" for c, who in reasons.items()
        ]
    return "\n".join(lines).rstrip() + "\n"


def recorded(page: str) -> Cells:
    """The cells that stand on the page."""
    text = page.split(BEGIN)[1].split(END)[0]
    rows = [
        re.split(r"\s*\|\s*", line.strip("| ")) for line in text.splitlines() if line[:1] == "|"
    ]
    head, body = (rows[0], rows[2:]) if rows else ([], [])
    cells = {(row[0], m): Cell(mark) for row in body for m, mark in zip(head[1:], row[1:])}
    for line in text.splitlines():
        if told := re.match(r"\* (.+?) on (.+?)\. (\S+): (.*)$", line):
            name, models, mark, reason = told.groups()
            cells |= {(name, model): Cell(mark, reason) for model in models.split(", ")}
    return cells


def rewritten(page: str, cells: Cells) -> str:
    """The page with another table between its marks."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + table(cells) + END + rest.split(END)[1]


def run(orders: Iterable[Order], tell: Any = lambda *words: None) -> Cells:
    """All models under some orders."""
    cells: Cells = {}
    for known in orders:
        for model in SMALL:
            start = time.perf_counter()
            with Threads() as threads:
                one = cells[known.name, model.name] = cell(known, model, threads)
            tell(
                f"{known.name:<20}{model.name:<14}{time.perf_counter() - start:6.1f} s  "
                f"{one.mark} {one.reason}"
            )
    return cells


def main() -> None:
    """Run the matrix, and write it into the page where all of it was run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="*", help="these orders, the others as recorded")
    asked = parser.parse_args().only
    orders = ORDERS if asked is None else [find_order(name) for name in asked]
    cells = {} if asked is None else recorded(PAGE.read_text())
    for known in orders:
        cells |= run([known], lambda words: print(words, file=sys.stderr, flush=True))
        PAGE.write_text(rewritten(PAGE.read_text(), cells))
    print(f"{sum(one.ok for one in cells.values())} of {len(cells)} cells are verified")


if __name__ == "__main__":
    main()
