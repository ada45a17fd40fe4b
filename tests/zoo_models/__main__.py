"""Fill the table: `python -m tests.zoo_models [--part i/n] [--mesh tp|zero|pp|3d] [KIND ...]`."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.zoo_models import table, worker
from tests.zoo_models.cases import model_families
from tests.zoo_models.meshes import MESHES
from tests.zoo_models.store import Store, source


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.zoo_models", description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="all of them if none is named")
    parser.add_argument("--part", default="1/1", help="i/n: every n-th kind, from the i-th")
    parser.add_argument("--mesh", action="append", choices=[*MESHES], help="may be repeated")
    parser.add_argument("--jobs", type=int, default=1, help="how many at once")
    parser.add_argument(
        "--trust",
        action="append",
        default=[],
        metavar="STATUS",
        help="keep verdicts of earlier sources with this status",
    )
    parser.add_argument("--write", action="store_true", help="write docs/models.md and its JSON")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Run cells without a stored verdict and print counts; returns 1 if a cell has failed."""
    options, store = parse_arguments(argv), Store()
    stored, families = store.known(), model_families()
    part, _, parts = options.part.partition("/")
    kinds = (options.kinds or [*families])[int(part) - 1 :: int(parts)]
    meshes = options.mesh or [*MESHES]
    current = {
        cell
        for cell, entry in stored.items()
        if entry.source == source() or entry.verdict.status in (*options.trust, worker.NOT_TINY)
    }
    jobs = [(kind, [m for m in meshes if (kind, m) not in current]) for kind in kinds]
    _preload()
    _run_jobs(jobs, options.jobs, store)
    stored = store.known()
    if options.write:
        table.write_page(stored, families)
    verdicts = [stored[kind, m].verdict for kind in kinds for m in meshes if (kind, m) in stored]
    for status in sorted({v.status for v in verdicts}):
        print(f"{status}: {sum(v.status == status for v in verdicts)}")
    return int(any(v.status == "failed" for v in verdicts))


def _run_jobs(jobs: list[tuple[str, list[str]]], at_once: int, store: Store) -> None:
    bar = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*bar, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("models", total=sum(len(meshes) for _, meshes in jobs))
        for verdict in worker.verdicts(jobs, at_once):
            store.add(verdict)
            progress.advance(task)
            if verdict.status not in ("verified", worker.NOT_TINY):
                print(f"{verdict.kind} {verdict.mesh}: {verdict.status}: {verdict.why}", flush=True)


def _preload() -> None:
    """Import modules once, before processes are forked."""
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama
    import transformers.models.t5.modeling_t5  # noqa: F401

    import schedlang.passes.lower.build  # noqa: F401


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
