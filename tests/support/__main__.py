"""Fill the matrix: `python -m tests.support [--only A+B ...] [--jobs n] [--new]`."""

from __future__ import annotations

import argparse
import multiprocessing
import sys

from tests.support import page
from tests.support.cells import FAILED, Cell, judged
from tests.support.features import Combination, combinations_of, ordered, schedule


def arguments(given: list[str]) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.support", description=__doc__)
    parser.add_argument("--only", nargs="*", metavar="A+B", help="features joined by +")
    parser.add_argument("--with", dest="holding", help="all combinations that have this feature")
    parser.add_argument("--new", action="store_true", help="only what is not known or has failed")
    parser.add_argument("--jobs", type=int, default=1, help="how many at once")
    parser.add_argument("--show", action="store_true", help="print the schedules, run nothing")
    return parser.parse_args(given)


def main(given: list[str]) -> int:
    """Run what was asked for, write both files, and give 1 if a cell has failed."""
    asked, cells = arguments(given), page.read()
    wanted = _wanted(asked, cells)
    if asked.show:
        print("\n".join(schedule(names) for names in wanted))
        return 0
    _warm()
    with multiprocessing.get_context("fork").Pool(asked.jobs, maxtasksperchild=8) as pool:
        for cell in pool.imap_unordered(judged, wanted):
            cells[cell.names] = cell
            _tell(cell)
            page.write(cells)
    return int(any(cells[names].status == FAILED for names in wanted))


def _wanted(asked: argparse.Namespace, cells: page.Cells) -> list[Combination]:
    wanted = list(combinations_of())
    if asked.only is not None:
        wanted = [ordered(one.split("+")) for one in asked.only]
    if asked.holding:
        wanted = [names for names in wanted if asked.holding in names]
    if asked.new:
        wanted = [n for n in wanted if n not in cells or cells[n].status == FAILED]
    return wanted


def _tell(cell: Cell) -> None:
    name = " x ".join(cell.names)
    print(f"{name:<36}{cell.seconds:6.1f} s  {cell.status} {cell.why}", flush=True)


def _warm() -> None:
    """Imported once, before processes are forked."""
    import transformers.models.llama.modeling_llama
    import transformers.models.mixtral.modeling_mixtral
    import transformers.models.whisper.modeling_whisper  # noqa: F401

    import schedlang.passes.lower.build  # noqa: F401


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
