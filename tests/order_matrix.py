"""Verify every order on every small model: python -m tests.order_matrix [--only ORDER ...]

Each order trains each small model for three steps on the threads engine, in float64, and is
compared with the original model: losses, all gradients, and the final state.  Orders with stale
weights are compared with their sequential oracle, by `prove`.  The table is written into
docs/orders.md, between its marks; with `--only` the rows of other orders do not change.  Refusals
are listed with their reasons.
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
from tests.proofs import assert_near, train_on_ranks, train_sequential
from tests.small_models import SMALL_MODELS, SmallModel, small_model, step_batches

PAGE = Path(__file__).parent.parent / "docs" / "orders.md"
BEGIN, END = "<!-- matrix -->\n", "<!-- end of matrix -->\n"
STEPS, FEWEST = 3, 4
SIZES = ((2, 4), (2, 8), (4, 8), (4, 4))  # (ranks, microbatches): orders take the first that fits
VERIFIED, ORACLE = "✓", "✓ oracle"
DIFFERS, NOT_RUN = "✗", "–"


@dataclass(frozen=True)
class Cell:
    """The result of an order on a model: a mark, or the code and reason of a refusal."""

    mark: str
    reason: str = ""

    @property
    def ok(self) -> bool:
        """Whether it was verified."""
        return self.mark in (VERIFIED, ORACLE)


@functools.cache
def size_of(order: Order) -> Size:
    """The first of SIZES at which an order differs from all orders before it."""
    size = None
    for ranks, micro in SIZES:
        try:
            size = checked_size(order, ranks, micro, slices=2 if order.sliced else 1)
        except OrderError:
            continue
        if not any(_same(order, earlier, size) for earlier in ORDERS[: ORDERS.index(order)]):
            return size
    assert size is not None, f"{order.name} has none of the sizes {SIZES}"
    return size


def _same(order: Order, earlier: Order, size: Size) -> bool:
    try:
        return earlier.make(checked_size(earlier, size.ranks, size.micro)) == order.make(size)
    except OrderError:
        return False


def layers_of(order: Order) -> int:
    """An even number of layers, enough for one in each stage."""
    stages = order.make(size_of(order)).stages
    return max(FEWEST, stages + stages % 2)


def schedule_text(order: Order, model: SmallModel) -> str:
    """The text of the schedule that runs an order on a model."""
    size = size_of(order)
    sliced = f", slices={size.slices}" if size.slices > 1 else ""
    relaxed = f" relax({', '.join(sorted(order.relaxed))})" if order.relaxed else ""
    return (
        f'schedule 1\n\nmesh(pp={size.ranks})\n\nstep "pipeline"{relaxed} {{\n'
        f"  {model.trunk}  pipeline_split(over=pp)\n"
        f'  pipeline(order="{order.name}", micro={size.micro}{sliced})\n}}\n'
    )


@functools.cache
def train_original(name: str, layers: int) -> Any:
    """Train the original model and return its losses, gradients and state."""
    model = small_model(name)
    return train_sequential(model.make(layers), step_batches(model.batch, STEPS))


def run_cell(order: Order, model: SmallModel, threads: Threads) -> Cell:
    """Run an order on a model, compare with the original, and return the result."""
    layers, batches = layers_of(order), step_batches(model.batch, STEPS)
    try:
        tree = parse(Source("rows.sched", schedule_text(order, model)))
        plan = Schedule(model.make(layers), tree).plan()
        if order.relaxed:
            report = prove(Case(plan, batches, dtype="none"), pool=threads)  # type: ignore[arg-type]
            return Cell(ORACLE) if report.ok else Cell(DIFFERS, _last(str(report)))
        observed = train_on_ranks(threads, plan, batches)
        assert_near(observed, train_original(model.name, layers))
    except Refusal as refusal:
        diagnostic = refusal.diagnostics[0]
        return Cell(diagnostic.code, diagnostic.title)
    except AssertionError as error:
        return Cell(DIFFERS, _last(str(error)))
    except Exception as error:
        return Cell(NOT_RUN, _last(str(error)))
    return Cell(VERIFIED)


def _last(text: str) -> str:
    """The last non-empty line, escaped for a Markdown table."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200].replace("|", "/").replace("<", "(").replace(">", ")") if lines else ""


