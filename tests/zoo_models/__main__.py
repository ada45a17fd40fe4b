"""Fill the table: `python -m tests.zoo_models [--part i/n] [--mesh tp|zero|pp|3d] [KIND ...]`."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.zoo_models import table, worker
from tests.zoo_models.cases import names
from tests.zoo_models.meshes import MESHES
from tests.zoo_models.store import Store, source


def arguments(given: list[str]) -> argparse.Namespace:
    """What was asked for."""
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
    return parser.parse_args(given)


def main(given: list[str]) -> int:
    """Run what is not known, tell it, and give 1 if a cell has failed."""
    asked, store = arguments(given), Store()
    known, families = store.known(), names()
    part, _, parts = asked.part.partition("/")
    kinds = (asked.kinds or [*families])[int(part) - 1 :: int(parts)]
    meshes = asked.mesh or [*MESHES]
    kept = {
        cell
        for cell, one in known.items()
        if one.source == source() or one.verdict.status in (*asked.trust, worker.NOT_TINY)
    }
    jobs = [(kind, [m for m in meshes if (kind, m) not in kept]) for kind in kinds]
    _warm()
    _run(jobs, asked.jobs, store)
    known = store.known()
    if asked.write:
        table.write(known, families)
    mine = [known[kind, m].verdict for kind in kinds for m in meshes if (kind, m) in known]
    for status in sorted({v.status for v in mine}):
        print(f"{status}: {sum(v.status == status for v in mine)}")
    return int(any(v.status == "failed" for v in mine))


def _run(jobs: list[tuple[str, list[str]]], at_once: int, store: Store) -> None:
    bar = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*bar, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("models", total=sum(len(meshes) for _, meshes in jobs))
        for verdict in worker.verdicts(jobs, at_once):
            store.add(verdict)
            progress.advance(task)
            if verdict.status not in ("verified", worker.NOT_TINY):
                print(f"{verdict.kind} {verdict.mesh}: {verdict.status}: {verdict.why}", flush=True)


def _warm() -> None:
    """Imported once, before processes are forked."""
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama
    import transformers.models.t5.modeling_t5  # noqa: F401

    import schedlang.passes.lower.build  # noqa: F401


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
