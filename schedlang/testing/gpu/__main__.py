"""The command: python -m schedlang.testing.gpu [--quick] [--only PART[:CASE]] [--json] [--out FILE]

Examines a GPU in at most ten minutes (`--quick`: three), and writes what it found as a page. The
exit code is 0 if all is well, 1 if something is wrong or failed, 3 if there was no time left for
some case, and 2 if there is no GPU; then nothing is written. `--device cpu` and `--device sim`
rehearse it without a GPU, on tiny shapes, in at most ten times the time: everything except the
times, and except what is compiled for GPUs. A rehearsal writes a page only where `--out` says.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

PAGE = Path("docs/gpu.md")
DEVICES = ("cuda", "cpu", "sim")
REHEARSAL = 10.0  # times the limits of a GPU: interpreters and compilers of a CPU are slow


def options() -> argparse.ArgumentParser:
    """Make the command's options."""
    parser = argparse.ArgumentParser(
        prog="python -m schedlang.testing.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="small shapes, within three minutes")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="PART[:CASE]",
        help="these parts; of one the cases that begin so",
    )
    parser.add_argument("--json", action="store_true", help="print JSON; progress goes to stderr")
    parser.add_argument("--out", type=Path, help=f"where the page is written ({PAGE})")
    parser.add_argument(
        "--device", choices=DEVICES, default=DEVICES[0], help="`cpu` or `sim` rehearse it"
    )
    parser.add_argument(
        "--patience",
        type=float,
        help=f"stretches all limits of time (1; of a rehearsal {REHEARSAL:.0f})",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Examine the device, print and write the results; return the exit code."""
    parser = options()
    arguments = parser.parse_args(argv)

    import torch

    from schedlang.testing.gpu import driver, page
    from schedlang.testing.gpu.case import Setup

    try:
        parts = driver.chosen(arguments.only)
    except ValueError as error:
        parser.error(str(error))
    rehearsed = arguments.device != DEVICES[0]
    if not rehearsed and not torch.cuda.is_available():
        print(
            "no GPU is here that torch can use: nothing was run, and nothing is written "
            "(`--device cpu` rehearses it)",
            file=sys.stderr,
        )
        return 2
    patience = arguments.patience or (REHEARSAL if rehearsed else 1.0)
    size = "tiny" if rehearsed else "quick" if arguments.quick else "full"
    out = sys.stderr if arguments.json else sys.stdout
    start = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - start:5.0f} s  {line}", file=out, flush=True)

    setup = Setup(arguments.device, size)
    results = driver.examine(setup, parts, say, patience)
    env = page.here(setup, [part.name for part, _ in parts], time.monotonic() - start)
    bad = sum(result.bad for result in results)
    say(f"{len(results)} cases: {page.counted(results)}")
    late = sum(result.outcome == "late" for result in results)
    if late:
        noun = "case was" if late == 1 else "cases were"
        say(f"{late} {noun} not run for want of time: `--patience {2 * patience:g}` gives more")
    target = arguments.out or (None if rehearsed else PAGE)
    if target is not None:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(page.page(env, results))
        say(f"written: {target}")
    if arguments.json:
        print(json.dumps({"here": vars(env), "found": [result.plain() for result in results]}))
    return 1 if bad else 3 if late else 0


if __name__ == "__main__":
    sys.exit(main())
