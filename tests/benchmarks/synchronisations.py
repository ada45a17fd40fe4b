"""Waits of the host per step: python -m tests.benchmarks.synchronisations [PART] [--lines]

Each schedule of `examples/` trains on simulated devices; counted is how often the host of rank 0
waits for its device in a step, the most of three: by lines of schedlang, and by those of the model
and its library, at which the untouched model waits on one device, too. Batches come from the host,
as a loader gives them, or lie on the device already; the loss is read, or not.
"""

from __future__ import annotations

import argparse
from collections import Counter

from schedlang.testing.accelerator import spawn
from tests.accelerator.exampled import CASES, RUN, Example, plainly, waits


def own(found: list[list[str]], model: set[str]) -> list[list[str]]:
    """Waits that the model does not have by itself."""
    return [[one for one in step if one not in model] for step in found]


def row(example: Example, lines: bool) -> str:
    """What is counted of a schedule, as a row of a table."""
    told, behind = [], []
    model = set(spawn(plainly, example, ranks=1, timeout=300)[0])
    most = 0
    cases = spawn(waits, example, ranks=example.ranks, timeout=600)[0]
    for (there, read), found in zip(CASES, cases):
        ours = own(found, model)
        told.append(max(map(len, ours)))
        most = max(most, max(len(a) - len(b) for a, b in zip(found, ours)))
        if lines:
            where = Counter(max(ours, key=len))
            case = f"batch {'there' if there else 'of the host'}{', loss read' * read}"
            behind += [f"    {case}: {count} x {one}" for one, count in where.items()]
    cells = " | ".join(map(str, (*told, most)))
    return "\n".join([f"| `{example.file}` | {example.ranks} | {cells} |", *behind])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("part", nargs="?", default="", help="of the names of files")
    parser.add_argument("--lines", action="store_true", help="where the host waits")
    asked = parser.parse_args()
    print("| schedule | ranks | not read | read | batch there, not read | read | of the model |")
    print("|---|---|---|---|---|---|---|")
    for example in RUN:
        if asked.part in example.file:
            print(row(example, asked.lines), flush=True)


if __name__ == "__main__":
    main()
