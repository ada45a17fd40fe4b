"""The language at scale: python -m tests.benchmarks.scale

Prints processor time and memory of: `check` as a command, start included; reading a file of 2,000
rows; expanding 12,000 actions (three rows at every layer of 4,000, facts of the model included);
planning the same schedule for 64 and for 16,384 ranks.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from schedlang.passes.reading.expand import expand
from schedlang.passes.reading.state import Settings
from schedlang.schedule import Schedule
from schedlang.source import Source
from schedlang.syntax import parse

HEAD = "schedule 1\n\nmesh(dp=2, tp=2)\n\n"
EXAMPLE = "examples/llama/3d.sched"


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of this process's processor, and the result."""
    start = time.process_time()
    made = work()
    return time.process_time() - start, made


def command(*words: str) -> float:
    """Seconds of processor of a whole command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "schedlang", *words], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


class Deep(nn.Module):
    """Very many small layers, on no device."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2, device="meta") for _ in range(layers))


def actions(layers: int = 4_000) -> int:
    """Three rows at very many modules: actions of a plan, counted by the modules they act on."""
    verbs = ("shard(col, output=R, over=tp)", "checkpoint()", "offload(activations)")
    text = HEAD + "".join(f"layers.*  {verb}\n" for verb in verbs)
    plan = Schedule(Deep(layers), parse(Source("deep.sched", text)), Settings()).plan()
    return sum(len(action.sites) for action in plan.actions)


def planned(ranks: int) -> None:
    """Plan the 70-billion model's schedule for some ranks, with all that is counted."""
    from schedlang.verbs.files import accounted
    from schedlang.verbs.files import planned as of
    from tests.benchmarks.plan_scale import MODEL, SCHEDULE

    with TemporaryDirectory() as folder:
        file = Path(folder) / "llama70b.sched"
        file.write_text(SCHEDULE % (ranks // 64))
        file.with_name("model.py").write_text(MODEL.replace("(1024,", f"({max(64, ranks // 8)},"))
        accounted(of(file, None, None, None))


def main() -> None:
    """Measure, and print."""
    fastest = min(command("check", EXAMPLE) for _ in range(3))
    print(f"check, a command, warm cache      {fastest:.2f} s")
    text = HEAD + "".join(f"a.{n}.b  checkpoint()\n" for n in range(2000))
    spent, tree = min(
        (timed(lambda: parse(Source("rows.sched", text))) for _ in range(3)), key=lambda p: p[0]
    )
    print(f"read 2,000 rows                   {spent:.2f} s")
    print(f"and check them                    {timed(lambda: expand(tree, None))[0]:.2f} s")
    spent, count = timed(actions)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{count:,} actions           {spent:.2f} s, {peak:.2f} GiB")
    for ranks in (64, 16_384):
        print(f"plan for {ranks:6} ranks             {timed(partial(planned, ranks))[0]:.1f} s")


if __name__ == "__main__":
    main()