def diagonal_pairs() -> Iterator[tuple[Order, SmallModel]]:
    """Pairs of each order with one model, and of each model with at least one order.

    Orders with stale weights take the first model: their proof runs everything several times.
    """
    for index in range(max(len(ORDERS), len(SMALL_MODELS))):
        order = ORDERS[index % len(ORDERS)]
        yield order, SMALL_MODELS[0 if order.relaxed else index % len(SMALL_MODELS)]


Cells = dict[tuple[str, str], Cell]


def table(cells: Cells) -> str:
    """The cells as Markdown: a row for each order, a column for each model, reasons below."""
    heads = [result.name for result in SMALL_MODELS]
    lines = [f"| order | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]
    orders = [order.name for order in ORDERS if (order.name, heads[0]) in cells]
    for name in orders:
        lines.append(f"| {name} | {' | '.join(cells[name, head].mark for head in heads)} |")
    results = [cells[name, head] for name in orders for head in heads]
    lines += [
        "",
        f"{sum(result.ok for result in results)} of {len(results)} cells are verified.",
        "",
    ]
    for name in orders:
        reasons: dict[Cell, list[str]] = {}
        for head in heads:
            if not cells[name, head].ok:
                reasons.setdefault(cells[name, head], []).append(head)
        lines += [
            f"* {name} on {', '.join(failed_models)}. {c.mark}: {c.reason}"
            for c, failed_models in reasons.items()
        ]
    return "\n".join(lines).rstrip() + "\n"


def recorded_cells(page: str) -> Cells:
    """Read the cells from the page."""
    text = page.split(BEGIN)[1].split(END)[0]
    rows = [
        re.split(r"\s*\|\s*", line.strip("| ")) for line in text.splitlines() if line[:1] == "|"
    ]
    head, body = (rows[0], rows[2:]) if rows else ([], [])
    cells = {(row[0], m): Cell(mark) for row in body for m, mark in zip(head[1:], row[1:])}
    for line in text.splitlines():
        if match := re.match(r"\* (.+?) on (.+?)\. (\S+): (.*)$", line):
            name, models, mark, reason = match.groups()
            cells |= {(name, model): Cell(mark, reason) for model in models.split(", ")}
    return cells


def rewrite_page(page: str, cells: Cells) -> str:
    """Replace the table between the marks of the page."""
    preceding, following = page.split(BEGIN)
    return preceding + BEGIN + table(cells) + END + following.split(END)[1]


def run_orders(orders: Iterable[Order], tell: Any = lambda *words: None) -> Cells:
    """Run all models under these orders."""
    cells: Cells = {}
    for order in orders:
        for model in SMALL_MODELS:
            start = time.perf_counter()
            with Threads() as threads:
                result = cells[order.name, model.name] = run_cell(order, model, threads)
            tell(
                f"{order.name:<20}{model.name:<14}{time.perf_counter() - start:6.1f} s  "
                f"{result.mark} {result.reason}"
            )
    return cells


def main() -> None:
    """Run the matrix and write it into the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="*", help="these orders, the others as recorded")
    only = parser.parse_args().only
    orders = ORDERS if only is None else [find_order(name) for name in only]
    cells = {} if only is None else recorded_cells(PAGE.read_text())
    for order in orders:
        cells |= run_orders([order], lambda message: print(message, file=sys.stderr, flush=True))
        PAGE.write_text(rewrite_page(PAGE.read_text(), cells))
    print(f"{sum(result.ok for result in cells.values())} of {len(cells)} cells are verified")


if __name__ == "__main__":
    main()
