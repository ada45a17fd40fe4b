"""How fast commands start and long files are read: python -m tests.benchmarks.startup

Prints the processor time of fresh processes, the least of several, beside that of an empty Python,
and of reading and checking a file of 2,000 rows in this process.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "examples" / "gpt2" / "3d.sched"


def spent(words: list[str], times: int) -> tuple[float, float]:
    """Seconds of processor and of wall clock that a fresh process takes at least."""
    best, wall = float("inf"), float("inf")
    for _ in range(times):
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(
            [sys.executable, *words],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wall = min(wall, time.perf_counter() - start)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        user, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
        best = min(best, user + system)
    return best, wall


def least(run: Callable[[], object], times: int) -> float:
    """Seconds of processor that something takes at least in this process."""
    best = float("inf")
    for _ in range(times):
        start = time.process_time()
        run()
        best = min(best, time.process_time() - start)
    return best


def long_file(folder: Path, rows: int) -> Path:
    """A schedule of many rows."""
    body = "\n".join(f"  h.{i}.mlp.c_fc  shard(col, over=tp)" for i in range(rows))
    file = folder / "long.sched"
    file.write_text(f'schedule 1 for GPT\nmesh(tp=2)\nstep "tensor parallel" {{\n{body}\n}}\n')
    return file


def main() -> None:
    """Print all figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--rows", type=int, default=2000)
    given = parser.parse_args()
    from schedlang.language.syntax import parse, read
    from schedlang.verbs.checking import warnings_of
    from schedlang.verbs.inputs import settings

    command = ["-m", "schedlang"]
    print(f"{'a fresh process':<44}{'processor':>10}{'clock':>10}")
    with TemporaryDirectory() as folder:
        file = long_file(Path(folder), given.rows)
        for name, words in (
            ("python, nothing in it", ["-c", "pass"]),
            ("check FILE", [*command, "check", str(EXAMPLE)]),
            ("check FILE --mesh ...", [*command, "check", str(EXAMPLE), "--mesh", "tp=2"]),
            ("--help", [*command, "--help"]),
            ("explain S402", [*command, "explain", "S402"]),
            (f"check FILE, {given.rows:,} rows", [*command, "check", str(file)]),
        ):
            used, wall = spent(words, given.times)
            print(f"{name:<44}{used:>9.3f}s{wall:>9.3f}s")
        source = read(file)
        none = settings(None, None)
        print(f"{'parsing the rows':<44}{least(lambda: parse(source), given.times):>9.3f}s")
        took = least(lambda: warnings_of([file], none), given.times)
        print(f"{'parsing and checking them':<44}{took:>9.3f}s")


if __name__ == "__main__":
    main()
