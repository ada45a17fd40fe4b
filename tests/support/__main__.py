"""Fill the matrix: `python -m tests.support [--only A+B ...] [--jobs n] [--new]`."""

from __future__ import annotations

import argparse
import multiprocessing
import sys

from tests.support import page
from tests.support.cells import FAILED, Cell, judge_cell
from tests.support.features import Combination, combinations_of, in_order, schedule_text


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.support", description=__doc__)
    parser.add_argument("--only", nargs="*", metavar="A+B", help="features joined by +")
    parser.add_argument("--with", dest="holding", help="all combinations that have this feature")
    parser.add_argument("--new", action="store_true", help="only what is not known or has failed")
    parser.add_argument("--jobs", type=int, default=1, help="how many at once")
    parser.add_argument("--show", action="store_true", help="print the schedules, run nothing")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Run the chosen combinations, write both files, and return 1 if a cell failed."""
    args, cells = parse_args(argv), page.read_cells()
    chosen = _chosen_names(args, cells)
    if args.show:
        print("\n".join(schedule_text(names) for names in chosen))
        return 0
    _import_models()
    with multiprocessing.get_context("fork").Pool(args.jobs, maxtasksperchild=8) as pool:
        for cell in pool.imap_unordered(judge_cell, chosen):
            cells[cell.names] = cell
            _print_cell(cell)
            page.write_files(cells)
    return int(any(cells[names].status == FAILED for names in chosen))


def _chosen_names(args: argparse.Namespace, cells: page.Cells) -> list[Combination]:
    """The combinations that the command line chooses."""
    chosen = list(combinations_of())
    if args.only is not None:
        chosen = [in_order(text.split("+")) for text in args.only]
    if args.holding:
        chosen = [names for names in chosen if args.holding in names]
    if args.new:
        chosen = [n for n in chosen if n not in cells or cells[n].status == FAILED]
    return chosen


def _print_cell(cell: Cell) -> None:
    """Print one cell."""
    name = " x ".join(cell.names)
    print(f"{name:<36}{cell.seconds:6.1f} s  {cell.status} {cell.why}", flush=True)


def _import_models() -> None:
    """Import the models once, before processes are forked."""
    import transformers.models.llama.modeling_llama
    import transformers.models.mixtral.modeling_mixtral
    import transformers.models.whisper.modeling_whisper  # noqa: F401

    import schedlang.passes.lower.build  # noqa: F401


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
