"""Host waits per step: python -m tests.benchmarks.synchronisations [PART] [--lines]

Each schedule of `examples/` trains on simulated devices. Counted is how often the host of rank 0
waits for its device in a step (the most of three): at lines of schedlang, and at lines of the model
and its library where the plain model waits on one device, too. Batches come from the host, as from
a loader, or are on the device already; the loss is read, or not.
"""

from __future__ import annotations

import argparse
from collections import Counter

from schedlang.testing.accelerator import spawn
from tests.accelerator.example_runs import CASES, EXAMPLE_RUNS, Example, host_waits, model_waits


def own_waits_of(steps: list[list[str]], model: set[str]) -> list[list[str]]:
    """Return the waits that the plain model does not have."""
    return [[wait for wait in step if wait not in model] for step in steps]


def table_line(example: Example, lines: bool) -> str:
    """Count a schedule's waits, and return a row of the table."""
    counts, details = [], []
    model = set(spawn(model_waits, example, ranks=1, timeout=300)[0])
    most = 0
    cases = spawn(host_waits, example, ranks=example.ranks, timeout=600)[0]
    for (on_device, read), steps in zip(CASES, cases):
        own_waits = own_waits_of(steps, model)
        counts.append(max(map(len, own_waits)))
        most = max(most, max(len(a) - len(b) for a, b in zip(steps, own_waits)))
        if lines:
            waits_by_line = Counter(max(own_waits, key=len))
            case = f"batch {'there' if on_device else 'of the host'}{', loss read' * read}"
            details += [f"    {case}: {count} x {line}" for line, count in waits_by_line.items()]
    cells = " | ".join(map(str, (*counts, most)))
    return "\n".join([f"| `{example.file}` | {example.ranks} | {cells} |", *details])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("part", nargs="?", default="", help="of the names of files")
    parser.add_argument("--lines", action="store_true", help="where the host waits")
    arguments = parser.parse_args()
    print("| schedule | ranks | not read | read | batch there, not read | read | of the model |")
    print("|---|---|---|---|---|---|---|")
    for example in EXAMPLE_RUNS:
        if arguments.part in example.file:
            print(table_line(example, arguments.lines), flush=True)


if __name__ == "__main__":
    main()
